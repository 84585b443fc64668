"""Which probabilities dropout keeps, on the CPU: those that the kernels keep (src/general/dropout.h)."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

#: Keys whose numbers come from the same four counters; 16-bit numbers a counter.
KEYS_PER_GROUP = 32


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

    A counter is (query, 4 * group of 32 keys + pair, sequence and head, 0). Its words hold the numbers of the
    keys 2 * pair and 2 * pair + 1 of each eight, as a lane of an mma accumulator has them.
    """
    first, last = keys[0] // KEYS_PER_GROUP, -(-keys[1] // KEYS_PER_GROUP)
    pairs = torch.arange(4 * first, 4 * last)
    heads = torch.arange(sequence * num_heads, (sequence + 1) * num_heads)[:, None, None]
    rows = torch.arange(*queries)[:, None]
    words = philox((seed & _WORD, seed >> 32 & _WORD), (rows, pairs, heads, torch.zeros_like(pairs)))
    halves = torch.stack(
        [half for word in torch.broadcast_tensors(*words) for half in (word & 0xFFFF, word >> 16)]
    )
    # From [word, half, head, query, group, pair] to [head, query, group, word, pair, half]: keys in order.
    apart = halves.view(4, 2, num_heads, len(rows), last - first, 4).permute(2, 3, 4, 0, 5, 1)
    in_order = apart.reshape(num_heads, len(rows), (last - first) * KEYS_PER_GROUP)
    begin = keys[0] - first * KEYS_PER_GROUP
    return in_order[:, :, begin : begin + keys[1] - keys[0]] >= drop_below
