"""The op ``merge_states``: an output and the log-sum-exp of its scores, from two that saw different keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cutlass_fmha import _C, autocast
from cutlass_fmha.arguments import check, results, tensors
from cutlass_fmha.launch import helpers
from cutlass_fmha.launch.plan import kept
from cutlass_fmha.ops import dispatcher

STATES = "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b"
SCHEMA = f"merge_states({STATES}) -> (Tensor output, Tensor softmax_lse)"
SCHEMA_OUT = f"merge_states_out({STATES}, Tensor(a!) out, Tensor(b!) lse) -> ()"


def _check(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> None:
    check.check_tensors_given({"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b})
    if o_a.dim() not in (3, 4):
        raise ValueError(
            "o_a must have shape [batch, seqlen_q, num_heads, head_dim_v] or [total_q, num_heads, "
            f"head_dim_v], got {tuple(o_a.shape)}"
        )
    tensors.check_alike({"o_a": o_a, "o_b": o_b})
    tensors.check_device("o_a", o_a, {"lse_a": lse_a, "lse_b": lse_b})
    if o_b.shape != o_a.shape:
        raise ValueError(f"o_b must have o_a's shape {tuple(o_a.shape)}, got {tuple(o_b.shape)}")
    if any(size > check.MAX_SEQLEN for size in o_a.shape):
        raise ValueError(f"o_a must have sizes of 2**29 at most, got {tuple(o_a.shape)}")
    wanted = (*o_a.shape[:-3], o_a.shape[-2], o_a.shape[-3])
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {check.dtype_name(lse.dtype)}")
        if lse.shape != wanted:
            raise ValueError(f"{name} must have shape {tuple(wanted)}, as o_a has it, got {tuple(lse.shape)}")


def check_states(o_a: Tensor, lse_a: Tensor, out: Tensor | None, lse: Tensor | None) -> None:
    """What is given to write a state to; what may be of metadata alone."""
    for name, tensor, like in (("out", out, o_a), ("lse", lse, lse_a)):
        if tensor is not None:
            results.check_result(name, tensor, tuple(like.shape), like.dtype, ("o_a", o_a))


def empty(o_a: Tensor, lse_a: Tensor) -> tuple[Tensor, Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _lse_strides(lse: Tensor) -> tuple[int, int, int]:
    """(batch, head, seqlen) strides of [batch, num_heads, seqlen_q], or without a batch."""
    batch, head, seqlen = lse.stride() if lse.dim() == 3 else (0, *lse.stride())
    return batch, head, seqlen


def _cuda(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    tensors = (o_a, lse_a, o_b, lse_b)
    plan = kept("merge_states", tensors, lambda: _prepare(*tensors))
    state = empty(o_a, lse_a)
    _launch(plan, *tensors, *state)
    return state


def _cuda_out(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    tensors = (o_a, lse_a, o_b, lse_b, out, lse)
    plan = kept("merge_states_out", tensors, lambda: _prepare(*tensors))
    _check_apart(*tensors)
    _launch(plan, *tensors)


def _launch(
    plan: helpers.Helper[_C.MergeParams],
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    output: Tensor,
    lse: Tensor,
) -> None:
    p = plan.params.copy()
    p.o_a, p.o_b, p.o = o_a.data_ptr(), o_b.data_ptr(), output.data_ptr()
    p.lse_a, p.lse_b, p.lse = lse_a.data_ptr(), lse_b.data_ptr(), lse.data_ptr()
    helpers.launch(plan, p)


def _check_apart(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    states = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b}
    results.check_apart(results.placed({"out": out, "lse": lse}), results.placed(states))


def _prepare(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> helpers.Helper[_C.MergeParams]:
    _check(o_a, lse_a, o_b, lse_b)
    check_states(o_a, lse_a, out, lse)
    output = torch.empty(o_a.shape, device="meta") if out is None else out
    lse = torch.empty(lse_a.shape, device="meta") if lse is None else lse
    p = _C.MergeParams()
    p.o_a_stride, p.o_b_stride, p.o_stride = (helpers.strides(x) for x in (o_a, o_b, output))
    p.lse_a_stride, p.lse_b_stride, p.lse_stride = (_lse_strides(x) for x in (lse_a, lse_b, lse))
    p.batch = o_a.shape[0] if o_a.dim() == 4 else 1
    p.seqlen_q, p.num_heads, p.head_dim_v = o_a.shape[-3:]
    return helpers.helper("merge", p, o_a)


def _cpu(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    if dispatcher.simulated():
        return _cuda(o_a, lse_a, o_b, lse_b)
    _check(o_a, lse_a, o_b, lse_b)
    dtype = torch.float64 if o_a.dtype == torch.float64 else torch.float32
    no_a, no_b = lse_a == -math.inf, lse_b == -math.inf
    a, b = lse_a.to(dtype), lse_b.to(dtype)
    reference = torch.maximum(a, b)
    # Infinite ones are no different from their maximum, and their difference would be NaN.
    weight_a = torch.where(a == reference, 1.0, torch.exp(a - reference))
    weight_b = torch.where(b == reference, 1.0, torch.exp(b - reference))
    total = weight_a + weight_b
    lse = torch.where(no_a, lse_b, torch.where(no_b, lse_a, (reference + torch.log(total)).float()))

    def by_row(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).unsqueeze(-1)

    merged = (by_row(weight_a) * o_a.to(dtype) + by_row(weight_b) * o_b.to(dtype)) / by_row(total)
    output = torch.where(by_row(no_b), o_a, merged.to(o_a.dtype))
    output = torch.where(by_row(no_a), o_b, output).masked_fill(by_row(no_a & no_b), 0.0)
    return output.contiguous(), lse.contiguous()


def _cpu_out(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    if dispatcher.simulated():
        return _cuda_out(o_a, lse_a, o_b, lse_b, out, lse)
    _check(o_a, lse_a, o_b, lse_b)
    check_states(o_a, lse_a, out, lse)
    _check_apart(o_a, lse_a, o_b, lse_b, out, lse)
    for to, found in zip((out, lse), _cpu(o_a, lse_a, o_b, lse_b), strict=True):
        to.copy_(found)
    return None


def _fake(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check(o_a, lse_a, o_b, lse_b)
    return empty(o_a, lse_a)


def _fake_out(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    _check(o_a, lse_a, o_b, lse_b)
    check_states(o_a, lse_a, out, lse)


def _casts(
    dtype: torch.dtype, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *to: Tensor
) -> autocast.Arguments:
    """Autocast's rule for sums: the wider of two dtypes, and nothing is cast where they are the same."""
    if torch.float32 in (o_a.dtype, o_b.dtype):
        o_a, o_b = autocast.cast(o_a, torch.float32), autocast.cast(o_b, torch.float32)
    return (o_a, lse_a, o_b, lse_b, *to), {}


dispatcher.register(SCHEMA, {"CUDA": _cuda, "CPU": _cpu, "fake": _fake}, _casts)
dispatcher.register(SCHEMA_OUT, {"CUDA": _cuda_out, "CPU": _cpu_out, "fake": _fake_out}, _casts)
dispatcher.register_writes("merge_states_out", ("out", "lse"))
