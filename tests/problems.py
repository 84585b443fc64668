"""Attention problems as data, so that the same list runs against every row, a report can name what failed, and
hypothesis can draw more. ``operands.py`` makes their tensors."""

import random
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from operands import CAUSAL, LAYOUTS, OF_EACH, Call, Maker, filled, lay_out
from torch import Tensor

OUT_LAYOUTS = ("bshd", "bhsd", "padded", "unaligned")
MEMORY = ("plain", "expanded", "missing", "transposed", "padded", "strided", "overlapping")
#: Of tables, lists, slopes and seeds. "overlapping": each row begins one number after the one before.
SMALL_MEMORY = ("plain", "strided", "expanded", "overlapping")


#: Of each sequence: rows, of them used, and rows before the first key.
Lengths = namedtuple("Lengths", "rows_q used_q rows_k used_k padding")


@dataclass(frozen=True)
class Problem:
    """One call of attention, but for the dtype. Lengths are those of the longest sequence."""

    seqlen_q: int = 33
    seqlen_k: int = 65
    causal: str = "none"
    batch: int = 2
    num_heads: int = 2
    num_heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    scale: float | None = None
    fill: str = "normal"
    layout: str = "bshd"
    out_layout: str = "bshd"
    return_lse: bool = True
    window: tuple[int, int] | None = None  # (left, right), -1 without limit
    mask: tuple[str, str] | None = None  # in which of the dimensions "bhqk" it has a size, and MEMORY
    bias: tuple[str, str, str] | None = None  # the same, with "same" or "float32" between
    bias_fill: str = "normal"  # "minus-inf": in part
    prefix: bool = False
    blocks: tuple[int, int] | None = None  # queries and keys of a block
    block_dims: str = "bh"  # for which of them there are lists of blocks
    blocks_beyond: bool = False  # whether lists go on beyond the keys
    softcap: float = 0.0
    alibi: str = ""  # "h" or "bh"
    sinks: str = ""  # "normal", "high" or "low"
    dropout: float = 0.0
    packed_q: bool = False  # cu_seqlens_q
    packed_k: bool = False
    used_q: bool = False  # seqused_q
    used_k: bool = False
    leftpad: bool = False
    page_size: int = 0
    indexed: bool = False  # cache_batch_idx
    bounded: bool = False  # max_seqlen_k where seqused_k is what the longest sequence of a cache goes by
    num_splits: int | None = None
    memory: str = "plain"  # of what is small (SMALL_MEMORY), so far as it need not be contiguous
    pack: bool = False  # in a launch around the package: the heads of a group share tiles
    seed: int = 0

    def __str__(self) -> str:
        said = (f"{name}={x!r}" for name, x in vars(self).items() if x != DEFAULTS[name])
        return f"Problem({', '.join(said)})"

    @property
    def features(self) -> list[str]:
        others = {
            self.causal: self.causal != "none", "splits": (self.num_splits or 1) > 1,
            "other head_dim_v": self.head_dim_v != self.head_dim,
            "odd head dim": self.head_dim % 8 or self.head_dim_v % 8,
            "grouped heads": self.num_heads != self.num_heads_kv,
            f"mask {self.mask and self.mask[1]}": self.mask, f"bias {self.bias and self.bias[2]}": self.bias,
        }  # fmt: skip
        found = [name for name, x in vars(self).items() if x and not DEFAULTS[name] and name != "seed"]
        found += [f"{name} {getattr(self, name)}" for name in ("fill", "layout", "memory")]
        return found + [name for name, there in others.items() if there]

    @property
    def group(self) -> int:
        return self.num_heads // self.num_heads_kv if self.num_heads_kv else 1

    def runs_on(self, alignment: int) -> bool:
        """Whether a row that asks for ``alignment`` bytes can take the problem's memory layout."""
        return alignment <= 2 or self.layout not in ("unaligned", "overlapping")

    def inputs(self, dtype: torch.dtype, head_dim: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as [batch, seqlen, heads, head_dim] views between NaN, without features."""
        return lay_out(*filled(self, dtype, head_dim, device), self.layout)

    def call(self, dtype: torch.dtype = torch.float16, device: torch.device | str = "cpu") -> Call:
        return Maker(self, dtype, device).call()

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for: whole pages."""
        page = self.page_size or 1
        return -(-self.seqlen_k // page) * page

    @property
    def is_bounded(self) -> bool:
        return self.bounded and self.used_k and not self.packed_k

    @property
    def width(self) -> int:
        """Keys of the longest sequence, for all that the host knows: what masks and biases are as wide as."""
        return max(self.lengths().used_k, default=0) if self.is_bounded else self.capacity

    def lengths(self) -> Lengths:
        """Drawn from the seed: one sequence is as long as the longest may be, others often empty."""
        chance = random.Random(self.seed)

        def some(most: int, apply: bool, beyond: int = 0) -> list[int]:
            if not apply:
                return [most] * self.batch
            found = [chance.choice((0, most, chance.randint(0, most + beyond))) for _ in range(self.batch)]
            if self.batch and not beyond:
                found[chance.randrange(self.batch)] = most
            return found

        rows_q = some(self.seqlen_q, self.packed_q)
        rows_k = some(self.seqlen_k, self.packed_k) if not self.page_size else [self.capacity] * self.batch
        used_q = [min(n, used) for n, used in zip(rows_q, some(self.seqlen_q, self.used_q, 3), strict=True)]
        used_k = [min(n, used) for n, used in zip(rows_k, some(self.capacity, self.used_k, 3), strict=True)]
        padding = [chance.randint(0, chance.choice((3, used + 1))) if self.leftpad else 0 for used in used_k]
        return Lengths(rows_q, used_q, rows_k, used_k, padding)


DEFAULTS = {name: entry.default for name, entry in Problem.__dataclass_fields__.items()}
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 104, 112, 128, 160, 192, 200, 256, 1, 5, 33, 100, 250)
FILLS_WITHOUT_A_SCALE = ("normal", "constant", "ramp", "steep-ramp", "outliers", "huge-values", "small", "tiny")


def fitted(problem: Problem, head_dim: int, head_dim_v: int, block_m: int, block_n: int) -> Problem:
    """The problem as a row can take it that has these head dims at most and divides blocks of these sizes."""
    p, (m, n) = problem, problem.blocks or (0, 0)
    blocks = p.blocks and (-(-m // block_m) * block_m, -(-n // block_n) * block_n)
    return replace(p, head_dim=min(p.head_dim, head_dim), head_dim_v=min(p.head_dim_v, head_dim_v), blocks=blocks)


def sometimes(values: st.SearchStrategy[Any], nothing: Any = None) -> st.SearchStrategy[Any]:
    """A third of the time ``values``."""
    return st.sampled_from((False, False, True)).flatmap(lambda there: values if there else st.just(nothing))


@st.composite
def problems(draw: st.DrawFn, longest: int = 700) -> Problem:
    """Any mixture of features, of moderate size. Shrinks towards a plain problem."""
    length = st.one_of(st.integers(0, 40), st.integers(0, 300), st.integers(0, longest))
    flag, decode = sometimes(st.just(True), False), draw(st.booleans())
    seqlen_q, seqlen_k = draw(st.integers(1, 16) if decode else length), draw(length)
    group, heads_kv = draw(st.integers(1, 8 if decode else 4)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    page_size = draw(sometimes(st.sampled_from((16, 48, 64, 256)), 0))
    packed_k, fill = not page_size and draw(flag), draw(st.sampled_from(FILLS_WITHOUT_A_SCALE))
    dims = st.sets(st.sampled_from("bhqk")).map(lambda names: "".join(x for x in "bhqk" if x in names))
    memory = st.sampled_from(MEMORY)
    side = st.one_of(st.just(-1), st.integers(0, 30), st.integers(0, longest))
    problem = Problem(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=draw(st.integers(1, 4)), num_heads=group * heads_kv,
        num_heads_kv=heads_kv, head_dim=head_dim, head_dim_v=draw(sometimes(st.sampled_from(HEAD_DIMS), head_dim)),
        causal=draw(st.sampled_from(CAUSAL)),
        scale=draw(sometimes(st.one_of(st.just(0.0), st.floats(-1.0, 1.0, width=32)))), fill=fill,
        out_layout=draw(st.sampled_from(OUT_LAYOUTS)), return_lse=draw(st.booleans()),
        window=draw(sometimes(st.tuples(side, side))), mask=draw(sometimes(st.tuples(dims, memory))),
        bias=draw(sometimes(st.tuples(dims, st.sampled_from(("same", "float32")), memory))),
        bias_fill=draw(st.sampled_from(("normal", "minus-inf"))), prefix=draw(flag),
        blocks=draw(sometimes(st.sampled_from(((64, 64), (128, 64), (64, 128), (192, 128))))),
        block_dims=draw(st.sampled_from(("", "b", "h", "bh"))), blocks_beyond=draw(st.booleans()),
        softcap=draw(sometimes(st.sampled_from((0.5, 5.0, 30.0)), 0.0)),
        alibi=draw(sometimes(st.sampled_from(("h", "bh")), "")),
        sinks=draw(sometimes(st.sampled_from(("normal", "high", "low")), "")),
        dropout=draw(sometimes(st.sampled_from((0.1, 0.5, 0.9, 0.9999, 1e-6)), 0.0)),
        packed_q=draw(flag), packed_k=packed_k, used_q=draw(flag),
        used_k=draw(flag) or (page_size > 0 and draw(st.booleans())), leftpad=draw(flag), page_size=page_size,
        indexed=not page_size and not packed_k and draw(flag), num_splits=draw(st.one_of(st.none(), st.integers(1, 7))),
        memory=draw(sometimes(st.sampled_from(SMALL_MEMORY[1:]), "plain")),
        pack=draw(st.booleans()), seed=draw(st.integers(0, 2**16)), bounded=draw(st.booleans()),
    )  # fmt: skip
    # Where sequences differ in which of their rows count, they have rows of their own.
    lengths = ("packed_q", "packed_k", "used_q", "used_k", "leftpad", "page_size", "indexed")
    layouts = OF_EACH if any(getattr(problem, name) for name in lengths) else LAYOUTS
    return replace(problem, layout=draw(st.sampled_from(layouts)))
