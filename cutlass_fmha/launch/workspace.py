"""Where a launch's own memory comes from: torch's caching allocator, or the ``Workspace`` that is in use.

A launch's own is what is free again when it is done: parts of split keys and of a tail, bits of masks, sums in float32,
copies of what a kernel can't read. What lies between the launches of a call is that call's, before theirs.
What a call returns is new memory of torch's, or the caller's (``out``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor

from cutlass_fmha import private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.launch.streams import current_stream

#: Bytes that each tensor begins at a multiple of, as torch's allocator has it.
ALIGNMENT = 512

#: Those that any thread is inside of. While there is none, a launch asks no further.
IN_USE: list[Workspace] = []

_of_thread = threading.local()
_CALLERS = "cutlass_fmha.workspaces"  # what torch hands on to threads that compute gradients


class Workspace:
    """Memory for what launches need besides their tensors: taken once, and the same for all of them.

    Inside of ``with workspace:`` the launches of this thread on the workspace's device take it from there,
    those of gradients that it asks for included, compiled ones too; and so do the gradients of calls that
    were made there, whenever they are computed, unless these were compiled. Where workspaces of a device are
    nested, from the innermost. A launch that needs more is refused: nothing grows, and torch is not asked
    instead. A compiled graph's own tensors are torch's.

    One stream at a time: a launch on another one is refused, and so is who enters there meanwhile. Who enters
    later on another stream waits for the one before. A CUDA graph is captured by ``with
    torch.cuda.graph(graph), workspace:``, and reads and writes the workspace whenever it is replayed: keep
    the workspace as long, and replay where nothing else uses it.

    Args:
        size: bytes. ``memory_plan(...).workspace`` is what a call and its gradients need; of several calls
            the largest serves all.
        device: where; the current CUDA device when None. The CPU backend takes nothing from one.

    Attributes:
        high_water: bytes, the most that a launch has taken until now.

    Raises:
        TypeError, ValueError: a size that is none, or a device that is neither CUDA nor the CPU.
        RuntimeError: of a launch, that the workspace is too small for it, with the size that it needs, or
            that it is on another stream.
    """

    def __init__(self, size: int, device: str | int | torch.device | None = None) -> None:
        if check.integer("size", size, "") < 0:
            raise ValueError(f"size must be 0 bytes or more, got {size}")
        where = torch.device("cuda" if device is None else device)
        if where.type not in ("cuda", "cpu", "meta"):
            raise ValueError(f"device must be a CUDA device or the CPU, got {where}")
        self._take(torch.empty(size, dtype=torch.uint8, device=where))

    @classmethod
    def within(cls, memory: Tensor) -> Workspace:
        """One in memory that somebody has, uint8 [size], for the current stream."""
        found = cls.__new__(cls)
        found._take(memory)
        return found

    def _take(self, memory: Tensor) -> None:
        self._memory = memory
        self.device = self._memory.device
        self.size = memory.numel()
        self.high_water = 0
        self._index = self._memory.get_device() if self._memory.is_cuda else -1
        self._turn = threading.RLock()
        self._stream = current_stream(self._index)
        self._last = torch.cuda.current_stream(self._index) if self._index >= 0 else None
        self._users = 0
        self._held = 0

    def __repr__(self) -> str:
        return f"Workspace({self.size}, device={str(self.device)!r}, high_water={self.high_water})"

    def __enter__(self) -> Workspace:
        with self._turn:
            self._check_stream("enter it") if self._users else self._move()
            self._users += 1
        stack = _stack()
        stack.append(self)
        if not private_torch.is_stashed(_CALLERS):
            private_torch.stash(_CALLERS, stack)
        IN_USE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack = _stack()
        del stack[len(stack) - 1 - stack[::-1].index(self)]
        IN_USE.remove(self)
        with self._turn:
            self._users -= 1

    def _move(self) -> None:
        """To the current stream, behind what the one before still does."""
        stream = current_stream(self._index)
        if self._last is not None and stream != self._stream:
            now = torch.cuda.current_stream(self._index)
            if not torch.cuda.is_current_stream_capturing():  # a graph waits for nothing outside of it
                now.wait_stream(self._last)
            self._memory.record_stream(now)
            self._last = now
        self._stream = stream

    def _check_stream(self, what: str) -> None:
        if current_stream(self._index) != self._stream:
            raise RuntimeError(
                "a workspace is for one stream at a time, and this is another than it is in use on: "
                f"{what} on that one, or make a Workspace for each"
            )

    def _begin(self) -> None:
        """A launch's turn: threads on one stream take their turns."""
        self._turn.acquire()
        try:
            self._check_stream("launch")
        except BaseException:
            self._turn.release()
            raise

    def _refuse(self, needed: int) -> None:
        raise RuntimeError(
            f"a workspace of {self.size} bytes is too small: this launch needs {needed}, which "
            f"memory_plan(...).workspace says beforehand; make a Workspace({needed}) or a larger one"
        )


def _stack() -> list[Workspace]:
    found: list[Workspace] | None = getattr(_of_thread, "stack", None)
    if found is None:
        found = _of_thread.stack = []
    return found


def in_use(device: torch.device) -> Workspace | None:
    """The workspace that launches of this thread on a device take their memory from.

    In a thread of autograd's, that of a call whose gradient it is, else that of who asked for gradients.
    """
    if IN_USE:
        there = private_torch.is_stashed(_CALLERS)
        callers: Sequence[Workspace] = private_torch.stashed(_CALLERS) if there else ()
        for workspace in (*reversed(_stack()), *reversed(callers)):
            if workspace.device == device:
                return workspace
    return None


def inside(workspace: Workspace | None) -> AbstractContextManager[object]:
    """That of a call, around its gradients: whichever thread computes them."""
    return nullcontext() if workspace is None else workspace


class Scratch:
    """The memory of one launch, or of a call around several: torch's, or a workspace's, whose turn it has.

    Where the workspace is too small torch lends the rest, until ``check`` has the size to refuse with.
    """

    __slots__ = ("_device", "_first", "_kept", "_taken", "_workspace")

    def __init__(self, device: torch.device) -> None:
        self._workspace = in_use(device)
        self._device = device
        self._first = self._taken = 0
        self._kept: Tensor | None = None

    def begin(self) -> Scratch:
        if (workspace := self._workspace) is not None:
            workspace._begin()
            self._first = self._taken = workspace._held
        return self

    def end(self, *raised: object) -> None:
        if (workspace := self._workspace) is not None:
            workspace._held = self._first
            workspace._turn.release()

    def hold(self) -> None:
        """Launches inside of this one's context take what lies behind. Raises as ``check`` does."""
        self.check()
        if (workspace := self._workspace) is not None:
            workspace._held = -(-self._taken // ALIGNMENT) * ALIGNMENT

    __enter__, __exit__ = begin, end

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of whatever was there."""
        workspace = self._workspace
        if workspace is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        begin = -(-self._taken // ALIGNMENT) * ALIGNMENT
        self._taken = end = begin + math.prod(shape) * dtype.itemsize
        if end > workspace.size:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device)
        return workspace._memory[begin:end].view(dtype).view(tuple(shape))

    def like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, x.dtype)

    def copy(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous copy."""
        return self.empty(x.shape, x.dtype if dtype is None else dtype).copy_(x)

    def floats(self, count: int) -> int:
        """The address of so many, and nothing else: what most launches need."""
        if (workspace := self._workspace) is None:
            self._kept = torch.empty(count, dtype=torch.float32, device=self._device)
            return self._kept.data_ptr()
        self._taken = self._first + 4 * count
        self.check()
        return workspace._memory.data_ptr() + self._first

    def check(self) -> None:
        """Comes before the kernel. Raises RuntimeError where the workspace was too small."""
        if (workspace := self._workspace) is not None:
            if self._taken > workspace.size:
                workspace._refuse(self._taken)
            workspace.high_water = max(workspace.high_water, self._taken)
