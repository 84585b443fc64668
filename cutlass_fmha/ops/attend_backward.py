"""The op ``attend_backward``: gradients of a call of ``forward`` or ``attend``; and what autograd does."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import cpu, private_torch
from cutlass_fmha.arguments import check, check_features, tensors
from cutlass_fmha.dispatch.describe import problem_of
from cutlass_fmha.dispatch.gradients import lacking, names_of
from cutlass_fmha.dispatch.problem import FULL_ALIGNMENT, Problem
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import NO_FEATURES, Features, Sizes
from cutlass_fmha.launch import gradients, workspace
from cutlass_fmha.ops import dispatcher
from cutlass_fmha.ops.attend import check_options, no_lse, scale_of

#: What a call may say and still be differentiable: keyword arguments of ``attend``.
SAID = (
    ("SymInt", "window_left", "-1"),
    ("SymInt", "window_right", "-1"),
    ("Tensor?", "mask", "None"),
    ("Tensor?", "bias", "None"),
    ("Tensor?", "prefix_lengths", "None"),
    ("Tensor?", "block_counts", "None"),
    ("Tensor?", "block_indices", "None"),
    ("int", "block_m", "0"),
    ("int", "block_n", "0"),
    ("float", "softcap", "0."),
    ("Tensor?", "alibi_slopes", "None"),
    ("Tensor?", "sinks", "None"),
    ("float", "dropout_p", "0."),
    ("Tensor?", "dropout_seed", "None"),
    ("Tensor?", "cu_seqlens_q", "None"),
    ("Tensor?", "cu_seqlens_k", "None"),
    ("SymInt?", "max_seqlen_q", "None"),
    ("SymInt?", "max_seqlen_k", "None"),
    ("Tensor?", "seqused_q", "None"),
    ("Tensor?", "seqused_k", "None"),
    ("Tensor?", "leftpad_k", "None"),
    ("bool", "deterministic", "False"),
    ("int?", "deterministic_workspace", "None"),
)
SCHEMA = (
    "attend_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor output, Tensor softmax_lse, "
    "Tensor? dlse, float scale, str causal, *, "
    + ", ".join(f"{kind} {name}={default}" for kind, name, default in SAID)
    + ", Tensor? numbers=None, bool[5] wanted=[True, True, True, False, False], str? row=None) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dbias, Tensor dsinks)"
)
#: What has gradients, in the order of ``wanted`` and of the results; one that nobody wants is empty.
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")
QKV = (True, True, True, False, False)

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _checked(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    causal: str,
    said: dict[str, Any],
) -> tuple[float, Features, Sizes]:
    """The arguments as the implementations want them. Raises TypeError or ValueError, naming the fault."""
    scale = scale_of(scale, said)
    check_options(scale, causal)
    features = Features(**said)
    sizes = check_features.check_features((query, key, value), features)
    same = {"dout": dout, "output": output}
    check.check_tensors_given({**same, "softmax_lse": softmax_lse}, {"dlse": dlse})
    tensors.check_device("query", query, {**same, "softmax_lse": softmax_lse, "dlse": dlse})
    for name, tensor in same.items():
        if tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} must have query's dtype {check.dtype_name(query.dtype)}, got {check.dtype_name(tensor.dtype)}"
            )
        if tuple(tensor.shape) != sizes.out_shape:
            raise ValueError(f"{name} must have shape {sizes.out_shape}, got {tuple(tensor.shape)}")
    for name, lse in (("softmax_lse", softmax_lse), ("dlse", dlse)):
        if lse is not None and tuple(lse.shape) != sizes.lse_shape:
            raise ValueError(f"{name} must have shape {sizes.lse_shape}, got {tuple(lse.shape)}")
    if softmax_lse.dtype != torch.float32 and query.dtype != torch.float64:
        raise ValueError(f"softmax_lse must be float32, got {check.dtype_name(softmax_lse.dtype)}")
    if names := _unknown(query, features, sizes, causal):
        raise NotImplementedError(f"cutlass_fmha has no backward yet with {names}")
    return scale, features, sizes


def _unknown(query: Tensor, features: Features, sizes: Sizes, causal: str) -> str:
    """What a call says that gradients don't know; ``numbers`` tell of it when a graph runs."""
    return names_of(lacking(_problem(query, features, sizes, causal)))


def _problem(query: Tensor, features: Features, sizes: Sizes, causal: str) -> Problem:
    """As far as gradients depend on it: nothing has an address while a graph is traced."""
    return problem_of(sizes, features, check.dtype_name(query.dtype), causal, FULL_ALIGNMENT, runs=False)


def launch(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    causal: str,
    wanted: Sequence[bool] = QKV,
    row: str | None = None,
    into: tuple[Tensor | None, ...] = (None,) * 5,
    **said: Any,
) -> Gradients:
    """What the op is on a GPU. ``into``: tensors of the gradients' shapes that are written, of those that have one."""
    scale, _, _ = _checked(dout, query, key, value, output, softmax_lse, dlse, scale, causal, said)
    nothing = NO_FEATURES._asdict()
    asked = {name: x for name, x in said.items() if isinstance(x, Tensor) or x != nothing[name]}
    tensors = (query, key, value)
    given = (dout, tensors, output, softmax_lse, dlse, scale, causal, asked, tuple(wanted), row)
    return gradients.launch(*given, into=into)


def _cpu(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    causal: str,
    wanted: Sequence[bool] = QKV,
    row: str | None = None,
    **said: Any,
) -> Gradients:
    scale, features, sizes = _checked(dout, query, key, value, output, softmax_lse, dlse, scale, causal, said)
    cpu.check_contents(query, key, features, sizes)
    if dispatcher.simulated():
        return launch(dout, query, key, value, output, softmax_lse, dlse, scale, causal, wanted, row, **said)
    if row is not None:
        raise UnsupportedError(f"row {row} is a CUDA kernel, and the tensors are on the CPU")
    found = cpu.attend_backward(dout, dlse, query, key, value, output, softmax_lse, scale, causal, features, sizes)
    return _five(query, (x if need else None for x, need in zip(found, wanted, strict=True)))


def _five(query: Tensor, found: Iterable[Tensor | None]) -> Gradients:
    """The op's arity is fixed."""
    a, b, c, d, e = (query.new_empty(0) if x is None else x for x in found)
    return a, b, c, d, e


def _fake(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    causal: str,
    wanted: Sequence[bool] = QKV,
    row: str | None = None,
    **said: Any,
) -> Gradients:
    said.pop("numbers", None)  # known when the graph runs
    _checked(dout, query, key, value, output, softmax_lse, dlse, scale, causal, said)
    given = (query, key, value, said.get("bias"), said.get("sinks"))
    found = [x.new_empty(x.shape) if need and x is not None else None for x, need in zip(given, wanted, strict=True)]
    if query.is_cuda:
        found[:3] = [None if x is None else gradients.empty_like(x) for x in found[:3]]
    return _five(query, found)


dispatcher.register(SCHEMA, {"CUDA": launch, "CPU": _cpu, "fake": _fake})


# ---- autograd ----------------------------------------------------------------------------------------------

NAMES = tuple(name for _, name, _ in SAID)


def keep_features(ctx: Any, features: Mapping[str, Any], device: torch.device) -> None:
    """What a backward needs of a call besides the tensors that are saved: ``names`` of those that are features."""
    ctx.names = tuple(dispatcher.tensors_of(features))
    ctx.said = {name: x for name, x in features.items() if not isinstance(x, Tensor) and name in NAMES}
    if torch.get_deterministic_debug_mode() == 2:  # what is not deterministic is an error
        ctx.said["deterministic"] = True
    ctx.workspace = workspace.in_use(device)


class _Attend(dispatcher.Differentiable):
    """``forward`` or ``attend``, whose LSE is kept: no probability is."""

    @staticmethod
    def forward(
        name: str,
        keyset: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        causal: str,
        row: str | None,
        features: Mapping[str, Any],
        *given: Tensor,
    ) -> tuple[Tensor, Tensor]:
        op = getattr(torch.ops.cutlass_fmha, name).default
        # An LSE that nobody asked for is wanted here.
        found: tuple[Tensor, Tensor] = private_torch.after_autograd(
            op, keyset, query, key, value, scale, causal, True, row, **features
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        _, _, query, key, value, ctx.scale, ctx.causal, _, features, *given = inputs
        out, lse = output
        ctx.save_for_backward(query, key, value, out, lse, *given)
        keep_features(ctx, features, query.device)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        query, key, value, out, lse, *given = ctx.saved_tensors
        needs = dict(zip(("query", "key", "value"), ctx.needs_input_grad[2:5], strict=True))
        needs |= dict(zip(ctx.names, ctx.needs_input_grad[9:], strict=True))
        found: dict[str, Tensor] = {}
        if dout is not None or dlse is not None:
            said = {**ctx.said, **dict(zip(ctx.names, given, strict=True))}
            # Not from the workspace, whose size is known before what the gradients of a loss look like.
            dout = torch.zeros_like(out) if dout is None else dispatcher.rows_of_gradient(dout)
            dlse = None if dlse is None else dlse.contiguous()
            wanted = [needs.get(name, False) for name in DIFFERENTIABLE]
            with workspace.inside(ctx.workspace):
                given = (dout, query, key, value, out, lse, dlse, ctx.scale, ctx.causal)
                gradients = dispatcher.call("attend_backward", *given, **said, wanted=wanted)
            found = {name: x for name, x, need in zip(DIFFERENTIABLE, gradients, wanted, strict=True) if need}
        of_given = (found.get(name) for name in ctx.names)
        return (None, None, *map(found.get, DIFFERENTIABLE[:3]), None, None, None, None, *of_given)


def refusal(query: Tensor, key: Tensor, value: Tensor, causal: str, features: Mapping[str, Any]) -> str:
    """Why a call has no gradient; empty where it has one."""
    wanted = [name for name, x in features.items() if isinstance(x, Tensor) and dispatcher.requires_grad(x)]
    if others := [name for name in wanted if name not in DIFFERENTIABLE]:
        return f"cutlass_fmha has no backward yet for {', '.join(others)}: pass it detached"
    said = {name: x for name, x in features.items() if name != "numbers"}
    call = Features(**said)
    sizes = check_features.check_features((query, key, value), call)
    if names := _unknown(query, call, sizes, causal):
        return f"cutlass_fmha has no backward yet with {names}"
    if query.device.type == "cuda":
        problem = _problem(query, call, sizes, causal)
        if "bias" in wanted:
            problem = replace(problem, bias_gradient=True)
        return gradients.refusal(problem, query.get_device())
    return ""


def _autograd(
    name: str,
    keyset: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: str,
    return_lse: bool,
    row: str | None,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    """What ``forward`` and ``attend`` do where a gradient may be wanted."""
    given = [x for x in features.values() if isinstance(x, Tensor)]
    op = getattr(torch.ops.cutlass_fmha, name).default
    if not dispatcher.needs_gradient(query, key, value, *given):
        found: tuple[Tensor, Tensor] = private_torch.after_autograd(
            op, keyset, query, key, value, scale, causal, return_lse, row, **features
        )
        return found
    dispatcher.check_reverse(keyset, query, key, value, *given)
    if sentence := refusal(query, key, value, causal, features):
        raise NotImplementedError(sentence)
    out, lse = _Attend.apply(  # type: ignore[no-untyped-call]
        name, keyset, query, key, value, scale, causal, row, features, *given
    )
    return out, lse if return_lse else no_lse(query)


dispatcher.register_once("attend_backward", "attention")
for _name in ("forward", "attend"):
    dispatcher.register_gradients(_name, functools.partial(_autograd, _name))
