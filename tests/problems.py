"""Attention problems as data, so that the same lists run against every row, without features and with them, a report
can name what failed, and hypothesis can draw more. ``operands.py`` makes their tensors."""

import itertools
import random
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from operands import CAUSAL, EXACT_FILLS, FILLS, LAYOUTS, OF_EACH, Call, Maker, filled, lay_out
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
P = Problem  # in the lists of what every row is run on
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


def _seeded(*made: P) -> list[P]:
    return [replace(problem, seed=seed) for seed, problem in enumerate(made)]


def each(*lengths: int, **choices: Any) -> list[P]:
    """All combinations: what is a list is of several choices."""
    lists = [x if isinstance(x, list) else [x] for x in choices.values()]
    return [P(*lengths, **dict(zip(choices, chosen, strict=True))) for chosen in itertools.product(*lists)]


NOTHING = P(5, 7, batch=0), P(5, 7, num_heads=0, num_heads_kv=0)
ALL, ALIGNED, KINDS = [*CAUSAL], [*CAUSAL[::2]], ["same", "float32"]
MASKS = [*zip(("bhqk", "qk", "k", "bk", "", "bqk", "hqk"), MEMORY, strict=True)]
BIASES = zip(("bhqk", "hqk", "hk", "q", "", "bqk", "hqk"), MEMORY, strict=True)
BLOCKS = {"blocks": (64, 64), "blocks_beyond": True, "page_size": [0, 16, 64]}
PACKED, GROUPED = {"packed_q": True, "packed_k": True}, {"num_heads": 6, "num_heads_kv": 3, "batch": 3}
PAGES = {"num_heads": 8, "num_heads_kv": 2, "num_splits": 4, "pack": True, "used_k": True}
WHOLE = ("bhqk", "float32", "plain")
SCORES = {"alibi": "bh", "sinks": "normal", "softcap": 15.0, "bias": ("bhqk", "float32", "transposed"), "dropout": 0.4}
FILLED = [{"fill": fill, "scale": 1.0 if fill in EXACT_FILLS else None} for fill in FILLS]
#: Each feature by itself around the tiles' sizes, pairs that meet in a kernel, numbers at the edge.
_GROUPS = {
    "masks": [
        *each(130, 300, causal=ALL, window=[(0, 0), (5, -1), (-1, 7), (64, 0), (300, 300), (33, 70)]),
        *each(70, 200, mask=MASKS),
        *each(200, 130, causal=ALL, prefix=True, num_heads=4),
        *each(150, 300, causal=ALL[1:], window=(20, -1), prefix=True),
        *(P(200, 500, blocks=(64, 64)), P(200, 500, blocks=(192, 128), block_dims="b")),
        P(200, 500, blocks=(64, 128), block_dims="", causal="bottom-right"),
        P(200, 500, blocks=(128, 64), block_dims="h", causal="top-left"),
        *each(blocks=(64, 64), seqlen_k=400, memory=[*SMALL_MEMORY], seqlen_q=[10, 150], num_heads_kv=1),
        *each(**BLOCKS, seqlen_k=160, seqlen_q=[5, 150], used_k=[False, True]),
        *each(70, 160, **BLOCKS, leftpad=True, head_dim=40, head_dim_v=33),
        P(300, 300, causal="bottom-right", blocks=(64, 64), window=(100, 0), mask=("hqk", "plain")),
        P(600, 65, "top-left", blocks=(64, 64), window=(3, -1), page_size=16, used_k=True),
    ],
    "scores": [
        *(
            P(70, 200, bias=(dims, kind, memory), causal=ALIGNED[n % 2])
            for n, (dims, memory) in enumerate(BIASES)
            for kind in KINDS
        ),
        *each(70, 200, bias=[("bhqk", kind, "plain") for kind in KINDS], bias_fill="minus-inf"),
        *each(113, 257, softcap=[0.5, 4.0, 20.0, 50.0], causal="bottom-right"),
        *each(113, 257, alibi=["h", "bh"], causal=ALL, num_heads=4),
        *each(113, 257, alibi="bh", num_heads=4, dropout=0.3, memory=[*SMALL_MEMORY[1:]]),
        *each(113, 257, sinks=["normal", "high", "low"], causal=ALIGNED),
        *(P(300, 100, sinks="normal", causal="bottom-right"), P(33, 0, sinks="normal")),
        *each(130, 300, dropout=[0.1, 0.5, 0.9999, 1e-6], causal=ALIGNED),
        P(130, 300, softcap=10.0, bias=("hqk", "same", "plain"), alibi="h", sinks="normal", dropout=0.2),
    ],
    "shapes": [
        *(P(70, 130, head_dim=d, head_dim_v=d, causal="bottom-right") for d in HEAD_DIMS),
        *(P(70, 130, head_dim=d, head_dim_v=v) for d, v in ((192, 128), (64, 256), (128, 8), (16, 100), (40, 33))),
        *each(65, 113, **GROUPED, layout=[*LAYOUTS], out_layout=[*OUT_LAYOUTS], causal="bottom-right"),
        *(P(*n, causal) for n in ((0, 5), (5, 0), (1, 1), (300, 0)) for causal in CAUSAL),
        *NOTHING,
    ],
    "lengths": [
        *(
            replace(problem, causal=causal)
            for causal in CAUSAL
            for problem in (
                P(130, 200, batch=5, **PACKED),
                P(130, 200, batch=4, **PACKED, used_q=True, used_k=True),
                P(70, 300, batch=4, used_q=True, used_k=True, leftpad=True),
                P(130, 130, batch=3, packed_q=True, used_k=True, indexed=True),
                P(60, 300, batch=3, packed_q=True, page_size=48, used_k=True, leftpad=True),
                P(113, 257, batch=4, **PACKED, window=(40, 5), num_splits=3),
            )
        ),
        *each(100, 300, batch=3, page_size=[16, 48, 64, 256], used_k=True),
        *each(9, 300, batch=3, page_size=48, used_k=True, memory=[*SMALL_MEMORY[1:]]),
        *each(9, 700, batch=3, window=(50, -1), page_size=[16, 48, 64, 256], used_k=True, prefix=[False, True]),
        P(40, 90, batch=3, packed_q=True, bias=WHOLE, mask=("bqk", "plain"), dropout=0.3),
    ],
    # Few queries: heads packed, keys split.
    "decode": [
        *(P(2, 700, page_size=size, window=(3 * size, 0), **PAGES) for size in (16, 48, 256)),
        *(
            P(q, 1000, c, num_heads=h, num_heads_kv=h_kv, num_splits=splits, pack=pack, used_k=True)
            for q, h, h_kv, c in ((1, 8, 1, "none"), (3, 12, 3, "bottom-right"), (17, 4, 2, "bottom-right"))
            for splits in (1, 2, 7)
            for pack in (False, True)
        ),
        *(P(2, 700, page_size=size, leftpad=size == 16, **PAGES) for size in (16, 64, 256)),
        P(5, 400, num_heads=6, num_heads_kv=2, num_splits=3, pack=True, window=(200, 0), **SCORES),
        *(P(4, 20, num_heads=4, num_heads_kv=1, num_splits=7, pack=True), P(1, 5, num_splits=64)),
    ],
    "numbers": [
        *(P(130, 300, **fill) for fill in FILLED),
        *(P(70, 600, **fill, num_splits=3, causal="bottom-right") for fill in FILLED),
        *each(130, 300, scale=[0.0, -0.2, 3.0, 1e-6, 1e-45], window=(90, 0)),
        *(P(70, 200, scale=-0.3, softcap=3.0, sinks="high"), P(70, 200, fill="huge", scale=-1.0, causal="top-left")),
    ],
}
GROUPS = {name: _seeded(*group) for name, group in _GROUPS.items()}


# Around the tiles' sizes (32, 64 and 256), both lengths, each longer than the other by less and by more than a tile.
LENGTHS = (
    *itertools.product((1, 17, 113, 1023), repeat=2),
    *((33, 96), (63, 65), (64, 64), (65, 63), (128, 32), (255, 257), (256, 256), (257, 255)),
)


def listed() -> list[P]:
    """The problems every row is run on, without those whose layout it can't take. Each has its own seed."""
    numbers = [(i, j, *of) for i, of in enumerate(LENGTHS) for j in range(3)]
    heads = [{"num_heads": h, "num_heads_kv": h_kv} for h, h_kv in ((2, 2), (4, 2), (3, 1))]
    return _seeded(
        *(P(*n, CAUSAL[j], **heads[(i + j) % 3], return_lse=(i + j) % 4 > 0) for i, j, *n in numbers),
        *(P(*n, causal) for n in ((0, 5), (1, 0), (5, 0), (300, 0), (0, 0)) for causal in CAUSAL),
        *NOTHING,
        *each(130, 300, scale=[0.0, -0.2, 1.0, -3.0, 20.0, 1e-6, 1e-45, -1e-45], causal=ALIGNED),
        *(
            P(q, k, causal, **fill, num_heads=4)
            for fill in FILLED
            for q, k, causal in ((130, 300, "none"), (300, 300, "bottom-right"), (70, 1023, "none"))
        ),
        *(P(130, 300, "bottom-right", fill="small", scale=2.0**40), P(200, 500, fill="steep-ramp", scale=-0.1)),
        P(64, 64, "top-left", fill="huge", scale=-1.0),
        *each(113, 113, **GROUPED, layout=[*OF_EACH, "packed"], causal="bottom-right"),
        *each(65, 300, **GROUPED, layout=[*OF_EACH, "packed"]),
        *(P(3, 5, batch=1, num_heads=64, num_heads_kv=8), P(1, 70, batch=300, num_heads=8, num_heads_kv=1)),
        # More (batch, head) pairs than the y and z dimensions of a grid hold.
        P(1, 2, batch=70000, num_heads=1, num_heads_kv=1),
        P(2, 1, batch=1, num_heads=70000, num_heads_kv=1),
        P(1, 20000, batch=1, num_heads=4, num_heads_kv=1),
        P(2048, 2048, "bottom-right", batch=1, num_heads=8, num_heads_kv=2),
    )


def is_short(p: P) -> bool:
    """Whether a simulator takes tens of milliseconds for it: few scores, and few heads in all batches."""
    blocks = p.batch * p.num_heads
    return blocks * p.seqlen_q * p.seqlen_k <= 2**20 and blocks <= 3000
