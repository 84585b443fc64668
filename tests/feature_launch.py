"""Launches of scored and wide rows around the package's Python layer, on a GPU's tensors or on a simulator's.

Outputs, LSE and the parts of split keys lie in buffers full of NaN that the kernels must overwrite exactly
where they are asked to.
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
from operands import GUARD, place
from problems import DEFAULTS, Problem, fitted
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments.check_features import check_features
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.dispatch.families import wide
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


def fit(problem: Problem, row: _C.Row) -> Problem:
    """The problem as a row can take it."""
    if row.family == "wide":
        return fit_wide(problem, row)
    if not row.takes_features:
        return only_plain(problem, row)
    problem = fitted(problem, row.head_dim, row.head_dim_v, row.tile_m, row.tile_n * row.kv_warps)
    if row.family in ("ranged", "score_mod"):
        problem = only_ranges(problem, row.family == "score_mod")
        if row.copy == "tma" and problem.page_size:
            problem = replace(problem, leftpad=False)
    return problem


def only_plain(problem: Problem, row: _C.Row) -> Problem:
    """What plain rows know: lengths, heads, a diagonal, a scale, numbers and how they lie."""
    kept = (
        "seqlen_q",
        "seqlen_k",
        "causal",
        "batch",
        "num_heads",
        "num_heads_kv",
        "scale",
        "fill",
        "return_lse",
    )
    layout = problem.layout if problem.runs_on(row.alignment) else "bshd"
    dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim, "layout": layout, "seed": problem.seed}
    return Problem(**{name: getattr(problem, name) for name in kept}, **dims)


def only_ranges(problem: Problem, modified: bool = False) -> Problem:
    """What ranged rows know of a problem, or where ``modified`` score-mod rows: whole vectors."""

    def aligned(layout: str) -> str:
        return "padded" if layout in ("unaligned", "overlapping") else layout

    return replace(
        problem,
        **{
            name: DEFAULTS[name]
            for name in ("mask", "bias", "blocks", "num_splits")
            + (() if modified else ("softcap", "alibi", "dropout"))
        },
        head_dim=-(-problem.head_dim // 8) * 8,
        head_dim_v=-(-problem.head_dim_v // 8) * 8,
        layout=aligned(problem.layout),
        out_layout=aligned(problem.out_layout),
    )


def fit_wide(p: Problem, row: _C.Row) -> Problem:
    """The problem without what the row does not know, and with head dims that it is for."""
    dims = [min(dim, row.head_dim) for dim in (p.head_dim, p.head_dim_v)]
    if row.head_dim > LARGEST and max(dims) <= LARGEST and p.seed % 2:
        dims = [dim + LARGEST for dim in dims] if p.seed % 4 == 1 else [dims[0], dims[1] + LARGEST]
    bias = p.bias
    if bias is not None and row.dtype != "float32":
        bias = (bias[0], "same", bias[2])
    fill = p.fill
    if row.mma == "tf32x3" and fill.endswith("minus-inf"):
        fill = "normal"  # an infinity has no rest: inf - inf
    return replace(
        p,
        head_dim=dims[0],
        head_dim_v=dims[1],
        window=None if p.window is None else (-1, p.window[1]),
        bias=bias,
        fill=fill,
        prefix=False,
        blocks=None,
        softcap=0.0,
        alibi="",
        sinks="",
        dropout=0.0,
        page_size=0,
        num_splits=None,
        pack=False,
    )


def launch_of(row: _C.Row, problem: Problem, device: torch.device) -> FeatureLaunch | gpu.Launch:
    """A launch of any row."""
    kind = WideLaunch if row.family == "wide" else FeatureLaunch if row.takes_features else gpu.Launch
    return kind.of(row, fit(problem, row), device)


@dataclass
class FeatureLaunch:
    """One call of ``_C.run``, ready to be made any number of times."""

    row: _C.Row
    problem: Problem
    call: Call
    out: Guarded
    lse: Guarded | None
    params: _C.AttentionParams | None = None
    partial: list[Tensor] = field(default_factory=list)
    #: Half ulps of fp32 that a product may be off by besides.
    product_error: float = 0.0

    @property
    def q(self) -> Tensor:
        return self.call.q

    @property
    def k(self) -> Tensor:
        return self.call.k

    @property
    def v(self) -> Tensor:
        return self.call.v

    @classmethod
    def of(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> FeatureLaunch:
        problem = fit(problem, row)
        call = problem.call(gpu.torch_dtype(row), device)
        out, lse = outputs(problem, call, problem.head_dim_v)
        params = _params(problem, call, out.view, None if lse is None else lse.view)
        launch = cls(row, problem, call, out, lse, params)
        launch._add_splits()
        return launch

    def _add_splits(self) -> None:
        splits = self.problem.num_splits or 1
        if splits == 1:
            return
        rows, device = self.params.lse_rows, self.call.q.device
        self.partial = [
            torch.full((splits * rows * width,), torch.nan, device=device)
            for width in (self.problem.head_dim_v, 1, 1)
        ]
        self.params.splits = splits
        if rows:
            addresses = [tensor.data_ptr() for tensor in self.partial]
            self.params.partial_o, self.params.partial_lse, self.params.partial_low = addresses

    def run(self, stream: int | None = None) -> None:
        """Launch on ``stream``, or on torch's current one."""
        device = self.call.q.device
        if device.type == "cpu":  # a simulator, which has one device
            _C.run(self.row.index, self.params, 0, 0)
            return
        stream = torch.cuda.current_stream(device).cuda_stream if stream is None else stream
        _C.run(self.row.index, self.params, device.index or 0, stream)

    def errors(self) -> oracle.Errors:
        """How far the outputs are from fp64."""
        out, lse = self.out.view[..., : self.problem.head_dim_v], None if self.lse is None else self.lse.view
        if out.numel() == 0:
            return oracle.Errors(0.0, 0.0)
        return compare(self.call, out, lse, self.product_error)

    def intact(self) -> bool:
        """Whether the kernels wrote nothing but their outputs."""
        checks = [self.out.intact()] + ([self.lse.intact()] if self.lse else [])
        return bool(torch.stack(checks).all())

    def check(self) -> oracle.Errors:
        """Launch and compare: the errors, or AssertionError."""
        self.run()
        errors = self.errors().check()
        assert self.intact(), f"{self.row.name}: {self.problem}: wrote outside its outputs"
        return errors


@dataclass
class WideLaunch(FeatureLaunch):
    """One call of ``wide.run`` into guarded outputs, ready to be made any number of times."""

    @classmethod
    def of(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> WideLaunch:
        problem = fit_wide(problem, row)
        call = problem.call(gpu.torch_dtype(row), device)
        room = outputs(problem, call, wide.padded(row, call.v.shape[-1]), aligned=True)
        return cls(row, problem, call, *room, product_error=SPLIT_ERROR if row.mma == "tf32x3" else 0.0)

    def run(self, stream: int | None = None) -> None:
        """Launch on torch's current stream."""
        call, features = self.call, Features(**op_arguments(self.call.q, self.call.features))
        tensors = (call.q, call.k, call.v)
        scale = self.problem.head_dim**-0.5 if call.scale is None else call.scale
        lse = None if self.lse is None else self.lse.view
        sizes = check_features(tensors, features)
        wide.run(self.row, tensors, self.out.view, lse, scale, call.causal, features, sizes)


def compare(call: Call, out: Tensor, lse: Tensor | None, product_error: float = 0.0) -> oracle.Errors:
    """Outputs of a call against fp64."""
    operands = (call.q, call.k, call.v, call.scale, call.causal, call.exact_scores, product_error)
    return oracle_features.compare(out, lse, *operands, **call.features)


def outputs(
    problem: Problem, call: Call, width: int, aligned: bool = False
) -> tuple[Guarded, Guarded | None]:
    """Room for O, rows of ``width``, and for the LSE between NaN; ``aligned``: for 16-byte stores."""
    packed = problem.packed_q
    shape = (*call.q.shape[:-1], width)
    like = torch.empty((1, *shape) if packed else shape, dtype=call.q.dtype, device=call.q.device)
    if problem.out_layout == "unaligned" and not aligned:
        view = place(like, row_pad=1, offset=GUARD + 1)
    elif problem.out_layout in ("padded", "unaligned"):
        view = place(like, row_pad=8)
    else:
        view = place(like, problem.out_layout)
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


def _params(problem: Problem, call: Call, out: Tensor, lse: Tensor | None) -> _C.AttentionParams:
    p, features = _C.AttentionParams(), call.features
    for name, tensor in (("q", call.q), ("k", call.k), ("v", call.v), ("o", out)):
        setattr(p, name, tensor.data_ptr())
        setattr(p, f"{name}_stride", _strides(tensor))
    p.batch, p.seqlen_q, p.seqlen_k = problem.batch, problem.seqlen_q, problem.width
    p.entries_k, p.rows_k = (1 if call.k.dim() == 3 else call.k.shape[0]), call.k.shape[-3]
    p.num_heads, p.num_heads_kv = problem.num_heads, problem.num_heads_kv
    p.head_dim, p.head_dim_v = problem.head_dim, problem.head_dim_v
    p.scale = problem.head_dim**-0.5 if call.scale is None else call.scale
    p.softcap = problem.softcap
    p.bottom_right = call.causal != "top-left"
    left, right = problem.window or (-1, -1)
    p.window_left, p.window_right = left, right if call.causal == "none" else 0
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
    p.lse = 0 if lse is None else lse.data_ptr()
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


def without_splits(problem: Problem) -> Problem:
    return replace(problem, num_splits=1)
