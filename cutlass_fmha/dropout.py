"""Which probabilities dropout keeps, and what it multiplies them by, as in src/features/dropout.h."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from cutlass_fmha.arguments.check import dtype_name, integer, number_of

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7

#: Queries and keys of a square within which counters have their numbers.
_SQUARE = 16
#: So many 16-bit numbers are there,
_NUMBERS = 1 << 16
#: as fp16 so many from 0 on, and so many that are less than infinity.
_POSITIVE = 0x7C01
_ORDERED = _POSITIVE + 0x7C00
#: Elements of a mask that are made at a time: their numbers take 16 times their bytes.
_CHUNK = 1 << 22


def threshold(dropout_p: float) -> int:
    """How many of 65536 random numbers drop their key: as fp16, 0 and -0 are equal, so that one count has no limit."""
    count = min(round(dropout_p * _NUMBERS), _NUMBERS - 1)
    return count + (count == _POSITIVE)


def scale(dropout_p: float) -> float:
    """What is kept is multiplied by this: the inverse of the probability of that, which leaves the mean."""
    return _NUMBERS / (_NUMBERS - threshold(dropout_p))


def check_probability(dropout_p: float) -> None:
    """Raises ValueError."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")


def check_seed(seed: Tensor) -> None:
    """Raises ValueError."""
    if seed.dtype != torch.int64 or seed.shape != (1,):
        raise ValueError(
            f"dropout_seed must be int64 of shape (1,), got {dtype_name(seed.dtype)} of shape {tuple(seed.shape)}"
        )


def seed_tensor(seed: int, device: torch.device | str | None) -> Tensor:
    """int64 [1]. Raises ValueError."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"dropout_seed must fit in 64 bits, got {seed}")
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def dropout_mask(
    dropout_seed: int | Tensor,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Which probabilities ``attention`` keeps with this ``dropout_p`` and ``dropout_seed``, bit for bit.

    Args:
        dropout_seed: int, or int64 [1], which is not read by the host.
        batch, num_heads: the call's; num_heads that of q.
        seqlen_q, seqlen_k: how many queries and keys of each sequence, no matter how many it has.
        dropout_p: in [0, 1). A 16-bit number decides, so that what counts is the nearest multiple of 1/65536
            (but 31746 of them for 31745), 65535/65536 at most: below 1/131072, nothing is dropped.
        device: where the mask is made; the seed's, or torch's default, when None.

    Returns:
        bool [batch, num_heads, seqlen_q, seqlen_k], True where a probability is kept, and then divided by
        that multiple's complement to 1. [b, h, i, j] is the b-th sequence's i-th query and j-th key, wherever
        they stand: query i of a packed sequence (cu_seqlens_q) is row cu_seqlens_q[b] + i, key 0 is the first
        one after left padding, and b counts sequences, not entries of a cache (cache_batch_idx).

    Raises:
        TypeError, ValueError: an argument is not what is described above.
    """
    sizes = {"batch": batch, "num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        if integer(name, size, or_else="") < 0:
            raise ValueError(f"{name} must be 0 or more, got {size}")
    dropout_p = number_of("dropout_p", dropout_p)
    check_probability(dropout_p)
    if isinstance(dropout_seed, Tensor):
        check_seed(dropout_seed)
        seed = dropout_seed if device is None else dropout_seed.to(device)
    else:
        seed = seed_tensor(int(integer("dropout_seed", dropout_seed, " or a torch.Tensor")), device)
    device = seed.device
    mask = torch.empty(batch, num_heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    # Whole squares: the numbers of others in one are made with them.
    step = _SQUARE * max(1, _CHUNK // max(1, _SQUARE * num_heads * seqlen_k))
    for b in range(batch):
        for first in range(0, seqlen_q, step):
            queries = first, min(first + step, seqlen_q)
            mask[b, :, slice(*queries)] = kept(seed, threshold(dropout_p), b, num_heads, queries, (0, seqlen_k))
    return mask


def philox(
    key: tuple[int | Tensor, int | Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Philox4x32-7 (Salmon, Moraes, Dror and Shaw 2011): the 32-bit words of each counter, in int64."""
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
    seed: int | Tensor,
    dropped: int,
    sequence: int,
    num_heads: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
) -> Tensor:
    """[num_heads, queries, keys] bool, for ranges of the queries and keys of sequence number ``sequence``.

    A counter is (queries, keys, sequence and head, 0), of queries i and i + 8 and keys j, j + 1, j + 8 and j + 9 of a
    square of 16 by 16. Its words hold the numbers of two neighbouring keys each, the first in the low half.
    """
    device = seed.device if isinstance(seed, Tensor) else "cpu"
    (first_row, rows), (first_key, columns) = _squares(*queries), _squares(*keys)
    heads = torch.arange(sequence * num_heads, (sequence + 1) * num_heads, device=device)[:, None, None]
    of_rows = torch.arange(first_row * 8, (first_row + rows) * 8, device=device)[:, None]
    of_keys = torch.arange(first_key * 4, (first_key + columns) * 4, device=device)
    words = philox((seed & _WORD, seed >> 32 & _WORD), (of_rows, of_keys, heads, torch.zeros_like(of_keys)))
    numbers = torch.stack([_as_half(half) for word in words for half in (word & 0xFFFF, word >> 16)], -1)
    # Head, square and query, square and pair of keys, half of queries, half of keys, which of the pair.
    numbers = numbers.view(num_heads, rows, 8, columns, 4, 2, 2, 2).permute(0, 1, 5, 2, 3, 6, 4, 7)
    numbers = numbers.reshape(num_heads, rows * _SQUARE, columns * _SQUARE)
    row, key = queries[0] - first_row * _SQUARE, keys[0] - first_key * _SQUARE
    own = numbers[:, row : row + queries[1] - queries[0], key : key + keys[1] - keys[0]]
    return _keeps(own, dropped)


def _squares(begin: int, end: int) -> tuple[int, int]:
    """The first one, and how many."""
    first = begin // _SQUARE
    return first, -(-end // _SQUARE) - first


def _keeps(numbers: Tensor, dropped: int) -> Tensor:
    """All but the ``dropped`` greatest; where that would take what is no number, only the greatest of the others."""
    if dropped > _ORDERED:
        return numbers > _half(_POSITIVE - 1 - (_NUMBERS - dropped))
    greatest = _POSITIVE - 1 - dropped if dropped < _POSITIVE else 0x8000 + dropped - _POSITIVE
    return ~(numbers > _half(greatest))


def _as_half(bits: Tensor) -> Tensor:
    """Of 16 bits in an int64."""
    return ((bits ^ 0x8000) - 0x8000).to(torch.int16).view(torch.float16)


def _half(bits: int) -> float:
    number: float = struct.unpack("<e", struct.pack("<H", bits))[0]
    return number
