"""torch's dispatcher: how an op is registered, and when a call may pass it by."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutlass_fmha import _C, autocast, private_torch
from cutlass_fmha.arguments import check, results
from cutlass_fmha.launch import workspace
from cutlass_fmha.launch.workspace import Scratch

#: In a build whose kernels run on the CPU (tools/simulator), 1 has ops launch them on CPU tensors.
SIMULATE = "CUTLASS_FMHA_SIMULATE"

# The library must live as long as its registrations. Schemas and plain implementations are registered by hand
# because torch.library.custom_op costs three times as much per call.
library = torch.library.Library("cutlass_fmha", "DEF")
#: Of each op what autograd does, and autocast.
_gradients: dict[str, Callable[..., Any]] = {}
_casts: dict[str, autocast.Rule] = {}

NO_BACKWARD = (
    "cutlass_fmha has no backward yet of this op, and an input of this call requires a gradient: call it "
    "under torch.no_grad() or with detached inputs"
)
NO_FORWARD_MODE = (
    "cutlass_fmha has no backward yet in forward mode, nor where torch.func transforms its ops called by themselves: "
    "call its functions, with torch.func.grad, vjp or jacrev"
)
#: Ops whose gradients autograd knows: they say what happens where one may be wanted.
DIFFERENTIABLE = (
    "forward",
    "attend",
    "attend_backward",
    "rotary_qk",
    "rotary_qk_",
    "qk_norm_rope",
    "qk_norm_rope_backward",
    "rms_norm",
    "rms_norm_backward",
    "gated",
    "gated_backward",
    "qk_norm_rope_append_",
)


def register(
    schema: str, implementations: Mapping[str, Callable[..., Any]], casts: autocast.Rule = autocast.as_it_is
) -> None:
    """Defines an op. ``implementations``: for "CUDA", "CPU" and "fake"; ``casts``: autocast's rule."""
    name = schema.partition("(")[0]
    # Inductor must not hand over another layout than the traced one: last dimensions have to stay contiguous.
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    refuse_elsewhere(name)
    for key, implementation in implementations.items():
        if key == "fake":
            torch.library.register_fake(f"cutlass_fmha::{name}", implementation, lib=library)
        else:
            library.impl(name, implementation, key)
    if name not in DIFFERENTIABLE:
        register_gradients(name, functools.partial(_refuse_gradients, name))
    _casts[name] = casts
    autocast.register(library, name, casts)


#: What counts an op's writes, which autograd calls itself: torch's way there costs as much as a kernel's launch.
_counting: dict[str, Callable[..., Any]] = {}


def register_writes(name: str, written: Sequence[str]) -> None:
    """Autograd's rule for ops that write to arguments: whoever saved one of these for a backward is told."""
    op = getattr(torch.ops.cutlass_fmha, name).default
    names = [each.name for each in op._schema.arguments]

    def count(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        found = private_torch.after_writes(op, keyset, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        results.count_writes(given[each] for each in written if given.get(each) is not None)
        return found

    _counting[name] = count
    library.impl(name, count, "ADInplaceOrView", with_keyset=True)


def register_gradients(name: str, implementation: Callable[..., Any]) -> None:
    """What autograd does for an op, called with the keyset first."""
    _gradients[name] = implementation
    library.impl(name, implementation, "Autograd", with_keyset=True)


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """The op. Under torch.func what autograd does for it comes first: once an op is dispatched, its transforms don't
    let an ``autograd.Function`` begin."""
    if torch.compiler.is_compiling() or private_torch.peek_interpreter_stack() is None:
        return getattr(torch.ops.cutlass_fmha, name)(*args, **kwargs)
    dtype = autocast.dtype_of(args[0])
    if dtype is None:
        return _gradients[name](None, *args, **kwargs)
    args, kwargs = _casts[name](dtype, *args, **kwargs)  # before anything is kept for gradients
    with autocast.off(args[0].device.type):
        return _gradients[name](None, *args, **kwargs)


class Differentiable(torch.autograd.Function):
    """Of an op. ``forward`` takes the keyset first: None where the call is not dispatched yet."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(NO_FORWARD_MODE)


class _Once(Differentiable):
    """An op that computes gradients: who asks to differentiate them is told."""

    @staticmethod
    def forward(keyset: Any, op: Any, of: str, said: Mapping[str, Any], *given: Any) -> Any:
        return private_torch.after_autograd(op, keyset, *given, **said)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.of = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError(
            f"cutlass_fmha has no backward yet of its backward: {ctx.of} can be differentiated once"
        )


def register_once(name: str, of: str) -> None:
    """For an op that computes the gradients of what ``of`` says."""
    op = getattr(torch.ops.cutlass_fmha, name).default

    def autograd(keyset: Any, *given: Any, **said: Any) -> Any:
        if needs_gradient(*(x for x in (*given, *said.values()) if isinstance(x, Tensor))):
            return _Once.apply(keyset, op, of, said, *given)  # type: ignore[no-untyped-call]
        return private_torch.after_autograd(op, keyset, *given, **said)

    register_gradients(name, autograd)


def _refuse_gradients(name: str, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """The op has no backward: a call whose gradient would silently be missing raises."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if needs_gradient(*given):
        raise NotImplementedError(results.NO_GRADIENT if name.endswith("_out") else NO_BACKWARD)
    if name in _counting:
        return _counting[name](keyset, *args, **kwargs)
    return private_torch.after_autograd(getattr(torch.ops.cutlass_fmha, name).default, keyset, *args, **kwargs)


def tensors_of(said: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in said.items() if isinstance(x, Tensor)}


def check_reverse(keyset: Any, *tensors: Tensor | None) -> None:
    """A derivative of the call is in reverse mode, and none of a dispatched op that torch.func transforms."""
    if has_tangent(*tensors) or (keyset is not None and private_torch.peek_interpreter_stack() is not None):
        raise NotImplementedError(NO_FORWARD_MODE)


def check_differentiable(keyset: Any, inputs: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Gradients of ``inputs`` are known, in reverse mode alone; of ``others`` they are not."""
    check_reverse(keyset, *inputs.values(), *others.values())
    if names := [name for name, x in others.items() if requires_grad(x)]:
        raise NotImplementedError(f"cutlass_fmha has no backward yet for {', '.join(names)}: pass it detached")


def rows_of_gradient(x: Tensor) -> Tensor:
    """A gradient as kernels read it: one of a sum has strides of 0."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.clone(memory_format=torch.contiguous_format)


_OF_TORCH: AbstractContextManager[None] = nullcontext()


def between_launches(x: Tensor) -> AbstractContextManager[Scratch | None]:
    """Of a workspace, room for what lies between the launches of one call on x; None: torch lends it."""
    if not workspace.IN_USE or torch.compiler.is_compiling():
        return _OF_TORCH
    ours = type(x) is Tensor and private_torch.peek_interpreter_stack() is None and (x.is_cuda or simulated())
    return Scratch(x.device) if ours and workspace.in_use(x.device) is not None else nullcontext()


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd, in reverse or forward mode, would want a derivative of a call on these tensors."""
    if torch.is_grad_enabled() and any(x is not None and requires_grad(x) for x in tensors):
        return True
    return has_tangent(*tensors)


def requires_grad(x: Tensor) -> bool:
    """Of what torch.func's transforms wrap, too: vmap hides what grad asks for."""
    if x.requires_grad or torch.compiler.is_compiling():  # a compiler can't ask for more
        return x.requires_grad
    return private_torch.is_transformed(x) and requires_grad(private_torch.unwrapped(x))


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether autograd is in forward mode, and has a derivative of one of these."""
    if private_torch.forward_ad._current_level < 0:
        return False
    asked = (x for x in tensors if x is not None and not private_torch.is_batched(x))  # vmap's are asked inside of it
    return any(forward_ad.unpack_dual(x).tangent is not None for x in asked)


def refuse_elsewhere(name: str) -> None:
    """Has the op refuse what it has no implementation for: other devices, sparse and nested tensors."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        arguments = getattr(torch.ops.cutlass_fmha, name).default._schema.arguments
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        for each in arguments:
            value = given.get(each.name)
            if str(each.type) == "Tensor" or isinstance(value, Tensor):
                check.check_tensor(each.name, value)
            if isinstance(value, Tensor) and value.is_quantized:
                raise NotImplementedError(
                    f"{each.name} is quantized, which no kernel takes: pass {each.name}.dequantize()"
                )
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        raise NotImplementedError(
            f"{arguments[0].name} must be on a CUDA device or the CPU, got {device}: {name} can't run there"
        )

    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA"):
        library.impl(name, refuse, key)


def simulated() -> bool:
    """Whether kernels run on CPU tensors: in a build for tools/simulator that was told to."""
    return os.environ.get(SIMULATE) == "1" and bool(_C.build_info().get("simulator"))


def anything_listens() -> bool:
    """Whether something would see operators that are called: what may change them, or the profiler."""
    return anything_changes() or private_torch.profiler._is_profiler_enabled


def anything_changes() -> bool:
    """Whether something may do another thing where operators are called: a mode, a transform, a trace."""
    return (
        private_torch.len_torch_function_stack() != 0
        or private_torch.len_torch_dispatch_stack() != 0
        or private_torch.peek_interpreter_stack() is not None
        or private_torch.get_tracing_state() is not None
        or private_torch.forward_ad._current_level >= 0
    )


def can_skip_dispatcher(query: Any, key: Any, value: Any) -> bool:
    """Whether nothing but the CUDA implementation would have a say in a call: half of its host time is saved.

    Whatever listens to operators gets its way through the dispatcher: tracing, modes, functorch transforms,
    subclasses, the profiler, gradients. Autocast had its say before: ``autocast.operands``. Only
    asked where ``torch.compiler.is_compiling()`` is false.
    """
    return (
        type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        # First: a mode for functions would see the questions to the tensors that follow.
        and not anything_listens()
        and query.is_cuda
        and key.is_cuda
        and value.is_cuda
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


def passes(tensors: tuple[Any, Any, Any], others: Collection[Any]) -> bool:
    """Whether a call goes past the dispatcher to its launch. ``others``: what it has beside three tensors."""
    return (
        not torch.compiler.is_compiling()
        and can_skip_dispatcher(*tensors)
        and (not others or others_can_skip_dispatcher(others))
    )


def others_can_skip_dispatcher(values: Iterable[Any]) -> bool:
    """What ``can_skip_dispatcher`` asks of query, key and value, of the other tensors of a call."""
    gradients = torch.is_grad_enabled()
    for value in values:
        if value is None:
            continue
        if type(value) is Tensor:
            if not value.is_cuda or (gradients and value.requires_grad) or value.is_neg():
                return False
        elif isinstance(value, Tensor):
            return False
    return True
