"""A mask of padding or packing, [batch, seqlen], in the words of ``attention``: lengths, where they can say it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

SAID = "_cutlass_fmha_said"
"""The attribute by which a mask [batch, seqlen_k], or positions, carry what they mean: layers need not find out."""


class Said(NamedTuple):
    """What a mask says of the calls that it is for."""

    causal: bool
    #: So many keys were there when it was made; a cache of fixed size has room behind them.
    seen: int
    #: Further arguments of ``attention``.
    arguments: dict[str, Any]


def padding(mask: Tensor, q_length: int, has_places: bool) -> dict[str, Any]:
    """Arguments of ``attention`` for what a padding mask hides, none for nothing. Waits for the device.

    Args:
        mask: bool [batch, seqlen_k], True for a token.
        q_length: queries of the call, the last of which stands where the last key does.
        has_places: whether queries have places among the keys, as causality and windows want it. Those behind
            a sequence's last token are then not computed; else they may be another sequence's than the keys.

    Returns:
        leftpad_k, seqused_k and seqused_q as needed where each row has one run of tokens, else ``mask``. A
        query of padding has output 0, or some number.
    """
    columns = mask.shape[1]
    first, count = mask.int().argmax(1).int(), mask.sum(1, dtype=torch.int32)
    end = first + count
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    # One look at the device for all four.
    whole, runs, from_first, to_last = torch.stack(
        [mask.all(), (starts <= 1).all(), (first == 0).all(), (end == columns).all()]
    ).tolist()
    if whole:
        return {}
    if not runs:
        return {"mask": mask[:, None, None, :]}
    said = {} if from_first else {"leftpad_k": first}
    if not to_last:
        said["seqused_k"] = end
        if has_places:
            said["seqused_q"] = (end - (columns - q_length)).clamp_(min=0)
    return said


def packing(sequences: Tensor) -> dict[str, Any]:
    """Arguments of ``packed_attention`` for rows of several sequences each. Waits for the device.

    Args:
        sequences: [batch, seqlen], numbers of which neighbours share one where they are of one sequence.
    """
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    starts = torch.cat([starts, starts.new_full((1,), sequences.numel())]).int()
    longest = int(starts.diff().max())
    return {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest,
    }  # fmt: skip
