"""Host time of an eager call through each surface, beside the call of this package that it becomes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from .timing import time_host

Call = Callable[[], Any]
BATCH, HEADS, SEQLEN, DIM = 2, 4, 128, 64


def measure_surfaces() -> dict[str, dict[str, float]]:
    """Microseconds on the host by what is said: of the direct call, which comes first, and by surface."""
    import cutlass_fmha

    with torch.no_grad(), cutlass_fmha.sdpa():
        return {
            f"by surface, {said}": {name: round(us, 2) for name, us in time_host(calls).items()}
            for said, calls in sections(torch.device("cuda")).items()
        }


def sections(device: torch.device) -> dict[str, dict[str, Call]]:
    """Calls that compute the same, in layouts of their own; torch's inside of ``cutlass_fmha.sdpa()``."""
    import cutlass_fmha
    from cutlass_fmha.flash_attn import flash_attn_interface as flash
    from cutlass_fmha.integrations import comfyui

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(BATCH, HEADS, SEQLEN, DIM, device=device, dtype=dtype) for _ in range(3))
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    q, k, v = (x.transpose(1, 2) for x in rows)
    packed = [x.flatten(0, 1) for x in rows]
    mask = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=device).tril()[None, None]
    starts = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * SEQLEN
    sides = {"max_seqlen_q": SEQLEN, "max_seqlen_k": SEQLEN, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    step = [rows[0][:, :1], rows[1], rows[2], rows[1][:, :1], rows[2][:, :1]]
    used = {"cache_seqlens": torch.full((BATCH,), SEQLEN // 2, dtype=torch.int32, device=device)}

    bind: Callable[..., Call] = partial  # whose arguments mypy would know by name
    found: dict[str, dict[str, Call]] = {
        "nothing": {
            "attention": bind(cutlass_fmha.attention, *rows),
            "flash_attn_func": bind(flash.flash_attn_func, *rows),
            "torch SDPA": bind(torch_sdpa, q, k, v),
            "comfyui": bind(comfyui.attention, q, k, v, HEADS, skip_reshape=True, skip_output_reshape=True),
        },
        "a mask": {
            "attention": bind(cutlass_fmha.attention, *rows, mask=mask),
            "torch SDPA": bind(torch_sdpa, q, k, v, attn_mask=mask),
        },
        "packed sequences": {
            "attention": bind(cutlass_fmha.attention, *packed, **sides),
            "flash_attn_varlen_func": bind(flash.flash_attn_varlen_func, *packed, **sides),
        },
        "a key appended to a cache": {
            "with_kv_cache": bind(cutlass_fmha.with_kv_cache, *step, causal=True, **used),
            "flash_attn_with_kvcache": bind(flash.flash_attn_with_kvcache, *step, causal=True, **used),
        },
    }
    found["nothing"] |= _of_arrays(rows)
    for said, calls in (*_of_transformers(q, k, v, mask, starts), *_of_diffusers(rows, mask)):
        found[said] |= calls
    return found


def _of_arrays(rows: list[Tensor]) -> dict[str, Call]:
    """CuPy's, and NumPy's on the CPU. JAX's would take most of the GPU's memory for the process."""
    import cutlass_fmha

    name = "numpy" if rows[0].is_cpu else "cupy"
    try:
        take = importlib.import_module(name).asarray
    except ImportError:
        return {}
    return {f"arrays of {name}": partial(cutlass_fmha.attention, *map(take, rows))}


def _of_transformers(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, starts: Tensor
) -> list[tuple[str, dict[str, Call]]]:
    try:
        from transformers import AttentionInterface

        from cutlass_fmha.integrations import transformers as integration

        name = integration.register()
    except ImportError:
        return []
    interface: Any = AttentionInterface
    masks, flash = (interface().get_interface(each, None) for each in (name, f"{name}_flash"))
    layer = SimpleNamespace(is_causal=False, training=False)
    said = {"scaling": DIM**-0.5, "dropout": 0.0}
    lengths = {f"max_length_{side}": SEQLEN for side in "qk"} | {f"cu_seq_lens_{s}": starts for s in "qk"}
    one = [x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for x in (q, k, v)]  # a batch of one
    return [
        ("nothing", {f"transformers, {name}": partial(masks, layer, q, k, v, None, **said)}),
        ("nothing", {f"transformers, {name}_flash": partial(flash, layer, q, k, v, None, **said)}),
        ("a mask", {f"transformers, {name}": partial(masks, layer, q, k, v, mask, **said)}),
        (
            "packed sequences",
            {f"transformers, {name}_flash": partial(flash, layer, *one, None, **said, **lengths)},
        ),
    ]


def _of_diffusers(rows: list[Tensor], mask: Tensor) -> list[tuple[str, dict[str, Call]]]:
    """By the dispatcher, which is diffusers' own."""
    try:
        from cutlass_fmha.integrations import diffusers as integration

        backend = integration.register()
        from diffusers.models.attention_dispatch import dispatch_attention_fn
    except ImportError:
        return []
    call = partial(dispatch_attention_fn, *rows, backend=backend)
    return [("nothing", {"diffusers": call}), ("a mask", {"diffusers": partial(call, attn_mask=mask)})]
