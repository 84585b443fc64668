"""The kernels beside attention: which one runs, where."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments import check
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.launch.streams import current_stream

Params = TypeVar(
    "Params",
    _C.CombineParams,
    _C.MergeParams,
    _C.RotaryParams,
    _C.AppendParams,
    _C.RopeParams,
    _C.RopeBackwardParams,
    _C.RmsNormParams,
    _C.RmsNormBackwardParams,
    _C.GatedParams,
    _C.GatedBackwardParams,
)


class Helper(NamedTuple, Generic[Params]):
    """A plan of a kernel beside attention."""

    row: int
    device_index: int
    params: Params  # complete but for addresses, and never written to


def launch(plan: Helper[Params], params: Params) -> None:
    """Runs it on the current stream of its device. ``params``: a copy with the addresses of a call."""
    _C.run(plan.row, params, max(plan.device_index, 0), current_stream(plan.device_index))


def helper(family: str, params: Params, tensor: Tensor) -> Helper[Params]:
    """The family's kernel for this tensor's dtype and device."""
    index, dtype = tensor.get_device(), check.dtype_name(tensor.dtype)
    arch = _arch(index)
    for row in _C.helpers():
        if (row.family, row.dtype, row.arch) == (family, dtype, arch):
            return Helper(row.index, index, params)
    raise ValueError(f"this build has no kernel of family {family} for {dtype} on sm_{arch}")


def _arch(index: int) -> int:
    """The architecture whose kernels a device takes; -1: the simulator."""
    compiled_for = dict(tables.this_build().compiled_for)
    built = {row.arch: compiled_for.get(row.arch, str(row.arch)) for row in _C.helpers()}
    if not built:
        raise UnsupportedError(tables.NO_KERNELS)
    device = devices.of_index(index) if index >= 0 else devices.simulated(built)
    arch = devices.rows_arch(device, built)
    if arch is None or not devices.can_execute(built[arch], device.capability):
        names = ", ".join(f"sm_{each}" for each in sorted(built))
        raise UnsupportedError(f"this build has kernels for {names}, and none of them runs on {device}")
    return arch


def resident_blocks(tensor: Tensor, per_sm: int) -> int:
    """How many thread blocks the tensor's device has room for at once, where an SM has for ``per_sm``."""
    index = tensor.get_device()
    return per_sm * (devices.of_index(index).sm_count if index >= 0 else 2)


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, head) strides of [batch, seqlen, heads, head_dim], or packed rows without a batch."""
    batch, seqlen, head = tensor.stride()[:3] if tensor.dim() == 4 else (0, *tensor.stride()[:2])
    return batch, seqlen, head


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
