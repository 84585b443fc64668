"""Ranged rows among the others: what they take, how they divide, when they are picked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_build import L4, Row, make_build

from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import blocks, choose, eligibility
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.dispatch.table import Table

RANGED = Row(
    9999, 89, "bfloat16", 128, 256, 64, 8, "cp_async_16", 98 * 1024, 1, 1, 1, False, True, False, True, True
)
BUILD = Table((*make_build((89,)).rows, RANGED))  # type: ignore[arg-type]
PACKED = Problem(8, 2048, 2048, 16, 16, 128, "bfloat16", "bottom-right", features=("varlen",))


def reasons(problem: Problem) -> list[str]:
    return eligibility.reasons(RANGED, problem, L4, BUILD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "feature", ["window", "prefix", "sinks", "varlen", "lengths", "pages", "cache_batch_idx"]
)
def test_ranges_and_where_keys_stand_are_no_reason(feature: str):
    assert reasons(replace(PACKED, features=(feature,))) == []


@pytest.mark.parametrize("feature", ["mask", "bias", "softcap", "alibi", "dropout", "block_mask", "splits"])
def test_what_becomes_of_scores_takes_a_scored_row(feature: str):
    (reason,) = reasons(replace(PACKED, features=(feature,)))
    assert reason.startswith("has no ") and reason.endswith(": that takes a scored row")


def test_whole_vectors_alone():
    assert reasons(replace(PACKED, head_dim=72)) == []
    assert reasons(replace(PACKED, head_dim=72, head_dim_v=33)) == [
        "takes head dims that are multiples of 8, and the tensors have 72, value 33"
    ]
    assert reasons(replace(PACKED, alignment=8)) == [
        "needs pointers and strides aligned to 16 bytes, and these are aligned to 8"
    ]
    assert reasons(replace(PACKED, head_dim=136)) == [
        "made for head dims up to 128, and the tensors have 136"
    ]


def test_documents_are_for_ranged_rows_and_dense_calls_are_not():
    default = store.default(L4)
    assert choose.choose(PACKED, L4, table=BUILD, calibration=default) is RANGED
    dense = replace(PACKED, features=())
    assert choose.choose(dense, L4, table=BUILD, calibration=default).family == "plain"
    assert choose.choose(replace(PACKED, features=("varlen", "softcap")), L4, table=BUILD).family == "scored"


def test_their_keys_are_not_split():
    few = replace(PACKED, batch=1, seqlen_q=300, num_heads=1, num_heads_kv=1, seqlen_k=32768)
    assert blocks.split_keys(RANGED, few, L4) == 1  # type: ignore[arg-type]
    scored = next(
        row
        for row in BUILD.rows
        if row.family == "scored" and row.head_dim == 128 and row.dtype == "bfloat16"
    )
    assert blocks.split_keys(scored, few, L4) > 1
