"""The public functions: what a caller says, turned into one call of the op."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from cutlass_fmha import check, ops, plan


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = ...,
    causal: bool | str | None = ...,
    return_lse: Literal[False] = ...,
    layout: str = ...,
    template: str | None = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = ...,
    causal: bool | str | None = ...,
    return_lse: Literal[True],
    layout: str = ...,
    template: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool | str | None = False,
    return_lse: bool = False,
    layout: str = "bshd",
    template: str | None = None,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Exact attention, ``softmax(scale * q @ k^T + mask) @ v``, in one kernel (FlashAttention-2, Dao 2023).

    Args:
        q: [batch, seqlen_q, num_heads, head_dim], float16 or bfloat16 (on the CPU also float32 and float64).
            Any strides, as long as the last dimension is contiguous.
        k, v: [batch, seqlen_k, num_heads_kv, head_dim], of q's dtype and device. num_heads_kv divides
            num_heads: each head of k and v serves num_heads / num_heads_kv consecutive heads of q (GQA; MQA
            when it is 1).
        scale: factor on the scores before the softmax, any finite number; 1/sqrt(head_dim) when None.
        causal: False (or "none"), or which keys a mask hides. "bottom-right" (or True) aligns the last query
            with the last key: key j is visible to query i when j <= i + seqlen_k - seqlen_q. "top-left"
            aligns the first ones: j <= i.
        return_lse: also return the log-sum-exp of each row's scaled scores.
        layout: "bshd", or "bhsd" for [batch, num_heads, seqlen, head_dim], which torch's SDPA has.
        template: name of the kernel to run, in place of the winner that ``cutlass_fmha.explain`` shows.

    Returns:
        The output, a new tensor of q's shape, dtype and layout. With ``return_lse`` a pair of it and the
        natural-log LSE, float32 [batch, num_heads, seqlen_q]. A query that sees no key has output 0 and LSE
        -inf.

    Raises:
        TypeError, ValueError: an argument is not what is described above; the sentence names it.
        UnsupportedError: no kernel of this build runs the problem on the device; the message lists each row's
            reasons.
        NotImplementedError: an input requires a gradient: there is no backward yet.
    """
    check.layout_name(layout)
    output, lse = _forward(
        q, k, v, scale, check.causal_name(causal), return_lse, layout, template, ("q", "k", "v")
    )
    return (output, lse) if return_lse else output


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with its signature and semantics, where supported.

    Args:
        query: [..., num_heads, seqlen_q, head_dim], with any number of leading dimensions, none included;
            dtypes as for ``attention``, any strides (a last dimension that is not contiguous is copied).
        key, value: [..., num_heads, seqlen_k, head_dim]. Leading dimensions broadcast, as torch's do.
        attn_mask: None; anything else raises.
        dropout_p: 0; anything else raises.
        is_causal: key j is visible to query i when j <= i, also when the lengths differ ("top-left").
        scale: 1/sqrt(head_dim) when None.
        enable_gqa: key and value may have fewer heads, a divisor of query's.

    Returns:
        The output, [..., num_heads, seqlen_q, head_dim].

    Raises:
        NotImplementedError: attn_mask, dropout_p or a gradient is asked for: nothing is silently dropped.
        TypeError, ValueError, UnsupportedError: as ``attention``.
    """
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask is not supported yet: pass None, or use torch's scaled_dot_product_attention"
        )
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p is not supported yet: pass 0, got {dropout_p}")
    causal = "top-left" if is_causal else "none"
    if not _same_leading(query, key, value, enable_gqa):
        check.check_types((query, key, value))
        lead, tensors = _broadcast(query, key, value, enable_gqa)
        query, key, value = (_contiguous_rows(tensor) for tensor in tensors)
        output, _ = _forward(query, key, value, scale, causal, False, "bhsd", None, check.NAMES)
        return output.reshape(*lead, *output.shape[-2:])
    query, key, value = _contiguous_rows(query), _contiguous_rows(key), _contiguous_rows(value)
    return _forward(query, key, value, scale, causal, False, "bhsd", None, check.NAMES)[0]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    layout: str,
    template: str | None,
    names: plan.Names,
) -> tuple[Tensor, Tensor | None]:
    """One call of the op, or of what the op would call where nothing listens in between."""
    if scale is not None:
        scale = check.finite_scale(scale)
    if template is not None and not isinstance(template, str):
        raise TypeError(f"template must be the name of a row or None, got {type(template).__name__}")
    if not torch.compiler.is_compiling() and ops.can_skip_dispatcher(q, k, v):
        return plan.launch(q, k, v, scale, causal, return_lse, template, layout, names)
    dims = check.check_tensors((q, k, v), layout, names)
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if scale is None:
        scale = float(dims.head_dim) ** -0.5
    output, lse = torch.ops.cutlass_fmha.forward(q, k, v, scale, causal, return_lse, template)
    return (output.transpose(1, 2) if layout == "bhsd" else output), lse


def _same_leading(query: object, key: object, value: object, enable_gqa: bool) -> bool:
    """The usual case: four dimensions, nothing to broadcast."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    last = 1 if enable_gqa else 2
    return query.shape[:last] == key.shape[:last] == value.shape[:last]


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """The output's leading sizes, and four-dimensional views (copies where dimensions can't be merged)."""
    tensors = (query, key, value)
    own = 3 if enable_gqa else 2  # trailing dimensions that do not broadcast
    for name, tensor in zip(check.NAMES, tensors, strict=True):
        if tensor.dim() < own:
            needed = "[..., num_heads, seqlen, head_dim]" if enable_gqa else "[..., seqlen, head_dim]"
            raise ValueError(
                f"{name} must have at least {own} dimensions, {needed}, got shape {tuple(tensor.shape)}"
            )
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


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
