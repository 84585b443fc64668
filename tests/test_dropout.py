"""Which probabilities dropout keeps: Philox by its known answers, and where its numbers go."""

from __future__ import annotations

import oracle_general
import pytest
import torch

from cutlass_fmha import attention, dropout

# Known answers of Random123 (Salmon, Moraes, Dror and Shaw 2011) for philox4x32-10: key, counter, words.
ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), ANSWERS)
def test_philox_gives_the_known_answers(key: tuple, counter: tuple, words: tuple):
    ours = dropout.philox(key, tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in ours) == words
    assert tuple(int(word) for word in oracle_general.philox(key, counter)) == words


def number_of(sequence: int, head: int, query: int, key: int) -> int:
    """The 16-bit number of a score: the largest threshold that keeps it, bit by bit."""
    number = 0
    for bit in reversed(range(16)):
        below = number + (1 << bit)
        if dropout.kept(0, below, sequence, 2, (query, query + 1), (key, key + 1))[head].item():
            number = below
    return number


def test_numbers_by_hand():
    """The first known answer is the counter of sequence, head and query 0 and of the first eight keys."""
    words = ANSWERS[0][2]
    for key, number in [
        (0, words[0] & 0xFFFF),
        (1, words[0] >> 16),
        (2, words[1] & 0xFFFF),
        (7, words[3] >> 16),
    ]:
        assert number_of(0, 0, 0, key) == number
    # Every eight keys, query, head and sequence have a counter of their own.
    places = [(0, 0, 0, 0), (0, 0, 0, 8), (0, 0, 0, 32), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)]
    assert len({number_of(*place) for place in places}) == len(places)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, -1, -(2**63)])
def test_ranges_are_pieces_of_the_whole(seed: int):
    whole = oracle_general.kept(seed % 2**64, 20000, 3, 2, 20, 100)
    assert abs(whole.mean() - (1 - 20000 / 65536)) < 0.03
    for queries in [(0, 20), (0, 1), (7, 9)]:
        for keys in [(0, 100), (31, 33), (64, 96), (5, 6), (10, 10)]:
            part = dropout.kept(seed, 20000, 3, 2, queries, keys)
            assert torch.equal(part, torch.from_numpy(whole[:, slice(*queries), slice(*keys)].copy()))


@pytest.mark.parametrize(("p", "below"), [(0.0, 0), (0.5, 32768), (0.1, 6554), (1e-6, 0), (0.999999, 65536)])
def test_the_threshold_is_rounded(p: float, below: int):
    assert dropout.threshold(p) == below


def test_a_seed_is_drawn_where_none_is_given():
    q, k, v = torch.randn(3, 1, 64, 2, 16).unbind(0)
    state = torch.get_rng_state()
    first = attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), state)
    second = attention(q, k, v, dropout_p=0.5)
    torch.set_rng_state(state)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), first) and not torch.equal(first, second)
    state = torch.get_rng_state()
    attention(q, k, v, dropout_p=0.5, dropout_seed=3)
    attention(q, k, v, dropout_p=0.0)
    attention(q, k, v, softcap=2.0)
    assert torch.equal(torch.get_rng_state(), state)
