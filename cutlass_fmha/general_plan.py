"""The way from tensors and features to one call of ``_C.run``.

As in ``plan.py``, everything that follows from metadata is prepared once and kept. A call copies the prepared
parameters, so that threads don't meet in them, and writes the addresses into its copy.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutlass_fmha import _C, blocks, dropout, fallback, select
from cutlass_fmha import device as devices
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.check_features import broadcast_strides, check_features
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features, Sizes
from cutlass_fmha.recent import MAX_PLANS, Recent
from cutlass_fmha.select import Problem
from cutlass_fmha.streams import current_stream

if TYPE_CHECKING:
    from cutlass_fmha._C import Template
    from cutlass_fmha.device import Device

logger = logging.getLogger("cutlass_fmha")

#: What ``batch_invariant`` goes by where the longest sequence of a batch would decide.
INVARIANT_SEQLEN_Q, INVARIANT_SEQLEN_K = 4096, 8192

Names = tuple[str, str, str]
Operands = tuple[Tensor, Tensor, Tensor]

#: Tensors of ``Features`` and where their addresses go.
_ADDRESSES = (
    ("mask", "mask"),
    ("bias", "bias"),
    ("prefix_lengths", "prefix_lengths"),
    ("block_counts", "block_counts"),
    ("block_indices", "block_indices"),
    ("alibi_slopes", "alibi_slopes"),
    ("sinks", "sinks"),
    ("dropout_seed", "dropout_seed"),
    ("cu_seqlens_q", "cu_seqlens_q"),
    ("cu_seqlens_k", "cu_seqlens_k"),
    ("seqused_q", "seqused_q"),
    ("seqused_k", "seqused_k"),
    ("leftpad_k", "leftpad_k"),
    ("page_table", "page_table"),
    ("cache_batch_idx", "batch_index_k"),
)

#: Features of a problem (``select.FEATURES``) that a tensor of ``Features`` stands for.
_NAMED = (
    ("mask", ("mask",)),
    ("bias", ("bias",)),
    ("prefix", ("prefix_lengths",)),
    ("block_mask", ("block_counts",)),
    ("alibi", ("alibi_slopes",)),
    ("sinks", ("sinks",)),
    ("varlen", ("cu_seqlens_q", "cu_seqlens_k")),
    ("lengths", ("seqused_q", "seqused_k", "leftpad_k")),
    ("pages", ("page_table",)),
    ("cache_batch_idx", ("cache_batch_idx",)),
)


@dataclass(frozen=True)
class GeneralPlan:
    """What a launch and the allocation of its outputs need, for every call with the same metadata."""

    row: int
    #: Complete but for addresses and the scale, and never written to; None where ``fallback`` launches it.
    params: _C.AttentionParams | None
    fallback: Template | None
    #: (name in Features, field) of the tensors that are read.
    addresses: tuple[tuple[str, str], ...]
    sizes: Sizes
    room: int  # floats that the parts of split keys leave
    dtype: torch.dtype
    device: torch.device
    index: int

    @property
    def empty(self) -> bool:
        return 0 in (self.sizes.batch, self.sizes.seqlen_q, self.sizes.num_heads)


_plans: Recent[Any, GeneralPlan] = Recent(MAX_PLANS)
_warned: set[tuple[str, ...]] = set()


def clear() -> None:
    """Forgets every plan."""
    _plans.clear()
    _warned.clear()


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    return_lse: bool,
    template: str | None,
    features: Features,
    names: Names = check.NAMES,
) -> tuple[Tensor, Tensor | None]:
    """Runs one call of ``attend`` on the current stream of the tensors' device: output and LSE.

    ``scale`` None is 1/sqrt(head_dim). Raises what ``check_features`` and ``select.select`` raise.
    """
    key = _key(q, k, v, causal, template, features)
    plan = _plans.get(key)
    if plan is None:
        plan = prepare((q, k, v), causal, template, features, names)
        _plans.put(key, plan)
    sizes = plan.sizes
    scale = sizes.head_dim**-0.5 if scale is None else scale
    if plan.fallback is not None:
        return fallback.launch(plan.fallback, (q, k, v), scale, causal, return_lse, features, sizes)
    out = torch.empty(sizes.out_shape, dtype=plan.dtype, device=plan.device)
    lse = torch.empty(sizes.lse_shape, dtype=torch.float32, device=plan.device) if return_lse else None
    if plan.empty:
        return out, lse
    assert plan.params is not None
    lse_address = 0 if lse is None else lse.data_ptr()
    params = plan.params.of_call(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse_address, scale)
    for name, field in plan.addresses:
        setattr(params, field, getattr(features, name).data_ptr())
    if plan.room:
        parts = torch.empty(plan.room, dtype=torch.float32, device=plan.device)
        add_room(params, parts.data_ptr())
    index, stream = max(plan.index, 0), current_stream(plan.index)  # a simulator takes the CPU's tensors
    _C.run(plan.row, params, index, stream)
    return out, lse


def _key(q: Tensor, k: Tensor, v: Tensor, causal: str, template: str | None, features: Features) -> Any:
    """Everything that a plan is made from: metadata, and the bits of addresses that alignment depends on."""
    aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    return (causal, template, aligned, *map(_metadata, (q, k, v)), *map(_metadata, features))


def _metadata(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.get_device()
    return value


# ---- a plan ------------------------------------------------------------------------------------------------


def prepare(
    tensors: Operands, causal: str, template: str | None, features: Features, names: Names = check.NAMES
) -> GeneralPlan:
    """Checks the arguments, picks the row, packs what is known. Reads metadata and addresses, no element."""
    problem, sizes, operands = describe(tensors, causal, features, names)
    if not select.this_build().templates:
        raise UnsupportedError(select.NO_KERNELS)
    index = tensors[0].get_device()
    device = devices.of_index(index) if index >= 0 else devices.simulated(select.this_build().architectures)
    row = select.select(problem, device, template)
    params, room = None, 0
    if row.family != select.WIDE:
        params = params_of(sizes, features, causal, operands)
    if row.scored and params is not None:
        room = divide(params, row, problem, device)
        if not params.vectors(row.element_bytes):
            _warn_of_element_copies(row.name, operands, sizes, names)
    return GeneralPlan(
        row=row.index,
        params=params,
        fallback=row if row.family == select.WIDE else None,
        addresses=_addresses(features),
        sizes=sizes,
        room=room,
        dtype=tensors[0].dtype,
        device=tensors[0].device,
        index=index,
    )


def describe(
    tensors: Operands, causal: str, features: Features, names: Names = check.NAMES
) -> tuple[Problem, Sizes, list[check.Operand]]:
    """What a call asks of selection, checked; with its sizes and how its tensors lie."""
    sizes = check_features(tensors, features, names)
    operands = [check.operand(tensor if tensor.dim() == 4 else tensor.unsqueeze(0)) for tensor in tensors]
    alignment = min(operand.alignment for operand in operands)
    problem = problem_of(sizes, features, check.dtype_name(tensors[0].dtype), causal, alignment)
    problem = replace(problem, key_span=fallback.key_span(tensors[1], tensors[2], sizes.seqlen_k))
    return (for_one_sequence(problem, features) if features.batch_invariant else problem), sizes, operands


def _addresses(features: Features) -> tuple[tuple[str, str], ...]:
    """(name, field) of the tensors that are read: an empty one has no address to speak of."""
    found = tuple((name, field) for name, field in _ADDRESSES if _is_read(getattr(features, name)))
    if _is_read(features.block_counts) and not _is_read(features.block_indices):
        return (*found, ("block_counts", "block_indices"))  # lists without room for an entry: nothing is read
    return found


def _is_read(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def window_of(left: int, right: int, causal: str) -> tuple[tuple[int, int] | None, str]:
    """The window that a call really has, None where it is all or a causal mask, and that mask."""
    right = 0 if causal != "none" else right
    if left < 0 and right == 0:
        return None, "bottom-right" if causal == "none" else causal
    return (None if left < 0 and right < 0 else (left, right)), causal


def problem_of(sizes: Sizes, features: Features, dtype: str, causal: str, alignment: int) -> Problem:
    """What selection knows of a call."""
    window, causal = window_of(features.window_left, features.window_right, causal)
    found = {name for name, tensors in _NAMED if any(getattr(features, x) is not None for x in tensors)}
    asked = {
        "window": window is not None,
        "softcap": features.softcap > 0,
        "dropout": features.dropout_p > 0,
        "splits": (features.num_splits or 1) > 1,
    }
    found |= {name for name, wanted in asked.items() if wanted}
    return Problem(
        sizes.batch,
        sizes.seqlen_q,
        sizes.seqlen_k,
        sizes.num_heads,
        sizes.num_heads_kv,
        sizes.head_dim,
        dtype,
        causal,
        alignment,
        head_dim_v=sizes.head_dim_v,
        features=tuple(name for name in select.FEATURES if name in found),
        window=window or (-1, -1),
        block_mask=(features.block_m, features.block_n) if "block_mask" in found else None,
        page_size=sizes.page_size,
        num_splits=features.num_splits,
    )


def for_one_sequence(problem: Problem, features: Features) -> Problem:
    """The problem that ``batch_invariant`` is planned by: one sequence, of a length that no batch decides.

    A batch's longest sequence must not decide for the others, so that packed queries are planned as one fixed
    length and packed or paged keys as another. The kernel cuts the keys of each tile of queries by their own
    number, and each row's arithmetic depends on nothing but its own sequence.
    """
    problem = replace(problem, batch=1)
    if features.cu_seqlens_q is not None:
        problem = replace(problem, seqlen_q=INVARIANT_SEQLEN_Q)
    if features.cu_seqlens_k is not None or features.page_table is not None:
        problem = replace(problem, seqlen_k=INVARIANT_SEQLEN_K)
    return problem


# ---- parameters --------------------------------------------------------------------------------------------


def params_of(
    sizes: Sizes, features: Features, causal: str, operands: list[check.Operand]
) -> _C.AttentionParams:
    """All but addresses, scale, pack, splits and a tail."""
    p = _C.AttentionParams()
    p.q_stride, p.k_stride, p.v_stride = (operand.strides for operand in operands)
    p.o_stride = _out_strides(sizes)
    p.batch, p.seqlen_q, p.seqlen_k = sizes.batch, sizes.seqlen_q, sizes.seqlen_k
    p.num_heads, p.num_heads_kv = sizes.num_heads, sizes.num_heads_kv
    p.head_dim, p.head_dim_v = sizes.head_dim, sizes.head_dim_v
    p.bottom_right = causal != "top-left"
    p.window_left, p.window_right = features.window_left, features.window_right if causal == "none" else 0
    p.softcap = features.softcap
    if features.dropout_p > 0:
        p.dropout_threshold = dropout.threshold(features.dropout_p)
        p.dropout_scale = dropout.scale(features.dropout_p)
    if (table := features.page_table) is not None and table.numel() > 0:
        p.page_size, p.page_table_stride = sizes.page_size, table.stride(0)
    _add_strides(p, features, sizes)
    p.lse_batch_stride = 0 if sizes.total_q is not None else sizes.num_heads * sizes.seqlen_q
    p.lse_head_stride = sizes.seqlen_q if sizes.total_q is None else sizes.total_q
    p.lse_rows = _lse_rows(sizes)
    return p


def divide(p: _C.AttentionParams, row: Template, problem: Problem, device: Device) -> int:
    """How a row's work is divided: pack and splits, or a plain row's tail. Floats that the parts leave."""
    if row.scored:
        p.pack = blocks.packed_heads(row, problem)
        p.splits = blocks.split_keys(row, problem, device)
        return p.splits * p.lse_rows * (p.head_dim_v + 2) if p.splits > 1 else 0
    tail = blocks.tail_of(row, problem, device)
    if tail is None:
        return 0
    p.tail_tiles, p.tail_parts, p.tail_first, p.tail_rest = tail
    return tail.rows(row) * (p.head_dim_v + 2)


def add_room(p: _C.AttentionParams, address: int) -> None:
    """Where the parts of split keys, or those of a tail, leave as many floats as ``divide`` says."""
    if p.splits == 1:
        p.tail = address
        return
    parts = p.splits * p.lse_rows
    p.partial_o = address
    p.partial_lse = address + 4 * parts * p.head_dim_v
    p.partial_low = p.partial_lse + 4 * parts


def contiguous_params(row: Template, problem: Problem, device: Device) -> tuple[_C.AttentionParams, int]:
    """The same of a plain problem with contiguous tensors, and what ``divide`` says: for what times rows."""
    sizes = Sizes(
        problem.batch,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.num_heads,
        problem.num_heads_kv,
        problem.head_dim,
        problem.value_dim,
        None,
        0,
    )
    shapes = (
        (problem.seqlen_q, problem.num_heads, problem.head_dim),
        (problem.seqlen_k, problem.num_heads_kv, problem.head_dim),
        (problem.seqlen_k, problem.num_heads_kv, problem.value_dim),
    )
    operands = [
        check.Operand((seqlen * heads * dim, heads * dim, dim), 16, (16, 16, 16))
        for seqlen, heads, dim in shapes
    ]
    p = params_of(sizes, Features(), problem.causal, operands)
    return p, divide(p, row, problem, device)


def _add_strides(p: _C.AttentionParams, features: Features, sizes: Sizes) -> None:
    """How masks, biases, block lists and slopes lie."""
    if _is_read(mask := features.mask) and mask is not None:
        p.mask_stride = broadcast_strides(mask, sizes)
    if _is_read(bias := features.bias) and bias is not None:
        p.bias_stride = broadcast_strides(bias, sizes)
        p.bias_type = "float32" if bias.dtype == torch.float32 else "same_as_q"
    counts, indices = features.block_counts, features.block_indices
    if counts is not None and indices is not None:
        p.block_m, p.block_n = features.block_m, features.block_n
        p.count_stride = (*_broadcast_pair(counts), counts.stride(2))
        p.block_stride = (*_broadcast_pair(indices), indices.stride(2), indices.stride(3))
    if (slopes := features.alibi_slopes) is not None:
        p.alibi_stride = (0, slopes.stride(0)) if slopes.dim() == 1 else (slopes.stride(0), slopes.stride(1))


def _broadcast_pair(lists: Tensor) -> tuple[int, int]:
    """Batch and head stride of block lists, which may be the same for all."""
    batch, head = (
        0 if size == 1 else stride for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)
    )
    return batch, head


def _out_strides(sizes: Sizes) -> tuple[int, int, int]:
    row = sizes.num_heads * sizes.head_dim_v
    return (sizes.seqlen_q * row if sizes.total_q is None else 0, row, sizes.head_dim_v)


def _lse_rows(sizes: Sizes) -> int:
    rows = sizes.batch * sizes.seqlen_q if sizes.total_q is None else sizes.total_q
    return rows * sizes.num_heads


def _warn_of_element_copies(row: str, operands: list[check.Operand], sizes: Sizes, names: Names) -> None:
    """One warning per distinct cause."""
    causes = check.misaligned(operands, names)
    for name, size in (("head_dim", sizes.head_dim), ("head_dim_v", sizes.head_dim_v)):
        if size % 8 and (name == "head_dim" or size != sizes.head_dim):
            causes.append(f"{name} {size}")
    if not causes or tuple(causes) in _warned:
        return
    _warned.add(tuple(causes))
    logger.warning(
        "%s %s not a multiple of 16 bytes: %s copies element by element, which is slower",
        " and ".join(causes),
        "is" if len(causes) == 1 else "are",
        row,
    )
