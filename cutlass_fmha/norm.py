"""RMSNorm (Zhang and Sennrich 2019), alone or of the sum that a pre-norm block goes on with."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from cutlass_fmha.arguments import check
from cutlass_fmha.ops import dispatcher


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    residual: None = ...,
    eps: float = ...,
    weight_offset: float = ...,
    out_dtype: torch.dtype | None = ...,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    residual: Tensor,
    eps: float = ...,
    weight_offset: float = ...,
    out_dtype: torch.dtype | None = ...,
    out: tuple[Tensor, Tensor] | None = ...,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) + bias, of each row.

    Args:
        x: [..., dim], dim 1 to 65,536; float16, bfloat16 or float32 (on the CPU also float64), any strides
            with a contiguous last dimension. With more than three leading dimensions that can't be viewed as
            one, x is copied first.
        weight, bias: [dim], both of x's dtype or both float32; None: 1 and 0.
        residual: of x's shape and dtype: x + residual, rounded to their dtype, takes the place of x, and is
            returned too. Under autocast they may have two dtypes: both become float32.
        eps: 0 or more.
        weight_offset: added to weight in float32: 1.0 where weights are kept as their distance from one.
        out_dtype: x's, which is the default, or float32; of a float32 x also float16 and bfloat16.
        out: to write to, with a residual (out, sum): of x's shape, contiguous in the last dimension. It gives
            its dtype to the output. It shares no memory with another tensor of the call, and is not taken
            where a gradient is wanted.

    Returns:
        The output, or with a residual (output, sum): ``out``, or new contiguous tensors. Computed in
        float32 (of float64: in float64) and rounded once. x, weight, bias and residual have gradients;
        those of weight and bias have the same bits each time.

    Raises:
        TypeError, ValueError: an argument is of another type, or does not fit; the sentence says which.
        NotImplementedError: a second derivative, or one in forward mode.
    """
    check.check_tensors_given({"x": x}, {"weight": weight, "bias": bias, "residual": residual})
    eps, weight_offset = check.number_of("eps", eps), check.number_of("weight_offset", weight_offset)
    if not (out_dtype is None or isinstance(out_dtype, torch.dtype)):
        raise TypeError(f"out_dtype must be a torch.dtype or None, got {type(out_dtype).__name__}")
    if out is None:
        found = dispatcher.call("rms_norm", x, weight, bias, residual, eps, weight_offset, out_dtype)
        output: Tensor = found[0]
        return output if residual is None else (output, found[1])
    sum = None
    if residual is None:
        check.check_optional_tensor("out", out)
        output = out  # type: ignore[assignment]
    elif isinstance(out, tuple) and len(out) == 2:
        output, sum = out
        check.check_tensors_given({"out[0]": output, "out[1]": sum})
    else:
        raise TypeError(f"out must be a tuple (out, sum) with a residual, got {check.shown(out)}")
    if out_dtype not in (None, output.dtype):
        raise ValueError("out_dtype must be None or out's dtype where out is given")
    torch.ops.cutlass_fmha.rms_norm_out(x, weight, bias, residual, output, sum, eps, weight_offset)
    return out
