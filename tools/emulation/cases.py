"""The problems that rows are measured on: long ones, where a kernel is its main loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

#: Head dimension -> batch, heads, seqlen. Tiles of 256, 128 and 64 queries make whole waves on 132 SMs: the
#: last wave of a target would be another one.
SHAPES: dict[int, tuple[int, int, int]] = {
    32: (12, 11, 4096),
    64: (12, 11, 4096),
    96: (3, 11, 8192),
    128: (3, 11, 8192),
    192: (3, 11, 4096),
    256: (3, 11, 4096),
}


@dataclass(frozen=True)
class Case:
    """Self-attention in bf16, [batch, seqlen, num_heads, head_dim] contiguous."""

    head_dim: int
    causal: bool
    batch: int
    num_heads: int
    seqlen: int

    @property
    def flop(self) -> float:
        """Of both products over the visible pairs, counted exactly."""
        pairs = self.seqlen * (self.seqlen + 1) / 2 if self.causal else self.seqlen**2
        return 4.0 * self.batch * self.num_heads * pairs * self.head_dim

    @property
    def label(self) -> str:
        mask = " causal" if self.causal else ""
        return f"B{self.batch} H{self.num_heads} S{self.seqlen} D{self.head_dim} bf16{mask}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "label": self.label, "flop": self.flop}


def cases(head_dims: Iterable[int]) -> list[Case]:
    """Full and causal for each head dimension. Raises ValueError for one without a shape."""
    wanted = sorted(set(head_dims))
    unknown = [dim for dim in wanted if dim not in SHAPES]
    if unknown:
        known = ", ".join(map(str, SHAPES))
        raise ValueError(f"head_dim must be one of {known}, got {unknown[0]}")
    return [Case(dim, causal, *SHAPES[dim]) for dim in wanted for causal in (False, True)]
