"""Arrays of other libraries: tensors' numbers, shared memory, and the stream that the protocol wants."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tensors import ints, qkv, randn
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cutlass_fmha import arrays, attention, private_torch


class Recorder:
    """An array like CuPy's: on CUDA device 1 by its own account, of a library that is this module."""

    def __init__(self, tensor: Tensor, device: tuple[int, int] = (2, 1)) -> None:
        self.tensor, self.device, self.asked = tensor, device, []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        return self.tensor.__dlpack__()

    def __array_namespace__(self) -> Any:
        return Recorder

    @staticmethod
    def from_dlpack(tensor: Tensor) -> Recorder:
        return Recorder(tensor)


LIBRARIES = [
    pytest.param("numpy", "cpu"),
    pytest.param("jax.numpy", "cpu"),
    pytest.param("cupy", "cuda", marks=pytest.mark.gpu),
    pytest.param("jax.numpy", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("library", "device"), LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_arrays_in_arrays_out(library: str, device: str, dtype: torch.dtype):
    pytest.importorskip(library.partition(".")[0], reason=f"{library} is not installed")
    namespace = importlib.import_module(library)
    tensors = [x.to(device) for x in qkv(dtype=dtype)]
    mask = torch.arange(65) < ints(65, 20)[:, None, None, None]
    said: dict[str, Any] = {"mask": mask, "seqused_k": ints(65, 30)}
    if device == "cpu" or dtype == torch.float16:  # which no row of float32 takes
        said["sinks"] = randn(4)
        said["block_mask"] = (ints(1).view(1, 1, 1), ints(0).view(1, 1, 1, 1), (128, 128))

    placed = tree_map_only(Tensor, lambda x: x.to(device), said)
    as_arrays = functools.partial(tree_map_only, Tensor, lambda x: namespace.asarray(x.cpu().numpy()))
    rest: dict[str, Any] = {"causal": True, "return_lse": True, "scale": 0.2}
    want, given = attention(*tensors, **rest, **placed), as_arrays(tensors)
    out, lse = attention(*given, **rest, **as_arrays(said))
    assert type(out) is type(lse) is type(given[0]) and out.shape == tuple(tensors[0].shape)
    assert type(attention(*given)) is type(out)
    for found, wanted in zip((out, lse), want, strict=True):
        shared = torch.from_dlpack(found)
        assert shared.device.type == device and torch.equal(shared, wanted)


def test_memory_is_shared_both_ways(monkeypatch: pytest.MonkeyPatch):
    seen: list[Tensor] = []
    q, k, v = (x.numpy() for x in qkv())

    def call(*given: Tensor, **said: Any) -> Tensor:
        seen.extend((*given, torch.zeros(3)))
        return seen[-1]

    out = arrays.through(call, q, k, v, {}, {})
    addresses = [x.__array_interface__["data"][0] for x in (q, k, v, out)]
    assert [x.data_ptr() for x in seen] == addresses


@pytest.mark.parametrize(("current", "asked"), [(0, 1), (2, 2), (77, 77)])
def test_the_stream_that_the_kernel_runs_on_is_handed_over(monkeypatch: pytest.MonkeyPatch, current: int, asked: int):
    """1 is CUDA's default stream, which has no number; another one is known by its address."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=current))
    monkeypatch.setattr(private_torch, "raw_stream", lambda index: devices.append(index) or current)
    given = [Recorder(x) for x in qkv()]
    length = Recorder(ints(65, 20))
    out = attention(*given, seqused_k=length)
    assert [x.asked for x in (*given, length)] == [[asked]] * 4 and devices == [1]
    assert isinstance(out, Recorder)
    want = attention(*qkv(), seqused_k=ints(65, 20))
    assert torch.equal(torch.from_dlpack(out.tensor), want)  # torch is on that stream
    assert torch.equal(torch.from_dlpack(out.tensor.__dlpack__(stream=asked, max_version=(0, 8))), want)
    with monkeypatch.context() as changed:  # on another one the tensor has it wait
        changed.setattr(Tensor, "__dlpack__", lambda _, **said: said)
        assert out.tensor.__dlpack__(stream=asked + 1) == {"stream": asked + 1}
    place = arrays._Place(Recorder, None)
    assert [place.take(Recorder(x)) is None for x in (ints(1), ints(1))] == [False, False]
    place._index = 3  # where q was
    assert place.take(given[0]) is None
    host = [Recorder(x, (1, 0)) for x in qkv()]
    attention(*host)
    assert [x.asked for x in host] == [[None]] * 3


@pytest.mark.parametrize(("its", "ours", "waits"), [(0, 0, False), (77, 77, False), (77, 0, True), (0, 2, True)])
def test_a_library_on_the_kernels_stream_is_handed_the_memory_alone(
    monkeypatch: pytest.MonkeyPatch, its: int, ours: int, waits: bool
):
    """As CuPy: its from_dlpack takes a capsule, too, and then asks for no stream."""
    taken: list[Any] = []

    class Array(Recorder):
        __module__ = "cupy._core"

        def __array_namespace__(self) -> Any:
            return library

    def from_dlpack(given: Any) -> Array:
        taken.append(given)
        is_capsule = not hasattr(given, "__dlpack__")
        return Array(torch.utils.dlpack.from_dlpack(given if is_capsule else given.__dlpack__(stream=ours or 1)))

    current = SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=its))
    library = SimpleNamespace(from_dlpack=from_dlpack, cuda=current)
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setattr(arrays, "_begun", {1})
    monkeypatch.setattr(private_torch, "raw_stream", lambda index: ours)
    given = [Array(x) for x in qkv()]
    out, lse = attention(*given, return_lse=True)
    assert [x.asked for x in given] == [[ours or 1]] * 3  # the protocol's: it waits where it has to
    assert [hasattr(x, "__dlpack__") for x in taken] == [waits] * 2
    for found, want in zip((out, lse), attention(*qkv(), return_lse=True), strict=True):
        assert torch.equal(found.tensor, want)


class OnGpu(Recorder):
    """A library's array on a GPU, whose work is on a stream of that library: it follows the protocol."""

    own: torch.cuda.Stream

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor, (2, tensor.get_device()))

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        consumer = torch.cuda.default_stream() if stream == 1 else torch.cuda.ExternalStream(stream)
        consumer.wait_event(self.own.record_event())
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __array_namespace__(self) -> Any:
        return OnGpu

    @staticmethod
    def from_dlpack(tensor: Tensor) -> OnGpu:
        found = OnGpu(torch.from_dlpack(tensor.__dlpack__(stream=OnGpu.own.cuda_stream)))
        assert found.tensor.data_ptr() == tensor._tensor.data_ptr(), "the result is copied"
        return found


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True])
def test_arrays_of_a_gpu_are_shared_and_streams_wait_for_each_other(side: bool):
    """While the library's stream stands still: its arrays are written after the call, and read after it."""
    from gpu import held

    OnGpu.own, current = torch.cuda.Stream(), torch.cuda.Stream() if side else torch.cuda.default_stream()
    tensors = [x.cuda() for x in qkv()]
    want = attention(*tensors, causal=True, return_lse=True)
    for stand_still in (contextlib.nullcontext(), held(OnGpu.own)):  # the first loads all code
        given = [OnGpu(torch.zeros_like(x)) for x in tensors]
        assert [arrays.tensors("x", x).data_ptr() for x in given] == [x.tensor.data_ptr() for x in given]
        torch.cuda.synchronize()
        with torch.cuda.stream(current), stand_still:
            with torch.cuda.stream(OnGpu.own):
                for array, x in zip(given, tensors, strict=True):
                    array.tensor.copy_(x)
            found = attention(*given, causal=True, return_lse=True)
            with torch.cuda.stream(OnGpu.own):
                kept = [x.tensor.clone() for x in found]
        torch.cuda.synchronize()
        number = current.cuda_stream or 1
        assert [x.asked[1:] for x in given] == [[number]] * 3
        assert all(isinstance(x, OnGpu) for x in found) and all(map(torch.equal, kept, want))


class Opaque:
    """An array of a library that takes nothing."""

    def __dlpack__(self) -> Any:
        raise BufferError("this memory is not for others")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Closed(Recorder):
    def __array_namespace__(self) -> Any:
        return object()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": [1.0]}, "k must be a torch.Tensor, got list"),
        ({"out": numpy.zeros(1)}, "out is not taken where q is a numpy.ndarray"),
        ({"k": Opaque()}, "k, a .*Opaque, can't be shared by DLPack: this memory is not for others"),
        ({"q": Closed(randn(1))}, "whose library has no from_dlpack to take the result with"),
        ({"k": randn(2, 65, 2, 32, dtype=torch.float16).requires_grad_()}, "k requires a gradient, and q is"),
        ({"k": qkv()[1].numpy()[:, ::-1]}, "k, a numpy.ndarray, has a negative stride"),
        ({"q": numpy.zeros((2, 33, 4, 32), "U1")}, "q, a numpy.ndarray, can't be shared by DLPack: "),
    ],
)
def test_what_cannot_be_shared_is_said(change: dict[str, Any], sentence: str):
    given = {**dict(zip("qkv", (x.numpy() for x in qkv()), strict=True)), **change}
    with pytest.raises(TypeError, match=sentence):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
