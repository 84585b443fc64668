"""Launches of rows, each a ``_C.run`` of its own, on a GPU's tensors or on a simulator's. Outputs, LSE and the parts of
split keys lie in buffers full of NaN that the kernels must overwrite exactly where they are asked to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import gpu
import oracle
import oracle_features
import torch
from gpu import Guarded
from operands import GUARD, Call, place, poison
from problems import DEFAULTS, Problem, fitted
from torch import Tensor

from cutlass_fmha import _C
from cutlass_fmha.arguments.check import operand
from cutlass_fmha.arguments.check_features import check_features
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.dispatch.blocks import Tail
from cutlass_fmha.dispatch.families import wide
from cutlass_fmha.dispatch.table import PLAIN
from cutlass_fmha.features import Features
from cutlass_fmha.launch.params import addresses_of, params_of

#: Head dim from which on there are wide rows alone: their problems have such ones every second time.
LARGEST = 256
#: In 3xTF32 a factor is a truncated TF32 number and a TF32-rounded rest, off by 2^-21 at most; the product of
#: two rests, 2^-20 at most, is left out. Together 2^-19, in half ulps of fp32:
SPLIT_ERROR = 32.0

#: What plain rows know: lengths, heads, a diagonal, a scale, numbers and how they lie.
OF_PLAIN_ROWS = {"seqlen_q", "seqlen_k", "causal", "batch", "num_heads", "num_heads_kv", "head_dim"}
OF_PLAIN_ROWS |= {"head_dim_v", "scale", "fill", "return_lse", "layout", "seed"}
#: Fields of which the rows of a family know nothing.
UNKNOWN = {
    **dict.fromkeys(PLAIN, DEFAULTS.keys() - OF_PLAIN_ROWS),
    "score_mod": ("mask", "bias", "blocks", "num_splits"),
    "masked": ("blocks", "num_splits", "softcap", "alibi", "dropout", "pack"),
    "ranged": ("mask", "bias", "blocks", "num_splits", "softcap", "alibi", "dropout"),
    "wide": ("prefix", "blocks", "softcap", "alibi", "sinks", "dropout", "page_size", "num_splits", "pack"),
}
#: Of the ways in which a mask or a bias may lie in memory, those that masked rows read, and what is nearest.
RUNS = {"expanded": "expanded", "missing": "missing", "padded": "padded by runs", "strided": "padded by runs"}


def without(p: Problem, *names: str) -> Problem:
    return replace(p, **{name: DEFAULTS[name] for name in names})


def fit(problem: Problem, row: _C.Row) -> Problem:
    p, family = without(problem, *UNKNOWN.get(row.family, ())), row.family
    if family in PLAIN:
        layout = p.layout if p.runs_on(row.alignment) else "bshd"
        return replace(p, head_dim=row.head_dim, head_dim_v=row.head_dim, layout=layout)
    if family == "wide":
        p = fit_head_dims(p, row)
        if p.window is not None:
            p = replace(p, window=(-1, p.window[1]))
        return replace(p, bias=(p.bias[0], "same", p.bias[2])) if p.bias and row.dtype != "float32" else p
    if family in ("ranged", "score_mod", "masked", "wide_scored"):
        p = whole_vectors(p)
    if family == "masked":
        p = only_runs(p, row)
    if family == "wide_scored":
        p = fit_head_dims(p, row)
    elif row.copy == "tma" and p.page_size:
        p = replace(p, leftpad=False)
    return fitted(p, row.head_dim, row.head_dim_v, row.tile_m, row.tile_n * row.kv_warps)


def packs_mask(p: Problem, row: _C.Row) -> bool:
    """Whether a row's mask is packed: two of three, where it can be read both ways."""
    return row.family == "masked" and row.reads_mask_bits and (p.seed % 3 != 0 or not row.reads_mask_bytes)


def only_runs(p: Problem, row: _C.Row) -> Problem:
    """The problem with a bias that can be read four keys at once, or a mask that is or is packed; not both, and not
    neither."""
    if packs_mask(p, row) and p.mask and not (p.bias and p.seed % 2):
        return without(p, "bias")
    mask = p.mask and (p.mask[0].rstrip("k") + "k", RUNS.get(p.mask[1], "plain"))
    bias = p.bias and (p.bias[0].rstrip("k") + "k", "same", RUNS.get(p.bias[2], "plain"))
    if mask and bias:
        mask, bias = (None, bias) if p.seed % 2 else (mask, None)
    bias = bias if mask or bias else ("bhqk", "same", "plain")
    return replace(p, mask=mask, bias=bias, seqlen_k=-(-p.seqlen_k // 4) * 4, bounded=False)


def whole_vectors(p: Problem) -> Problem:
    dims = {name: -(-getattr(p, name) // 8) * 8 for name in ("head_dim", "head_dim_v")}
    odd = [name for name in ("layout", "out_layout") if getattr(p, name) in ("unaligned", "overlapping")]
    return replace(p, **dims, **dict.fromkeys(odd, "padded"))


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


@dataclass
class Launch:
    """One call of ``_C.run``, or of ``wide.run``, ready to be made any number of times, with other tensors, too."""

    row: _C.Row
    problem: Problem
    call: Call
    out: Guarded
    lse: Guarded | None
    #: Half ulps of fp32 that a product may be off by besides.
    product_error: float
    #: What it is told besides q, k, v and o.
    plan: _C.AttentionParams = field(init=False)
    partial: list[Tensor] = field(init=False)

    q = property(lambda self: self.call.q, lambda self, x: self._put(q=x))
    k = property(lambda self: self.call.k, lambda self, x: self._put(k=x))
    v = property(lambda self: self.call.v, lambda self, x: self._put(v=x))

    @classmethod
    def of(cls, row: _C.Row, problem: Problem, device: torch.device | str) -> Launch:
        problem = fit(problem, row)
        call, width, layout = problem.call(gpu.torch_dtype(row), device), problem.head_dim_v, ""
        if row.family in PLAIN:
            layout = "unaligned" if row.alignment <= 2 else ("padded", "bhsd padded")[problem.seed % 2]
        elif row.family == "wide":
            width = wide.padded(row, width)
        room = outputs(problem, call, width, row.family == "wide", layout)
        error = SPLIT_ERROR if row.family.startswith("wide") and row.mma == "tf32x3" else 0.0
        return cls(row, problem, call, *room, error)

    def __post_init__(self) -> None:
        problem, call = self.problem, self.call
        self.features = Features(**op_arguments(call.q, call.features))
        self.sizes = check_features(call[:3], self.features)
        self.plan = p = params_of(self.sizes, self.features, call.causal, ((0, 0, 0),) * 3)
        p.scale = problem.head_dim**-0.5 if call.scale is None else call.scale
        p.lse = 0 if self.lse is None else self.lse.view.data_ptr()
        if problem.pack and problem.group and problem.blocks is None:
            p.pack = problem.group
        for name, address in addresses_of(self.features):
            setattr(p, address, getattr(self.features, name).data_ptr())
        if (splits := problem.num_splits or 1) > 1:
            p.splits, sizes = splits, [splits * p.lse_rows * width for width in (problem.head_dim_v, 1, 1)]
            self.partial = [torch.full((size,), torch.nan, device=call.q.device) for size in sizes]
            p.partial_o, p.partial_lse, p.partial_low = (x.data_ptr() if p.lse_rows else 0 for x in self.partial)

        if p.mask and packs_mask(problem, self.row):
            words = max(1, self.row.mask_words(p))
            self.partial = [torch.full((words,), 0x5A5A5A5A, dtype=torch.int32, device=call.q.device)]
            p.mask_bits = self.partial[0].data_ptr()

    def _put(self, **tensors: Tensor) -> None:
        self.call = self.call._replace(**tensors)

    def params(self) -> _C.AttentionParams:
        p = self.plan.copy()
        for name, x in zip("qkvo", (*self.call[:3], self.out.view), strict=True):
            setattr(p, name, x.data_ptr())
            of_features = operand(x if x.dim() == 4 else x[None]).strides
            setattr(p, f"{name}_stride", of_features if self.row.takes_features else x.stride()[:3])
        return p

    def run(self, stream: int | None = None, tail: Tail | None = None) -> None:
        tensors, device, lse = self.call[:3], self.call.q.device, self.lse and self.lse.view
        if self.row.family == "wide":
            about = (self.plan.scale, self.call.causal, self.features, self.sizes)
            wide.run(self.row, tensors, self.out.view, lse, *about)
            return
        p = self.params()
        if stream is None:  # a simulator, whose tensors are on the CPU, has but one
            stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
        if tail is not None:
            parts = poison(torch.float32, tail.rows(self.row) * (self.row.head_dim + 2), device)
            p.tail = parts.data_ptr()
            p.tail_tiles, p.tail_parts, p.tail_first, p.tail_rest = tail
        _C.run(self.row.index, p, device.index or 0, stream)

    def errors(self) -> oracle.Errors:
        out, lse = self.out.view[..., : self.problem.head_dim_v], self.lse and self.lse.view
        return compare(self.call, out, lse, self.product_error) if out.numel() else oracle.Errors(0.0, 0.0)

    def intact(self) -> bool:
        return all(bool(buffer.intact()) for buffer in (self.out, self.lse) if buffer)

    def check(self) -> oracle.Errors:
        self.run()
        errors = self.errors().check()
        assert self.intact(), f"{self.row.name}: {self.problem}: wrote outside its outputs"
        return errors


def compare(call: Call, out: Tensor, lse: Tensor | None, product_error: float = 0.0) -> oracle.Errors:
    operands = (call.q, call.k, call.v, call.scale, call.causal, call.exact_scores, product_error)
    return oracle_features.compare(out, lse, *operands, **call.features)


def outputs(
    problem: Problem, call: Call, width: int, aligned: bool = False, layout: str = ""
) -> tuple[Guarded, Guarded | None]:
    """Room for O, rows of ``width``, and for the LSE between NaN; ``aligned``: for 16-byte stores."""
    packed, shape = problem.packed_q, (*call.q.shape[:-1], width)
    like = call.q.new_empty((1, *shape) if packed else shape)
    layout = layout or problem.out_layout
    order = layout.removesuffix(" padded") if layout.startswith("bhsd") else "bshd"
    odd = layout == "unaligned" and not aligned
    view = place(like, order, 0 if layout == order else 1 if odd else 8, GUARD + odd)
    out = Guarded.around(view[0] if packed else view)
    if not problem.return_lse:
        return out, None
    lse = place(torch.empty(*oracle_features._lse_shape(like), 1, device=call.q.device)).squeeze(-1)
    return out, Guarded.around(lse[0] if packed else lse)
