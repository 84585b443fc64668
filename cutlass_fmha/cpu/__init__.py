"""The ops on CPU tensors, with the semantics that the kernels have."""

from cutlass_fmha.cpu.features import attend, check_contents
from cutlass_fmha.cpu.gradients import attend_backward
from cutlass_fmha.cpu.plain import forward

__all__ = ["attend", "attend_backward", "check_contents", "forward"]
