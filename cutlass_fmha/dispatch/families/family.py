"""What every family of rows answers, and the rules that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.describe import Call
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import FEATURES, Problem
from cutlass_fmha.dispatch.table import Row, Table


class Rule(Protocol):
    """One eligibility rule: a sentence why a row can't run a problem, or None."""

    def __call__(self, row: Row, problem: Problem, device: Device, table: Table) -> str | None: ...


class Offers(Protocol):
    """Microseconds of a row's launches, by which rows are chosen."""

    def at_least(self, problem: Problem) -> float:
        """They are no less, which is found sooner."""

    def us(self, problem: Problem) -> float: ...


#: Runs a call by itself: its tensors, scale, whether its LSE is wanted, what its features are made of, and
#: what it is given of ``RESULTS``.
Launch = Callable[[tuple[Tensor, Tensor, Tensor], float, bool, Mapping[str, Any]], tuple[Tensor, Tensor | None]]


class Prepared(NamedTuple):
    """What is known of all calls with the same metadata: the parameters of a launch, but for addresses and
    the scale, and the floats that its parts leave, or words of a mask; or how the family launches."""

    params: _C.AttentionParams
    room: int = 0
    launch: Launch | None = None


class Family(Protocol):
    """A family of rows; a module is one."""

    #: What a row is made for, and what else a call may ask.
    FIXED_RULES: tuple[Rule, ...]
    CALL_RULES: tuple[Rule, ...]

    def lacking(self, problem: Problem) -> tuple[str, ...]:
        """The features of a problem that its rows don't know."""

    def other_head_dims(self, row: Row, problem: Problem) -> str | None:
        """The head dims that a row is for, where a problem has others."""

    def offers(self, row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
        """Those for problems that differ from this one in lengths, heads and batch."""

    def prepare(self, row: Row, call: Call, device: Device) -> Prepared: ...


# ---- rules that several share -----------------------------------------------------------------------------


def made_for_device(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    arch = devices.rows_arch(device, table.architectures)
    if row.arch in (arch, devices.own_arch(device)):
        compiled_for = table.architectures.get(row.arch, str(row.arch))
        if not devices.can_execute(compiled_for, device.capability):
            major, minor = device.capability
            return (
                f"compiled for {devices.described(compiled_for)}, "
                f"which a device of capability {major}.{minor} can't execute"
            )
    if arch == row.arch:
        return None
    if arch is None:
        return f"made for sm_{row.arch}, and this device takes no row of this build"
    return f"made for sm_{row.arch}, and this device takes the sm_{arch} rows"


def dtype(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if row.dtype == problem.dtype:
        return None
    return f"computes {row.dtype}, and the tensors are {problem.dtype}"


def shared_memory(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if row.smem_bytes <= device.smem_per_block:
        return None
    return f"needs {row.smem_bytes} bytes of shared memory per block, and this device has {device.smem_per_block}"


def alignment(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if problem.alignment % row.alignment == 0:
        return None
    return f"needs pointers and strides aligned to {row.alignment} bytes, and these are aligned to {problem.alignment}"


def whole_blocks(problem: Problem, queries: int, keys: int) -> str | None:
    """Why a row whose tiles have so many can't walk the blocks of a mask."""
    if problem.block_mask is None:
        return None
    block_m, block_n = problem.block_mask
    if block_m % queries == 0 and block_n % keys == 0:
        return None
    return f"takes block masks of blocks that are multiples of {queries} x {keys}, and these are {block_m} x {block_n}"


def head_dims(problem: Problem) -> str:
    return f"{problem.head_dim}" + ("" if problem.head_dim_v is None else f", value {problem.head_dim_v}")


def has_no(names: Sequence[str]) -> str:
    return f"has no {', no '.join(FEATURES[name] for name in names)}"
