"""``torch.ops.cutlass_fmha.forward``: its schema, and what it does for CUDA, CPU, fake tensors, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from cutlass_fmha import check, cpu, plan
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.select import CAUSAL, mask_diagonal

SCHEMA = (
    "forward(Tensor query, Tensor key, Tensor value, float scale, str causal, bool return_lse, "
    "str? template) -> (Tensor output, Tensor softmax_lse)"
)

# The library must live as long as its registrations. A schema and plain implementations are registered by
# hand because torch.library.custom_op costs three times as much per call.
_library = torch.library.Library("cutlass_fmha", "DEF")
# Inductor must not hand over another layout than the traced one: the last dimension has to stay contiguous.
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))


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


def _no_lse(query: Tensor) -> Tensor:
    """The op's arity is fixed: what stands in for an LSE that nobody asked for."""
    return torch.empty(0, dtype=torch.float32, device=query.device)


def _autograd(keyset: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Refuses a call whose gradient would silently be missing; everything else goes on to the backend."""
    if needs_gradient(query, key, value):
        raise NotImplementedError(
            "cutlass_fmha has no backward yet, and an input of this call requires a gradient: call it under "
            "torch.no_grad() or with detached inputs, or train with torch's scaled_dot_product_attention"
        )
    return torch.ops.cutlass_fmha.forward.default.redispatch(
        keyset & torch._C._after_autograd_keyset, query, key, value, *rest
    )


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd, in reverse or forward mode, would want a derivative of a call on these tensors."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def can_skip_dispatcher(query: Any, key: Any, value: Any) -> bool:
    """Whether nothing but the CUDA implementation would have a say in a call: half of its host time is saved.

    Whatever listens to operators gets its way through the dispatcher: tracing, modes, functorch transforms,
    subclasses, the profiler, gradients. Only asked where ``torch.compiler.is_compiling()`` is false.
    """
    return (
        type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        # The modes come first: one for functions would see the questions to the tensors that follow.
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not profiler._is_profiler_enabled
        and query.is_cuda
        and key.is_cuda
        and value.is_cuda
        and not (
            torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        )
        and not (query.is_neg() or key.is_neg() or value.is_neg())
    )


_library.impl("forward", _cuda, "CUDA")
_library.impl("forward", _cpu, "CPU")
_library.impl("forward", _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("cutlass_fmha::forward", _fake, lib=_library)
