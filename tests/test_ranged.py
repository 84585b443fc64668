"""Ranged and score-mod rows among the others: what they take, how they divide, when they are picked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fake_build import L4, Row, make_build

from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import blocks, choose, eligibility
from cutlass_fmha.dispatch.describe import describe
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import EVEN, Problem, class_of, mean_length, typical
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.features import Features

RANGED = Row(9999, 89, "bfloat16", 128, 256, 64, 8, "cp_async_16", 98 * 1024, 1, 1, 1, False, True, False, True, True)
HOPPER = Device("NVIDIA H200", (9, 0), 132, 227 * 1024)
SCORE_MOD = replace(RANGED, index=9998, tile_n=48, ranged=False, score_mod=True)
MASKED = replace(RANGED, index=9997, tile_n=32, ranged=False, masked=True)
BUILD = Table((*make_build((89,)).rows, RANGED, SCORE_MOD, MASKED))  # type: ignore[arg-type]
PACKED = Problem(8, 2048, 2048, 16, 16, 128, "bfloat16", "bottom-right", features=("varlen",))


def reasons(problem: Problem, row: Row = RANGED) -> list[str]:
    return eligibility.reasons(row, problem, L4, BUILD)  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", ["window", "prefix", "sinks", "varlen", "lengths", "pages", "cache_batch_idx"])
def test_ranges_and_where_keys_stand_are_no_reason(feature: str):
    assert reasons(replace(PACKED, features=(feature,))) == []


@pytest.mark.parametrize("feature", ["mask", "bias", "softcap", "alibi", "dropout", "block_mask", "splits"])
def test_what_becomes_of_scores_takes_a_scored_row(feature: str):
    (reason,) = reasons(replace(PACKED, features=(feature,)))
    assert reason.startswith("has no ") and reason.endswith(": that takes a scored row")


@pytest.mark.parametrize("feature", ["softcap", "alibi", "dropout"])
def test_score_mod_rows_take_what_becomes_of_a_score_by_itself(feature: str):
    assert reasons(replace(PACKED, features=("window", feature)), SCORE_MOD) == []
    (reason,) = reasons(replace(PACKED, features=("mask", feature)), SCORE_MOD)
    assert reason == "has no boolean mask: that takes a scored row"
    (reason,) = reasons(PACKED, SCORE_MOD)
    assert reason.endswith("without them, a ranged row is faster")


@pytest.mark.parametrize("feature", ["mask", "bias"])
def test_masked_rows_take_a_mask_or_a_bias(feature: str):
    asked = replace(PACKED, features=("window", feature))
    assert reasons(asked, MASKED) == []
    for more in ("softcap", "alibi", "dropout", "block_mask", "splits"):
        (reason,) = reasons(replace(asked, features=(feature, more)), MASKED)
        assert reason.endswith(": that takes a scored row")
    (reason,) = reasons(replace(asked, features=("mask", "bias")), MASKED)
    assert reason.startswith("takes a mask or a bias, not both")
    (reason,) = reasons(replace(asked, score_runs=False), MASKED)
    assert reason.startswith("reads a mask, or a bias of q's dtype, by 4 keys")
    (reason,) = reasons(PACKED, MASKED)
    assert reason.endswith("without them, a ranged row is faster")


def test_masks_and_biases_that_masked_rows_can_read():
    """All dimensions may be broadcast but the keys'; rows begin at multiples of four keys."""
    q, k = torch.empty(2, 24, 4, 64, dtype=torch.float16), torch.empty(2, 40, 4, 64, dtype=torch.float16)
    buffer = torch.empty(2 * 4 * 24 * 64 + 8, dtype=torch.float16)

    def runs(name: str, x: torch.Tensor, k: torch.Tensor = k, **more: object) -> bool:
        x = x > 0 if name == "mask" and x.dtype != torch.bool else x
        return describe((q, k, k), "none", Features(**{name: x}, **more)).problem.score_runs

    whole = buffer[:-8].view(2, 4, 24, 64)
    as_bool = torch.empty(buffer.shape, dtype=torch.bool)[:-8].view(2, 4, 24, 64)
    for name, x in (("bias", whole), ("mask", as_bool)):
        assert runs(name, x[..., :40])
        assert runs(name, x[..., 4:44]) and not runs(name, x[..., 2:42]) and not runs(name, x[..., 1:41])
        assert runs(name, x[:1, :1, :, :40]) and runs(name, x[:, :, :1, :40]) and runs(name, x[0, 0, 0, :40])
        assert runs(name, x[:1, :, :, :40].expand(2, -1, -1, -1))
        assert runs(name, x[..., :40].transpose(0, 1).contiguous().transpose(0, 1))
        assert not runs(name, x[..., :1]) and not runs(name, x[..., :1].expand(-1, -1, -1, 40))
        assert not runs(name, x[..., :40].transpose(2, 3).contiguous().transpose(2, 3))
        assert not runs(name, x.reshape(2, 4, -1)[..., : 24 * 41].view(2, 4, 24, 41)[..., :40])
        for keys in (1, 17, 38):
            assert not runs(name, x[..., :keys], k[:, :keys])
        used = {"seqused_k": torch.zeros(2, dtype=torch.int32), "max_seqlen_k": 40}
        assert runs(name, x[..., :40], **used) and not runs(name, x[..., :40], **used, batch_invariant=True)
    assert not runs("bias", whole[..., :40].float())


def test_runs_of_a_page_that_tma_copies():
    features = ("pages", "leftpad")
    by_tma = replace(RANGED, arch=90, copy="tma")
    (reason,) = eligibility.reasons(by_tma, replace(PACKED, features=features), HOPPER, make_build((90,)))  # type: ignore[arg-type]
    assert reason == "copies whole runs of a page's rows, which left padding doesn't leave"
    assert reasons(replace(PACKED, features=features)) == []


def test_whole_vectors_alone():
    assert reasons(replace(PACKED, head_dim=72)) == []
    (reason,) = reasons(replace(PACKED, head_dim=72, head_dim_v=33))
    assert reason == "takes head dims that are multiples of 8, and the tensors have 72, value 33"
    (reason,) = reasons(replace(PACKED, alignment=8))
    assert reason == "needs pointers and strides aligned to 16 bytes, and these are aligned to 8"
    assert reasons(replace(PACKED, head_dim=136)) == ["made for head dims up to 128, and the tensors have 136"]


def test_documents_are_for_ranged_rows_and_dense_calls_are_not():
    default = store.default(L4)
    assert choose.choose(PACKED, L4, table=BUILD, calibration=default) is RANGED
    dense = replace(PACKED, features=())
    assert choose.choose(dense, L4, table=BUILD, calibration=default).family == "plain"
    assert choose.choose(replace(PACKED, features=("varlen", "softcap")), L4, table=BUILD) is SCORE_MOD
    for feature in ("mask", "bias"):
        asked = replace(PACKED, features=("varlen", feature))
        assert choose.choose(asked, L4, table=BUILD) is MASKED
        assert choose.choose(replace(asked, score_runs=False), L4, table=BUILD).family == "scored"
        few = replace(asked, batch=1, seqlen_q=1, seqlen_k=16384)
        assert choose.choose(few, L4, table=BUILD).scored


def test_their_keys_are_not_split():
    few = replace(PACKED, batch=1, seqlen_q=300, num_heads=1, num_heads_kv=1, seqlen_k=32768)
    assert blocks.split_keys(RANGED, few, L4) == 1  # type: ignore[arg-type]
    rows = [row for row in BUILD.rows if row.family == "scored" and row.dtype == "bfloat16"]
    scored = next(row for row in rows if row.head_dim == 128)
    assert blocks.split_keys(scored, few, L4) > 1


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("tile_m", [128, 256])
@pytest.mark.parametrize(
    ("shortest", "longest", "count"), [(1024, 1024, 16), (200, 300, 64), (40, 2900, 24), (4000, 7000, 3)]
)
def test_packed_documents_count_as_long_as_they_are(shortest: int, longest: int, count: int, tile_m: int, causal: str):
    """Not as long as the longest, by which there would be up to twice as many steps."""
    row = replace(RANGED, tile_m=tile_m)
    lengths = [shortest + (longest - shortest) * number // (count - 1) for number in range(count)]
    mean = mean_length(sum(lengths), count, longest)
    packed = replace(PACKED, causal=causal, batch=count, seqlen_q=longest, seqlen_k=longest, mean=(mean, mean))
    found = blocks.groups(row, packed, L4)
    alone = (replace(packed, batch=1, seqlen_q=each, seqlen_k=each, mean=EVEN) for each in lengths)
    expected = [group for each in alone for group in blocks.groups(row, each, L4)]
    for name in ("block", "steps", "warp_steps"):
        total, exact = (sum(g.blocks * getattr(g, name) for g in groups) for groups in (found, expected))
        assert total == pytest.approx(exact, rel=0.12)
    assert packed.elements_written == pytest.approx(sum(lengths) * 16 * 128, rel=0.12)
    assert packed.elements_read == pytest.approx(3 * sum(lengths) * 16 * 128, rel=0.12)
    of_class = typical(packed)
    assert typical(of_class) == of_class
    assert of_class.mean[0] == pytest.approx(mean, rel=0.25)
    assert of_class.seqlen_q == pytest.approx(longest, rel=0.5)


def test_shapes_tell_how_long_documents_are_on_average():
    def mean(rows_q: int, rows_k: int, **more: bool) -> tuple[int, int]:
        q, k = (torch.empty(rows, 2, 64, dtype=torch.float16) for rows in (rows_q, rows_k))
        cu = torch.empty(5, dtype=torch.int32)
        features = Features(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=100, max_seqlen_k=300, **more)
        return describe((q, k, k), "bottom-right", features).problem.mean

    assert mean(400, 1100) == EVEN  # about as long as the longest
    assert mean(200, 301) == (50, 76)
    assert mean(0, 1) == (0, 1)
    assert mean(0, 0) == EVEN
    assert mean(200, 300, batch_invariant=True) == EVEN


def test_batches_of_like_documents_are_of_few_classes():
    """Each batch has another mean and another longest: rows are not compared anew for most."""
    generator, classes = random.Random(1), set()
    for _ in range(1000):
        lengths = [generator.randint(20, 400) for _ in range(generator.randint(15, 17))]
        mean, longest = mean_length(sum(lengths), len(lengths), max(lengths)), max(lengths)
        said = {"batch": len(lengths), "seqlen_q": longest, "seqlen_k": longest, "mean": (mean, mean)}
        classes.add(class_of(replace(PACKED, **said)))
    assert len(classes) <= 7
