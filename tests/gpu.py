"""The GPU under test, its rows, and memory that shows what kernels write."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from operands import poison
from oracle_helpers import bits
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.dispatch.device import can_execute, code_for, of_index, own_arch
from cutlass_fmha.dispatch.table import PLAIN

if _C.build_info().get("simulator"):
    # The package's own way to a kernel leads to the simulator as well.
    os.environ.setdefault("CUTLASS_FMHA_SIMULATE", "1")


def rows_arch() -> int | None:
    """The architecture whose rows this machine's first GPU takes, or was told to take; None without a GPU."""
    if forced := os.environ.get("CUTLASS_FMHA_FORCE_ARCH"):
        return int(forced)
    if simulated():
        return min(row.arch for row in _C.rows())
    if not torch.cuda.is_available():
        return None
    return own if (own := own_arch(of_index(0))) in {row.arch for row in _C.rows()} else 89


def simulated() -> bool:
    """Whether this build runs its rows on the CPU, on tensors that are there."""
    return bool(_C.build_info().get("simulator"))


def device() -> torch.device:
    return torch.device("cpu") if simulated() else torch.device("cuda", 0)


def _under_test(*families: str) -> list[_C.Row]:
    """All of one architecture; none where there is no GPU to test them on."""
    every = (*_C.rows(), *_C.backward_rows()) if unusable() is None else ()
    return [row for row in every if row.arch == rows_arch() and row.family in families]


#: The plain rows under test; the scored ones, with ranged and masked ones; those that compute gradients.
rows = partial(_under_test, *PLAIN)
scored_rows = partial(_under_test, "ranged", "masked", "scored", "few_query_scored", "wide_scored")
wide_rows = partial(_under_test, "wide")
backward_rows = partial(_under_test, "backward", "backward_wide")


@contextlib.contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """The stream stands still in the block; what it was asked meanwhile is done at the end. Whoever waits for it in the
    block hangs: half an hour later the process ends, with a traceback."""
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    arguments = (ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(word.data_ptr()), 1, 0)  # word >= 1
    status = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2(*arguments)
    assert status == 0, f"cuStreamWaitValue32: error {status}"
    faulthandler.dump_traceback_later(1800, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        word.fill_(1)
        stream.synchronize()


def mode() -> str:
    """How the rows run: ``native``, ``ptx`` (sm_89 rows on another GPU) or ``proxy`` (compiled for it); with
    ``80`` or ``86`` behind it where it is what they are compiled for there that runs."""
    if rows_arch() in _C.build_info()["proxy"]:
        return "proxy"
    code = code_for(_C.build_info()["compiled_for"][rows_arch()], torch.cuda.get_device_capability(0))
    how, number = ("ptx" if code.startswith("compute") else "native"), code.partition("_")[2]
    return how + (number if number in ("80", "86") else "")


def unusable() -> str | None:
    """Why the rows can't be tested on this machine, in one sentence; None when they can."""
    if simulated():
        return None
    build = _C.build_info()
    if not build["cuda"]:
        return "cutlass_fmha was built without CUDA, so there is no kernel to test"
    if not torch.cuda.is_available():
        return "no CUDA device can be used: there is no NVIDIA GPU, or no driver for torch's CUDA"
    if (capability := torch.cuda.get_device_capability(0)) < (8, 0):
        return f"{torch.cuda.get_device_name(0)} is older than compute capability 8.0"
    target = build["compiled_for"].get(arch := rows_arch())
    if not any(row.arch == arch for row in _C.rows()):
        return f"this build of cutlass_fmha has no sm_{arch} rows"
    compiled_for = build["proxy"].get(arch, arch)
    if compiled_for not in (89, own := own_arch(of_index(0))) or not can_execute(target, capability):
        return f"this build's sm_{arch} rows are code for sm_{compiled_for}, and this GPU is sm_{own}"
    return None


def other_sources() -> str | None:
    """Whether the extension says that it was built from another src/ than the one beside these tests."""
    from source_hash import source_hash

    built_from = _C.build_info().get("source_hash") or source_hash()
    told = f"the extension was built from sources with the hash {built_from}, src/ has {source_hash()}"
    return told if built_from != source_hash() else None


def without_tma() -> str | None:
    """Why no row under test copies by TMA, in one sentence; None when one does. Without a GPU to test on, of
    all rows of the build."""
    tested = _C.rows() if unusable() is not None else rows()
    if any(row.family in PLAIN and row.copy == "tma" for row in tested):
        return None
    others = "no row of this build copies by TMA; the candidates do: CUTLASS_FMHA_MANIFEST=src/candidates.cmake"
    return "sm_89 has no TMA" if rows_arch() == 89 else others


def by_row(rows: list[_C.Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def torch_dtype(row: _C.Row) -> torch.dtype:
    return getattr(torch, row.dtype)


@dataclass
class Guarded:
    """A view that a kernel has to fill, inside a buffer of NaN that it must not touch."""

    buffer: Tensor
    view: Tensor

    @classmethod
    def around(cls, view: Tensor) -> Guarded:
        """``view``, a view into a buffer of its own (as ``place`` makes them), is filled with NaN as well."""
        size = view.untyped_storage().nbytes() // view.element_size()
        return cls(view.as_strided((size,), (1,), 0).copy_(poison(view.dtype, size, view.device)), view)

    def intact(self) -> Tensor:
        intact = bits(self.buffer) == bits(poison(self.buffer.dtype, 1, self.buffer.device))
        intact.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(True)
        return intact.all()


FAR = 2**31  # elements
REGION = 2**19  # distance between the first elements of q, k, v and o


def far_view(buffer: Tensor, index: int, shape: tuple[int, ...], axis: int) -> Tensor:
    """A view of ``shape`` whose last index along ``axis`` is 2^31 elements away from the first."""
    strides, step = [0, 0, 0, 1], shape[3]
    for other in (x for x in (2, 1, 0) if x != axis):
        strides[other] = step
        step *= shape[other]
    assert step <= REGION
    strides[axis] = FAR // (shape[axis] - 1) // 8 * 8 + 8
    return buffer.as_strided(shape, strides, index * REGION)
