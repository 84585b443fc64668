"""The ops ``forward`` and ``attend``: their schemas, and what they do for each of torch's dispatch keys.

``attend`` takes everything that a call may say; ``forward`` is the short form that most calls need.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cutlass_fmha import (
    _C,
    autocast,
    cpu,
    plan,
    private_torch,
)
from cutlass_fmha.arguments import check, check_features
from cutlass_fmha.arguments.check import CAUSAL
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features
from cutlass_fmha.select import mask_diagonal

#: In a build whose kernels run on the CPU (tools/simulator), 1 has ``attend`` launch them on CPU tensors.
SIMULATE = "CUTLASS_FMHA_SIMULATE"

SCHEMA = (
    "forward(Tensor query, Tensor key, Tensor value, float scale, str causal, bool return_lse, "
    "str? template) -> (Tensor output, Tensor softmax_lse)"
)
ATTEND_SCHEMA = (
    "attend(Tensor query, Tensor key, Tensor value, float scale, str causal, bool return_lse, "
    "str? template, *, SymInt window_left=-1, SymInt window_right=-1, Tensor? mask=None, Tensor? bias=None, "
    "Tensor? prefix_lengths=None, Tensor? block_counts=None, Tensor? block_indices=None, int block_m=0, "
    "int block_n=0, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0., "
    "Tensor? dropout_seed=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? leftpad_k=None, Tensor? page_table=None, Tensor? cache_batch_idx=None, int? num_splits=None, "
    "bool batch_invariant=False, Tensor? numbers=None) -> (Tensor output, Tensor softmax_lse)"
)

# The library must live as long as its registrations. A schema and plain implementations are registered by
# hand because torch.library.custom_op costs three times as much per call.
_library = torch.library.Library("cutlass_fmha", "DEF")
# Inductor must not hand over another layout than the traced one: the last dimension has to stay contiguous.
for _schema in (SCHEMA, ATTEND_SCHEMA):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))


def _check_options(scale: float, causal: str) -> None:
    check.finite_scale(scale)
    if causal not in CAUSAL:
        raise ValueError(f'causal must be "none", "top-left" or "bottom-right", got {causal!r}')


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    template: str | None,
) -> tuple[Tensor, Tensor]:
    _check_options(scale, causal)
    output, lse = plan.launch(query, key, value, scale, causal, return_lse, template)
    return output, _no_lse(query) if lse is None else lse


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    template: str | None,
) -> tuple[Tensor, Tensor]:
    _check_options(scale, causal)
    dims = check.check_tensors((query, key, value))
    if template is not None:
        raise UnsupportedError(f"template {template} is a CUDA kernel, and the tensors are on the CPU")
    output, lse = cpu.forward(query, key, value, scale, mask_diagonal(causal, dims.seqlen_q, dims.seqlen_k))
    return output, lse if return_lse else _no_lse(query)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    template: str | None,
) -> tuple[Tensor, Tensor]:
    _check_options(scale, causal)
    dims = check.check_tensors((query, key, value))
    output = query.new_empty((dims.batch, dims.seqlen_q, dims.num_heads, dims.head_dim))
    if not return_lse:
        return output, _no_lse(query)
    return output, query.new_empty((dims.batch, dims.num_heads, dims.seqlen_q), dtype=torch.float32)


def _scale_of(scale: float, features: dict[str, Any]) -> float:
    """The scale of a call of ``attend``, whose features become those of ``Features``.

    ``numbers``, float64 [3] on the CPU, are scale, softcap and dropout_p in place of those: a compiled graph
    holds a float as a constant, and would be compiled anew for each value.
    """
    numbers = features.pop("numbers", None)
    if numbers is not None:
        if numbers.dtype != torch.float64 or numbers.shape != (3,) or numbers.device.type != "cpu":
            raise ValueError(
                f"numbers must be float64 of shape (3,) on the CPU, got {check.dtype_name(numbers.dtype)} of "
                f"shape {tuple(numbers.shape)} on {numbers.device}"
            )
        scale, features["softcap"], features["dropout_p"] = numbers.tolist()
    return scale


def _attend_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    template: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    scale = _scale_of(scale, features)
    _check_options(scale, causal)
    output, lse = plan.launch(
        query, key, value, scale, causal, return_lse, template, "bshd", check.NAMES, features
    )
    return output, _no_lse(query) if lse is None else lse


def _attend_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    template: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    scale = _scale_of(scale, features)
    _check_options(scale, causal)
    arguments = Features(**features)
    sizes = check_features.check_features((query, key, value), arguments)
    cpu.check_contents(query, key, arguments, sizes)
    if os.environ.get(SIMULATE) == "1" and _C.build_info().get("simulator"):
        return _attend_cuda(query, key, value, scale, causal, return_lse, template, **features)
    if template is not None:
        raise UnsupportedError(f"template {template} is a CUDA kernel, and the tensors are on the CPU")
    output, lse = cpu.attend(query, key, value, scale, causal, arguments, sizes)
    return output, lse if return_lse else _no_lse(query)


def _attend_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    template: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    _check_options(scale, causal)
    features.pop("numbers", None)  # known when the graph runs, and checked then
    sizes = check_features.check_features((query, key, value), Features(**features))
    output = query.new_empty(sizes.out_shape)
    if not return_lse:
        return output, _no_lse(query)
    return output, query.new_empty(sizes.lse_shape, dtype=torch.float32)


def _no_lse(query: Tensor) -> Tensor:
    """The op's arity is fixed: what stands in for an LSE that nobody asked for."""
    return torch.empty(0, dtype=torch.float32, device=query.device)


NO_BACKWARD = (
    "cutlass_fmha has no backward yet, and an input of this call requires a gradient: call it under "
    "torch.no_grad() or with detached inputs, or train with torch's scaled_dot_product_attention"
)


def _autograd(keyset: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Refuses a call whose gradient would silently be missing; everything else goes on to the backend."""
    if needs_gradient(query, key, value):
        raise NotImplementedError(NO_BACKWARD)
    return private_torch.after_autograd(
        torch.ops.cutlass_fmha.forward.default, keyset, query, key, value, *rest
    )


def _attend_autograd(
    keyset: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **features: Any
) -> Any:
    """The same; a bias, slopes or sinks may want a gradient, too."""
    others = (argument for argument in features.values() if isinstance(argument, Tensor))
    if needs_gradient(query, key, value, *others):
        raise NotImplementedError(NO_BACKWARD)
    return private_torch.after_autograd(
        torch.ops.cutlass_fmha.attend.default, keyset, query, key, value, *rest, **features
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd, in reverse or forward mode, would want a derivative of a call on these tensors."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return True
    if private_torch.forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


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
        _library.impl(name, refuse, key)


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
        # The modes come first: one for functions would see the questions to the tensors that follow.
        and private_torch.len_torch_function_stack() == 0
        and private_torch.len_torch_dispatch_stack() == 0
        and private_torch.peek_interpreter_stack() is None
        and private_torch.get_tracing_state() is None
        and private_torch.forward_ad._current_level < 0
        and not private_torch.profiler._is_profiler_enabled
        and query.is_cuda
        and key.is_cuda
        and value.is_cuda
        and not (
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        )
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


def others_can_skip_dispatcher(arguments: Mapping[str, Any]) -> bool:
    """What ``can_skip_dispatcher`` asks of query, key and value, of the other tensors of a call."""
    gradients = torch.is_grad_enabled()
    return all(
        type(value) is Tensor
        and value.is_cuda
        and not (gradients and value.requires_grad)
        and not value.is_neg()
        for value in arguments.values()
        if isinstance(value, Tensor)
    )


for _name in ("forward", "attend"):
    refuse_elsewhere(_name)
_library.impl("forward", _cuda, "CUDA")
_library.impl("forward", _cpu, "CPU")
_library.impl("forward", _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("cutlass_fmha::forward", _fake, lib=_library)
autocast.register(_library, "forward", autocast.attention_rule)
_library.impl("attend", _attend_cuda, "CUDA")
_library.impl("attend", _attend_cpu, "CPU")
_library.impl("attend", _attend_autograd, "Autograd", with_keyset=True)
torch.library.register_fake("cutlass_fmha::attend", _attend_fake, lib=_library)
autocast.register(_library, "attend", autocast.attention_rule)
