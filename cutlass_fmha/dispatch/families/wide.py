"""Rows for what no other row takes: float32, and head dims above 256. Most are CUTLASS's own memory-efficient
attention (its example 41).

They are the family ``wide`` of the table, with reasons, a predicted cost and a launch of their own. What such
a row needs of a layout and a caller's tensor does not have is made here, by a copy: head dims and strides
that are a multiple of ``alignment``, and rows of a bias that are whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cutlass_fmha import _C, log
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.check_features import broadcast_strides
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.cost.store import Calibration
from cutlass_fmha.dispatch.describe import Call
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.families.family import (
    Offers,
    Prepared,
    Rule,
    dtype,
    has_no,
    made_for_device,
    shared_memory,
)
from cutlass_fmha.dispatch.problem import MAX_KEY_SPAN, Problem
from cutlass_fmha.dispatch.table import Row, Table
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features, Sizes
from cutlass_fmha.launch.params import addresses_of, params_of
from cutlass_fmha.launch.streams import current_stream
from cutlass_fmha.launch.workspace import Scratch

Operands = tuple[Tensor, Tensor, Tensor]

#: The largest head dim of the rows that come first.
LARGEST_HEAD_DIM = 256
#: Bytes that a row of a bias is read in.
VECTOR_BYTES = 16

#: Of ``problem.FEATURES``, what these rows know: a mask becomes a bias, and a window may have no left limit.
KNOWN = frozenset({"window", "mask", "bias", "varlen", "lengths", "leftpad", "cache_batch_idx"})

#: TFLOP/s of one SM in the example's main loop: from datasheets (RTX 4090, RTX 5090), times the share of
#: issue slots or of the tensor pipe that it leaves to the multiplication; on sm_90 measured (H200).
_SM_TFLOPS: Mapping[tuple[int, str], float] = {
    (89, "simt"): 82.6 / 128 * 0.6,
    (120, "simt"): 104.8 / 170 * 0.6,
    (90, "tf32x3"): 46 / 132,
    (89, "m16n8k16"): 121 / 58 * 0.4,
    (90, "m16n8k16"): 140 / 132,
    (120, "m16n8k16"): 209.5 / 170 * 0.4,
}
#: The same of our own main loops, measured (H200).
_OWN_SM_TFLOPS: Mapping[tuple[int, str], float] = {
    (90, "tf32x3"): 51 / 132,
    (90, "m16n8k16"): 165 / 132,
}
#: What a warp of 16 query rows does of that; it has twice as many or more otherwise.
_FEW_ROWS = 0.9
LAUNCH_US = 2.0


# ---- selection ---------------------------------------------------------------------------------------------


def _purpose(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if problem.dtype == "float32" or max(problem.head_dim, problem.value_dim) > LARGEST_HEAD_DIM:
        return None
    return f"for float32 and for head dims above {LARGEST_HEAD_DIM}, which no other row takes"


def _head_dim(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    largest = max(problem.head_dim, problem.value_dim)
    if largest <= row.head_dim:
        return None
    return f"made for head dims up to {row.head_dim}, and the tensors have {largest}"


def _offsets(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    if problem.key_span <= MAX_KEY_SPAN:
        return None
    return (
        f"its offsets are 32-bit, and the keys of a sequence span {problem.key_span} elements: {MAX_KEY_SPAN} at most"
    )


def _features(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    names = lacking(problem)
    return has_no(names) if names else None


def left_window(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    return "has no window with a left limit" if problem.window[0] >= 0 else None


def _bias_dtype(row: Row, problem: Problem, device: Device, table: Table) -> str | None:
    other = problem.score_runs is None and "bias" in problem.features and row.dtype != "float32"
    return other_bias(row.dtype, "float32") if other else None


FIXED_RULES: tuple[Rule, ...] = (made_for_device, _purpose, dtype, _head_dim, shared_memory)
CALL_RULES: tuple[Rule, ...] = (_offsets, _features, left_window, _bias_dtype)


def other_bias(own: str, given: str) -> str:
    return f"adds a bias of its own dtype {own}, and this one is {given}: pass bias.to(torch.{own})"


def lacking(problem: Problem) -> tuple[str, ...]:
    return tuple(name for name in problem.features if name not in KNOWN)


def other_head_dims(row: Row, problem: Problem) -> str | None:
    largest = max(problem.head_dim, problem.value_dim)
    if problem.dtype != "float32" and largest <= LARGEST_HEAD_DIM:
        return f"above {LARGEST_HEAD_DIM}"
    return None if largest <= row.head_dim else f"up to {row.head_dim}"


class ByDatasheet:
    """Microseconds that take no time to find."""

    def __init__(self, row: Row, device: Device, predict: Callable[[Row, Problem, Device], float]) -> None:
        self.row, self.device, self.predict = row, device, predict

    def us(self, problem: Problem) -> float:
        return self.predict(self.row, problem, self.device)

    at_least = us


def offers(row: Row, problem: Problem, device: Device, known: Calibration) -> Offers:
    return ByDatasheet(row, device, predicted_us)


def prepare(row: Row, call: Call, device: Device) -> Prepared:
    """Planned as other rows are, where neither a copy nor memory is needed."""
    sizes, features = call.sizes, call.features
    needs_room = row.accumulates and row.dtype != "float32"
    given = call.out_strides is not None
    if not whole_vectors(row, call) or needs_room or given or features.mask is not None or features.bias is not None:
        return Prepared(_C.AttentionParams(), launch=partial(launch, row, sizes, call.causal))
    params = params_of(sizes, features, call.causal, call.strides)
    params.pack = _packed_heads(sizes, features)
    return Prepared(params)


def whole_vectors(row: Row, call: Call) -> bool:
    """Whether a row takes a call's tensors as they lie."""
    sizes, multiple = call.sizes, _multiple(row)
    aligned = call.problem.alignment % row.alignment == 0
    return aligned and not (sizes.head_dim % multiple or sizes.head_dim_v % multiple)


def _packed_heads(sizes: Sizes, features: Features) -> int:
    """The heads of a group share a tile where there is one query: with ``batch_invariant``, in any batch."""
    if features.batch_invariant and features.cu_seqlens_q is not None:
        return 1
    return sizes.num_heads // sizes.num_heads_kv if sizes.seqlen_q == 1 and sizes.num_heads_kv else 1


def predicted_us(row: Row, problem: Problem, device: Device) -> float:
    """Microseconds of a launch by datasheet, to rank rows by: what tiles compute, padding included."""
    blocks = -(-problem.seqlen_q // row.tile_m) * problem.num_heads * problem.batch
    _, keys = problem.visible_keys(0, problem.seqlen_q - 1)
    keys = -(-keys // row.tile_n) * row.tile_n
    dims = -(-problem.head_dim // 32) * 32 + _value_columns(row, problem.value_dim)
    flop = row.tile_m * keys * dims * (1.0 if problem.causal != "none" else 2.0)
    return LAUNCH_US + -(-blocks // device.sm_count) * flop / _sm_tflops(row) / 1e6


def _value_columns(row: Row, value_dim: int) -> int:
    """How many columns of O are computed."""
    step = row.tile_n
    if not row.example:
        step = 64 if row.mma == "m16n8k16" else row.head_dim
    return -(-value_dim // step) * step


def _sm_tflops(row: Row) -> float:
    if row.example:
        return _SM_TFLOPS[row.arch, row.mma]
    few = row.mma == "tf32x3" and row.tile_m == 16 * row.warps
    return _OWN_SM_TFLOPS[row.arch, row.mma] * (_FEW_ROWS if few else 1.0)


# ---- a launch ----------------------------------------------------------------------------------------------


def launch(
    row: Row,
    sizes: Sizes,
    causal: str,
    tensors: Operands,
    scale: float,
    return_lse: bool,
    said: Mapping[str, Any],
    pack: int = 0,
    splits: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """One call by a row that has no reason against it, on the current stream: output and LSE.

    ``said``: what ``Features`` are made of, and ``RESULTS``, of which an LSE is contiguous.
    ``pack``: heads that share a tile, 0 where the row has one choice; ``splits``: parts of the keys.
    Raises UnsupportedError for a bias of another dtype than theirs.
    """
    like, given, lse = tensors[0], said.get("out"), said.get("lse")
    features = Features(**{name: x for name, x in said.items() if name not in RESULTS})
    out = given
    if out is None:
        out = torch.empty(sizes.out_shape, dtype=like.dtype, device=like.device)
    if return_lse and lse is None:
        lse = torch.empty(sizes.lse_shape, dtype=torch.float32, device=like.device)
    with Scratch(like.device) as scratch:
        to = out
        if not _fits(row, out):
            to = scratch.empty((*sizes.out_shape[:-1], padded(row, sizes.head_dim_v)), out.dtype)
        _run(row, tensors, to, lse, scale, causal, features, sizes, scratch, pack, splits)
        if to is not out:
            out.copy_(to[..., : sizes.head_dim_v])
    return out, lse


def padded(row: Row, head_dim: int) -> int:
    """The head dim that a row computes: the next that fills whole vectors."""
    multiple = _multiple(row)
    return -(-head_dim // multiple) * multiple


def run(
    row: Row,
    tensors: Operands,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: str,
    features: Features,
    sizes: Sizes,
) -> None:
    """Fills ``out``, of the ``padded`` head dim and any strides that fill whole vectors, and ``lse``.

    Operands that don't are copied, which a warning says. Of meta tensors all is done but the launch.
    """
    with Scratch(out.device) as scratch:
        _run(row, tensors, out, lse, scale, causal, features, sizes, scratch)


def _run(
    row: Row,
    tensors: Operands,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: str,
    features: Features,
    sizes: Sizes,
    scratch: Scratch,
    pack: int = 0,
    splits: int = 1,
) -> None:
    as_it_is = row.takes_features  # of masks and biases
    bias = None if as_it_is else _bias(row, features, sizes, out.dtype, scratch)
    if 0 in (sizes.batch, sizes.seqlen_q, sizes.num_heads):
        return
    q, k, v = (_aligned(row, tensor, scratch) for tensor in tensors)
    if copied := [name for name, a, b in zip("qkv", tensors, (q, k, v), strict=True) if a is not b]:
        _warn_of_copies(row, copied)
    strides = (_strides(q), _strides(k), _strides(v))
    params = params_of(sizes._replace(head_dim=q.shape[-1], head_dim_v=v.shape[-1]), features, causal, strides)
    params.o_stride, params.pack = _own_strides(out), pack or _packed_heads(sizes, features)
    for name, field in addresses_of(features):
        if as_it_is or name not in ("mask", "bias"):
            setattr(params, field, getattr(features, name).data_ptr())
    if not as_it_is:
        params.bias_type = "none"
    if bias is not None:
        params.bias, params.bias_type = bias.data_ptr(), "same_as_q"
        params.bias_stride = broadcast_strides(bias, sizes)
    sums = None
    if splits > 1:
        params.splits, rows = splits, splits * params.lse_rows
        sums = scratch.empty((rows * (params.head_dim_v + 2),), torch.float32)
        params.partial_o = sums.data_ptr()
        params.partial_lse = params.partial_o + 4 * rows * params.head_dim_v
        params.partial_low = params.partial_lse + 4 * rows
    elif not as_it_is and row.accumulates and not _can_accumulate_in(out, params):
        sums = scratch.empty(out.shape, torch.float32)
        params.partial_o = sums.data_ptr()
    scratch.check()
    if out.is_meta:
        return
    index, lse_address = out.get_device(), 0 if lse is None else lse.data_ptr()
    addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address)
    _C.launch(row.index, params, max(index, 0), current_stream(index), *addresses, scale, 0)


def _can_accumulate_in(out: Tensor, p: _C.AttentionParams) -> bool:
    """Whether O is float32 with rows that lie as close together as those of space of its own would."""
    _, from_query_to_query, from_head_to_head = p.o_stride
    if p.pack > 1:
        return out.dtype == torch.float32 and from_head_to_head == p.head_dim_v
    return out.dtype == torch.float32 and from_query_to_query == p.num_heads * p.head_dim_v


def _own_strides(out: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, head); of a dimension of one, which is never used, what a contiguous tensor has."""
    seqlen, heads, dim = out.shape[-3:]
    contiguous = (seqlen * heads * dim if out.dim() == 4 else 0, heads * dim, dim)
    sizes, strides = (1, *out.shape)[-4:-1], (0, *out.stride())[-4:-1]
    batch, query, head = (
        own if size == 1 else stride for size, stride, own in zip(sizes, strides, contiguous, strict=True)
    )
    return batch, query, head


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, head) in elements; 0 for a dimension of one, and for the batch of packed sequences."""
    return check.operand(tensor if tensor.dim() == 4 else tensor.unsqueeze(0)).strides


def _multiple(row: Row) -> int:
    """Elements that strides and head dims must be a multiple of."""
    return max(1, row.alignment // row.element_bytes)


def _fits(row: Row, tensor: Tensor) -> bool:
    """Whether address, strides and head dim fill whole vectors."""
    multiple = _multiple(row)
    strides_fit = all(stride % multiple == 0 for stride in _strides(tensor))
    return tensor.shape[-1] % multiple == 0 and strides_fit and tensor.data_ptr() % row.alignment == 0


def _aligned(row: Row, tensor: Tensor, scratch: Scratch) -> Tensor:
    """The tensor, or a contiguous copy with zeros up to the ``padded`` head dim."""
    head_dim = tensor.shape[-1]
    if _fits(row, tensor):
        return tensor
    copy = scratch.empty((*tensor.shape[:-1], padded(row, head_dim)), tensor.dtype)
    copy[..., :head_dim] = tensor
    copy[..., head_dim:] = 0
    return copy


def _warn_of_copies(row: Row, copied: list[str]) -> None:
    """One warning per distinct cause."""
    log.warn_once(
        (row.name, *copied),
        "%s %s an address, a stride or a head dim that is not a multiple of %d bytes: "
        "%s runs on a padded copy, which takes time and memory",
        " and ".join(copied),
        "has" if len(copied) == 1 else "have",
        row.alignment,
        row.name,
    )


def _bias(row: Row, features: Features, sizes: Sizes, dtype: torch.dtype, scratch: Scratch) -> Tensor | None:
    """Bias and mask as one tensor of four dimensions, whose rows of keys are whole vectors."""
    bias, mask = features.bias, features.mask
    if bias is not None and bias.dtype != dtype:
        raise UnsupportedError(f"{row.name} {other_bias(check.dtype_name(dtype), check.dtype_name(bias.dtype))}")
    if mask is not None and bias is not None:
        hidden = scratch.empty((), dtype).fill_(-torch.inf)
        shape = torch.broadcast_shapes(bias.shape, mask.shape)
        # Chosen, not added: a hidden key's bias may be NaN or inf.
        bias = torch.where(mask, bias, hidden, out=scratch.empty(shape, dtype))
    elif mask is not None:
        bias = scratch.empty(mask.shape, dtype).fill_(-torch.inf).masked_fill_(mask, 0.0)
    if bias is None or sizes.seqlen_k == 0:
        return None
    return _whole_vectors(bias[(None,) * (4 - bias.dim())], sizes, scratch)


def _whole_vectors(bias: Tensor, sizes: Sizes, scratch: Scratch) -> Tensor:
    """The bias, or a copy with longer rows. What they are longer by is read and not used."""
    multiple = VECTOR_BYTES // bias.itemsize
    *strides, from_key_to_key = broadcast_strides(bias, sizes)
    if (
        bias.shape[3] == sizes.seqlen_k
        and sizes.seqlen_k % multiple == 0
        and from_key_to_key == 1
        and bias.data_ptr() % VECTOR_BYTES == 0
        and all(stride % multiple == 0 for stride in strides)
    ):
        return bias
    keys = -(-sizes.seqlen_k // multiple) * multiple
    rows = scratch.empty((*bias.shape[:3], keys), bias.dtype)
    rows[..., : sizes.seqlen_k] = bias
    return rows
