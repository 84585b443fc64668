"""What a call may say beyond query, key, value, scale and causal, and the sizes of such a call."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from torch import Tensor

from cutlass_fmha.dispatch.problem import cached

#: Words for "no limit" of a window, as the op and the kernels have it.
NO_LIMIT = -1


class _Fields(NamedTuple):
    """The keyword arguments of the op ``attend``, by the same names. The defaults say nothing.

    All tensors are on query's device. The contents of those on a GPU are never read by the host. A tuple,
    because making a frozen dataclass of so many fields costs a call 1.5 microseconds more.
    """

    #: Key j is visible to query i when i + offset - left <= j <= i + offset + right; -1: without that limit.
    #: Causality is not in here: it makes the right one min(right, 0).
    window_left: int = NO_LIMIT
    window_right: int = NO_LIMIT
    #: bool, any strides, broadcastable to [batch, num_heads, seqlen_q, seqlen_k]: False hides a key.
    mask: Tensor | None = None
    #: query's dtype or float32, any strides, broadcastable to the same shape: added to the scores.
    bias: Tensor | None = None
    #: int32 [batch]: the first keys, so many, are visible to every query, whatever causal and the window say.
    prefix_lengths: Tensor | None = None
    #: int32 [batch or 1, num_heads or 1, query blocks]: how many entries of block_indices count.
    block_counts: Tensor | None = None
    #: int32 [batch or 1, num_heads or 1, query blocks, entries at most]: ascending
    #: numbers of the key blocks to visit.
    block_indices: Tensor | None = None
    #: Queries and keys of a block; 0 without block lists.
    block_m: int = 0
    block_n: int = 0
    #: Scores become softcap * tanh(score / softcap); 0: none.
    softcap: float = 0.0
    #: float32 [num_heads] or [batch, num_heads], any strides: slope * |i + offset - j| is subtracted.
    alibi_slopes: Tensor | None = None
    #: float32 [num_heads] (float64 with float64 tensors): one more score in the denominator, of value 0.
    sinks: Tensor | None = None
    #: Probability, in [0, 1) and in steps of 1/65536, with which a visible key's probability becomes 0.
    dropout_p: float = 0.0
    #: int64 [1]; there when dropout_p > 0.
    dropout_seed: Tensor | None = None
    #: int32 [batch + 1]: where the sequences of packed tensors begin; max_seqlen: the longest has no more. Of
    #: keys also where seqused_k is given.
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    #: int32 [batch]: rows in use; rows before the first key.
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    #: int32 [batch, pages of a sequence at most], last dimension contiguous: key and value are pages.
    page_table: Tensor | None = None
    #: int32 [batch]: which batch entry of key and value is the sequence's.
    cache_batch_idx: Tensor | None = None
    #: Parts that the keys of a sequence are divided into; None: chosen.
    num_splits: int | None = None
    #: The result of a sequence does not depend on what else is in the batch.
    batch_invariant: bool = False
    #: The gradients have the same bits each time. Those of keys and values, and the result, have them anyway.
    deterministic: bool = False
    #: Bytes that deterministic gradients may have of dS, and of a broadcast bias's sums, in memory; None:
    #: ``set_deterministic_workspace``'s.
    deterministic_workspace: int | None = None


class Features(_Fields):
    """All of a call that is beyond query, key, value, scale and causal."""

    @cached
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: x for name in TENSORS if (x := getattr(self, name)) is not None}


#: The fields that are tensors.
TENSORS = tuple(name for name, hint in _Fields.__annotations__.items() if "Tensor" in str(hint))

#: Those of a call that says nothing.
NO_FEATURES = Features()


class Sizes(NamedTuple):
    """The sizes of a call with features: those of its sequences, and of the tensors that hold them."""

    batch: int
    #: Of each sequence; at most, where lengths are on the device.
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    #: Rows of a packed query (cu_seqlens_q); None when it has a batch dimension.
    total_q: int | None
    #: Keys of a page; 0 without a page table.
    page_size: int
    #: Batch entries of k and v, or pages, and rows of each.
    entries_k: int
    rows_k: int

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.total_q is not None:
            return self.total_q, self.num_heads, self.head_dim_v
        return self.batch, self.seqlen_q, self.num_heads, self.head_dim_v

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.total_q is not None:
            return self.num_heads, self.total_q
        return self.batch, self.num_heads, self.seqlen_q


class _OfCaches(TypedDict, total=False):
    """What ``attention`` and ``with_kv_cache`` both take about features, by name; None says nothing."""

    window: tuple[int | None, int | None] | None
    mask: Tensor | None
    bias: Tensor | None
    prefix_lengths: Tensor | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    leftpad_k: Tensor | None
    page_table: Tensor | None
    cache_batch_idx: Tensor | None
    num_splits: int | None
    batch_invariant: bool | None


class FeatureArguments(_OfCaches, total=False):
    """The keyword arguments of ``attention`` that are about features."""

    block_mask: tuple[Tensor, Tensor, tuple[int, int]] | None
    dropout_p: float | None
    dropout_seed: Tensor | int | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    deterministic: bool | None
    deterministic_workspace: int | None


class _Results(TypedDict, total=False):
    """Tensors that results are written to."""

    out: Tensor | None
    lse: Tensor | None


class CallArguments(FeatureArguments, _Results, total=False):
    """All that ``attention`` takes as ``**features``."""


class CacheArguments(_OfCaches, _Results, total=False):
    """All that ``with_kv_cache`` does."""
