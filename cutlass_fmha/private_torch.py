"""The names that torch keeps to itself, each looked up once, at import, with a stand-in where it is missing.

A torch that lacks one must not fail a call. Whoever asks whether anything listens to operators then hears
that something does, and every call goes through the dispatcher.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import profiler as _profiler
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes

_C: Any = torch._C


def _something() -> int:
    """Neither 0 nor None: a mode, a transform, a trace."""
    return 1


# ---- what listens to operators -----------------------------------------------------------------------------

len_torch_function_stack: Callable[[], int] = getattr(_C, "_len_torch_function_stack", _something)
len_torch_dispatch_stack: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", _something)
_functorch: Any = getattr(_C, "_functorch", None)
peek_interpreter_stack: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", _something)
#: Of a tensor in a transform of torch.func: whether it is one, whether it is vmap's, and what it wraps.
is_transformed: Callable[[Any], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda x: False)
is_batched: Callable[[Any], bool] = getattr(_functorch, "is_batchedtensor", lambda x: False)
unwrapped: Callable[[Any], Any] = getattr(_functorch, "get_unwrapped", lambda x: x)
get_tracing_state: Callable[[], Any] = getattr(_C, "_get_tracing_state", _something)

#: Modules, whose ``_current_level`` and ``_is_profiler_enabled`` change.
forward_ad: Any = _forward_ad if hasattr(_forward_ad, "_current_level") else SimpleNamespace(_current_level=0)
profiler: Any = _profiler if hasattr(_profiler, "_is_profiler_enabled") else SimpleNamespace(_is_profiler_enabled=True)


#: Whether any device type's autocast is on; with the stand-in the public questions follow.
any_autocast_enabled: Callable[[], bool] = getattr(_C, "_is_any_autocast_enabled", lambda: True)

#: A context without autocast, of any device type, at a sixth of torch.autocast's cost; None: there is none.
disable_autocast: Any = getattr(_C, "_DisableAutocast", None)


def innermost(x: Any) -> Any:
    """What the transforms of torch.func wrap, which has memory."""
    while is_transformed(x):
        x = unwrapped(x)
    return x


# ---- from one implementation of an op to the next ----------------------------------------------------------


def _next(keys_name: str, guard_name: str) -> Callable[..., Any]:
    keys = getattr(_C, keys_name, None)
    if keys is not None:
        return lambda op, keyset, *args, **kwargs: (
            op(*args, **kwargs) if keyset is None else op.redispatch(keyset & keys, *args, **kwargs)
        )

    def guarded(op: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if keyset is None:
            return op(*args, **kwargs)
        with getattr(_C, guard_name)():
            return op(*args, **kwargs)

    return guarded


#: (op, keyset, arguments): the call, for what comes behind autograd, or behind its bookkeeping of writes. Of no keyset,
#: which a call has that is not dispatched yet: as anybody calls it.
after_autograd = _next("_after_autograd_keyset", "_AutoDispatchBelowAutograd")
after_writes = _next("_after_ADInplaceOrView_keyset", "_AutoDispatchBelowADInplaceOrView")


# ---- what threads that compute gradients are told ----------------------------------------------------------


def _keep_nothing(name: str, value: Any) -> None:
    """Whoever computes this thread's gradients then knows nothing of it."""


#: (name, value): kept for this thread, and for those in which torch computes the gradients that it asks for.
stash: Callable[[str, Any], None] = getattr(_C, "_stash_obj_in_tls", _keep_nothing)
is_stashed: Callable[[str], bool] = getattr(_C, "_is_key_in_tls", lambda name: False)
stashed: Callable[[str], Any] = getattr(_C, "_get_obj_in_tls", lambda name: ())


# ---- what a compiler knows ---------------------------------------------------------------------------------


def _is_constant(number: Any) -> bool:
    """Every number is one of its graph, and another one is compiled anew."""
    return True


#: Whether a number in a graph is a constant of it.
has_static_value: Callable[[Any], bool] = getattr(_symbolic_shapes, "has_static_value", _is_constant)


def forget_kernels(op: Any) -> None:
    """Has tracing, which keeps the kernels that it found for an op, look for them again."""
    getattr(op, "_dispatch_cache", {}).clear()


#: Of torch.compiler.config's ``cache_key_tag``, which as such is one thread's; None: this torch has none.
_tag: Any = getattr(getattr(torch.compiler, "config", None), "_config", {}).get("cache_key_tag")
_OF_ALL_THREADS = "env_value_default" if isinstance(getattr(_tag, "env_value_default", None), str) else "default"
_tag_before: str = getattr(_tag, _OF_ALL_THREADS, "")


def tag_graphs(tag: str) -> None:
    """Has torch's files of compiled graphs be found by this, too, in place of any tag before."""
    if hasattr(_tag, _OF_ALL_THREADS):
        setattr(_tag, _OF_ALL_THREADS, _tag_before + tag)


# ---- jagged tensors ----------------------------------------------------------------------------------------


def ragged_axis(jagged: Any) -> int | None:
    """The dimension whose sizes differ; None where this torch doesn't say."""
    axis: int | None = getattr(jagged, "_ragged_idx", None)
    return axis


def bounds_of_jagged(jagged: Any) -> tuple[int | None, int | None]:
    """The shortest and the longest length, if it keeps them: computing them would wait for a GPU."""
    return getattr(jagged, "_maybe_min_seqlen", None), getattr(jagged, "_maybe_max_seqlen", None)


def _of(module: str, name: str) -> Any:
    """What a module of torch's calls so; None: this torch has no such thing."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


_jagged_view = _of("torch.nested._internal.nested_tensor", "nested_view_from_values_offsets_lengths")


def jagged_view(
    values: Any, offsets: Any, lengths: Any, axis: int | None, bounds: tuple[int | None, int | None]
) -> Any:
    """``torch.nested.nested_tensor_from_jagged``, also where a compiler traces torch's attention."""
    if _jagged_view is None:
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, axis, *bounds)
    return _jagged_view(values, offsets, lengths, axis, *bounds)


#: The op by which a softmax's gradient comes; None: another one, inside of which nothing is known.
softmax_backward: Any = getattr(getattr(torch.ops.aten, "_softmax_backward_data", None), "default", None)

#: What torch's attention is for jagged tensors, in ``jagged_module``.
OF_JAGGED = "jagged_scaled_dot_product_attention"


def jagged_module() -> Any:
    """The module whose function ``OF_JAGGED`` is called; None: this torch has another way."""
    module = "torch.nested._internal.ops"
    return None if _of(module, OF_JAGGED) is None else importlib.import_module(module)


# ---- shortcuts ---------------------------------------------------------------------------------------------


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


#: The current stream of a CUDA device: a tenth of the cost of torch.cuda.current_stream, which builds a
#: Stream object; absent from a torch without CUDA.
raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _raw_stream)


#: (sizes, strides, dtype): a tensor on the current CUDA device, as compiled graphs make it, at a third of the
#: cost of torch.empty_strided. Only asked where ``current_device`` says that it serves.
empty_strided_cuda: Any = getattr(getattr(getattr(_C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)

#: The current CUDA device; one that no tensor is on where there is no cheap way to ask.
current_device: Callable[[], int] = getattr(_C if empty_strided_cuda else None, "_cuda_getDevice", lambda: -2)


def _check_value(condition: Any, sentence: Callable[[], str]) -> None:
    if not condition:
        raise ValueError(sentence())


#: ValueError unless the condition holds; one on a number that a compiler can't know is checked when it runs.
check_value: Callable[[Any, Callable[[], str]], None] = getattr(torch, "_check_value", _check_value)

#: torch's fused attention for CPU tensors; None where there is none.
flash_for_cpu: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)

#: A capsule of DLPack as a tensor, and a tensor as one of version 1, which older ones don't have.
from_capsule: Callable[[Any], Any] = getattr(_C, "_from_dlpack", torch.utils.dlpack.from_dlpack)
to_capsule: Any = getattr(torch.utils.dlpack, "to_dlpack")  # noqa: B009  which mypy takes for private
to_capsule_1: Any = getattr(_C, "_to_dlpack_versioned", None)
