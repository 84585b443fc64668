"""flash_attn.bert_padding: rows that padding is left out of, and back. Everything has gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of ``input`` [rows, ...] that ``indices`` [n] names: [n, ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``values`` [n, ...] as rows ``indices`` of [first_axis_dim, ...], the others 0."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``index_first_axis`` and ``input`` itself, for a residual connection."""
    return input.index_select(0, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one after the other. Waits for the device.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], bool or int: 1 (True) for a token.
        unused_mask: [batch, seqlen]: 1 for what has a row, and is none.

    Returns:
        The rows [total, ...] that either mask has; their indices [total] among all; cu_seqlens, int32
        [batch + 1]; the longest sequence; and how many tokens each has, int32 [batch].
    """
    present = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return (*_unpadded(hidden_states, present, present.sum(dim=-1, dtype=torch.int32)), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As ``unpad_input``, of rows that hold several sequences each.

    attention_mask_in_length: [batch, seqlen], int: the lengths of a row's sequences, then 0.
    """
    lengths = attention_mask_in_length.flatten()
    rows = torch.arange(hidden_states.shape[1], device=lengths.device)
    present = rows < attention_mask_in_length.sum(-1, keepdim=True)
    return _unpadded(hidden_states, present, lengths[lengths != 0])


def _unpadded(hidden_states: Tensor, present: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = present.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Rows [total, ...] where ``unpad_input`` found them: [batch, seqlen, ...], the others 0."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.view(batch, seqlen, *rows.shape[1:])
