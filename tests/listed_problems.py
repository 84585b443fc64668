"""Problems that every row is run on: those without features, and those with."""

from __future__ import annotations

from dataclasses import replace

from operands import CAUSAL, FILLS, LAYOUTS, OF_EACH
from problems import EXACT_FILLS, HEAD_DIMS, MEMORY, SMALL_MEMORY
from problems import Problem as P


def _masks() -> list[P]:
    found = [
        P(130, 300, causal=causal, window=window)
        for causal in CAUSAL
        for window in ((0, 0), (5, -1), (-1, 7), (64, 0), (300, 300), (33, 70))
    ]
    dims = ("bhqk", "qk", "k", "bk", "", "bqk", "hqk")
    found += [P(70, 200, mask=mask) for mask in zip(dims, MEMORY, strict=True)]
    found += [P(200, 130, causal=causal, prefix=True, num_heads=4) for causal in CAUSAL]
    found += [P(150, 300, causal=causal, window=(20, -1), prefix=True) for causal in CAUSAL[1:]]
    found += [
        P(200, 500, blocks=(64, 64)), P(200, 500, blocks=(64, 128), block_dims="", causal="bottom-right"),
        P(200, 500, blocks=(128, 64), block_dims="h", causal="top-left"),
        P(200, 500, blocks=(192, 128), block_dims="b"),
    ]  # fmt: skip
    for memory in SMALL_MEMORY:
        found += [P(q, 400, blocks=(64, 64), memory=memory, num_heads_kv=1) for q in (10, 150)]
    for page_size in (0, 16, 64):
        common = {"blocks": (64, 64), "blocks_beyond": True, "page_size": page_size}
        found += [P(q, 160, **common, used_k=used) for q in (5, 150) for used in (False, True)]
        found += [P(70, 160, **common, leftpad=True, head_dim=40, head_dim_v=33)]
    all_three = {"blocks": (64, 64), "window": (100, 0), "mask": ("hqk", "plain")}
    return [*found, P(300, 300, causal="bottom-right", **all_three)]


def _scores() -> list[P]:
    found = [
        P(70, 200, bias=(dims, kind, memory), causal=causal)
        for dims, memory, causal in zip(
            ("bhqk", "hqk", "hk", "q", "", "bqk", "hqk"), MEMORY, ("none", "bottom-right") * 4, strict=False
        )
        for kind in ("same", "float32")
    ]
    found += [P(70, 200, bias=("bhqk", kind, "plain"), bias_fill="minus-inf") for kind in ("same", "float32")]
    found += [P(113, 257, softcap=softcap, causal="bottom-right") for softcap in (0.5, 20.0, 50.0)]
    found += [P(113, 257, alibi=a, causal=causal, num_heads=4) for a in ("h", "bh") for causal in CAUSAL]
    found += [P(113, 257, alibi="bh", num_heads=4, dropout=0.3, memory=m) for m in SMALL_MEMORY[1:]]
    found += [P(113, 257, sinks=s, causal=c) for s in ("normal", "high", "low") for c in CAUSAL[::2]]
    found += [P(300, 100, sinks="normal", causal="bottom-right"), P(33, 0, sinks="normal")]
    found += [P(130, 300, dropout=p, causal=c) for p in (0.1, 0.5, 0.9999, 1e-6) for c in CAUSAL[::2]]
    bias = ("hqk", "same", "plain")
    return [*found, P(130, 300, softcap=10.0, bias=bias, alibi="h", sinks="normal", dropout=0.2)]


def _shapes() -> list[P]:
    found = [P(70, 130, head_dim=d, head_dim_v=d, causal="bottom-right") for d in HEAD_DIMS]
    found += [P(70, 130, head_dim=d, head_dim_v=v) for d, v in ((192, 128), (64, 256), (128, 8), (16, 100), (40, 33))]
    found += [
        P(65, 113, num_heads=6, num_heads_kv=3, batch=3, layout=layout, out_layout=out, causal="bottom-right")
        for layout in LAYOUTS
        for out in ("bshd", "bhsd", "padded", "unaligned")
    ]
    found += [P(q, k, causal=causal) for q, k in ((0, 5), (5, 0), (1, 1), (300, 0)) for causal in CAUSAL]
    return [*found, P(5, 7, batch=0), P(5, 7, num_heads=0, num_heads_kv=0)]


def _lengths() -> list[P]:
    found = []
    for causal in CAUSAL:
        found += [
            P(130, 200, batch=5, packed_q=True, packed_k=True, causal=causal),
            P(130, 200, batch=4, packed_q=True, packed_k=True, causal=causal, used_q=True, used_k=True),
            P(70, 300, batch=4, used_q=True, used_k=True, leftpad=True, causal=causal),
            P(130, 130, batch=3, packed_q=True, used_k=True, indexed=True, causal=causal),
            P(60, 300, batch=3, packed_q=True, page_size=48, used_k=True, leftpad=True, causal=causal),
            P(113, 257, batch=4, packed_q=True, packed_k=True, window=(40, 5), causal=causal, num_splits=3),
        ]
    found += [P(100, 300, batch=3, page_size=size, used_k=True) for size in (16, 48, 64, 256)]
    found += [P(9, 300, batch=3, page_size=48, used_k=True, memory=memory) for memory in SMALL_MEMORY[1:]]
    added = {"bias": ("bhqk", "float32", "plain"), "mask": ("bqk", "plain"), "dropout": 0.3}
    return [*found, P(40, 90, batch=3, packed_q=True, **added)]


def _decode() -> list[P]:
    """Few queries: heads packed, keys split."""
    found = [
        P(q, 1000, num_heads=heads, num_heads_kv=kv, num_splits=splits, pack=pack, causal=causal, used_k=True)
        for q, heads, kv, causal in ((1, 8, 1, "none"), (3, 12, 3, "bottom-right"), (17, 4, 2, "bottom-right"))
        for splits in (1, 2, 7)
        for pack in (False, True)
    ]
    pages = {"num_heads": 8, "num_heads_kv": 2, "num_splits": 4, "pack": True, "used_k": True}
    found += [P(2, 700, page_size=size, leftpad=size == 16, **pages) for size in (16, 64, 256)]
    bias = ("bhqk", "float32", "transposed")
    scores = {"alibi": "bh", "sinks": "normal", "softcap": 15.0, "bias": bias, "dropout": 0.4}
    found += [P(5, 400, num_heads=6, num_heads_kv=2, num_splits=3, pack=True, window=(200, 0), **scores)]
    return [*found, P(4, 20, num_heads=4, num_heads_kv=1, num_splits=7, pack=True), P(1, 5, num_splits=64)]


def _numbers() -> list[P]:
    found = []
    for fill in FILLS:
        scale = 1.0 if fill in EXACT_FILLS else None
        found += [P(130, 300, fill=fill, scale=scale)]
        found += [P(70, 600, fill=fill, scale=scale, num_splits=3, causal="bottom-right")]
    found += [P(130, 300, scale=scale, window=(90, 0)) for scale in (0.0, -0.2, 3.0, 1e-6, 1e-45)]
    found += [P(70, 200, scale=-0.3, softcap=3.0, sinks="high")]
    return [*found, P(70, 200, fill="huge", scale=-1.0, causal="top-left")]


def _seeded(*made: P) -> list[P]:
    return [replace(problem, seed=seed) for seed, problem in enumerate(made)]


#: Each feature by itself around the tiles' sizes, pairs that meet in a kernel, numbers at the edge.
GROUPS = {
    "masks": _seeded(*_masks()), "scores": _seeded(*_scores()), "shapes": _seeded(*_shapes()),
    "lengths": _seeded(*_lengths()), "decode": _seeded(*_decode()), "numbers": _seeded(*_numbers()),
}  # fmt: skip


# Around the tiles' sizes (32, 64 and 256), both lengths, each longer than the other by less and by more than a tile.
LENGTHS = (
    (1, 1), (1, 17), (1, 113), (1, 1023), (17, 1), (17, 17), (17, 113), (17, 1023), (33, 96), (63, 65),
    (64, 64), (65, 63), (113, 1), (113, 17), (113, 113), (113, 1023), (128, 32), (255, 257), (256, 256),
    (257, 255), (1023, 1), (1023, 17), (1023, 113), (1023, 1023),
)  # fmt: skip


def listed() -> list[P]:
    """The problems every row is run on, without those whose layout it can't take. Each has its own seed."""
    heads = [(2, 2), (4, 2), (3, 1)]
    found = [
        P(*lengths, causal, num_heads=h, num_heads_kv=h_kv, return_lse=(i + j) % 4 > 0)
        for i, lengths in enumerate(LENGTHS)
        for j, causal in enumerate(CAUSAL)
        for h, h_kv in [heads[(i + j) % 3]]
    ]
    found += [P(q, k, causal) for q, k in ((0, 5), (1, 0), (5, 0), (300, 0), (0, 0)) for causal in CAUSAL]
    found += [P(5, 7, batch=0), P(5, 7, num_heads=0, num_heads_kv=0)]
    scales = (0.0, -0.2, 1.0, -3.0, 20.0, 1e-6, 1e-45, -1e-45)
    found += [P(130, 300, causal, scale=scale) for scale in scales for causal in ("none", "bottom-right")]
    found += [
        P(q, k, causal, fill=fill, scale=1.0 if fill in EXACT_FILLS else None, num_heads=4)
        for fill in FILLS
        for q, k, causal in ((130, 300, "none"), (300, 300, "bottom-right"), (70, 1023, "none"))
    ]
    found += [P(130, 300, "bottom-right", fill="small", scale=2.0**40), P(200, 500, fill="steep-ramp", scale=-0.1)]
    found += [P(64, 64, "top-left", fill="huge", scale=-1.0)]
    found += [
        P(q, k, causal, batch=3, num_heads=6, num_heads_kv=3, layout=layout)
        for layout in (*OF_EACH, "packed")
        for q, k, causal in ((113, 113, "bottom-right"), (65, 300, "none"))
    ]
    return _seeded(
        *found,
        P(3, 5, batch=1, num_heads=64, num_heads_kv=8),
        P(1, 70, batch=300, num_heads=8, num_heads_kv=1),
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
