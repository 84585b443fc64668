"""flash_attn.ops.triton.layer_norm, as far as it is RMSNorm: alone, or of the sum with a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cutlass_fmha.arguments import check
from cutlass_fmha.contiguous import contiguous_rows
from cutlass_fmha.norm import rms_norm
from cutlass_fmha.ops.rows import check_like

#: What is not here, and what to do in its place.
INSTEAD = {
    "dropout_p": "0 here: let torch.nn.functional.dropout have x before",
    "rowscale": "None here: multiply x by it before",
    "layerscale": "None here: multiply x by it before",
    "x1": "None here: add it to x before",
    "weight1": "None here: norm the sum that prenorm=True returns a second time",
    "bias1": "None here: norm the sum that prenorm=True returns a second time",
}


def decline(**given: Any) -> None:
    """Raises NotImplementedError for the first that is there."""
    for name, value in given.items():
        if value is not None and not (name == "dropout_p" and value == 0.0):
            raise NotImplementedError(f"{name} must be {INSTEAD[name]}")


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """RMSNorm of x, or of x + residual, by weight (by 1 + weight: zero_centered_weight), with gradients.

    x and residual: [..., dim] of one shape. The output has out's dtype, out_dtype, or x's. prenorm: (output,
    x + residual) are returned, the latter of residual's dtype; without a residual x, which residual_in_fp32
    makes float32. return_dropout_mask: two None follow. Other dtypes for residual or weight than x's take a
    pass of their own. out, residual_out: where the results are copied to.

    Raises NotImplementedError for dropout_p, x1, weight1, bias1 and rowscale; what ``cutlass_fmha.rms_norm``
    raises.
    """
    check.check_tensors_given({"x": x, "weight": weight}, {"bias": bias, "residual": residual})
    decline(dropout_p=dropout_p, x1=x1, weight1=weight1, bias1=bias1, rowscale=rowscale)
    x = contiguous_rows("x", x)
    wanted = out.dtype if out is not None else x.dtype if out_dtype is None else out_dtype
    kept = x.dtype
    if residual is not None:
        residual, kept = contiguous_rows("residual", residual), residual.dtype
        check_like("residual", residual, "x", x)
        if kept != x.dtype:
            x, residual = x + residual, None
    elif prenorm and residual_in_fp32:
        kept = torch.promote_types(x.dtype, torch.float32)
        x = x.to(kept)
    if any(each is not None and each.dtype not in (x.dtype, torch.float32) for each in (weight, bias)) or (
        bias is not None and bias.dtype != weight.dtype
    ):
        weight, bias = weight.float(), None if bias is None else bias.float()
    said: Any = {"eps": eps, "weight_offset": float(zero_centered_weight), "out_dtype": wanted}
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if residual is None:
        y, total = rms_norm(x, weight, bias, **said), x.to(kept)
    else:
        y, total = rms_norm(x, weight, bias, residual=residual, **said)
    y = y if out is None else out.copy_(y)
    total = total if residual_out is None else residual_out.copy_(total)
    found: tuple[Tensor | None, ...] = (y, total) if prenorm else (y,)
    found += (None, None) if return_dropout_mask else ()
    return found if len(found) > 1 else y


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """``rms_norm_fn`` with is_rms_norm; NotImplementedError without."""
    if not is_rms_norm:
        raise NotImplementedError(
            "is_rms_norm must be True: there is no LayerNorm here, torch.nn.functional.layer_norm is one"
        )
    places = (return_dropout_mask, out_dtype, out, residual_out)
    first = (x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm)
    return rms_norm_fn(*first, residual_in_fp32, zero_centered_weight, *places)


class Weighted(nn.Module):
    """Modules' parameters: weight, which begins as what multiplies by 1, and no bias."""

    def __init__(self, hidden_size: int, eps: float, device: Any, dtype: Any, zero: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_weight = zero
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)


class RMSNorm(Weighted):
    """``rms_norm_fn`` with a weight; dropout_p declines while training."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device, dtype, zero_centered_weight)
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )
