"""Host time of an eager call through each surface, beside the call of this package that it becomes."""

from __future__ import annotations

import importlib
import os
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
SECTION = "by surface, "
#: What JAX's arrays are measured beside: of an eager call JAX's own part.
JAX_ALONE = "q + k + v in jax.jit"

#: Microseconds that a surface may take beside the direct call: those of torch and transformers, others.
BARS = {"torch SDPA": 10.0, "transformers": 10.0, "": 6.0}


def measure_surfaces() -> dict[str, dict[str, float]]:
    """Microseconds on the host by what is said: of the direct call, which comes first, and by surface."""
    import cutlass_fmha

    with torch.no_grad(), cutlass_fmha.sdpa():
        return {
            f"{SECTION}{said}": {name: round(us, 2) for name, us in time_host(calls).items()}
            for said, calls in sections(torch.device("cuda")).items()
        }


def rows(host_us: dict[str, dict[str, float]]) -> list[list[str]]:
    """Of a table: what is measured, the call, microseconds, and of a surface how many more than the direct call's,
    and whether that is within its bar."""
    found = []
    for section, times in host_us.items():
        direct, *_ = times.values()
        for number, (name, us) in enumerate(times.items()):
            beside = ["", ""]
            if section.startswith(SECTION) and number:
                bar = next(bar for begin, bar in BARS.items() if name.startswith(begin))
                beside = [f"{us - direct:+.2f}", f"{bar:.0f}, {'met' if us - direct <= bar else 'missed'}"]
            found.append([section, name, f"{us:.2f}", *beside])
    return found


HEADINGS = ("host time", "call", "us", "beside the first", "bar")


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
    for said, calls in (
        *_of_transformers(q, k, v, mask, starts), *_of_diffusers(rows, mask), *_of_serving(rows), *_of_jax(rows),
    ):  # fmt: skip
        found.setdefault(said, {}).update(calls)
    return found


def _of_arrays(rows: list[Tensor]) -> dict[str, Call]:
    """CuPy's, and NumPy's on the CPU."""
    import cutlass_fmha

    name = "numpy" if rows[0].is_cpu else "cupy"
    try:
        take = importlib.import_module(name).asarray
    except ImportError:
        return {}
    return {f"arrays of {name}": partial(cutlass_fmha.attention, *map(take, rows))}


def _of_jax(rows: list[Tensor]) -> list[tuple[str, dict[str, Call]]]:
    """JAX's arrays beside a sum, which takes JAX itself more than a call of this package takes in all."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the GPU's memory
    try:
        import jax

        from cutlass_fmha import attention
        from cutlass_fmha.jax import attention as of_jax
    except ImportError:
        return []
    arrays = [jax.numpy.from_dlpack(x) for x in rows]
    calls = {JAX_ALONE: lambda q, k, v: q + k + v, "cutlass_fmha.jax in jax.jit": of_jax}
    calls = {name: jax.jit(call) for name, call in calls.items()}
    calls |= {"cutlass_fmha.jax": of_jax, "attention of JAX's arrays": attention}
    return [("JAX", {name: partial(call, *arrays) for name, call in calls.items()})]


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
    bind: Callable[..., Call] = partial
    call = bind(dispatch_attention_fn, *rows, backend=backend)
    return [("nothing", {"diffusers": call}), ("a mask", {"diffusers": bind(call, attn_mask=mask)})]


def _of_serving(rows: list[Tensor]) -> list[tuple[str, dict[str, Call]]]:
    """A layer of vLLM's and of SGLang's where they, or what stands in for them, can be imported: single tokens over
    pages that were written before."""
    import cutlass_fmha

    page, device = 16, rows[0].device
    of_each = SEQLEN // page
    query = rows[0][:, 0].contiguous()
    pages = torch.stack(rows[1:]).view(2, BATCH * of_each, page, HEADS, DIM)
    cache = torch.cat(tuple(pages), -1).transpose(1, 2)  # vLLM's: keys and values of a head side by side
    table = torch.arange(BATCH * of_each, dtype=torch.int32, device=device).view(BATCH, of_each)
    starts = torch.arange(BATCH + 1, dtype=torch.int32, device=device)
    used = torch.full((BATCH,), SEQLEN, dtype=torch.int32, device=device)
    out = torch.empty_like(query)
    said: dict[str, Any] = {"causal": True, "cu_seqlens_q": starts, "seqused_k": used, "page_table": table}
    said |= {"max_seqlen_q": 1, "max_seqlen_k": SEQLEN}
    bind: Callable[..., Call] = partial
    found = []
    try:
        from cutlass_fmha.integrations import vllm_backend as vllm

        impl = vllm.Impl(HEADS, DIM, DIM**-0.5, HEADS, None, None)
        of_batch = vllm.Metadata(BATCH, 1, starts, SEQLEN, used, table, starts, True)
        keys, values = impl._pages(cache)
        direct = bind(cutlass_fmha.attention, query, keys, values, out=out, **said)
        layer = bind(impl.forward, None, query, None, None, cache, of_batch, out)
        found.append(("pages, into memory that is given", {"attention": direct, "vLLM": layer}))
    except ImportError:
        pass
    try:
        from sglang.srt.layers.radix_attention import AttentionType

        from cutlass_fmha.integrations import sglang_backend as sglang

        backend: Any = object.__new__(sglang.Backend)  # its maker wants a model's runner
        pool = [x.flatten(0, 1) for x in pages]
        backend.pool, backend.page_size = SimpleNamespace(get_kv_buffer=lambda layer_id: pool), page
        backend._said, backend._views, backend._layers = {}, {}, {}
        backend.forward_metadata = sglang.Metadata(starts, used, table, 1, SEQLEN)
        radix = {"tp_q_head_num": HEADS, "qk_head_dim": DIM, "v_head_dim": DIM, "scaling": DIM**-0.5, "layer_id": 0}
        radix |= dict.fromkeys(("is_cross_attention", "use_irope", "logit_cap", "xai_temperature_len"), 0)
        radix |= {"attn_type": AttentionType.DECODER, "sliding_window_size": -1}
        direct = bind(cutlass_fmha.attention, query, *pages, **said)
        given = (query.flatten(1), None, None, type("Layer", (), radix)(), SimpleNamespace(_attn_output=None))
        found.append(("pages", {"attention": direct, "SGLang": bind(backend.forward_decode, *given)}))
    except ImportError:
        pass
    return found
