"""Problems that every row is run on: those without features, and those with."""

import itertools
from dataclasses import replace
from typing import Any

from operands import CAUSAL, EXACT_FILLS, FILLS, LAYOUTS, OF_EACH
from problems import HEAD_DIMS, MEMORY, OUT_LAYOUTS, SMALL_MEMORY
from problems import Problem as P


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
        *each(113, 257, softcap=[0.5, 20.0, 50.0], causal="bottom-right"),
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
