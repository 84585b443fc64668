"""Which probabilities dropout keeps, on the CPU: those that the kernels keep (src/general/dropout.h)."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

#: Keys whose 16-bit numbers one counter gives.
KEYS_PER_COUNTER = 8


def threshold(dropout_p: float) -> int:
    """A 16-bit random number below it drops its key."""
    return round(dropout_p * 65536)


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011): the 32-bit words of each counter, in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps to negative numbers; its bits are right, and the mask takes them.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> 32 & _WORD) ^ c1 ^ k0, product1 & _WORD
        c2, c3 = (product0 >> 32 & _WORD) ^ c3 ^ k1, product0 & _WORD
        k0, k1 = k0 + _INCREMENTS[0] & _WORD, k1 + _INCREMENTS[1] & _WORD
    return c0, c1, c2, c3


def kept(
    seed: int, drop_below: int, sequence: int, num_heads: int, queries: tuple[int, int], keys: tuple[int, int]
) -> Tensor:
    """[num_heads, queries, keys] bool, for ranges of the queries and keys of sequence number ``sequence``.

    A counter is (query, eighth of the keys, sequence and head, 0). Its words hold the numbers of the eight
    keys in order, two each, the first in the low half.
    """
    first, last = keys[0] // KEYS_PER_COUNTER, -(-keys[1] // KEYS_PER_COUNTER)
    eighths = torch.arange(first, last)
    heads = torch.arange(sequence * num_heads, (sequence + 1) * num_heads)[:, None, None]
    rows = torch.arange(*queries)[:, None]
    words = philox((seed & _WORD, seed >> 32 & _WORD), (rows, eighths, heads, torch.zeros_like(eighths)))
    halves = [half for word in torch.broadcast_tensors(*words) for half in (word & 0xFFFF, word >> 16)]
    in_order = torch.stack(halves, -1).flatten(-2)
    begin = keys[0] - first * KEYS_PER_COUNTER
    return in_order[:, :, begin : begin + keys[1] - keys[0]] >= drop_below
