"""Arrays of other libraries in a call of attention, by DLPack: no copy, and streams wait for each other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import dlpack

from cutlass_fmha.arguments.results import RESULTS


class Array(Protocol):
    """What NumPy, CuPy and JAX have: https://dmlc.github.io/dlpack/latest/python_spec.html."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


def is_array(value: object) -> bool:
    """An array of another library."""
    return (
        not isinstance(value, Tensor) and hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")
    )


def through(
    function: Callable[..., Any], q: Any, k: Any, v: Any, features: Mapping[str, Any], **options: Any
) -> Any:
    """A call of ``function`` with tensors in place of arrays, and its results as arrays of q's library.

    The kernels run on torch's current stream: q's library is told to have its memory ready there, and makes
    its own stream wait when it takes the result. Raises TypeError for what can't be shared.
    """
    from_dlpack = _from_dlpack(q)
    given = {"q": q, "k": k, "v": v, **features}
    for name, value in given.items():
        if value is None:
            continue
        if name in RESULTS:
            raise TypeError(f"{name} is not taken where q is a {_name(q)}: its library gets a new array")
        given[name] = found = tensors(name, value)
        if found is value and isinstance(found, Tensor) and found.requires_grad:
            raise TypeError(
                f"{name} requires a gradient, and q is a {_name(q)}, whose library would not know of it: "
                f"pass {name}.detach(), or tensors alone"
            )
    found = function(given.pop("q"), given.pop("k"), given.pop("v"), **options, **given)
    return tuple(map(from_dlpack, found)) if isinstance(found, tuple) else from_dlpack(found)


def tensors(name: str, value: Any) -> Any:
    """An argument with tensors in place of arrays, also inside of a tuple; anything else as it is."""
    if type(value).__module__ == "numpy":
        try:
            if value.flags.writeable:
                return torch.from_numpy(value)  # the same, in less than half of the time
        except (AttributeError, TypeError, ValueError):
            pass  # a reason that is said below
    if isinstance(value, tuple):
        return tuple(tensors(name, each) for each in value)
    if not is_array(value):
        return value
    if any(stride < 0 for stride in getattr(value, "strides", None) or ()):  # torch would abort
        raise TypeError(
            f"{name}, a {_name(value)}, has a negative stride, which no tensor has: pass {name}.copy()"
        )
    try:
        # torch hands its current stream to __dlpack__.
        return dlpack.from_dlpack(value)
    except (BufferError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(f"{name}, a {_name(value)}, can't be shared by DLPack: {reason}") from error


def _from_dlpack(array: Any) -> Callable[[Tensor], Any]:
    """What makes arrays of this one's kind."""
    if type(array).__module__ == "numpy":
        return Tensor.numpy  # whose from_dlpack makes them read-only, where torch or NumPy is older
    if hasattr(array, "__array_namespace__"):
        library = array.__array_namespace__()
    else:
        library = sys.modules.get(type(array).__module__.partition(".")[0])
    found: Callable[[Tensor], Any] | None = getattr(library, "from_dlpack", None)
    if found is None:
        raise TypeError(
            f"q is a {_name(array)}, whose library has no from_dlpack to take the result with: "
            "pass torch.from_dlpack(q), and alike k and v"
        )
    return found


def _name(array: object) -> str:
    return f"{type(array).__module__.partition('.')[0]}.{type(array).__qualname__}"
