"""``scaled_dot_product_attention``: torch's signature and semantics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutlass_fmha import autocast, jagged, private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.arguments.results import OUT
from cutlass_fmha.call import call_attention
from cutlass_fmha.contiguous import contiguous_rows, have_contiguous_rows
from cutlass_fmha.launch.plan import NOTHING

if TYPE_CHECKING:
    from cutlass_fmha.features import CallArguments


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with its signature and semantics, where supported.

    Args:
        query: [..., num_heads, seqlen_q, head_dim], with any number of leading dimensions, none included;
            dtypes as for ``attention``, any strides (a last dimension that is not contiguous is copied).
            Jagged nested tensors are taken too, [batch, num_heads, seqlen, head_dim] whose seqlen is jagged.
        key, value: [..., num_heads, seqlen_k, head_dim]. Leading dimensions broadcast, as torch's do.
        attn_mask: bool, where False hides a key, or of query's dtype or float32, to be added to the scores;
            broadcastable to [..., num_heads, seqlen_q, seqlen_k].
        dropout_p: as for ``attention``. The numbers are not those that torch draws.
        is_causal: key j is visible to query i when j <= i, also when the lengths differ ("top-left").
        scale: 1/sqrt(head_dim) when None.
        enable_gqa: key and value may have fewer heads, a divisor of query's.
        out: where the output is written to, which is returned; as ``attention``, but that leading dimensions
            beyond the batch must lie in memory as one. torch has no such argument.

    Returns:
        The output, a new tensor or ``out``, [..., num_heads, seqlen_q, head_dim of value]. A query that sees
        no key, or only scores of -inf, has output 0.

    Raises:
        NotImplementedError, TypeError, ValueError, UnsupportedError: as ``attention``; ValueError also for
            attn_mask together with is_causal.
    """
    causal = "none" if is_causal is False else "top-left"
    if is_causal is not False and is_causal is not True:
        check.flag("is_causal", is_causal)  # type: ignore[unreachable]
    if private_torch.any_autocast_enabled():
        query, key, value, said = autocast.operands(query, key, value, {"bias": attn_mask})
        attn_mask = said["bias"]
    plain = attn_mask is None and dropout_p == 0.0 and out is None
    layout = "sdpa" if enable_gqa is False else "sdpa, gqa" if enable_gqa is True else "bhsd"
    # Where a call like this one went well, its tensors need not be asked again what they are.
    if layout != "bhsd" and (plain or (type(attn_mask) is Tensor and dropout_p == 0.0 and out is None)):
        said = NOTHING
        if attn_mask is not None:
            said = {"mask" if attn_mask.dtype is torch.bool else "bias": attn_mask}
        known = call_attention(query, key, value, scale, causal, False, layout, None, check.NAMES, said, True)
        if known is not None:
            return known[0]  # type: ignore[no-any-return]
    lead = None
    if not _same_leading(query, key, value, enable_gqa):
        check.flag("enable_gqa", enable_gqa)
        if jagged.is_jagged(query) or jagged.is_jagged(key):
            jagged.refuse_leading(query, key, value, enable_gqa)
        check.check_types((query, key, value))
        lead, (query, key, value) = _broadcast(query, key, value, enable_gqa)
        layout = "bhsd"
    if not have_contiguous_rows(query, key, value):
        rows = tuple(map(contiguous_rows, check.NAMES, (query, key, value)))
        if any(one is not other for one, other in zip(rows, (query, key, value), strict=True)):
            layout, (query, key, value) = "bhsd", rows
    arguments: Mapping[str, Any] = NOTHING
    if not plain:
        features: CallArguments = {"dropout_p": dropout_p}
        if out is not None:
            features["out"] = _four_dims(out, query, value, lead)
        if attn_mask is not None:
            if is_causal:
                raise ValueError(
                    "attn_mask and is_causal exclude each other, as in torch: "
                    "use cutlass_fmha.attention, which takes a mask and causal together"
                )
            leading = query.shape[:2] if lead is None else lead
            scores = _of_scores(attn_mask, query.dtype, (*leading, query.shape[2], key.shape[2]))
            features["mask" if scores.dtype == torch.bool else "bias"] = scores
        arguments = op_arguments(query, features, results=OUT)
    output: Tensor = call_attention(query, key, value, scale, causal, False, layout, None, check.NAMES, arguments)[0]
    if out is not None:
        return out
    return output if lead is None else output.reshape(*lead, *output.shape[-2:])


def _same_leading(query: object, key: object, value: object, enable_gqa: bool) -> bool:
    """The usual case: four dimensions, nothing to broadcast."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    last = 1 if enable_gqa else 2
    try:
        return query.shape[:last] == key.shape[:last] == value.shape[:last]
    except RuntimeError:  # a nested tensor has no shape
        return False


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """The output's leading sizes, and four-dimensional views (copies where dimensions can't be merged)."""
    tensors = (query, key, value)
    own = 3 if enable_gqa else 2  # trailing dimensions that do not broadcast
    for name, tensor in zip(check.NAMES, tensors, strict=True):
        if tensor.dim() < own:
            needed = "[..., num_heads, seqlen, head_dim]" if enable_gqa else "[..., seqlen, head_dim]"
            raise ValueError(f"{name} must have at least {own} dimensions, {needed}, got shape {tuple(tensor.shape)}")
    try:
        lead = torch.broadcast_shapes(*(tensor.shape[:-own] for tensor in tensors))
    except RuntimeError:
        hint = "" if enable_gqa else " (enable_gqa=True lets key and value have fewer heads)"
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"query, key and value must have leading dimensions that broadcast, got shapes {shapes}{hint}"
        ) from None
    expanded = [tensor.expand(*lead, *tensor.shape[-own:]) for tensor in tensors]
    while expanded[0].dim() < 4:
        expanded = [tensor.unsqueeze(0) for tensor in expanded]
    q, k, v = (tensor.flatten(0, tensor.dim() - 4) for tensor in expanded)
    return (*lead, query.shape[-3]) if enable_gqa else tuple(lead), (q, k, v)


def _four_dims(out: Tensor, query: Tensor, value: Tensor, lead: tuple[int, ...] | None) -> Tensor:
    """``scaled_dot_product_attention``'s ``out`` as [batch, num_heads, seqlen_q, head_dim], a view of it."""
    check.check_tensor("out", out)
    if lead is None:
        return out
    shape = (*lead, query.shape[-2], value.shape[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    try:
        return out.view(*query.shape[:-1], value.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"out must have leading dimensions that lie in memory as one, got strides {tuple(out.stride())}"
        ) from None


def _of_scores(attn_mask: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A mask or a bias that goes with ``shape``, [..., seqlen_q, seqlen_k], in four dimensions at most."""
    check.check_optional_tensor("attn_mask", attn_mask)
    if attn_mask.dtype not in (torch.bool, dtype, torch.float32):
        raise ValueError(
            f"attn_mask must be bool, or of query's dtype {check.dtype_name(dtype)} or float32, "
            f"got {check.dtype_name(attn_mask.dtype)}"
        )
    sizes = tuple(attn_mask.shape)
    own = shape[max(0, len(shape) - len(sizes)) :]
    if sizes != own and (
        len(own) < len(sizes) or any(size not in (1, want) for size, want in zip(sizes, own, strict=True))
    ):
        raise ValueError(
            f"attn_mask must be broadcastable to {shape}, [..., seqlen_q, seqlen_k], got shape {tuple(attn_mask.shape)}"
        )
    if len(shape) < 5 or attn_mask.dim() < 4:
        return attn_mask
    return attn_mask.expand(*shape[:-3], *attn_mask.shape[-3:]).flatten(0, len(shape) - 4)
