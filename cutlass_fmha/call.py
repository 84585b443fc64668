"""One call of attention whose arguments have the op's names: through its plan, or through torch's dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import autocast, jagged, private_torch
from cutlass_fmha.arguments import check, check_features, results
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.arguments.results import OUT, RESULTS
from cutlass_fmha.dispatch.describe import Names
from cutlass_fmha.features import Features
from cutlass_fmha.launch import plan
from cutlass_fmha.ops import dispatcher


def call_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    layout: str,
    row: str | None,
    names: Names,
    arguments: Mapping[str, Any],
    known_only: bool = False,
) -> Any:
    """One call of an op, or of what the op would call where nothing listens in between: output and LSE.

    ``known_only``: None, and nothing is done, where there is no plan for that.
    ``arguments`` are those of ``attend``, under its names; without any, the op is ``forward``.
    """
    if scale is not None:
        scale = check.finite_scale(scale)
    if row is not None:
        check.row_name(row)
    if arguments and layout not in ("bshd", "packed") and ("cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments):
        raise ValueError(
            'layout must be "bshd" with cu_seqlens_q or cu_seqlens_k: '
            "packed tensors are [total tokens, num_heads, head_dim]"
        )
    if dispatcher.passes((q, k, v), arguments.values()):
        try:
            return plan.launch(q, k, v, scale, causal, return_lse, row, layout, names, arguments, known_only)
        except RuntimeError:
            if known_only:  # what CUDA refuses, it does again
                return None
            check.check_types((q, k, v), names)  # nested and sparse tensors have no shape or address
            raise
    if known_only:
        return None
    return _dispatch(q, k, v, scale, causal, return_lse, plan.LAYOUTS[layout], row, names, arguments)


def _dispatch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    layout: str,
    row: str | None,
    names: Names,
    arguments: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The call through torch's dispatcher, checked before: the op would use names of its own."""
    if (type(q) is not Tensor or type(k) is not Tensor) and (jagged.is_jagged(q) or jagged.is_jagged(k)):
        packed = jagged.pack((q, k, v), layout, names, arguments)
        out, lse = call_attention(*packed.tensors, scale, causal, return_lse, "bshd", row, names, packed.arguments)
        return packed.as_given(out, lse if return_lse else None)
    check.check_types((q, k, v), names)
    compiling = torch.compiler.is_compiling()
    if type(q) is not Tensor and not compiling and type(q).__name__ == "DTensor":
        from cutlass_fmha.ops import sharding  # noqa: F401  torch.distributed is there, and now knows the ops
    changes = compiling and not (scale is None or private_torch.has_static_value(scale))
    short = not arguments and not changes and not (q.dim() == v.dim() == 4 and v.shape[3] != q.shape[3])
    if short:
        check.check_tensors((q, k, v), layout, names)
    elif layout == "bhsd":
        check.check_dims((q, k, v), layout, names)  # before they are transposed; the rest comes later
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    given = {name: arguments[name] for name in RESULTS if name in arguments}
    said = {name: x for name, x in arguments.items() if name not in given} if given else arguments
    if given:
        to, lse = _results(given, (q, k, v), said, layout, names, return_lse)
    elif not short and not compiling:
        check_features.check_features((q, k, v), Features(**said), names)
    scale = float(q.shape[-1]) ** -0.5 if scale is None else scale
    if short:
        output, lse = dispatcher.call("forward", q, k, v, scale, causal, return_lse, row)
        return (output.transpose(1, 2) if layout == "bhsd" else output), lse
    if compiling:
        scale, said = _numbers_that_change(scale, said)
    if given:
        torch.ops.cutlass_fmha.attend_out(
            q, k, v, to.transpose(1, 2) if layout == "bhsd" else to, lse, scale, causal, row, **said
        )
        return to, lse
    output, lse = dispatcher.call("attend", q, k, v, scale, causal, return_lse, row, **said)
    return (output.transpose(1, 2) if layout == "bhsd" else output), lse


def _results(
    given: Mapping[str, Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    said: Mapping[str, Any],
    layout: str,
    names: Names,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """What is written to, checked: what is given, and new memory for the rest. The layout is theirs alone."""
    q, compiling, out, lse = tensors[0], torch.compiler.is_compiling(), given.get("out"), given.get("lse")
    if type(q).__name__ == "DTensor":
        raise NotImplementedError("out and lse are not taken with DTensors: leave them out")
    if not compiling or out is None or (lse is None and return_lse):
        # The op in a graph checks the rest: here nothing may branch on sizes.
        sizes_of = check_features.check_operands if compiling else check_features.check_features
        sizes = sizes_of(tensors, Features(**said), names)
        if not compiling:
            results.check_results(given, sizes, layout, (names[0], q))
            read = dict(zip(names, tensors, strict=True)) | dispatcher.tensors_of(said)
            results.check_apart_before(given, read)
        if out is None:
            out = q.new_empty(sizes.out_shape)
            out = out.transpose(1, 2) if layout == "bhsd" else out
        if lse is None and return_lse:
            lse = q.new_empty(sizes.lse_shape, dtype=torch.float32)
    return out, lse


def _numbers_that_change(scale: float, arguments: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Scale and arguments of the op in a graph: numbers that may take any value there go in a tensor."""
    numbers = (scale, arguments.get("softcap", 0.0), arguments.get("dropout_p", 0.0))
    if all(private_torch.has_static_value(number) for number in numbers):
        return scale, arguments
    one = torch.ones((), dtype=torch.float64, device="cpu")
    rest = {name: value for name, value in arguments.items() if name not in ("softcap", "dropout_p")}
    return 1.0, {**rest, "numbers": torch.stack([one * number for number in numbers])}


def attend_known(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, known: Mapping[str, Any], own: Mapping[str, Any]
) -> Tensor:
    """``attention`` for callers of many layers: ``known`` is what ``op_arguments`` made of what all of them say,
    ``own`` what this one says besides."""
    if private_torch.any_autocast_enabled():
        q, k, v, own = autocast.operands(q, k, v, own)
    arguments = {**known, **op_arguments(q, own, "q", OUT)} if own else known
    word = "bottom-right" if causal else "none"
    return call_attention(q, k, v, scale, word, False, "bshd", None, ("q", "k", "v"), arguments)[0]  # type: ignore[no-any-return]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool | str, **features: Any
) -> Tensor:
    """``attention`` of packed sequences in tensors [batch, num_heads, seqlen, head_dim], where the tokens of
    an entry follow those of the one before: [batch, seqlen_q, num_heads, head_dim]. Not for ``out``."""
    word = check.causal_name(causal)
    said: Mapping[str, Any] = features
    if private_torch.any_autocast_enabled():
        q, k, v, said = autocast.operands(q, k, v, features)
    arguments = op_arguments(q, said, "q")
    rest = (None, ("q", "k", "v"), arguments)
    if (known := call_attention(q, k, v, scale, word, False, "packed", *rest, True)) is not None:
        return known[0]  # type: ignore[no-any-return]
    tensors, layout = (q, k, v), "packed"
    rows = plan.packed_rows(q), plan.packed_rows(k), plan.packed_rows(v)
    if not dispatcher.passes(tensors, arguments.values()) or any(
        row.data_ptr() != x.data_ptr() for row, x in zip(rows, tensors, strict=True)
    ):
        layout, tensors = "bshd", rows
    out: Tensor = call_attention(*tensors, scale, word, False, layout, *rest)[0]
    return out if layout == "packed" else out.view(q.shape[0], q.shape[2], *out.shape[1:])
