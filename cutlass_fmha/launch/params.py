"""``_C.AttentionParams``: what a plan knows of a launch, packed once."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import _C, dropout
from cutlass_fmha.arguments.check_features import broadcast_strides
from cutlass_fmha.dispatch import blocks
from cutlass_fmha.dispatch.describe import Call, Strides
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Row
from cutlass_fmha.features import NO_FEATURES, TENSORS, Features, Sizes

#: Where addresses of ``Features``' tensors go: most to the field of the same name.
_FIELDS = {name: (name, name) for name in TENSORS} | {"cache_batch_idx": ("cache_batch_idx", "batch_index_k")}


def addresses_of(features: Features) -> tuple[tuple[str, str], ...]:
    """(name, field) of the tensors that are read: an empty one has no address to speak of."""
    if features is NO_FEATURES:
        return ()
    found = tuple(_FIELDS[name] for name, x in features.tensors.items() if x.numel() > 0)
    if _is_read(features.block_counts) and not _is_read(features.block_indices):
        return (*found, ("block_counts", "block_indices"))  # lists without room for an entry: nothing is read
    return found


def _is_read(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def prepare_attention(row: Row, call: Call, device: Device) -> tuple[_C.AttentionParams, int]:
    """All parameters but addresses and the scale, and the floats that the parts of a launch leave; or words of a
    masked row's mask, if that is packed before."""
    params = params_of(call.sizes, call.features, call.causal, call.strides)
    if call.out_strides is not None:
        params.o_stride = call.out_strides
    if row.family == "masked" and _is_read(call.features.mask):
        words = row.mask_words(params)
        params.packs_mask = row.reads_mask_bits and blocks.worth_packing_mask(call.problem, row, words, params.batch)
        return params, max(1, words) if params.packs_mask else 0  # without queries there is none, and any mask
    return params, divide(params, row, call.problem, device)


def params_of(
    sizes: Sizes, features: Features, causal: str, strides: tuple[Strides, Strides, Strides]
) -> _C.AttentionParams:
    """All but addresses, scale, pack, splits and a tail."""
    p = _C.AttentionParams()
    p.q_stride, p.k_stride, p.v_stride = strides
    p.o_stride = _out_strides(sizes)
    # Packed rows and pages of which there is none have no address, however long a sequence may be.
    p.batch, p.seqlen_q = sizes.batch, 0 if sizes.total_q == 0 else sizes.seqlen_q
    p.seqlen_k = sizes.seqlen_k if sizes.entries_k and sizes.rows_k else 0
    p.entries_k, p.rows_k = sizes.entries_k, sizes.rows_k
    p.num_heads, p.num_heads_kv = sizes.num_heads, sizes.num_heads_kv
    p.head_dim, p.head_dim_v = sizes.head_dim, sizes.head_dim_v
    p.bottom_right = causal != "top-left"
    if causal != "none":
        p.window_right = 0
    if features is not NO_FEATURES:
        _add_features(p, features, causal, sizes)
    p.lse_batch_stride = 0 if sizes.total_q is not None else sizes.num_heads * sizes.seqlen_q
    p.lse_head_stride = sizes.seqlen_q if sizes.total_q is None else sizes.total_q
    p.lse_rows = _lse_rows(sizes)
    return p


def divide(p: _C.AttentionParams, row: Row, problem: Problem, device: Device) -> int:
    """How a row's work is divided: pack and splits, or a plain row's tail. Floats that the parts leave."""
    pack, splits, tail = blocks.divide(row, problem, device)
    if pack > 1:
        p.pack = pack
    if splits > 1:
        p.splits = splits
        return splits * p.lse_rows * (p.head_dim_v + 2)
    if tail is None:
        return 0
    p.tail_tiles, p.tail_parts, p.tail_first, p.tail_rest = tail
    return tail.rows(row) * (p.head_dim_v + 2)


def contiguous_params(row: Row, problem: Problem, device: Device) -> tuple[_C.AttentionParams, int]:
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
        problem.batch,
        problem.seqlen_k,
    )
    shapes = (
        (problem.seqlen_q, problem.num_heads, problem.head_dim),
        (problem.seqlen_k, problem.num_heads_kv, problem.head_dim),
        (problem.seqlen_k, problem.num_heads_kv, problem.value_dim),
    )
    q, k, v = ((seqlen * heads * dim, heads * dim, dim) for seqlen, heads, dim in shapes)
    p = params_of(sizes, NO_FEATURES, problem.causal, (q, k, v))
    return p, divide(p, row, problem, device)


def _add_features(p: _C.AttentionParams, features: Features, causal: str, sizes: Sizes) -> None:
    """What is said beyond sizes, and how its tensors lie."""
    p.window_left, p.window_right = features.window_left, features.window_right if causal == "none" else 0
    p.softcap = features.softcap
    if features.dropout_p > 0:
        p.dropout_threshold = dropout.threshold(features.dropout_p)
        p.dropout_scale = dropout.scale(features.dropout_p)
    if (table := features.page_table) is not None and table.numel() > 0:
        p.page_size, p.page_table_stride = sizes.page_size, table.stride(0)
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
    batch, head = (0 if size == 1 else stride for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True))
    return batch, head


def _out_strides(sizes: Sizes) -> tuple[int, int, int]:
    row = sizes.num_heads * sizes.head_dim_v
    return (sizes.seqlen_q * row if sizes.total_q is None else 0, row, sizes.head_dim_v)


def _lse_rows(sizes: Sizes) -> int:
    rows = sizes.batch * sizes.seqlen_q if sizes.total_q is None else sizes.total_q
    return rows * sizes.num_heads
