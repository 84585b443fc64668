"""The ops on CPU tensors, with the semantics that the kernels have."""

from cutlass_fmha.cpu.features import attend, check_contents
from cutlass_fmha.cpu.plain import forward

__all__ = ["attend", "check_contents", "forward"]
