"""One call, as far as the choice of a row depends on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

CAUSAL = ("none", "top-left", "bottom-right")
FULL_ALIGNMENT = 16  # bytes: the widest copy there is
FEW_QUERIES, MANY_KEYS = 64, 512
"""Query rows that share keys at most, and keys at least, of what counts as decoding."""
CLASS_BITS = 5
"""Lengths are told apart by so many leading bits where rows are compared: to 1/16 or better. Exact up to 32,
and for all lengths that models are usually trained and timed with."""
EVEN = (0, 0)
"""``mean`` of sequences that are about as long as the longest, or of which nobody knows."""
MEAN_BITS, BATCH_BITS, HALF_OCTAVE, SHORT = 2, 3, 2**0.5, 64
"""Packed lengths vary from batch to batch: their mean and their number are told to the nearest that so many
bits and zeros can say, the longest in half octaves above the mean. If even that is short, none is asked."""
SCORE_RUN = 4
"""Keys of which some rows read a mask or a bias at once."""
EMPTY_BLOCK = 0.6
"""A block whose queries see no key only writes zeros: that much of ``block`` and ``warp_block``."""
MAX_KEY_SPAN = 2**31 - 1
"""Elements: some rows multiply a row's number and its stride in 32 bits, up to the end of a tile."""

#: What only scored rows know, and what it is called.
FEATURES: Mapping[str, str] = {
    "window": "sliding window",
    "mask": "boolean mask",
    "bias": "bias",
    "prefix": "prefix that every query sees",
    "block_mask": "block mask",
    "softcap": "softcap",
    "alibi": "ALiBi slopes",
    "sinks": "sinks",
    "dropout": "dropout",
    "varlen": "packed sequences",
    "lengths": "lengths of each sequence",
    "leftpad": "left padding",
    "pages": "paged keys",
    "cache_batch_idx": "cache_batch_idx",
    "splits": "split keys",
}

if TYPE_CHECKING:
    import functools

    cached = functools.cached_property
else:

    class cached:
        """``functools.cached_property`` without the lock that Python 3.11's has, which takes 0.3 us."""

        def __init__(self, ask: Any) -> None:
            self.ask, self.name = ask, ask.__name__

        def __get__(self, instance: Any, owner: Any) -> Any:
            found = instance.__dict__[self.name] = self.ask(instance)
            return found


@dataclass(unsafe_hash=True)  # and never written to: frozen ones take twice as long to make
class Problem:
    """One forward call, as far as the choice of a row depends on it.

    ``seqlen_q`` and ``seqlen_k`` are those of the longest sequence. ``alignment``: the largest power of two,
    at most 16, that divides every pointer and every stride in bytes. ``head_dim_v`` is None where it is
    head_dim. ``features``: names of ``FEATURES``. ``window``: (left, right), -1 without limit.
    ``block_mask``: queries and keys of a block. ``page_size``: keys of a page, 0 without pages.
    ``num_splits``: parts of the keys that the caller asks for. ``key_span``: elements that the keys or values
    of a sequence lie apart at most, 0 where any row's offsets hold them. ``mean``: the average length
    of packed sequences, of queries and of keys; 0 where they are about as long as the longest.
    ``score_runs``: mask and bias can be read by ``SCORE_RUN`` keys at once, a bias in 16 bits; None where they
    can't, and the bias is of another dtype than q, float32. ``bias_gradient``: of gradients, whether the bias has one.
    ``batch_invariant``: no tile is divided because of where in the batch it comes. ``packable_mask``: one that can't
    be read so may be packed to bits before.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: str = "none"
    alignment: int = FULL_ALIGNMENT
    head_dim_v: int | None = None
    features: tuple[str, ...] = ()
    window: tuple[int, int] = (-1, -1)
    block_mask: tuple[int, int] | None = None
    page_size: int = 0
    num_splits: int | None = None
    key_span: int = 0
    mean: tuple[int, int] = EVEN
    score_runs: bool | None = True
    bias_gradient: bool = False
    batch_invariant: bool = False
    packable_mask: bool = False

    def __post_init__(self) -> None:
        if self.head_dim_v == self.head_dim:
            self.head_dim_v = None

    def of_sizes(self, batch: int, seqlen_q: int, seqlen_k: int, key_span: int, mean: tuple[int, int]) -> Problem:
        """The same with other sizes, in half the time of ``dataclasses.replace``."""
        return Problem(
            batch,
            seqlen_q,
            seqlen_k,
            self.num_heads,
            self.num_heads_kv,
            self.head_dim,
            self.dtype,
            self.causal,
            self.alignment,
            self.head_dim_v,
            self.features,
            self.window,
            self.block_mask,
            self.page_size,
            self.num_splits,
            key_span,
            mean,
            self.score_runs,
            self.bias_gradient,
            self.batch_invariant,
            self.packable_mask,
        )

    @property
    def value_dim(self) -> int:
        """Head dim of value and output."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def is_plain(self) -> bool:
        """Whether the call asks for nothing that plain rows don't know."""
        return not self.features and self.head_dim_v is None

    @property
    def is_decode(self) -> bool:
        """Whether few queries meet many keys, so that dividing the keys may be what fills the GPU."""
        group = self.num_heads // self.num_heads_kv if self.num_heads_kv else 1
        return self.seqlen_q * group <= FEW_QUERIES and self.seqlen_k >= MANY_KEYS

    @cached
    def is_ranged(self) -> bool:
        """Whether queries see different ranges of keys."""
        return self.diagonal is not None or max(self.window) >= 0

    @cached
    def is_even(self) -> bool:
        """Whether all queries see as many keys."""
        return not self.is_ranged and self.mean == EVEN

    @cached
    def lines(self) -> tuple[int, int, int]:
        """Of query 0: its first key, and one less than the end of its keys.

        Each query's lie one further; all are cut at 0 and at the number of keys, which comes third.
        """
        (left, right), keys = self.window, self.seqlen_k
        offset = 0 if self.causal == "top-left" else keys - self.seqlen_q
        end = offset if self.causal != "none" else offset + right if right >= 0 else keys
        return -self.seqlen_q if left < 0 else offset - left, end, keys

    @cached
    def walked(self) -> tuple[float, float, int, int, int]:
        """What tiles of one query and one key would do at least: blocks and steps, and the steps of the last.

        Of packed sequences, the last of a long one. Before it: at how many queries ``lines`` rise, and how
        many ends such stretches have, where a tile may lie across.
        """
        if self.batch == 0 or self.seqlen_q == 0 or self.seqlen_k == 0:
            return 0.0, 0.0, 0, 0, 0
        if self.mean != EVEN:
            of_each = zip(*[document.walked for document in self.documents], strict=True)
            blocks, steps, rising, bounds, lasts = of_each
            return sum(blocks), sum(steps), sum(rising), sum(bounds), lasts[0]
        queries, (left, end, keys) = self.seqlen_q, self.lines
        seen, last = below(queries, 1, end, keys), min(keys, queries + end)
        rises, ends = min(queries, max(0, keys - end)), 1
        first_key = max(0, queries - 1 + left)
        if first_key:
            seen -= queries * (queries + 1) / 2 + (left - 1) * queries - below(queries, 1, left - 1, 0)
            rises, ends = rises + min(queries, first_key), 3
        heads = self.batch * self.num_heads
        block = 1.0 if end >= 0 and first_key < keys else EMPTY_BLOCK
        return heads * queries * block, heads * seen, heads * rises, heads * ends, max(0, last - first_key)

    def visible_keys(self, first: int, last: int) -> tuple[int, int]:
        """Begin and end of the keys that queries ``first`` to ``last`` see some of, by mask and window."""
        left, right = self.window
        if self.causal != "none":
            right = 0 if right < 0 else min(right, 0)
        offset = 0 if self.causal == "top-left" else self.seqlen_k - self.seqlen_q
        begin = 0 if left < 0 else max(0, first + offset - left)
        return begin, self.seqlen_k if right < 0 else max(0, min(self.seqlen_k, last + offset + right + 1))

    @cached
    def elements_read(self) -> int:
        """Those of the queries that see a key, and of the keys and values that are seen."""
        queries = self.seqlen_q
        if self.diagonal is not None:
            queries = max(0, min(queries, queries + self.diagonal))
        begin, end = self.visible_keys(0, self.seqlen_q - 1)
        of_keys = max(0, end - begin) * self.num_heads_kv * (self.head_dim + self.value_dim)
        of_queries = queries * self.num_heads * self.head_dim
        mean_q, mean_k = self.mean
        if mean_q:
            of_queries = of_queries * mean_q // self.seqlen_q
        if mean_k:
            of_keys = of_keys * mean_k // self.seqlen_k
        return self.batch * (of_queries + of_keys)

    @cached
    def elements_written(self) -> int:
        """Those of the output."""
        return self.batch * (self.mean[0] or self.seqlen_q) * self.num_heads * self.value_dim

    @cached
    def documents(self) -> list[Problem]:
        """Sequences of equal lengths that stand for packed ones: half of them long, half short.

        The two lengths have the mean and the variance of lengths spread evenly about that mean, up to the
        longest. Of an odd number one is as long as the mean.
        """
        mean_q, mean_k = self.mean[0] or self.seqlen_q, self.mean[1] or self.seqlen_k
        by_q = min(mean_q, self.seqlen_q - mean_q) / 3**0.5
        by_k = min(mean_k, self.seqlen_k - mean_k) / 3**0.5
        found = []
        for batch, side in ((self.batch // 2, 1), (self.batch % 2, 0), (self.batch // 2, -1)):
            if batch:
                lengths = round(mean_q + side * by_q), round(mean_k + side * by_k)
                found.append(self.of_sizes(batch, *lengths, self.key_span, EVEN))
        return found

    @cached
    def diagonal(self) -> int | None:
        """Key j is visible to query i when j <= i + diagonal; None when every key is."""
        return mask_diagonal(self.causal, self.seqlen_q, self.seqlen_k)

    def __str__(self) -> str:
        return (
            f"batch {self.batch}, seqlen_q {self.seqlen_q}, seqlen_k {self.seqlen_k}, "
            f"num_heads {self.num_heads}, num_heads_kv {self.num_heads_kv}, head_dim {self.head_dim}, "
            f"{self.dtype}, causal {self.causal}, aligned to {self.alignment} bytes"
            + ("" if self.head_dim_v is None else f", head_dim_v {self.head_dim_v}")
            + ("" if not self.features else f", with {', '.join(FEATURES[name] for name in self.features)}")
        )


def mean_length(total: int, sequences: int, longest: int) -> int:
    """Of ``total`` rows in all, as ``Problem.mean`` has it."""
    if total == 0 or longest < SHORT or _half_octaves(total, sequences * longest) == 0:
        return 0
    return -(-total // sequences)


def _half_octaves(mean: int, longest: int) -> int:
    """How much longer the longest is: 0 up to 1.19 times, 1 up to 1.5 times, then whole octaves."""
    octaves = math.log2(longest / mean) if longest > mean else 0.0
    if octaves < 0.25:
        return 0
    return 1 if octaves < math.log2(1.5) else 2 * max(1, round(octaves))


def typical_length(length: int) -> int:
    """The length that stands for its class: the next one that CLASS_BITS bits and zeros can say."""
    unit = 1 << max(0, (length - 1).bit_length() - CLASS_BITS)
    return -(-length // unit) * unit


def typical(problem: Problem) -> Problem:
    """The problem that stands for those of the same class of lengths, by which a row is chosen.

    Choosing takes longer than all else that a new length takes. Equal lengths stay equal; what a
    row's offsets can hold is another class than what they can't. By the model, what a class picks costs at
    most 4.5 % more than the best row, 0.1 % on average (300 drawn problems, three GPUs); of packed sequences
    1.3 % on average by their own lengths, which nobody knows (2,070 drawn batches, five GPUs; with a bit more
    of the mean and all of the batch 1.4 %, without classes 0.65 %).
    """
    batch, seqlen_q, seqlen_k, mean = _typical_sizes(problem)
    return problem.of_sizes(batch, seqlen_q, seqlen_k, _key_span_class(problem.key_span), mean)


def _typical_sizes(problem: Problem) -> tuple[int, int, int, tuple[int, int]]:
    if problem.mean == EVEN:
        return problem.batch, typical_length(problem.seqlen_q), typical_length(problem.seqlen_k), EVEN
    of_keys = (problem.seqlen_k, problem.mean[1])
    seqlen_q, mean_q = found = _typical_mean(*(of_queries := (problem.seqlen_q, problem.mean[0])))
    seqlen_k, mean_k = found if of_keys == of_queries else _typical_mean(*of_keys)
    return _nearest(problem.batch, BATCH_BITS), seqlen_q, seqlen_k, (mean_q, mean_k)


def _typical_mean(longest: int, mean: int) -> tuple[int, int]:
    """The mean says more than the longest, which is told from it."""
    if not mean:
        return typical_length(longest), 0
    half_octaves = _half_octaves(mean, longest)
    mean = _nearest(mean, MEAN_BITS)
    return math.ceil(mean * HALF_OCTAVE**half_octaves), mean


def _nearest(number: int, bits: int) -> int:
    unit = 1 << max(0, number.bit_length() - bits)
    return (number + unit // 2) // unit * unit


def _key_span_class(key_span: int) -> int:
    return 0 if key_span <= MAX_KEY_SPAN else key_span


def class_of(problem: Problem) -> tuple[object, ...]:
    """What the choice of a row depends on: equal for problems that are ``typical`` of each other."""
    return (
        _typical_sizes(problem),
        problem.num_heads,
        problem.num_heads_kv,
        problem.head_dim,
        problem.dtype,
        problem.causal,
        problem.alignment,
        problem.head_dim_v,
        problem.features,
        problem.window,
        problem.block_mask,
        problem.page_size,
        problem.num_splits,
        _key_span_class(problem.key_span),
        problem.score_runs,
        problem.batch_invariant,
        problem.packable_mask,
        problem.is_decode,
    )


def below(points: int, slope: float, offset: float, most: int) -> float:
    """The sum of a line at 1 to ``points``, cut at ``most``."""
    rising = int((most - offset) / slope)
    rising = points if rising > points else rising if rising > 0 else 0
    return slope * rising * (rising + 1) / 2 + offset * rising + most * (points - rising)


def mask_diagonal(causal: str, seqlen_q: int, seqlen_k: int) -> int | None:
    """The diagonal of a causal mask; None also where it hides nothing, as in decoding with one query."""
    if causal == "none":
        return None
    diagonal = 0 if causal == "top-left" else seqlen_k - seqlen_q
    return None if diagonal >= seqlen_k - 1 else diagonal
