"""Which probabilities dropout keeps: Philox by its known answers, and where its numbers go."""

from __future__ import annotations

import oracle_features
import pytest
import torch

from cutlass_fmha import _C, attention, dropout, dropout_mask

# Known answers of Random123 (Salmon, Moraes, Dror and Shaw 2011) for philox4x32-7: key, counter, words.
ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), ANSWERS)
def test_philox_gives_the_known_answers(key: tuple, counter: tuple, words: tuple):
    ours = dropout.philox(key, tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in ours) == words
    assert tuple(int(word) for word in oracle_features.philox(key, counter)) == words
    assert tuple(_C.host.philox(key[0] | key[1] << 32, counter)) == words


#: Of 65536 numbers, those that drop.
THRESHOLDS = [(0.0, 0), (1e-6, 0), (0.1, 6554), (0.5, 32768), (0.9999, 65529), (1 - 1e-9, 65535)]


@pytest.mark.parametrize(("p", "below"), THRESHOLDS)
def test_what_is_kept_is_divided_by_the_probability_of_that(p: float, below: int):
    """With 256 equal probabilities and the identity as values, the output is the mask."""
    assert dropout.threshold(p) == below
    shape = (2, 3, 300, 256)
    q, k = torch.zeros(2, 300, 3, 8), torch.zeros(2, 256, 1, 8)
    v = torch.eye(256).view(1, 256, 1, 256).expand(2, -1, -1, -1)
    mask = dropout_mask(5, *shape, p)
    out = attention(q, k, v, dropout_p=p, dropout_seed=5).transpose(1, 2)
    torch.testing.assert_close(out, mask / 256 * (65536 / (65536 - below)), rtol=1e-6, atol=0)
    assert mask.any() and mask.all() == (below == 0)


@pytest.mark.parametrize("seed", [7, -1, torch.tensor([2**63 - 1])], ids=str)
def test_the_mask_is_the_oracles(seed: int | torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dropout, "_CHUNK", 2000)  # several queries at a time, and not all
    mask = dropout_mask(seed, 3, 4, 33, 70, 0.3)
    assert mask.dtype == torch.bool and mask.shape == (3, 4, 33, 70)
    for b in range(3):
        expected = oracle_features.kept(int(seed) % 2**64, 19661, b, 4, 33, 70)
        assert torch.equal(mask[b], torch.from_numpy(expected))
    for shape in [(0, 4, 3, 5), (2, 0, 3, 5), (2, 4, 0, 5), (2, 4, 3, 0)]:
        assert dropout_mask(seed, *shape, 0.3).shape == shape


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
