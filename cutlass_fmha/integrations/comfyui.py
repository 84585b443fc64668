"""A node for ComfyUI that has a model's attention computed by this package.

    echo "from cutlass_fmha.integrations.comfyui import *" > ComfyUI/custom_nodes/cutlass_fmha_attention.py

The node "cutlass_fmha attention" stands between a model and its sampler. In ComfyUI the function is also
in its registry, as "cutlass_fmha". This module imports nothing of ComfyUI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import tally

NAME = "cutlass_fmha"
OVERRIDE = "optimized_attention_override"

calls = tally.Tally("ComfyUI")

#: Keywords that ``attention`` obeys, or that change no result here: options of ComfyUI's own, and whether a
#: kernel may round more than its inputs do, which ours never does.
_KNOWN = {"transformer_options", "low_precision_attention", "_inside_attn_wrapper", "enable_gqa", "scale"}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention as ComfyUI's functions compute it.

    Args:
        q, k, v: [batch, seqlen, heads * head_dim], or [batch, heads, seqlen, head_dim] with skip_reshape.
        mask: bool, False hides a key, or added to the scores: [seqlen_q, seqlen_k], [batch, ...] or
            [batch, heads, ...], broadcastable.
        attn_precision: what to compute scores in; it is float32 here, always.
        kwargs: scale, and enable_gqa, with which k and v may have fewer heads.

    Returns:
        [batch, seqlen_q, heads * head_dim], or [batch, heads, seqlen_q, head_dim] with skip_output_reshape.

    Raises:
        NotImplementedError: another keyword. What ``cutlass_fmha.attention`` raises.
    """
    if unknown := {name for name, value in kwargs.items() if value is not None} - _KNOWN:
        raise NotImplementedError(f"ComfyUI says {', '.join(sorted(unknown))}, which is unknown here")
    layout = "bhsd" if skip_reshape else "bshd"
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
    said: dict[str, Any] = {}
    if mask is not None:
        name = "mask" if mask.dtype == torch.bool else "bias"
        said[name] = mask.unsqueeze(1) if mask.dim() == 3 else mask
    out: Tensor = cutlass_fmha.attention(q, k, v, layout=layout, scale=kwargs.get("scale"), **said)
    calls.count("attention")
    if skip_output_reshape:
        return out if skip_reshape else out.transpose(1, 2)
    return (out.transpose(1, 2) if skip_reshape else out).flatten(2)


def or_else(theirs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``attention``, or ComfyUI's own where that refuses; what stands in a model's options."""
    try:
        return attention(*args, **kwargs)
    except tally.REFUSALS as error:
        calls.decline("attention", tally.sentence(error))
    return theirs(*args, **kwargs)


class Attention:
    """The node: a model that computes its attention by this package."""

    CATEGORY = "model/attention"
    DESCRIPTION = "The model's attention by cutlass_fmha. ComfyUI computes what that declines, and the log says why."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def patch(self, model: Any) -> tuple[Any]:
        """Raises ValueError for a model whose attention another node changes: that would be lost."""
        changed = model.clone()
        options = changed.model_options.setdefault("transformer_options", {})
        if options.get(OVERRIDE) not in (None, or_else):
            raise ValueError("another node changes this model's attention, too: bypass that node, or this one")
        changed.model_options["transformer_options"] = {**options, OVERRIDE: or_else}
        return (changed,)


def register(comfy_attention: Any) -> None:
    """Puts the function into ComfyUI's registry. ``comfy_attention``: its comfy.ldm.modules.attention."""
    own = comfy_attention.attention_pytorch
    own = getattr(own, "__wrapped__", own)

    def attention_cutlass_fmha(*args: Any, **kwargs: Any) -> Tensor:
        return or_else(own, *args, **kwargs)

    wrapped = comfy_attention.wrap_attn(attention_cutlass_fmha)  # which looks for a model's override first
    comfy_attention.register_attention_function(NAME, wrapped)


if (_comfy_attention := sys.modules.get("comfy.ldm.modules.attention")) is not None:
    register(_comfy_attention)

NODE_CLASS_MAPPINGS = {"CutlassFmhaAttention": Attention}
NODE_DISPLAY_NAME_MAPPINGS = {"CutlassFmhaAttention": "cutlass_fmha attention"}
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
