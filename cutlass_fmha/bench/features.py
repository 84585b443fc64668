"""What the features of cases mean: as arguments of this package, and on the scores of a dense reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .cases import BLOCK, PREFIX, WINDOW, Case

SOFTCAP = 30.0
DROPOUT = 0.1
SEED = 1


@dataclass
class Feature:
    """What a call of a case says besides q, k and v: ``arguments`` of attention(), tensors on a device."""

    case: Case
    device: torch.device
    arguments: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = {"causal": self.case.causal, **self._lengths()}
        if self.case.feature:
            self.arguments |= getattr(self, f"_{self.case.feature}")()

    # ---- arguments ---------------------------------------------------------------------------------------

    def _random(self, *shape: int) -> Tensor:
        generator = torch.Generator(device=self.device).manual_seed(1)
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)

    def _window(self) -> dict[str, Any]:
        return {"window": (WINDOW, 0)}

    def _softcap(self) -> dict[str, Any]:
        return {"softcap": SOFTCAP}

    def _alibi(self) -> dict[str, Any]:
        """The slopes of its paper (Press et al. 2022): a geometric series down to 2^-8."""
        heads = torch.arange(1, self.case.num_heads + 1, device=self.device)
        return {"alibi_slopes": torch.exp2(-8.0 * heads / self.case.num_heads)}

    def _dropout(self) -> dict[str, Any]:
        return {"dropout_p": DROPOUT, "dropout_seed": SEED}

    def _ints(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _lengths(self) -> dict[str, Any]:
        case = self.case
        found: dict[str, Any] = {}
        if case.lengths:
            ends = self._ints(*accumulate(case.lengths, initial=0))
            found |= {"cu_seqlens_q": ends, "max_seqlen_q": case.seqlen_q}
            if not case.used:
                found |= {"cu_seqlens_k": ends, "max_seqlen_k": case.seqlen_k}
        return found | ({"seqused_k": self._ints(*case.used)} if case.used else {})

    def _prefix(self) -> dict[str, Any]:
        return {"prefix_lengths": self._ints(*[PREFIX] * self.case.batch)}

    def _sinks(self) -> dict[str, Any]:
        return {"sinks": self._random(self.case.num_heads)}

    def _topleft(self) -> dict[str, Any]:
        return {"causal": "top-left"}

    def _leftpad(self) -> dict[str, Any]:
        return {"leftpad_k": self._ints(*map(self.case.pad, range(self.case.batch)))}

    def _bias(self, heads: int = 1) -> dict[str, Any]:
        shape = (1, heads, self.case.seqlen_q, self.case.seqlen_k)
        return {"bias": self._random(*shape).to(getattr(torch, self.case.dtype))}

    def _head_bias(self) -> dict[str, Any]:
        return self._bias(self.case.num_heads)

    def _mask(self) -> dict[str, Any]:
        return {"mask": self._random(1, 1, self.case.seqlen_q, self.case.seqlen_k) > 0.0}

    def _block_mask(self) -> dict[str, Any]:
        rows, keys = (-(-length // BLOCK) for length in (self.case.seqlen_q, self.case.seqlen_k))
        named = self._random(1, 1, rows, keys).argsort(-1)[..., : keys // 2].sort(-1).values.to(torch.int32)
        return {"block_mask": (torch.full_like(named[..., 0], keys // 2), named.contiguous(), (BLOCK, BLOCK))}

    # ---- meaning: of the last sequence and its first heads ------------------------------------------------

    def scores(self, scores: Tensor, rows: Tensor) -> Tensor:
        """[1, heads, rows, keys] to the same, before what is hidden is."""
        given = self.arguments
        if "softcap" in given:
            return SOFTCAP * torch.tanh(scores / SOFTCAP)
        if "bias" in given:
            scores = scores + given["bias"][:, : scores.shape[1], rows]
        if "alibi_slopes" in given:
            distance = (rows[:, None] - torch.arange(scores.shape[-1], device=rows.device)).abs()
            slopes = given["alibi_slopes"][: scores.shape[1], None, None]
            scores = scores - slopes.to(scores.dtype) * distance
        return scores

    def visible(self, visible: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """Which keys each row sees, from those that the causal mask leaves."""
        feature = self.case.feature
        if feature == "window":
            return visible & (keys >= rows[:, None] - WINDOW)
        if feature == "prefix":
            return visible | (keys < PREFIX)
        if feature == "leftpad":
            return visible & (keys >= self.case.pad(self.case.batch - 1))
        if feature in ("mask", "block_mask"):
            return visible & self.mask()[:, :, rows]
        return visible

    def mask(self) -> Tensor:
        """[1, 1, queries, keys], of a mask or a block mask."""
        if "mask" in self.arguments:
            mask: Tensor = self.arguments["mask"]
            return mask
        _, named, _ = self.arguments["block_mask"]
        keys = -(-self.case.seqlen_k // BLOCK)
        blocks = torch.zeros(1, 1, named.shape[2], keys, dtype=torch.bool, device=self.device)
        blocks.scatter_(-1, named.long(), True)
        mask = blocks.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return mask[..., : self.case.seqlen_q, : self.case.seqlen_k]

    def weights(self, weights: Tensor, rows: Tensor) -> Tensor:
        """What becomes of the probabilities."""
        if self.case.feature != "dropout":
            return weights
        from cutlass_fmha import dropout

        sequence, keys = self.case.batch - 1, (0, self.case.seqlen_k)
        found = [
            dropout.kept(SEED, dropout.threshold(DROPOUT), sequence, self.case.num_heads, (row, row + 1), keys)
            for row in rows.tolist()
        ]
        kept = torch.cat(found, dim=1)[None, : weights.shape[1]].to(weights.device)
        return weights * kept / (1.0 - DROPOUT)
