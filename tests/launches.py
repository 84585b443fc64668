"""Launches of rows around the package's Python layer, on a GPU's tensors or on a simulator's.

Outputs, LSE and the parts of split keys lie in buffers full of NaN that the kernels must overwrite exactly
where they are asked to, which torch.empty would not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import gpu
import oracle
import oracle_features
import torch
from feature_tensors import Call
from gpu import Guarded
from operands import GUARD, place, poison
from problems import DEFAULTS, Problem, fitted
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments.check_features import check_features
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.dispatch.blocks import Tail
from cutlass_fmha.dispatch.families import wide
from cutlass_fmha.dispatch.table import PLAIN
from cutlass_fmha.features import Features

#: Which field of the parameters takes the address of a feature's tensor.
ADDRESSES = {
    **{name: name for name in ("mask", "bias", "prefix_lengths", "alibi_slopes", "sinks", "dropout_seed")},
    **{name: name for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k")},
    "page_table": "page_table",
    "cache_batch_idx": "batch_index_k",
}
#: Head dim from which on there are wide rows alone: their problems have such ones every second time.
LARGEST = 256
#: In 3xTF32 a factor is a truncated TF32 number and a TF32-rounded rest, off by 2^-21 at most; the product of
#: two rests, 2^-20 at most, is left out. Together 2^-19, in half ulps of fp32:
SPLIT_ERROR = 32.0

# ---- what a row can take of a problem ----------------------------------------------------------------------

#: What plain rows know: lengths, heads, a diagonal, a scale, numbers and how they lie.
OF_PLAIN_ROWS = {"seqlen_q", "seqlen_k", "causal", "batch", "num_heads", "num_heads_kv", "head_dim"}
OF_PLAIN_ROWS |= {"head_dim_v", "scale", "fill", "return_lse", "layout", "seed"}
#: Fields of which the rows of a family know nothing.
UNKNOWN = {
    **dict.fromkeys(PLAIN, tuple(DEFAULTS.keys() - OF_PLAIN_ROWS)),
    "score_mod": ("mask", "bias", "blocks", "num_splits"),
    "masked": ("blocks", "num_splits", "softcap", "alibi", "dropout", "pack"),
    "ranged": ("mask", "bias", "blocks", "num_splits", "softcap", "alibi", "dropout"),
    "wide": ("prefix", "blocks", "softcap", "alibi", "sinks", "dropout", "page_size", "num_splits", "pack"),
}


def fit(problem: Problem, row: _C.Row) -> Problem:
    """The problem as a row can take it."""
    p = replace(problem, **{name: DEFAULTS[name] for name in UNKNOWN.get(row.family, ())})
    if row.family in ("ranged", "score_mod", "masked", "wide_scored"):
        p = only_ranges(p, row.family)
    if row.family == "masked":
        p = only_runs(p)
    if row.family in PLAIN:
        layout = p.layout if p.runs_on(row.alignment) else "bshd"
        return replace(p, head_dim=row.head_dim, head_dim_v=row.head_dim, layout=layout)
    if row.family == "wide":
        return fit_wide(p, row)
    if row.family == "wide_scored":
        return fitted(fit_head_dims(p, row), row.head_dim, row.head_dim, row.tile_m, row.tile_n)
    if row.copy == "tma" and p.page_size:
        p = replace(p, leftpad=False)
    return fitted(p, row.head_dim, row.head_dim_v, row.tile_m, row.tile_n * row.kv_warps)


#: Of the ways in which a mask or a bias may lie in memory, those that masked rows read, and what is nearest.
RUNS = {"expanded": "expanded", "missing": "missing", "padded": "padded by runs", "strided": "padded by runs"}


def only_runs(p: Problem) -> Problem:
    """The problem with a mask or a bias that can be read four keys at once; not both, and not neither."""
    mask = p.mask and (p.mask[0].rstrip("k") + "k", RUNS.get(p.mask[1], "plain"))
    bias = p.bias and (p.bias[0].rstrip("k") + "k", "same", RUNS.get(p.bias[2], "plain"))
    if mask and bias:
        mask, bias = (None, bias) if p.seed % 2 else (mask, None)
    if not mask and not bias:
        bias = ("bhqk", "same", "plain")
    return replace(p, mask=mask, bias=bias, seqlen_k=-(-p.seqlen_k // 4) * 4, bounded=False)


def only_ranges(problem: Problem, family: str = "ranged") -> Problem:
    """What ranged rows know of a problem, or the others of their kind: whole vectors."""
    unknown = {name: DEFAULTS[name] for name in UNKNOWN.get(family, ())}
    dims = {name: -(-getattr(problem, name) // 8) * 8 for name in ("head_dim", "head_dim_v")}
    layouts = {name: getattr(problem, name) for name in ("layout", "out_layout")}
    odd = {name: "padded" for name, x in layouts.items() if x in ("unaligned", "overlapping")}
    return replace(problem, **unknown, **dims, **odd)


def fit_wide(p: Problem, row: _C.Row) -> Problem:
    """The problem as the row can take it, with head dims that it is for."""
    p = fit_head_dims(p, row)
    if p.window is not None:
        p = replace(p, window=(-1, p.window[1]))
    if p.bias is not None and row.dtype != "float32":
        p = replace(p, bias=(p.bias[0], "same", p.bias[2]))
    return p


def fit_head_dims(p: Problem, row: _C.Row) -> Problem:
    """The problem with head dims that only wide rows are for, every second time, or always where they are
    all that it is for."""
    dims = [min(dim, row.head_dim) for dim in (p.head_dim, p.head_dim_v)]
    no_other = row.family == "wide_scored" and row.dtype != "float32"
    if row.head_dim > LARGEST and max(dims) <= LARGEST and (no_other or p.seed % 2):
        dims = [dim + LARGEST for dim in dims] if p.seed % 4 == 1 else [dims[0], dims[1] + LARGEST]
    p = replace(p, head_dim=dims[0], head_dim_v=dims[1])
    # An infinity has no rest: inf - inf.
    return replace(p, fill="normal") if row.mma == "tf32x3" and p.fill.endswith("minus-inf") else p


# ---- launches ----------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One call of ``_C.run``, ready to be made any number of times, with other tensors, too."""

    row: _C.Row
    problem: Problem
    call: Call
    out: Guarded
    lse: Guarded | None
    #: What it is told besides q, k, v and o.
    plan: _C.AttentionParams = field(init=False)
    partial: list[Tensor] = field(default_factory=list)
    #: Half ulps of fp32 that a product may be off by besides.
    product_error: float = 0.0

    q = property(lambda self: self.call.q, lambda self, x: self.put(q=x))
    k = property(lambda self: self.call.k, lambda self, x: self.put(k=x))
    v = property(lambda self: self.call.v, lambda self, x: self.put(v=x))

    @classmethod
    def of(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> Launch:
        """A launch of any row, of the problem as the row can take it."""
        problem, dtype = fit(problem, row), gpu.torch_dtype(row)
        if row.family in PLAIN:
            inputs = problem.inputs(dtype, row.head_dim, device)
            call = Call(*inputs, problem.scale, problem.causal, {}, problem.exact_scores)
            layouts = ("unaligned",) if row.alignment <= 2 else ("padded", "bhsd padded")
            room = outputs(problem, call, problem.head_dim_v, layout=layouts[problem.seed % len(layouts)])
            return Launch(row, problem, call, *room)
        call = problem.call(dtype, device)
        if row.family == "wide":
            room = outputs(problem, call, wide.padded(row, call.v.shape[-1]), aligned=True)
            error = SPLIT_ERROR if row.mma == "tf32x3" else 0.0
            return WideLaunch(row, problem, call, *room, product_error=error)
        error = SPLIT_ERROR if row.family == "wide_scored" and row.dtype == "float32" else 0.0
        return Launch(row, problem, call, *outputs(problem, call, problem.head_dim_v), product_error=error)

    def __post_init__(self) -> None:
        self.plan = _plan(self.problem, self.call, self.lse)
        if (splits := self.problem.num_splits or 1) == 1:
            return
        self.plan.splits = splits
        sizes = [splits * self.plan.lse_rows * width for width in (self.problem.head_dim_v, 1, 1)]
        self.partial = [torch.full((size,), torch.nan, device=self.call.q.device) for size in sizes]
        if self.plan.lse_rows:
            addresses = [tensor.data_ptr() for tensor in self.partial]
            self.plan.partial_o, self.plan.partial_lse, self.plan.partial_low = addresses

    def put(self, **tensors: Tensor) -> None:
        """Other tensors for q, k or v."""
        self.call = self.call._replace(**tensors)

    def params(self) -> _C.AttentionParams:
        p, strides = self.plan.copy(), _strides if self.row.takes_features else lambda x: x.stride()[:3]
        for name, x in zip("qkvo", (*self.call[:3], self.out.view), strict=True):
            setattr(p, name, x.data_ptr())
            setattr(p, f"{name}_stride", strides(x))
        return p

    def run(self, stream: int | None = None, tail: Tail | None = None) -> None:
        """Launch on ``stream``, or on torch's current one."""
        p, device = self.params(), self.call.q.device
        if stream is None:  # a simulator, whose tensors are on the CPU, has but one
            stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
        if tail is not None:
            parts = poison(torch.float32, tail.rows(self.row) * (self.row.head_dim + 2), device)
            p.tail = parts.data_ptr()
            p.tail_tiles, p.tail_parts, p.tail_first, p.tail_rest = tail
        _C.run(self.row.index, p, device.index or 0, stream)

    def errors(self) -> oracle.Errors:
        """How far the outputs are from fp64."""
        out, lse = self.out.view[..., : self.problem.head_dim_v], self.lse and self.lse.view
        if out.numel() == 0:
            return oracle.Errors(0.0, 0.0)
        return compare(self.call, out, lse, self.product_error)

    def intact(self) -> bool:
        """Whether the kernels wrote nothing but their outputs."""
        return all(bool(buffer.intact()) for buffer in (self.out, self.lse) if buffer)

    def check(self) -> oracle.Errors:
        """Launch and compare: the errors, or AssertionError."""
        self.run()
        errors = self.errors().check()
        assert self.intact(), f"{self.row.name}: {self.problem}: wrote outside its outputs"
        return errors


class WideLaunch(Launch):
    """One call of ``wide.run`` into guarded outputs, ready to be made any number of times."""

    def run(self, stream: int | None = None, tail: Tail | None = None) -> None:
        """Launch on torch's current stream."""
        call, features = self.call, Features(**op_arguments(self.call.q, self.call.features))
        tensors, lse = call[:3], self.lse and self.lse.view
        scale = self.problem.head_dim**-0.5 if call.scale is None else call.scale
        sizes = check_features(tensors, features)
        wide.run(self.row, tensors, self.out.view, lse, scale, call.causal, features, sizes)


def compare(call: Call, out: Tensor, lse: Tensor | None, product_error: float = 0.0) -> oracle.Errors:
    """Outputs of a call against fp64."""
    operands = (call.q, call.k, call.v, call.scale, call.causal, call.exact_scores, product_error)
    return oracle_features.compare(out, lse, *operands, **call.features)


def outputs(
    problem: Problem, call: Call, width: int, aligned: bool = False, layout: str = ""
) -> tuple[Guarded, Guarded | None]:
    """Room for O, rows of ``width``, and for the LSE between NaN; ``aligned``: for 16-byte stores."""
    packed, shape = problem.packed_q, (*call.q.shape[:-1], width)
    like = call.q.new_empty((1, *shape) if packed else shape)
    layout = layout or problem.out_layout
    if layout == "unaligned" and not aligned:
        view = place(like, row_pad=1, offset=GUARD + 1)
    elif layout in ("padded", "unaligned", "bhsd padded"):
        view = place(like, "bhsd" if layout == "bhsd padded" else "bshd", row_pad=8)
    else:
        view = place(like, layout)
    out = Guarded.around(view[0] if packed else view)
    if not problem.return_lse:
        return out, None
    heads = problem.num_heads
    rows = (1, heads, shape[0], 1) if packed else (problem.batch, heads, problem.seqlen_q, 1)
    lse = place(torch.empty(rows, device=call.q.device)).squeeze(-1)
    return out, Guarded.around(lse[0] if packed else lse)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, head); a packed tensor has no batch, and what has one element has no stride."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return (0, strides[0], strides[1]) if len(strides) == 2 else (strides[0], strides[1], strides[2])


def _plan(problem: Problem, call: Call, lse: Guarded | None) -> _C.AttentionParams:
    """What a launch is told but for q, k, v and o."""
    p, features = _C.AttentionParams(), call.features
    p.batch, p.seqlen_q, p.seqlen_k = problem.batch, problem.seqlen_q, problem.width
    p.entries_k, p.rows_k = (1 if call.k.dim() == 3 else call.k.shape[0]), call.k.shape[-3]
    p.num_heads, p.num_heads_kv = problem.num_heads, problem.num_heads_kv
    p.head_dim, p.head_dim_v = problem.head_dim, problem.head_dim_v
    p.scale = problem.head_dim**-0.5 if call.scale is None else call.scale
    p.softcap = problem.softcap
    p.bottom_right = call.causal != "top-left"
    p.window_left, p.window_right = problem.window or (-1, -1)
    if call.causal != "none":
        p.window_right = 0
    for name, place_of in ADDRESSES.items():
        if (tensor := features.get(name)) is not None and tensor.numel():
            setattr(p, place_of, tensor.data_ptr())
    _add_strides(p, problem, features)
    if problem.dropout:
        p.dropout_threshold = oracle_features.dropped_of_65536(problem.dropout)
        p.dropout_scale = 65536 / (65536 - p.dropout_threshold)
    if problem.pack and problem.group and problem.blocks is None:
        p.pack = problem.group
    rows = call.q.shape[0] if problem.packed_q else problem.seqlen_q
    p.lse = 0 if lse is None else lse.view.data_ptr()
    p.lse_batch_stride = 0 if problem.packed_q else problem.num_heads * rows
    p.lse_head_stride = rows
    p.lse_rows = rows * problem.num_heads * (1 if problem.packed_q else problem.batch)
    return p


def _add_strides(p: _C.AttentionParams, problem: Problem, features: dict[str, Any]) -> None:
    """How masks, biases, lists, slopes and tables lie."""
    whole = (problem.batch, problem.num_heads, problem.seqlen_q, problem.width)
    for name in ("mask", "bias"):
        if (tensor := features.get(name)) is not None and tensor.numel():
            setattr(p, f"{name}_stride", tensor.expand(whole).stride())
            if name == "bias":
                p.bias_type = "float32" if tensor.dtype == torch.float32 else "same_as_q"
    if (table := features.get("page_table")) is not None and table.numel():
        p.page_size, p.page_table_stride = problem.page_size, table.stride(0)
    if (slopes := features.get("alibi_slopes")) is not None:
        p.alibi_stride = slopes.expand(problem.batch, problem.num_heads).stride()
    if (lists := features.get("block_mask")) is not None:
        counts, indices, (p.block_m, p.block_n) = lists
        both = (problem.batch, problem.num_heads)
        p.block_counts, p.count_stride = counts.data_ptr(), counts.expand(*both, -1).stride()
        p.block_indices, p.block_stride = indices.data_ptr(), indices.expand(*both, -1, -1).stride()
        if counts.numel() == 0:
            p.block_counts = p.block_indices = 0
