"""What the tensors and numbers of ``Features`` must be: every rule, one sentence each."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_fmha import dropout, private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.check import MAX_SCALE, MAX_SEQLEN, dtype_name
from cutlass_fmha.features import NO_LIMIT, Features, Sizes

#: The kernel that combines the parts of a sequence takes no more.
MAX_SPLITS = 64

Triple = tuple[str, str, str]

# Two arguments that contradict each other, and why.
_CONTRADICTIONS = (
    ("page_table", "cu_seqlens_k", "both say where the keys of a sequence are"),
    ("page_table", "cache_batch_idx", "a row of the page table already belongs to a sequence"),
    ("cache_batch_idx", "cu_seqlens_k", "packed keys have no batch entries to choose from"),
)
# An argument that means nothing without another one.
_NEEDS = (
    ("max_seqlen_q", "cu_seqlens_q"),
    ("block_counts", "block_indices"),
    ("block_indices", "block_counts"),
)
_ROWS = {
    4: "[batch, seqlen, num_heads, head_dim]",
    3: "[total tokens, num_heads, head_dim] with {cu}",
    0: "[pages, page size, num_heads, head_dim] with page_table",
}


def check_features(tensors: tuple[Tensor, Tensor, Tensor], features: Features, names: Triple = check.NAMES) -> Sizes:
    """Everything that a call of ``attend`` asks of its arguments, but for the contents of tensors.

    ``tensors``: query, key and value as the op has them: with a batch dimension, packed, or pages.
    Raises TypeError or ValueError, naming what is at fault. Reads metadata only.
    """
    check.check_types(tensors, names)
    _check_combinations(features)
    check_numbers(features)
    device = tensors[0].device
    for name, tensor in features.tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} must be on {names[0]}'s device {device}, got {tensor.device}")
    sizes = check_operands(tensors, features, names)
    _check_lengths(features, sizes)
    _check_scores(features, sizes, tensors[0].dtype, names[0])
    _check_blocks(features, sizes)
    return sizes


def _check_combinations(features: Features) -> None:
    for one, other, why in _CONTRADICTIONS:
        if getattr(features, one) is not None and getattr(features, other) is not None:
            raise ValueError(f"{one} and {other} exclude each other: {why}")
    for one, other in _NEEDS:
        if getattr(features, one) is not None and getattr(features, other) is None:
            raise ValueError(f"{one} is only taken with {other}")
    if features.max_seqlen_k is not None and features.cu_seqlens_k is None and features.seqused_k is None:
        raise ValueError("max_seqlen_k is only taken with cu_seqlens_k or seqused_k")
    if features.batch_invariant and features.num_splits is not None:
        raise ValueError("batch_invariant and num_splits exclude each other: batch_invariant fixes the split itself")
    if features.dropout_p > 0.0 and features.dropout_seed is None:
        raise ValueError("dropout_p is only taken with dropout_seed")


def check_numbers(features: Features) -> None:
    for name in ("window_left", "window_right"):
        side = getattr(features, name)
        if not NO_LIMIT <= side <= MAX_SEQLEN:
            raise ValueError(f"{name} must be -1 (no limit) or 0 to 2**29, got {side}")
    if not 0.0 <= features.softcap <= MAX_SCALE:
        raise ValueError(f"softcap must be 0 (none) or positive, 2e38 at most, got {features.softcap}")
    dropout.check_probability(features.dropout_p)
    if features.num_splits is not None and not 1 <= features.num_splits <= MAX_SPLITS:
        hint = ": None has a number chosen" if features.num_splits == 0 else ""
        raise ValueError(f"num_splits must be 1 to {MAX_SPLITS} or None, got {features.num_splits}{hint}")
    if (most := features.deterministic_workspace) is not None and most < 0:
        raise ValueError(f"deterministic_workspace must be 0 bytes or more, or None, got {most}")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        length = getattr(features, name)
        if length is not None and not (type(length) is int and 0 <= length <= MAX_SEQLEN):
            sentence = f"{name} must be 0 to 2**29, got {length}"
            _require(length >= 0, sentence)
            _require(length <= MAX_SEQLEN, sentence)


def _require(condition: bool, sentence: str) -> None:
    """What a compiler doesn't know yet is checked when its graph runs: nothing here may branch on it."""
    if condition is not True:
        private_torch.check_value(condition, lambda: sentence)


# ---- query, key and value ----------------------------------------------------------------------------------


def check_operands(tensors: tuple[Tensor, Tensor, Tensor], features: Features, names: Triple) -> Sizes:
    """Of query, key and value alone, as ``check_features``, which has the rest."""
    q, k, v = tensors
    _check_layout(q, names[0], "cu_seqlens_q", features.cu_seqlens_q, None)
    for name, tensor in zip(names[1:], (k, v), strict=True):
        _check_layout(tensor, name, "cu_seqlens_k", features.cu_seqlens_k, features.page_table)
    shapes = q_shape, k_shape, v_shape = [tuple(tensor.shape) for tensor in tensors]
    for name, tensor, shape in zip(names, tensors, shapes, strict=True):
        if shape[-1] < 1:
            raise ValueError(f"{name} must have a head_dim (last dimension) of at least 1, got 0")
        if tensor.stride()[-1] != 1 and shape[-1] > 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got a stride of {tensor.stride(-1)} "
                f"there: pass {name}.contiguous()"
            )
    if k_shape[-1] != q_shape[-1]:
        raise ValueError(
            f"{names[1]} must have {names[0]}'s head_dim (last dimension) {q_shape[-1]}, got {k_shape[-1]}"
        )
    if v_shape[:-1] != k_shape[:-1]:
        raise ValueError(
            f"{names[2]} must have {names[1]}'s shape but for the last dimension, {k_shape[:-1]}, got {v_shape[:-1]}"
        )
    heads, heads_kv = q_shape[-2], k_shape[-2]
    if heads != heads_kv and (heads_kv == 0 or heads % heads_kv != 0):
        raise ValueError(f"{names[1]} must have a number of heads that divides {names[0]}'s {heads}, got {heads_kv}")
    batch = _batch(q, k, features, names)
    seqlen_q, seqlen_k, page_size = _seqlens(q, k, features, names)
    lengths, heads_and_dims = (batch, seqlen_q, seqlen_k), (heads, heads_kv, q_shape[-1], v_shape[-1])
    total_q = None if features.cu_seqlens_q is None else q_shape[0]
    entries_k = 1 if len(k_shape) == 3 else k_shape[0]
    return Sizes(*lengths, *heads_and_dims, total_q, page_size, entries_k, k_shape[-3])


def _check_layout(tensor: Tensor, name: str, cu: str, cu_seqlens: Tensor | None, pages: Tensor | None) -> None:
    dims = 4 if cu_seqlens is None else 3
    if tensor.dim() != dims:
        axes = _ROWS[dims if pages is None else 0].format(cu=cu)
        raise ValueError(f"{name} must have {dims} dimensions, {axes}, got shape {tuple(tensor.shape)}")


def _batch(q: Tensor, k: Tensor, features: Features, names: Triple) -> int:
    """The number of sequences, and that of the entries that key and value have for them."""
    cu_seqlens = features.cu_seqlens_q
    if cu_seqlens is None:
        batch = q.shape[0]
    else:
        check_vector("cu_seqlens_q", cu_seqlens, None)
        batch = cu_seqlens.shape[0] - 1
    own_rows = features.page_table is None and features.cu_seqlens_k is None
    if own_rows and features.cache_batch_idx is None and k.shape[0] != batch:
        where = f"{names[0]}'s batch size" if cu_seqlens is None else "cu_seqlens_q's batch size"
        raise ValueError(f"{names[1]} must have {where} {batch}, got {k.shape[0]}")
    return batch


def _at_most(rows: int, said: int | None, free: bool) -> int:
    if said is None:
        return rows
    return torch.sym_min(rows, said) if free else said


def _seqlens(q: Tensor, k: Tensor, features: Features, names: Triple) -> tuple[int, int, int]:
    """The lengths of the sequences, at most, and the page size."""
    page_size = 0
    if features.page_table is not None:
        _check_table(features.page_table)
        page_size = k.shape[1]
        check.page_size(names[1], page_size)
        capacity: int | None = features.page_table.shape[1] * page_size
    else:
        capacity = k.shape[1] if features.cu_seqlens_k is None else None
    # Packed, the longest sequence has no more than all rows that there are, whatever is said of it; but a mask, a bias
    # or a list of blocks may be as large as that.
    free = features.mask is None and features.bias is None and features.block_counts is None
    seqlen_q, seqlen_k, longest = q.shape[1], capacity, features.max_seqlen_k
    if features.cu_seqlens_q is not None:
        seqlen_q = _at_most(q.shape[0], features.max_seqlen_q, free)
    if seqlen_k is None:
        seqlen_k = _at_most(k.shape[0], longest, free)
    elif longest is not None:
        seqlen_k = torch.sym_min(seqlen_k, longest)
    for name, length, bound in ((names[0], seqlen_q, "max_seqlen_q"), (names[1], seqlen_k, "max_seqlen_k")):
        if getattr(features, bound) is None and length > MAX_SEQLEN:
            packed = getattr(features, bound.replace("max_seqlen", "cu_seqlens")) is not None
            hint = f": pass {bound}" if packed else ""
            raise ValueError(f"{name} must have a seqlen of 2**29 at most, got {length}{hint}")
    return seqlen_q, seqlen_k, page_size


# ---- lengths, pages ----------------------------------------------------------------------------------------


def check_vector(name: str, vector: Tensor, length: int | None) -> None:
    """int32 [length], contiguous; with ``length`` None, of one element at least."""
    if vector.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {dtype_name(vector.dtype)}")
    if vector.dim() != 1 or (vector.shape[0] < 1 if length is None else vector.shape[0] != length):
        expected = "[batch + 1]" if length is None else f"({length},)"
        raise ValueError(f"{name} must have shape {expected}, got {tuple(vector.shape)}")
    if vector.stride(0) != 1 and vector.shape[0] > 1:
        raise ValueError(f"{name} must be contiguous: pass {name}.contiguous()")


def _check_table(table: Tensor) -> None:
    if table.dtype != torch.int32:
        raise ValueError(f"page_table must be int32, got {dtype_name(table.dtype)}")
    if table.dim() != 2:
        raise ValueError(f"page_table must have 2 dimensions, [batch, pages], got shape {tuple(table.shape)}")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError("page_table must be contiguous in its last dimension: pass page_table.contiguous()")


def _check_lengths(features: Features, sizes: Sizes) -> None:
    batch = sizes.batch
    if features.cu_seqlens_k is not None and features.cu_seqlens_k is not features.cu_seqlens_q:
        check_vector("cu_seqlens_k", features.cu_seqlens_k, batch + 1)
    if features.page_table is not None and features.page_table.shape[0] != batch:
        raise ValueError(
            f"page_table must have a row for each of {batch} sequences, got shape {tuple(features.page_table.shape)}"
        )
    for name in ("seqused_q", "seqused_k", "leftpad_k", "cache_batch_idx", "prefix_lengths"):
        if (vector := getattr(features, name)) is not None:
            check_vector(name, vector, batch)


# ---- masks and scores --------------------------------------------------------------------------------------


def broadcast_strides(tensor: Tensor, sizes: Sizes) -> tuple[int, int, int, int]:
    """(batch, head, query, key) strides of a mask or a bias in elements, 0 where it is broadcast."""
    missing = 4 - tensor.dim()
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    batch, head, query, key = [0] * missing + [0 if size == 1 else stride for size, stride in sides]
    return batch, head, query, key


def _check_broadcasts(name: str, tensor: Tensor, features: Features, sizes: Sizes) -> None:
    """A mask or a bias goes with [batch, num_heads, seqlen_q, seqlen_k]."""
    for side, axis in (("q", -2), ("k", -1)):
        packed = getattr(features, f"cu_seqlens_{side}") is not None
        bound = f"max_seqlen_{side}"
        if packed and getattr(features, bound) is None and tensor.dim() >= -axis and tensor.shape[axis] != 1:
            raise ValueError(f"{name} with packed sequences needs {bound}: it says how long its rows must be")
    wanted = (sizes.batch, sizes.num_heads, sizes.seqlen_q, sizes.seqlen_k)
    sentence = (
        f"{name} must be broadcastable to [batch, num_heads, seqlen_q, seqlen_k], {wanted}, "
        f"got shape {tuple(tensor.shape)}"
    )

    _require(tensor.dim() <= 4, sentence)
    for size, want in zip(tensor.shape, wanted[4 - tensor.dim() :], strict=True):
        _require(size == 1 or size == want, sentence)


def _check_scores(features: Features, sizes: Sizes, dtype: torch.dtype, query: str) -> None:
    if (mask := features.mask) is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {dtype_name(mask.dtype)}: what is added to scores is a bias")
        _check_broadcasts("mask", mask, features, sizes)
    if (bias := features.bias) is not None:
        if bias.dtype not in (dtype, torch.float32):
            also = "" if dtype == torch.float32 else " or float32"
            raise ValueError(f"bias must have {query}'s dtype {dtype_name(dtype)}{also}, got {dtype_name(bias.dtype)}")
        _check_broadcasts("bias", bias, features, sizes)
    if (slopes := features.alibi_slopes) is not None:
        if slopes.dtype != torch.float32:
            raise ValueError(f"alibi_slopes must be float32, got {dtype_name(slopes.dtype)}")
        heads = sizes.num_heads
        if slopes.shape not in ((heads,), (sizes.batch, heads)):
            raise ValueError(
                f"alibi_slopes must have shape ({heads},) or ({sizes.batch}, {heads}), got {tuple(slopes.shape)}"
            )
    if (sinks := features.sinks) is not None:
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        if sinks.dtype != wanted:
            raise ValueError(f"sinks must be {dtype_name(wanted)}, got {dtype_name(sinks.dtype)}")
        if sinks.shape != (sizes.num_heads,):
            raise ValueError(f"sinks must have shape ({sizes.num_heads},), got {tuple(sinks.shape)}")
        if sinks.stride(0) != 1 and sinks.shape[0] > 1:
            raise ValueError("sinks must be contiguous: pass sinks.contiguous()")
    if features.dropout_seed is not None:
        dropout.check_seed(features.dropout_seed)


def _check_blocks(features: Features, sizes: Sizes) -> None:
    counts, indices = features.block_counts, features.block_indices
    if counts is None or indices is None:
        return
    if features.block_m < 1 or features.block_n < 1:
        raise ValueError(
            f"block_mask must have blocks of at least 1 query and 1 key, got ({features.block_m}, {features.block_n})"
        )
    if features.cu_seqlens_q is not None and features.max_seqlen_q is None:
        raise ValueError("block_mask with packed sequences needs max_seqlen_q: it says how many blocks there are")
    blocks = -(-sizes.seqlen_q // features.block_m)
    for name, tensor, dims in (("block_counts", counts, 3), ("block_indices", indices, 4)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {dtype_name(tensor.dtype)}")
        more = "" if dims == 3 else ", entries at most"
        sentence = (
            f"{name} must have shape [batch or 1, num_heads or 1, query blocks{more}] with batch "
            f"{sizes.batch}, num_heads {sizes.num_heads} and {blocks} query blocks, "
            f"got {tuple(tensor.shape)}"
        )
        if (
            tensor.dim() != dims
            or tensor.shape[0] not in (1, sizes.batch)
            or tensor.shape[1] not in (1, sizes.num_heads)
        ):
            raise ValueError(sentence)
        _require(tensor.shape[2] == blocks, sentence)
