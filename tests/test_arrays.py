"""Arrays of other libraries: tensors' numbers, shared memory, and the stream that the protocol wants."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import operator
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import ints, qkv, randn
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_map_only

from cutlass_fmha import _C, arrays, attention, private_torch
from cutlass_fmha.launch import plan


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
        return type(self)

    @staticmethod
    def from_dlpack(tensor: Tensor) -> Recorder:
        return Recorder(tensor)


ON_GPU = [pytest.param(library, "cuda", marks=pytest.mark.gpu) for library in ("cupy", "jax.numpy")]


@pytest.mark.parametrize(("library", "device"), [("numpy", "cpu"), ("jax.numpy", "cpu"), *ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_arrays_in_arrays_out(library: str, device: str, dtype: torch.dtype):
    pytest.importorskip(library.partition(".")[0], reason=f"{library} is not installed")
    namespace = importlib.import_module(library)
    tensors = [x.to(device) for x in qkv(dtype=dtype)]
    mask = torch.arange(65) < ints(65, 20)[:, None, None, None]
    said: dict[str, Any] = {"mask": mask, "seqused_k": ints(65, 30)}
    if device == "cpu" or dtype == torch.float16:  # which no row of float32 takes
        said["sinks"] = randn(4)
        blocks = (ints(1).view(1, 1, 1), ints(0).view(1, 1, 1, 1), (128, 128))
        said["block_mask"] = blocks if dtype == torch.float16 else list(blocks)

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


def test_memory_is_shared_both_ways():
    seen: list[Tensor] = []
    given = [x.numpy() for x in qkv()]
    result = torch.zeros(3)
    out = arrays.through(lambda *x, **_: seen.extend((*x, result)) or result, *given, {}, arrays.Options())
    assert [x.data_ptr() for x in seen] == [x.__array_interface__["data"][0] for x in (*given, out)]


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
    place = arrays._Place(Recorder, 1, None)
    assert [place.take(Recorder(x)) is None for x in (ints(1), ints(1))] == [False, False]
    place._seen = 3  # where q was
    assert place.take(given[0]) is None
    host = [Recorder(x, (1, 0)) for x in qkv()]
    attention(*host)
    assert [x.asked for x in host] == [[None]] * 3


@given(st.data())
def test_capsules_say_what_plans_differ_by(data: st.DataObject):
    """Equal bytes where q, k and v have equal metadata, addresses to 16 bytes among it, and no others."""
    memory = torch.zeros(4096)

    def drawn() -> Tensor:
        shape = data.draw(st.lists(st.integers(1, 3), max_size=4))
        strides = [data.draw(st.integers(0, 20)) if n > 1 else 1 for n in shape]  # that of one element means nothing
        dtype = data.draw(st.sampled_from([torch.float32, torch.int32, torch.bfloat16]))
        return memory.view(dtype).as_strided(shape, strides, data.draw(st.integers(0, 5)))

    def metadata(*tensors: Tensor) -> Any:
        odd = functools.reduce(operator.or_, (x.data_ptr() for x in tensors)) % 16
        return [(x.shape, x.stride(), x.dtype) for x in tensors], odd

    first, second = [drawn() for _ in range(3)], [drawn() for _ in range(3)]
    changed = [b if data.draw(st.booleans()) else a for a, b in zip(first, second, strict=True)]
    found, other = (_C.array_metadata(*map(private_torch.to_capsule, x)) for x in (first, changed))
    assert found is not None and other is not None
    assert (found[0] == other[0]) == (metadata(*first) == metadata(*changed))
    assert list(found[1:]) == [x.data_ptr() for x in first]


def test_capsules_that_are_read_in_another_way():
    q, k, v = map(private_torch.to_capsule, qkv())
    assert _C.array_metadata(q, k, private_torch.to_capsule(torch.zeros(1, 1, 1, 1, 1))) is None
    assert _C.array_metadata(q, k, private_torch.to_capsule_1(qkv()[2])) is None
    assert _C.array_metadata(q, k, 1) is None
    taken = private_torch.from_capsule(v)
    assert _C.array_metadata(q, k, v) is None and torch.equal(taken, qkv()[2])


class Cupy(Recorder):
    __module__ = "cupy._core"
    stream, taken = 0, []  # which the library works on; what it was handed
    data = property(lambda self: SimpleNamespace(ptr=self.tensor.data_ptr()))
    dtype = property(lambda self: self.tensor.dtype)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        return private_torch.to_capsule(self.tensor)

    def __array_namespace__(self) -> Any:
        return sys.modules["cupy"]

    @staticmethod
    def from_dlpack(given: Any) -> Cupy:
        """A capsule, too, and then it asks for no stream."""
        Cupy.taken.append(given)
        capsule = given.__dlpack__(stream=given._stream) if hasattr(given, "__dlpack__") else given
        return Cupy(private_torch.from_capsule(capsule))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of kernels past all tensors: nothing runs."""
    library = SimpleNamespace(
        from_dlpack=Cupy.from_dlpack,
        cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=Cupy.stream)),
        empty=lambda shape, dtype: Cupy(torch.empty(shape, dtype=getattr(torch, str(dtype).removeprefix("torch.")))),
    )
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setattr(Cupy, "taken", [])
    monkeypatch.setattr(arrays, "_begun", {1})
    monkeypatch.setattr(private_torch, "raw_stream", lambda index: 0)
    monkeypatch.setattr(private_torch, "current_device", lambda: 1)
    calls: list[Any] = []
    monkeypatch.setattr(arrays.plan, "start", lambda *asked: calls.append(asked))
    return calls


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("its", "ours", "waits"), [(0, 0, False), (77, 77, False), (77, 0, True), (0, 2, True)])
def test_a_library_on_the_kernels_stream_is_handed_the_memory_alone(
    monkeypatch: pytest.MonkeyPatch, its: int, ours: int, waits: bool
):
    monkeypatch.setattr(Cupy, "stream", its)
    monkeypatch.setattr(private_torch, "raw_stream", lambda index: ours)
    given, said = [Cupy(x) for x in qkv()], {"return_lse": True, "seqused_k": ints(65, 20)}
    found = attention(*given, **said)
    assert [x.asked for x in given] == [[ours or 1]] * 3  # the protocol's: it waits where it has to
    assert [hasattr(x, "__dlpack__") for x in Cupy.taken] == [waits] * 2
    assert all(torch.equal(x.tensor, want) for x, want in zip(found, attention(*qkv(), **said), strict=True))


def test_a_call_of_arrays_alone_makes_no_tensor_of_them(launched: list[Any], monkeypatch: pytest.MonkeyPatch):
    q, k, v = (Cupy(x) for x in qkv())
    row = plan.prepare((q.tensor, k.tensor, v.tensor), "bottom-right", None).row
    out = attention(q, k, v)
    assert isinstance(out, Cupy) and launched[0][1][4] == 0 and launched.pop()[2] == 32**-0.5
    for _ in range(2):
        out, lse = attention(q, k, v, causal=True, return_lse=True, scale=0.5)
        ((asked, addresses, scale, said),) = launched
        assert (asked.row, scale, dict(said)) == (row, 0.5, {})
        assert list(addresses) == [x.tensor.data_ptr() for x in (q, k, v, out, lse)]
        assert out.tensor.shape == q.tensor.shape and out.tensor.dtype == q.tensor.dtype
        assert lse.tensor.shape == (2, 4, 33) and lse.tensor.dtype == torch.float32
        launched.clear()
        monkeypatch.setattr(private_torch, "from_capsule", None)  # the plan is known


@pytest.mark.parametrize(
    "what", ["stream", "device", "type", "layout", "feature", "mode", "autocast", "refusal", "a launch of its own"]
)
def test_a_call_with_anything_else_goes_by_tensors(launched: list[Any], monkeypatch: pytest.MonkeyPatch, what: str):
    q, k, v = (Cupy(x) for x in qkv())
    want = attention(*qkv())
    arounds = {"mode": BaseTorchFunctionMode(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    said = {"layout": {"layout": "bhsd"}, "feature": {"seqused_k": Cupy(ints(65, 65))}}.get(what, {})
    patches = {
        "stream": (Cupy, "stream", 7),
        "device": (private_torch, "current_device", lambda: 0),
        "refusal": (_C, "array_metadata", lambda *_: None),
    }
    if what in patches:
        monkeypatch.setattr(*patches[what])
    elif what == "type":
        v = type("Elsewhere", (Cupy,), {})(v.tensor, (1, 0))
    elif what == "layout":
        q, k, v = (Cupy(x.tensor.transpose(1, 2)) for x in (q, k, v))
    elif what == "a launch of its own":
        prepared = plan.prepare((q.tensor, k.tensor, v.tensor), "none", None)
        monkeypatch.setattr(arrays.plan, "kept_by", lambda *_: prepared._replace(launch=lambda *_: None))
    with arounds.get(what, contextlib.nullcontext()):
        out = attention(q, k, v, **said)
    assert not launched and torch.equal(out.tensor.transpose(1, 2) if what == "layout" else out.tensor, want)


def test_a_call_without_a_tensor_is_checked_alike(launched: list[Any]):
    arrays = [Cupy(x) for x in qkv()]
    three_heads = [Cupy(x[:, :, :3] if n else x) for n, x in enumerate(qkv(heads_kv=4))]
    for operands, said, sentence in (
        (arrays, {"scale": float("inf")}, "scale must be"),
        (arrays, {"row": 1}, "row must be"),
        (three_heads, {}, "k must have a number of heads that divides q's 4, got 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            attention(*operands, **said)
    assert not launched


@pytest.mark.gpu
@pytest.mark.parametrize("own_stream", [False, True])
def test_cupys_arrays_on_its_stream_and_on_torchs(own_stream: bool, monkeypatch: pytest.MonkeyPatch):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    tensors = [x.cuda() for x in qkv()]
    cases = [tensors, [x[:, ::2] for x in tensors], [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]]
    taken: list[Any] = []
    take = private_torch.from_capsule
    for case in cases:
        want = attention(*case, causal=True, return_lse=True)
        with cupy.cuda.Stream(non_blocking=True) if own_stream else contextlib.nullcontext():
            given = [cupy.from_dlpack(x) for x in case]
            for _ in range(2):
                monkeypatch.setattr(private_torch, "from_capsule", lambda x: taken.append(x) or take(x))
                taken.clear()
                out, lse = attention(*given, causal=True, return_lse=True)
                for found, wanted in zip((out, lse), want, strict=True):
                    assert type(found) is cupy.ndarray
                    assert torch.equal(torch.from_dlpack(found), wanted)
        assert bool(taken) is own_stream


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
