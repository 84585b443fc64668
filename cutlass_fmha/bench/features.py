"""What the features of cases mean: as arguments of this package, and on the scores of a dense reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .cases import DOCUMENTS, PREFIX, WINDOW, Case

SOFTCAP = 30.0
DROPOUT = 0.1
SEED = 1


@dataclass
class Feature:
    """The feature of a case, with its tensors on a device. ``arguments`` are those of attention()."""

    case: Case
    device: torch.device
    arguments: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.arguments = getattr(self, f"_{self.case.feature}")()

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

    def _documents(self) -> dict[str, Any]:
        length = self.case.seqlen_q // DOCUMENTS
        ends = torch.arange(self.case.batch * DOCUMENTS + 1, device=self.device, dtype=torch.int32) * length
        lengths = {"max_seqlen_q": length, "max_seqlen_k": length}
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **lengths}

    def _prefix(self) -> dict[str, Any]:
        return {
            "prefix_lengths": torch.full((self.case.batch,), PREFIX, dtype=torch.int32, device=self.device)
        }

    def _bias(self) -> dict[str, Any]:
        shape = (1, 1, self.case.seqlen_q, self.case.seqlen_k)
        return {"bias": self._random(*shape).to(getattr(torch, self.case.dtype))}

    def _mask(self) -> dict[str, Any]:
        return {"mask": self._random(1, 1, self.case.seqlen_q, self.case.seqlen_k) > 0.0}

    # ---- meaning: of the last batch entry and its first heads --------------------------------------------

    def scores(self, scores: Tensor, rows: Tensor) -> Tensor:
        """[1, heads, rows, keys] to the same, before what is hidden is."""
        given = self.arguments
        if "softcap" in given:
            return SOFTCAP * torch.tanh(scores / SOFTCAP)
        if "bias" in given:
            scores = scores + given["bias"][:, :, rows]
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
        if feature == "documents":
            length = self.case.seqlen_q // DOCUMENTS
            return visible & (keys // length == (rows // length)[:, None])
        if feature == "mask":
            mask: Tensor = self.arguments["mask"]
            return mask[:, :, rows]
        return visible

    def weights(self, weights: Tensor, rows: Tensor) -> Tensor:
        """What becomes of the probabilities."""
        if self.case.feature != "dropout":
            return weights
        from cutlass_fmha import dropout

        sequence, keys = self.case.batch - 1, (0, self.case.seqlen_k)
        found = [
            dropout.kept(
                SEED, dropout.threshold(DROPOUT), sequence, self.case.num_heads, (row, row + 1), keys
            )
            for row in rows.tolist()
        ]
        kept = torch.cat(found, dim=1)[None, : weights.shape[1]].to(weights.device)
        return weights * kept / (1.0 - DROPOUT)
