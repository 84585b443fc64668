"""What a call asks of selection: its arguments checked, its problem, how its tensors lie.

Reads metadata and addresses, no element.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from cutlass_fmha import private_torch
from cutlass_fmha.arguments import check
from cutlass_fmha.arguments.check_features import broadcast_strides, check_features
from cutlass_fmha.dispatch.blocks import PACKED_TIMES
from cutlass_fmha.dispatch.problem import EVEN, FEATURES, MAX_KEY_SPAN, SCORE_RUN, Problem, mean_length
from cutlass_fmha.features import NO_FEATURES, Features, Sizes

#: What ``batch_invariant`` goes by where the longest sequence of a batch would decide.
INVARIANT_SEQLEN_Q, INVARIANT_SEQLEN_K = 4096, 8192
#: A walk over keys reads to the end of its last tile at most.
MOST_KEYS_OF_A_TILE = 128

Names = tuple[str, str, str]
Operands = tuple[Tensor, Tensor, Tensor]
Strides = tuple[int, int, int]

#: Of each tensor of ``Features``, which feature of a problem (``FEATURES``) it stands for.
_STANDS_FOR = {
    "mask": "mask",
    "bias": "bias",
    "prefix_lengths": "prefix",
    "block_counts": "block_mask",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
    "cu_seqlens_q": "varlen",
    "cu_seqlens_k": "varlen",
    "seqused_q": "lengths",
    "seqused_k": "lengths",
    "leftpad_k": "leftpad",
    "page_table": "pages",
    "cache_batch_idx": "cache_batch_idx",
}


class Call(NamedTuple):
    """A checked call. ``strides``: (batch, seqlen, head) of query, key and value, in elements."""

    problem: Problem
    sizes: Sizes
    strides: tuple[Strides, Strides, Strides]
    features: Features
    causal: str
    #: Of an output that is given; None: a contiguous one will be made.
    out_strides: Strides | None = None


def describe(
    tensors: Operands,
    causal: str,
    features: Features = NO_FEATURES,
    names: Names = check.NAMES,
    layout: str = "bshd",
) -> Call:
    """Raises what ``check.check_tensors`` and ``check_features`` raise, under ``names``."""
    q, k, v = tensors
    if features is NO_FEATURES and not (q.dim() == v.dim() == 4 and v.shape[3] != q.shape[3]):
        dims = check.check_tensors(tensors, layout, names)
        sizes = Sizes(*dims, dims.head_dim, None, 0, dims.batch, dims.seqlen_k)
    else:
        if layout == "bhsd":
            check.check_dims(tensors, layout, names)  # before they are transposed
            q, k, v = tensors = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            layout = "bshd"
        sizes = check_features(tensors, features, names)
    strides = _strides(q, layout), _strides(k, layout), _strides(v, layout)
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
    for batch, seqlen, head in strides:
        bits |= (batch | seqlen | head) * q.element_size()
    span = (sizes.seqlen_k + MOST_KEYS_OF_A_TILE) * max(strides[1][1], strides[2][1])
    problem = problem_of(
        sizes,
        features,
        check.dtype_name(q.dtype),
        causal,
        check.alignment(bits),
        span if span > MAX_KEY_SPAN else 0,
        EVEN if features.cu_seqlens_q is None and features.cu_seqlens_k is None else _mean(q, k, features, sizes),
    )
    if features.batch_invariant:
        problem = for_one_sequence(problem, features, k)
    return Call(problem, sizes, strides, features, causal)


def with_output(call: Call, out: Tensor, layout: str) -> Call:
    """The call, whose output goes where the caller says: its alignment has a say in the choice of rows."""
    strides = _strides(out, layout)
    batch, seqlen, head = strides
    bits = out.data_ptr() | (batch | seqlen | head) * out.element_size()
    alignment = min(call.problem.alignment, check.alignment(bits))
    return call._replace(problem=replace(call.problem, alignment=alignment), out_strides=strides)


def _mean(q: Tensor, k: Tensor, features: Features, sizes: Sizes) -> tuple[int, int]:
    """``Problem.mean``, by what shapes tell: how many rows all sequences have."""
    total_q = 0 if features.cu_seqlens_q is None else q.shape[0]
    total_k = 0 if features.cu_seqlens_k is None else k.shape[0]
    mean_q = mean_length(total_q, sizes.batch, sizes.seqlen_q)
    if total_q == total_k and sizes.seqlen_q == sizes.seqlen_k:
        return mean_q, mean_q
    return mean_q, mean_length(total_k, sizes.batch, sizes.seqlen_k)


def _strides(tensor: Tensor, layout: str) -> Strides:
    """(batch, seqlen, head): 0 for a dimension of one, which is never used, and for packed rows' batch."""
    shape, strides = tensor.shape, tensor.stride()
    batch, seqlen, head = check.LAYOUTS[layout] if len(shape) == 4 else (-4, 0, 1)
    return (
        strides[batch] if batch >= 0 and shape[batch] > 1 else 0,
        strides[seqlen] if shape[seqlen] > 1 else 0,
        strides[head] if shape[head] > 1 else 0,
    )


def window_of(left: int, right: int, causal: str) -> tuple[tuple[int, int] | None, str]:
    """The window that a call really has, None where it is all or a causal mask, and that mask."""
    right = 0 if causal != "none" else right
    if left < 0 and right == 0:
        return None, "bottom-right" if causal == "none" else causal
    return (None if left < 0 and right < 0 else (left, right)), causal


def problem_of(
    sizes: Sizes,
    features: Features,
    dtype: str,
    causal: str,
    alignment: int,
    key_span: int = 0,
    mean: tuple[int, int] = EVEN,
    runs: bool = True,
) -> Problem:
    """What selection knows of a call. ``runs``: ``score_runs`` too, which asks where masks lie in memory."""
    found: tuple[str, ...] = ()
    window = None
    if features is not NO_FEATURES:
        window, causal = window_of(features.window_left, features.window_right, causal)
        found = _features_of(features, window)
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
        features=found,
        window=window or (-1, -1),
        block_mask=(features.block_m, features.block_n) if features.block_counts is not None else None,
        page_size=sizes.page_size,
        num_splits=features.num_splits,
        key_span=key_span,
        mean=mean,
        score_runs=not runs or _score_runs(features, sizes, dtype),
        packable_mask=is_packable(features.mask, sizes),
    )


def _score_runs(features: Features, sizes: Sizes, dtype: str) -> bool | None:
    if features.bias is not None and check.dtype_name(features.bias.dtype) != dtype:
        return None
    return in_runs(features.mask, sizes, 1) and in_runs(features.bias, sizes, 2)


def is_packable(mask: Tensor | None, sizes: Sizes) -> bool:
    """Whether a mask's bits, of each key, take less than it does, and are read often enough to pack them first."""
    if mask is None or mask.numel() == 0:
        return False
    batch, head, query, key = broadcast_strides(mask, sizes)
    if key != 1 or 0 < query < sizes.seqlen_k:
        return False
    whole = ((batch, sizes.batch), (head, sizes.num_heads), (query, sizes.seqlen_q))
    return math.prod(size for stride, size in whole if stride == 0) >= PACKED_TIMES


def in_runs(scores: Tensor | None, sizes: Sizes, element_bytes: int) -> bool:
    """Whether a mask or a bias can be read by SCORE_RUN keys at once, if it is there and of such elements.

    Rows that do so multiply a row's number and its stride in 32 bits, in bytes.
    """
    if scores is None or scores.numel() == 0:
        return True
    batch, head, query, key = broadcast_strides(scores, sizes)
    if key != 1 or sizes.seqlen_k % SCORE_RUN or scores.element_size() != element_bytes:
        return False
    bits = private_torch.innermost(scores).data_ptr() | (batch | head | query) * element_bytes
    return bits % (SCORE_RUN * element_bytes) == 0 and query * element_bytes < 2**32


def _features_of(features: Features, window: tuple[int, int] | None) -> tuple[str, ...]:
    """Names of ``FEATURES``, in that order."""
    asked = {_STANDS_FOR[name] for name in features.tensors if name in _STANDS_FOR}
    if window is not None:
        asked.add("window")
    if features.softcap > 0:
        asked.add("softcap")
    if features.dropout_p > 0:
        asked.add("dropout")
    if (features.num_splits or 1) > 1:
        asked.add("splits")
    return tuple(asked) if len(asked) < 2 else tuple(name for name in FEATURES if name in asked)


def for_one_sequence(problem: Problem, features: Features, k: Tensor) -> Problem:
    """The problem that ``batch_invariant`` is planned by: one sequence, of a length that no batch decides.

    A batch's longest sequence must not decide for the others, so that packed queries are planned as one fixed
    length and packed or paged keys as another. The kernel cuts the keys of each tile of queries by their own
    number, and each row's arithmetic depends on nothing but its own sequence.
    """
    # Whether a mask may be packed depends on how many share it.
    problem = replace(problem, batch=1, mean=EVEN, batch_invariant=True, packable_mask=False)
    if features.cu_seqlens_q is not None:
        problem = replace(problem, seqlen_q=INVARIANT_SEQLEN_Q)
    if features.cu_seqlens_k is not None or features.page_table is not None:
        problem = replace(problem, seqlen_k=INVARIANT_SEQLEN_K)
    elif features.max_seqlen_k is not None:
        problem = replace(problem, seqlen_k=k.shape[1])
    else:
        return problem
    if not problem.score_runs:
        return problem
    return replace(problem, score_runs=False)  # masks are as wide as the batch's longest sequence
