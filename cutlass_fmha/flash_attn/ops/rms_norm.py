"""flash_attn.ops.rms_norm: RMSNorm, alone or of the sum with a residual, without dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_fmha.flash_attn.ops.triton.layer_norm import Weighted, decline, rms_norm_fn


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, of each row of x [..., dim]."""
    out: Tensor = rms_norm_fn(x, weight, None, eps=epsilon)
    return out


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: None = None,
    layerscale: None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """RMSNorm of x0 + residual, as ``ops.triton.layer_norm.rms_norm_fn``; prenorm: (output, sum).

    return_dropout_mask: a mask follows, uint8 of x0's shape, all 1. Raises NotImplementedError for a
    dropout_p, a rowscale or a layerscale.
    """
    decline(dropout_p=dropout_p, rowscale=rowscale, layerscale=layerscale)
    said: Any = {"prenorm": prenorm, "residual_in_fp32": residual_in_fp32}
    found = rms_norm_fn(x0, weight, bias, residual, eps=epsilon, **said)
    if not return_dropout_mask:
        return found
    mask = torch.ones(x0.shape, dtype=torch.uint8, device=x0.device)
    return (*found, mask) if prenorm else (found, mask)


class RMSNorm(Weighted):
    """``rms_norm`` with a weight."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(hidden_size, eps, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(Weighted):
    """``dropout_add_rms_norm`` with a weight; p declines while training."""

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, device, dtype)
        self.prenorm, self.p, self.residual_in_fp32 = prenorm, p, residual_in_fp32

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        dropout_p = self.p if self.training else 0.0
        said = (dropout_p, self.eps, None, None, self.prenorm, self.residual_in_fp32)
        return dropout_add_rms_norm(x0, residual, self.weight, None, *said)
