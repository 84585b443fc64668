"""The attention problems that the benchmark times, and how much work each of them is.

The presets are fixed so that figures of different GPUs, versions and kernels can be laid side by side. Cases
that the package can't run yet stay in the list and are reported as unsupported.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

BYTES_PER_ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4}
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

WINDOW = 1024
PREFIX = 2048
PAD = 500
"""Left padding grows by so many rows from one sequence of the batch to the next."""
BLOCK = 128
"""Queries and keys of a block of a block mask, which names half of all blocks."""

FEATURES: dict[str, str] = {
    "window": f"window {WINDOW}",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "dropout": "dropout 0.1",
    "prefix": f"prefix-LM {PREFIX}",
    "bias": "bias [1, 1, Sq, Sk]",
    "mask": "mask [1, 1, Sq, Sk]",
    "head_bias": "bias [1, H, Sq, Sk]",
    "block_mask": f"block mask, half of {BLOCK} x {BLOCK}",
    "sinks": "sinks",
    "topleft": "top-left",
    "leftpad": f"left padding 0, {PAD}, ...",
}
"""What a case may have besides its shape, as tables print it; features.py knows what each means."""


@dataclass(frozen=True)
class Case:
    """One attention problem. ``causal`` is bottom-right aligned when the lengths differ.

    feature: one of FEATURES, or nothing.
    lengths: queries of each of ``batch`` sequences, which lie one after the other, as do its keys unless
        ``used`` says otherwise. seqlen_q and seqlen_k are the longest.
    used: how many keys of each sequence are in use; k and v are caches of seqlen_k rows each.
    """

    group: str
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    causal: bool = False
    feature: str = ""
    lengths: tuple[int, ...] = ()
    used: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Short, unique and readable as a shape: ``b1_h32-8_s8192_d128_bf16_causal``."""
        words = [f"h{self.num_heads}"]
        if self.num_heads != self.num_heads_kv:
            words[0] += f"-{self.num_heads_kv}"
        if self.lengths:
            words = [f"p{together(self.lengths, 'x', '-')}", *words]
        else:
            square = self.seqlen_q == self.seqlen_k
            words = [f"b{self.batch}", *words]
            words += [f"s{self.seqlen_q}"] if square else [f"q{self.seqlen_q}", f"k{self.seqlen_k}"]
        words += [f"u{together(self.used, 'x', '-')}"] if self.used else []
        words += [f"d{self.head_dim}", SHORT[self.dtype]]
        words += ["causal"] if self.causal else []
        words += [self.feature] if self.feature else []
        words += ["backward"] if self.backward else []
        return "_".join(words)

    @property
    def label(self) -> str:
        """The name as the tables and the picture print it."""
        words = [f"H{self.num_heads}"]
        if self.num_heads != self.num_heads_kv:
            words[0] += f"/{self.num_heads_kv}"
        if self.lengths:
            words = [together(self.lengths, " x ", " + "), *words]
        else:
            square = self.seqlen_q == self.seqlen_k
            words = [f"B{self.batch}", *words]
            words += [f"S{self.seqlen_q}"] if square else [f"Sq{self.seqlen_q}", f"Sk{self.seqlen_k}"]
        words += [f"D{self.head_dim}", SHORT[self.dtype]]
        words += ["causal"] if self.causal else []
        words += [FEATURES[self.feature]] if self.feature else []
        words += ["backward"] if self.backward else []
        words += [f"keys used {together(self.used, ' x ', ' + ')}"] if self.used else []
        return " ".join(words)

    @property
    def backward(self) -> bool:
        """Whether its gradients are computed, from what the forward left."""
        return self.group in ("backward", "score_gradients")

    @property
    def featured(self) -> bool:
        """Whether a call of it says more than q, k, v and causal."""
        return bool(self.feature or self.lengths or self.used)

    @property
    def plain(self) -> Case:
        """The same batch of sequences as long as its longest, without a feature."""
        return replace(self, feature="", lengths=(), used=())

    def pad(self, sequence: int) -> int:
        """Rows before a sequence's first key."""
        return sequence * PAD if self.feature == "leftpad" else 0

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs of one head, over the batch, that the mask leaves, counted exactly (not as half of
        the square).

        A mask in memory is random: it leaves no part of the work out, and all pairs count; of a block mask those of
        blocks that it names.
        """
        queries = self.lengths or (self.seqlen_q,) * self.batch
        keys = self.used or self.lengths or (self.seqlen_k,) * self.batch
        return sum(self._pairs(*each) for each in zip(range(self.batch), queries, keys, strict=True))

    def _pairs(self, sequence: int, queries: int, keys: int) -> int:
        keys -= self.pad(sequence)
        if self.feature == "block_mask":
            keys = keys // BLOCK // 2 * BLOCK
        if not self.causal:
            return queries * keys
        diagonal = 0 if self.feature == "topleft" else keys - queries
        pairs = visible_pairs(queries, keys, diagonal)
        if self.feature == "window":
            pairs -= visible_pairs(queries, keys, diagonal - WINDOW - 1)
        if self.feature == "prefix":  # the prefix for all, and what lies behind it as ever
            prefix = min(PREFIX, keys)
            pairs = queries * prefix + visible_pairs(queries, keys - prefix, diagonal - prefix)
        return pairs

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of queries and of keys, but for heads and head_dim: (batch, seqlen), or (rows,) packed."""
        packed = (sum(self.lengths),)
        query = packed if self.lengths else (self.batch, self.seqlen_q)
        return query, packed if self.lengths and not self.used else (self.batch, self.seqlen_k)

    @property
    def flop(self) -> int:
        """Floating-point operations of Q K^T and P V over the visible pairs, without the softmax's; of a
        backward those of its five products."""
        products = 5 if self.backward else 2
        return 2 * products * self.num_heads * self.visible_pairs * self.head_dim

    @property
    def input_bytes(self) -> int:
        """Bytes of Q, K and V that a call reads."""
        queries = sum(self.lengths) or self.batch * self.seqlen_q
        keys = sum(self.used or self.lengths) or self.batch * self.seqlen_k
        elements = self.head_dim * (queries * self.num_heads + 2 * keys * self.num_heads_kv)
        return elements * BYTES_PER_ELEMENT[self.dtype]

    @property
    def moved_bytes(self) -> int:
        """Bytes that a fused kernel has to move at least: Q, K and V read once, O written once."""
        queries = sum(self.lengths) or self.batch * self.seqlen_q
        return self.input_bytes + queries * self.num_heads * self.head_dim * BYTES_PER_ELEMENT[self.dtype]

    @property
    def memory_bound(self) -> bool:
        """Whether its rate is bytes per second: one query meets all keys."""
        return self.group == "decode"

    def as_dict(self) -> dict[str, object]:
        """The case as the JSON report holds it."""
        return {
            "name": self.name,
            "label": self.label,
            **asdict(self),
            "flop": self.flop,
            "bytes": self.moved_bytes,
        }


def together(lengths: tuple[int, ...], times: str, plus: str) -> str:
    """Many lengths in few words: 16 x 1024, 4096 + 7001, 24 x 37..2900."""
    if len(set(lengths)) == 1:
        return f"{len(lengths)}{times}{lengths[0]}"
    if len(lengths) <= 4:
        return plus.join(map(str, lengths))
    return f"{len(lengths)}{times}{min(lengths)}..{max(lengths)}"


def visible_pairs(seqlen_q: int, seqlen_k: int, diagonal: int | None) -> int:
    """Number of (query, key) pairs with key <= query + diagonal; None: of all pairs."""
    if diagonal is None:
        return seqlen_q * seqlen_k
    first = max(0, -diagonal)  # queries before it see nothing, from `full` on they see every key
    full = min(seqlen_q, max(first, seqlen_k - 1 - diagonal))
    rising = full - first
    return rising * (first + diagonal + 1) + rising * (rising - 1) // 2 + max(0, seqlen_q - full) * seqlen_k


def _mha(group: str, batch: int, heads: int, seqlen: int, head_dim: int, dtype: str, causal: bool = False) -> Case:
    return Case(group, batch, heads, heads, seqlen, seqlen, head_dim, dtype, causal)


def _both(case: Case) -> tuple[Case, Case]:
    return case, replace(case, causal=True)


def drawn(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """So many lengths, always the same ones, the shortest and the longest among them."""
    draw = random.Random(count)
    return (shortest, *(draw.randint(shortest, longest) for _ in range(count - 2)), longest)


def _packed(
    group: str, lengths: tuple[int, ...], heads: int, heads_kv: int, head_dim: int, used: tuple[int, ...] = ()
) -> tuple[Case, Case]:
    """Caches have rows for the longest of their sequences, in whole pages of 256."""
    longest = max(lengths)
    seqlen_k = -(-max(used) // 256) * 256 if used else longest
    sizes = (len(lengths), heads, heads_kv, longest, seqlen_k, head_dim, "bfloat16")
    return _both(Case(group, *sizes, lengths=lengths, used=used))


RANGES = ("used", "prefix", "sinks", "topleft", "leftpad")
SCORES = ("alibi", "softcap", "head_bias", "mask", "dropout")


def _beside_plain(group: str, head_dim: int, names: Iterable[str]) -> Iterable[Case]:
    """What the plain row could run if it were not for one feature."""
    for case in _both(_mha(group, 4, 16, 4096, head_dim, "bfloat16")):
        for name in names:
            if name == "used":
                yield replace(case, used=(case.seqlen_k,) * case.batch)
            elif case.causal or name not in ("prefix", "topleft"):
                yield replace(case, feature=name)


CASES: tuple[Case, ...] = (
    *_both(_mha("latency", 1, 8, 256, 64, "float16")),
    *_both(_mha("latency", 1, 8, 512, 64, "float16")),
    *_both(_mha("latency", 1, 8, 1024, 64, "float16")),
    *_both(_mha("dense", 4, 32, 4096, 64, "bfloat16")),
    _mha("dense", 32, 16, 512, 128, "bfloat16"),
    _mha("dense", 8, 16, 2048, 128, "bfloat16", causal=True),
    *_both(_mha("dense", 2, 16, 8192, 128, "bfloat16")),
    _mha("dense", 1, 16, 16384, 128, "bfloat16", causal=True),
    Case("dense", 1, 32, 8, 8192, 8192, 128, "bfloat16", causal=True),
    _mha("dense", 4, 16, 4096, 96, "bfloat16", causal=True),
    _mha("dense", 4, 8, 4096, 256, "bfloat16", causal=True),
    Case("decode", 8, 32, 8, 1, 8192, 128, "bfloat16"),
    Case("decode", 1, 32, 8, 1, 32768, 128, "bfloat16"),
    Case("decode", 32, 32, 8, 1, 2048, 128, "bfloat16"),
    Case("decode", 16, 32, 32, 1, 2048, 128, "bfloat16"),
    Case("decode", 8, 64, 8, 1, 8192, 64, "bfloat16"),
    Case("decode", 64, 32, 8, 1, 1000, 128, "bfloat16"),
    Case("decode", 32, 16, 16, 1, 512, 64, "bfloat16"),
    Case("decode", 1, 8, 1, 1, 16384, 256, "bfloat16"),
    *_both(_mha("wide", 4, 16, 2048, 64, "float32")),
    *_both(_mha("wide", 4, 16, 2048, 128, "float32")),
    *_both(_mha("wide", 4, 16, 2048, 256, "float32")),
    *_both(_mha("wide", 4, 16, 2048, 320, "bfloat16")),
    *_both(_mha("wide", 4, 16, 2048, 512, "bfloat16")),
    _mha("wide", 1, 8, 512, 64, "float32"),
    _mha("wide", 32, 16, 512, 128, "float32"),
    *(
        replace(_mha("features", 2, 16, 8192, 128, "bfloat16", causal=name not in ("bias", "mask")), feature=name)
        for name in ("window", "softcap", "alibi", "dropout", "prefix", "bias", "mask")
    ),
    _packed("features", (2048,) * 8, 16, 16, 128)[1],
    *(
        case
        for heads, heads_kv, head_dim in ((16, 16, 128), (32, 8, 128), (16, 16, 64))
        for lengths in ((1024,) * 16, drawn(24, 37, 2900), drawn(64, 200, 300), (4096, 7001, 5500))
        for case in _packed("packed", lengths, heads, heads_kv, head_dim)
    ),
    *(case for head_dim in (128, 64) for case in _beside_plain("ranges", head_dim, RANGES)),
    *(case for head_dim in (128, 64) for case in _beside_plain("scores", head_dim, SCORES)),
    *(
        replace(_mha("masks", 4, 16, 4096, head_dim, "bfloat16"), feature=name)
        for head_dim in (32, 96, 256)
        for name in ("mask", "head_bias")
    ),
    *(_mha("dims", 2, 16, 2049, head_dim, "bfloat16", causal=True) for head_dim in (72, 80, 88, 112, 120)),
    *(
        _packed("paged", lengths, heads, heads_kv, head_dim, used)[1]
        for heads, heads_kv, head_dim in ((32, 8, 128), (16, 16, 64))
        for lengths, used in (
            ((1024,) * 16, (1024,) * 16),  # whole prompts
            ((512,) * 8, drawn(8, 1000, 8000)),  # chunks behind what is in the cache
            ((512,) * 4 + (1,) * 28, drawn(32, 1000, 8000)),  # the same among decoding sequences
        )
    ),
    *_both(_mha("backward", 2, 16, 8192, 128, "bfloat16")),
    *_both(_mha("backward", 4, 32, 4096, 64, "bfloat16")),
    *_both(_mha("backward", 4, 16, 4096, 96, "bfloat16")),
    *_both(_mha("backward", 4, 8, 4096, 256, "bfloat16")),
    *_both(Case("backward", 1, 32, 8, 8192, 8192, 128, "bfloat16")),
    *_both(_mha("backward", 8, 16, 2048, 128, "bfloat16")),
    *_packed("backward", (2048,) * 8, 16, 16, 128),
    *_packed("backward", (4096, 7001, 5500), 16, 16, 128),
    *(
        replace(_mha("score_gradients", 4, 16, 2048, head_dim, "bfloat16", causal="mask" not in name), feature=name)
        for head_dim in (128, 64)
        for name in ("dropout", "alibi", "softcap", "mask", "head_bias", "block_mask")
    ),
)

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(case.group for case in CASES))


def select_cases(presets: list[str] | None) -> list[Case]:
    """The cases of the presets, each one of GROUPS or a case; all when None.

    Raises ValueError when a preset is neither.
    """
    if not presets:
        return list(CASES)
    known = {*GROUPS, *(case.name for case in CASES)}
    unknown = [preset for preset in presets if preset not in known]
    if unknown:
        groups = ", ".join(GROUPS)
        raise ValueError(f"unknown preset {unknown[0]!r}: take one of {groups} or a case, which --list names")
    return [case for case in CASES if case.group in presets or case.name in presets]
