"""flash_attn.ops.activations, of which swiglu is offered here."""

from __future__ import annotations

from torch import Tensor

from cutlass_fmha import gates
from cutlass_fmha.contiguous import contiguous_rows


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y of one shape and dtype, with gradients."""
    return gates.swiglu(contiguous_rows("x", x), contiguous_rows("y", y))
