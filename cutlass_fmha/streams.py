"""The stream that a launch goes to."""

from __future__ import annotations

import torch


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# A tenth of the cost of torch.cuda.current_stream, which builds a Stream object; absent from a torch without
# CUDA.
_of_device = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)


def current_stream(index: int) -> int:
    """The current stream of CUDA device ``index``; 0 for tensors on the CPU, which a simulator takes."""
    return _of_device(index) if index >= 0 else 0
