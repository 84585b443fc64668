"""Arrays of other libraries in a call of attention, by DLPack: no copy, and streams wait for each other."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from cutlass_fmha import _C, private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher

#: Devices of the protocol.
CPU, CUDA = 1, 2

#: What libraries raise of what they don't share.
_REFUSALS = (BufferError, RuntimeError, ValueError, TypeError, AssertionError)


class Array(Protocol):
    """What NumPy, CuPy and JAX have: https://dmlc.github.io/dlpack/latest/python_spec.html."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _speaks(kind: type) -> bool:
    return not issubclass(kind, Tensor) and hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")


def _traced(kind: type) -> bool:
    """JAX's stand-in for an array while it traces a function: there is nothing to share."""
    return any((_root(each), each.__name__) == ("jax", "Tracer") for each in kind.__mro__)


# mypy takes no type for hashable
_has_dlpack: Callable[[type], bool] = functools.lru_cache(_speaks)
is_traced: Callable[[type], bool] = functools.lru_cache(_traced)
_is_of_library: Callable[[type], bool] = functools.lru_cache(lambda kind: _speaks(kind) or _traced(kind))


def is_array(value: object) -> bool:
    """An array of another library."""
    return _is_of_library(type(value))


def _refuse_masked(name: str, kind: type) -> None:
    if kind.__module__ == "numpy.ma":  # DLPack has no word for what hides elements
        raise TypeError(f"{name}, a numpy.ma array, may hide elements: pass {name}.filled(...), and mask= for keys")


class Options(NamedTuple):
    """Of a call, in the op's words."""

    scale: float | None = None
    causal: str = "none"
    return_lse: bool = False
    layout: str = "bshd"
    row: str | None = None


def through(function: Callable[..., Any], q: Any, k: Any, v: Any, features: Mapping[str, Any], options: Options) -> Any:
    """A call of ``function`` with tensors in place of arrays, and its results as arrays of q's library.

    Where q is JAX's, and no other library's array and no tensor is with it, ``cutlass_fmha.jax`` takes all.
    The kernels run on torch's current stream: q's library is told to have its memory ready there, and makes
    its own stream wait when it takes the result. Raises TypeError for what can't be shared.
    """
    library = _library(q)
    scale, causal, return_lse, layout, row = options
    if library.attention is not None:
        said = features if layout == "bshd" else {**features, "layout": layout}
        if _jax_takes_all(q, k, v, said):
            return library.attention(q, k, v, said, (scale, causal, return_lse, row))
    place = None if library.from_dlpack is Tensor.numpy else _place(q)
    if place is not None and library.cupy is not None and not features:
        launched = _launched(library, place, (q, k, v), options)
        if launched is not None:
            return launched
    q_there = tensors("q", q, place)
    given = {"k": k, "v": v, **features}
    for name, value in given.items():
        if value is None:
            continue
        if name in RESULTS:
            raise TypeError(f"{name} is not taken where q is a {_name(q)}: its library gets a new array")
        given[name] = found = tensors(name, value, place)
        if found is value and isinstance(found, Tensor) and found.requires_grad:
            raise TypeError(
                f"{name} requires a gradient, and q is a {_name(q)}, whose library would not know of it: "
                f"pass {name}.detach(), or tensors alone"
            )
    off = private_torch.disable_autocast  # which is torch's: arrays keep their dtypes
    with nullcontext() if off is None or not private_torch.any_autocast_enabled() else off():
        found = function(q_there, given.pop("k"), given.pop("v"), **options._asdict(), **given)
    if isinstance(found, tuple):
        return tuple(_handed_over(x, library, place) for x in found)
    return _handed_over(found, library, place)


def tensors(name: str, value: Any, place: _Place | None = None) -> Any:
    """An argument with tensors in place of arrays, also inside of a tuple or list; anything else as it is."""
    kind: Any = type(value)
    if place is not None and kind is place.kind and (taken := place.take(value)) is not None:
        return taken
    if kind.__module__ == "numpy":
        try:
            if value.flags.writeable:
                return torch.from_numpy(value)  # the same, in less than half of the time
        except (AttributeError, TypeError, ValueError):
            pass  # a reason that is said below
    if isinstance(value, (tuple, list)):
        inside = [tensors(name, each, place) for each in value]
        return tuple(inside) if isinstance(value, tuple) else inside
    if not _has_dlpack(kind):
        return value
    _refuse_masked(name, kind)
    if (strides := getattr(value, "strides", None)) and min(strides) < 0:  # torch would abort
        raise TypeError(f"{name}, a {_name(value)}, has a negative stride, which no tensor has: pass {name}.copy()")
    try:
        # torch hands its current stream to __dlpack__.
        return dlpack.from_dlpack(value)
    except _REFUSALS as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(f"{name}, a {_name(value)}, can't be shared by DLPack: {reason}") from error


# ---- what torch's own way would ask of every array anew, at twice the host time ----------------------------


class _Place:
    """Where q is, and, until they are seen, all arrays of its type."""

    __slots__ = ("_seen", "index", "kind", "stream")

    def __init__(self, kind: type, index: int, stream: int | None) -> None:
        #: The stream of the kernel as the protocol has it; None on the CPU.
        self.kind, self.index, self.stream = kind, index, stream
        self._seen: int | None = None

    def take(self, array: Any) -> Tensor | None:
        """A tensor; None: it was elsewhere, or there is a reason against it, which torch's own way says."""
        if (strides := getattr(array, "strides", None)) and min(strides) < 0:
            return None
        try:
            stream = self.stream
            capsule = array.__dlpack__() if stream is None else array.__dlpack__(stream=stream)
            found: Tensor = private_torch.from_capsule(capsule)
        except _REFUSALS:
            return None
        index = found.get_device()
        if self._seen is None:  # q itself, which was asked
            self._seen = index
        return found if index == self._seen else None


#: CUDA devices that torch has begun with.
_begun: set[int] = set()


def _place(array: Any) -> _Place | None:
    """Of q; None: only torch's own way is known there."""
    try:
        device, index = array.__dlpack_device__()
        if device == CPU:
            return _Place(type(array), index, None)
        if device != CUDA:
            return None
        if index not in _begun:
            torch.cuda.current_stream(index)
            _begun.add(index)
        return _Place(type(array), index, private_torch.raw_stream(index) or 1)  # the default stream has no number
    except _REFUSALS:
        return None


class _Result:
    """A tensor that q's library takes: where its stream is the kernel's, nothing is to be waited for."""

    __slots__ = ("_stream", "_tensor")

    def __init__(self, tensor: Tensor, stream: int | None) -> None:
        self._tensor, self._stream = tensor, stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self._stream is None else (CUDA, self._tensor.get_device())

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if stream == self._stream and not copy and dl_device is None:
            versioned = max_version is not None and max_version[0] >= 1 and private_torch.to_capsule_1
            return (versioned or private_torch.to_capsule)(self._tensor)
        said = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        said = {name: x for name, x in said.items() if x is not None}  # older ones know the stream alone
        return self._tensor.__dlpack__(stream=stream, **said)


def _known_to_jax(kind: type) -> bool:
    return not issubclass(kind, Tensor) and (not _speaks(kind) or _root(kind) in ("jax", "jaxlib", "numpy"))


_is_known_to_jax: Callable[[type], bool] = functools.lru_cache(_known_to_jax)


def _jax_takes_all(q: Any, k: Any, v: Any, features: Mapping[str, Any]) -> bool:
    """False: there is a tensor or an array of another library among them, memory for the result, or a seed to draw."""
    kind = type(q)
    if not features and type(k) is kind and type(v) is kind:
        return True
    given = {name: x for name, x in features.items() if x is not None}
    values: list[Any] = [k, v]
    for x in given.values():
        values += x if isinstance(x, (tuple, list)) else (x,)
    if is_traced(kind) or any(is_traced(type(x)) for x in values):
        return True  # or refuses it: nobody else can
    if given.get("dropout_p") and "dropout_seed" not in given:
        return False  # nothing is drawn there
    return given.keys().isdisjoint((*RESULTS, "layout")) and all(_is_known_to_jax(type(x)) for x in values)


class _Library(NamedTuple):
    """What makes arrays of a kind."""

    from_dlpack: Callable[[Any], Any]
    #: The library where it is CuPy: its from_dlpack takes capsules, too, and a kernel may run on its stream.
    cupy: Any
    #: That of ``cutlass_fmha.jax`` where it is JAX.
    attention: Any = None

    def shares(self, place: _Place) -> bool:
        """Whether the kernel's stream is the library's own, so that none has to wait for the other."""
        if self.cupy is None or place.stream is None:
            return False
        own: int = self.cupy.cuda.get_current_stream(place.index).ptr
        return (own or 1) == place.stream


def _handed_over(tensor: Tensor, library: _Library, place: _Place | None) -> Any:
    """An array of q's library in the tensor's memory."""
    if place is None:
        return library.from_dlpack(tensor)
    if library.shares(place):  # what has nothing to wait for costs half of the time
        return library.from_dlpack(private_torch.to_capsule(tensor))
    return library.from_dlpack(_Result(tensor, place.stream))


# ---- a call without a tensor -------------------------------------------------------------------------------


def _launched(library: _Library, place: _Place, given: tuple[Any, Any, Any], options: Options) -> Any:
    """A kernel on arrays whose capsules say all that it must know, into new ones of their library.

    None, and nothing was launched, where anything else has a say: other arrays among them, another stream or
    device, what listens to torch's operators, a row with a launch of its own.
    """
    (q, k, v), (scale, causal, return_lse, layout, row) = given, options
    if type(k) is not place.kind or type(v) is not place.kind or layout != "bshd":
        return None
    if not library.shares(place):
        return None
    if torch.compiler.is_compiling() or dispatcher.anything_listens() or private_torch.any_autocast_enabled():
        return None
    if scale is not None:
        scale = check.finite_scale(scale)
    if row is not None:
        check.row_name(row)
    try:
        if place.index != private_torch.current_device():  # which needs a driver
            return None
        said = _C.array_metadata(*[x.__dlpack__(stream=place.stream) for x in given])
    except _REFUSALS:
        return None
    if said is None:
        return None
    key, *addresses = said
    known: plan.Plan | None = plan.kept_by((key, causal, row), lambda: _prepared(place, given, causal, row))
    if known is None or known.launch is not None:
        return None
    out = library.cupy.empty(known.out_shape, q.dtype)
    lse = library.cupy.empty(known.lse_shape, "float32") if return_lse else None
    places = (*addresses, out.data.ptr, 0 if lse is None else lse.data.ptr)
    plan.start(known, places, known.scale if scale is None else scale, plan.NOTHING)
    return (out, lse) if return_lse else out


def _prepared(place: _Place, given: tuple[Any, Any, Any], causal: str, row: str | None) -> plan.Plan | None:
    """None: torch has a reason against one of them, or it was elsewhere."""
    q, k, v = map(place.take, given)
    return None if q is None or k is None or v is None else plan.prepare((q, k, v), causal, row, names=("q", "k", "v"))


_libraries: dict[type, _Library] = {}


def _library(array: Any) -> _Library:
    """That of an array."""
    kind = type(array)
    known = _libraries.get(kind)
    if known is not None:
        return known
    _refuse_masked("q", kind)
    cupy = attention = None
    found: Callable[[Any], Any] | None
    if kind.__module__ == "numpy":
        found = Tensor.numpy  # whose from_dlpack makes them read-only, where torch or NumPy is older
    else:
        by_name = sys.modules.get(_root(kind))
        library = array.__array_namespace__() if hasattr(array, "__array_namespace__") else by_name
        found = getattr(library, "from_dlpack", None)
        if _root(kind) == "cupy":
            cupy = by_name
        elif _root(kind) in ("jax", "jaxlib"):
            with contextlib.suppress(ImportError):  # an older one's arrays are shared like any other's
                attention = importlib.import_module("cutlass_fmha.jax.traced").of_call
    if found is None:
        raise TypeError(
            f"q is a {_name(array)}, whose library has no from_dlpack to take the result with: "
            "pass torch.from_dlpack(q), and alike k and v"
        )
    _libraries[kind] = _Library(found, cupy, attention)
    return _libraries[kind]


def _name(array: object) -> str:
    return f"{_root(type(array))}.{type(array).__qualname__}"
