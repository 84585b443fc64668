"""Batches of a serving engine over a paged cache, and what attention of each request alone is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle_features
import torch
from tensors import randn
from torch import Tensor

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 32, 16

#: Keys and values in the cache of each request, and new tokens: a prompt, a part of one, single tokens, two
#: drafts, the first token of all; and single tokens alone.
MIXED = ((0, 37), (48, 21), (100, 1), (15, 1), (31, 3), (0, 1))
DECODE = ((100, 1), (15, 1), (16, 1), (64, 1))


@contextlib.contextmanager
def stand_ins(name: str) -> Iterator[None]:
    """Within it, ``import name`` finds the modules of tests/engines, and afterwards not."""
    where = str(Path(__file__).parent / "engines")
    sys.path.insert(0, where)
    try:
        yield
    finally:
        sys.path.remove(where)
        for module in [x for x in sys.modules if x.split(".")[0] == name or x.endswith(f"{name}_backend")]:
            del sys.modules[module]


class Requests:
    """Queries, keys and values of a batch, each request's whole, and pages for them in no order."""

    def __init__(self, lengths: tuple[tuple[int, int], ...]) -> None:
        self.old, self.new = ([pair[i] for pair in lengths] for i in (0, 1))
        self.used = [sum(pair) for pair in lengths]
        self.q = [randn(new, HEADS, DIM, seed=i) for i, new in enumerate(self.new)]
        self.k = [randn(used, HEADS_KV, DIM, seed=10 + i) for i, used in enumerate(self.used)]
        self.v = [randn(used, HEADS_KV, DIM, seed=20 + i) for i, used in enumerate(self.used)]
        pages = [-(-used // PAGE) for used in self.used]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).int() + 1
        #: Rows beyond a request's own pages are of no page at all.
        self.table = torch.full((len(lengths), max(pages) + 2), -7, dtype=torch.int32)
        for row, own in zip(self.table, order.split(pages), strict=True):
            row[: len(own)] = own
        self.pages = 1 + sum(pages)
        self.starts = torch.tensor([0, *self.new]).cumsum(0).int()

    def slots(self, number: int, begin: int, end: int) -> Tensor:
        """Where in the cache a request's rows lie, in rows of it."""
        at = torch.arange(begin, end)
        return self.table[number, at // PAGE].long() * PAGE + at % PAGE

    def expected(self, causal: str = "bottom-right", keys: list[int] | None = None, **said: Any) -> Tensor:
        """[total tokens, num_heads, head_dim] in fp64. keys: so many of each request are seen, for all."""
        of_each = [
            oracle_features.attention(q[None], k[None, :used], v[None, :used], causal=causal, **said)[0][0]
            for q, k, v, used in zip(self.q, self.k, self.v, keys or self.used, strict=True)
        ]
        return torch.cat(of_each)


def is_close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=1e-4, atol=1e-5)
