"""``aten::scaled_dot_product_attention`` itself: every call of it, before torch has chosen a backend.

That is what nn.functional, nn.MultiheadAttention, compilers and torch's own C++ call. It is the only place
where masks, float32, other devices' tensors and values of another head dim still are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cutlass_fmha import private_torch, tally
from cutlass_fmha.launch.recent import Recent
from cutlass_fmha.ops.dispatcher import has_tangent
from cutlass_fmha.scaled_dot_product import scaled_dot_product_attention
from cutlass_fmha.torch_sdpa.calls import calls

NAME = "scaled_dot_product_attention"

_KNOWN_TYPES = (Tensor, Parameter)
#: Of a tensor that is made of others, such as DTensor.
_is_made_of_others: Callable[[Any], bool] = is_traceable_wrapper_subclass

_TRANSFORMED = "torch.func transforms the call"
#: The keys that take calls before those of a device type and of its autograd do, and why the calls are torch's.
NEVER_OURS = {
    "FuncTorchVmapMode": _TRANSFORMED,
    "AutogradNestedTensor": "tensors are nested, in the strided layout",
}

#: Calls that were refused, by what they say of themselves, so that the next one costs no search for a row.
refused: Recent[Hashable, str] = Recent(1024)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that stands in torch's dispatcher, for a device type and for its autograd key."""
    rest = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _ours_or(_decomposed, query, key, value, *rest)


def attend_jagged(theirs: Callable[..., Tensor], device_types: tuple[str, ...]) -> Callable[..., Tensor]:
    """What stands in for the function that a jagged tensor's calls go to: no dispatcher sees them whole."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        rest = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if query.device.type not in device_types:
            return theirs(query, key, value, *rest)
        return _ours_or(theirs, query, key, value, *rest)

    return attend


def go_on(reason: str, device_types: tuple[str, ...]) -> Callable[..., Tensor]:
    """The kernel for one of NEVER_OURS, which is of every device type."""

    def attend(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.device.type in device_types:
            calls.decline(NAME, reason)
        theirs: Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(query, *args, **kwargs)
        return theirs

    return attend


def _decomposed(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    *positional, scale, enable_gqa = rest
    op = torch.ops.aten.scaled_dot_product_attention.default
    theirs: Tensor = op.decompose(query, key, value, *positional, scale=scale, enable_gqa=enable_gqa)
    return theirs


def _ours_or(
    theirs: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *rest: Any,
) -> Tensor:
    reason = _reason(query, key, value, attn_mask)
    known = None
    if reason is None and refused:
        known = _metadata(query, key, value, attn_mask, *rest)
        reason = None if known is None else refused.get(known)
    if reason is None:
        try:
            output = scaled_dot_product_attention(query, key, value, attn_mask, *rest)
        except tally.REFUSALS as error:
            reason = tally.sentence(error)
            known = _metadata(query, key, value, attn_mask, *rest)
            if known is not None:
                refused.put(known, reason)
        else:
            calls.count(NAME)
            return output
    calls.decline(NAME, reason)
    return theirs(query, key, value, attn_mask, *rest)


def _reason(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str | None:
    """Why a call is torch's whatever its tensors are; None: it is not."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch's backend FLASH_ATTENTION, whose place it takes, is switched off (sdpa_kernel)"
    if private_torch.peek_interpreter_stack() is not None:
        return _TRANSFORMED
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    for tensor in tensors:
        # A sharded tensor's sequences may lie on several devices, in an order that only torch knows.
        if type(tensor) not in _KNOWN_TYPES and tensor.layout is not torch.jagged and _is_made_of_others(tensor):
            return f"a tensor is a {type(tensor).__name__}, which torch takes apart first"
    return "gradients are in forward mode" if has_tangent(*tensors) else None


def _metadata(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any) -> Hashable | None:
    """All that a refusal may be about; None where a compiler's symbols are in it."""
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if any(type(tensor) not in _KNOWN_TYPES for tensor in tensors):
        return None
    wanted = torch.is_grad_enabled()
    return (
        *rest,
        *((x.shape, x.stride(), x.dtype, x.device, wanted and x.requires_grad) for x in tensors),
    )
