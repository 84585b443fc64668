"""Wide rows without a GPU: which problems they take and why not others, and what a launch is told."""

import itertools
import logging
from dataclasses import replace
from typing import Any

import oracle_features
import pytest
import torch
from fake_kernels import FakeKernels
from launches import Launch
from problems import GROUPS
from torch import Tensor

from cutlass_fmha import _C, log
from cutlass_fmha.arguments.check_features import check_features
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.dispatch import blocks, eligibility
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.choose import choose
from cutlass_fmha.dispatch.describe import describe
from cutlass_fmha.dispatch.device import PRESETS
from cutlass_fmha.dispatch.families import wide, wide_scored
from cutlass_fmha.dispatch.problem import FEATURES, Problem
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.features import Features
from cutlass_fmha.launch import plan

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DEVICES = {89: "rtx4090", 90: "h200", 120: "rtx5090"}
ROWS = [row for row in _C.rows() if row.family == "wide"]


@pytest.fixture(autouse=True)
def _built() -> None:
    assert ROWS, "this build has no wide rows: build with CUDA and a whole CUTLASS, as make does"


def row_of(dtype: str = "float32", arch: int = 89, head_dim: int | None = None) -> _C.Row:
    """A row of the build: the one for any head dim, or that for ``head_dim``."""
    found = [row for row in ROWS if (row.dtype, row.arch) == (dtype, arch)]
    return max(found, key=lambda row: row.head_dim if head_dim is None else row.head_dim == head_dim)


def scored_row(dtype: str = "bfloat16") -> _C.Row:
    return next(x for x in _C.rows() if (x.family, x.dtype, x.head_dim) == ("wide_scored", dtype, 512))


def test_every_architecture_has_rows_for_all_that_is_asked_of_them():
    for arch in _C.build_info()["architectures"]:
        assert {row.dtype for row in ROWS if row.arch == arch and row.head_dim > 512} == set(DTYPES), f"sm_{arch}"
    for row in ROWS:
        assert not row.takes_features and repr(row) == f"<Row {row.name}>"
        with pytest.raises(AttributeError, match=f"{row.name} has no copy"):
            row.copy  # noqa: B018


def problem(dtype: str = "float32", head_dim: int = 64, **more: Any) -> Problem:
    return Problem(2, 128, 256, 8, 2, head_dim, dtype, **more)


def reasons(row: _C.Row, asked: Problem) -> list[str]:
    return eligibility.reasons(row, asked, devices.named(DEVICES[row.arch]), tables.this_build())


UNKNOWN = ("prefix", "block_mask", "softcap", "alibi", "sinks", "dropout", "pages", "splits")
FLOAT32_BIAS = {"features": ("bias",), "score_runs": None}
MULTIPLES = "takes block masks of blocks that are multiples of 64 x 64, and these are 64 x 32"
LEFT, ABOVE_256 = {"window": (9, 0)}, "for float32 and for head dims above 256, which no other row takes"


def test_what_a_row_does_not_take_is_a_reason():
    of_64, of_512, of_any = (lambda _, arch: row_of("float32", arch, 64)), (lambda x, _: scored_row(x)), row_of
    for row, asked, expected in (
        (of_any, problem(), ""),
        (of_any, problem(head_dim=700, head_dim_v=33), ""),
        (of_any, problem("float16", 264), ""),
        (of_any, problem("bfloat16", 128, head_dim_v=264), ""),
        (of_any, problem(features=("mask", "bias", "varlen", "lengths", "cache_batch_idx")), ""),
        (of_any, problem(causal="bottom-right", alignment=4), ""),
        (of_any, problem(features=("window",), window=(-1, 5)), ""),
        (of_any, problem(key_span=2**31 - 1), ""),
        (of_64, problem("float16", 256), ABOVE_256),
        (of_64, problem("float16", 300), "computes float32, and the tensors are float16"),
        (of_64, problem(head_dim=64, head_dim_v=72), "made for head dims up to 64, and the tensors have 72"),
        (of_64, problem(key_span=2**31), "its offsets are 32-bit, and the keys of a sequence span 2147483648"),
        (of_64, problem(features=("window",), **LEFT), "has no window with a left limit"),
        *((of_64, problem(features=(name,)), f"has no {FEATURES[name]}") for name in UNKNOWN),
        (of_512, problem(features=tuple(FEATURES), num_splits=3, block_mask=(64, 128), **LEFT), ""),
        (of_512, problem("bfloat16", 8, head_dim_v=512, features=("pages",), alignment=2, page_size=16), ""),
        (of_any, problem("bfloat16", 320, **FLOAT32_BIAS), "adds a bias of its own dtype bfloat16, and this one "),
        (of_512, problem("bfloat16", 256), ABOVE_256),
        (of_512, problem("bfloat16", 513), "made for head dims up to 512, and the tensors have 513"),
        (of_512, problem(features=("block_mask",), block_mask=(64, 32)), MULTIPLES),
    ):
        for found in (reasons(row(asked.dtype, arch), asked) for arch in DEVICES):
            assert found == [] if not expected else any(each.startswith(expected) for each in found), found


def test_the_least_head_dim_is_the_fastest_and_smaller_tiles_where_problems_do_not_fill_the_gpu():
    device = devices.named("h200")
    for head_dim, (batch, smallest) in itertools.product((64, 128), ((1, True), (64, False))):
        own = [row for row in ROWS if not row.example and row.head_dim == head_dim]
        asked = Problem(batch, 512, 512, 8, 8, head_dim, "float32")
        fastest = min(own, key=lambda row, asked=asked: wide.predicted_us(row, asked, device), default=None)
        assert fastest is None or (fastest.tile_m == min(row.tile_m for row in own)) == smallest
    for arch, head_dim in itertools.product({row.arch for row in ROWS}, (32, 64, 80, 128, 200, 512)):
        device, asked = devices.named(DEVICES[arch]), Problem(4, 4096, 4096, 16, 16, head_dim, "float32")
        able = [row for row in ROWS if not eligibility.reasons(row, asked, device, tables.this_build())]
        costs = {row: wide.predicted_us(row, asked, device) for row in able}
        assert min(costs, key=costs.__getitem__).head_dim == min(row.head_dim for row in able)
        assert all(0 < us < 1e7 for us in costs.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_taken_for_what_the_others_lack_and_to_split_keys(dtype: str):
    device = devices.named(DEVICES[scored_row().arch])
    prefill, decode = Problem(4, 2048, 2048, 8, 4, 512, dtype), Problem(1, 1, 16384, 8, 4, 512, dtype)
    for asked, family, splits in (
        (prefill, "wide", 1),
        (replace(prefill, features=("softcap",)), "wide_scored", 1),
        (replace(decode, features=("pages", "lengths"), page_size=16), "wide_scored", 9),
        (decode, "wide_scored", 9),
        (replace(prefill, **FLOAT32_BIAS), "wide" if dtype == "float32" else "wide_scored", 1),
    ):
        row = choose(asked, device, table=tables.this_build())
        assert (row.family, min(9, blocks.split_keys(row, asked, device))) == (family, splits)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    """What a kernel would read is read in its place."""
    log.forget()
    found = FakeKernels(tables.this_build())
    found.install(monkeypatch)
    return found


def launch(
    row: _C.Row, q: Tensor, k: Tensor, v: Tensor, causal: str = "none", **features: Any
) -> tuple[Tensor, Tensor | None]:
    said = {name: x for name, x in features.items() if name not in RESULTS}
    sizes = check_features((q, k, v), Features(**said))
    return wide.launch(row, sizes, causal, (q, k, v), 0.5, True, features)


def made(dtype: torch.dtype, seqlen: int, heads: int, head_dim: int) -> Tensor:
    return torch.randn(2, seqlen, heads, head_dim).to(dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("group", GROUPS)
def test_a_launch_packs_what_its_tensors_hold(group: str):
    for problem, dtype in zip(GROUPS[group], itertools.cycle(DTYPES), strict=False):
        Launch.of(row_of(dtype), problem, "cpu").check()


FIELDS = [name for name, kind in vars(_C.AttentionParams).items() if isinstance(kind, property)]


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("packed", ["", "in any batch", "invariant"])
def test_what_is_planned_is_what_a_call_is_told(kernels: FakeKernels, seqlen_q: int, packed: str):
    """Where no operand is copied, a call needs nothing but its plan and addresses. Heads are packed for one query."""
    q, k = made(torch.float32, seqlen_q, 4, 40), made(torch.float32, 5, 2, 40)
    said: dict[str, Any] = {"window_right": 1, "batch_invariant": packed == "invariant"}
    if packed:
        q, k, cu = q[0], k[0], torch.tensor([0, 1], dtype=torch.int32)
        said |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": seqlen_q, "max_seqlen_k": 5}
    launch(row_of(), q, k, k, **said)
    told = kernels.last
    assert told.pack == (2 if seqlen_q == 1 and packed != "invariant" else 1)
    assert kernels.launches[-1][2:] == (0, 0)  # the device and its stream
    prepared = wide.prepare(row_of(), describe((q, k, k), "none", Features(**said)), PRESETS["l4"])
    assert prepared.launch is None and prepared.room == 0
    of_a_call = {"q", "k", "v", "o", "lse", "scale", "cu_seqlens_q", "cu_seqlens_k", "device_lengths"}
    for name in set(FIELDS) - of_a_call:
        assert getattr(prepared.params, name) == getattr(told, name), name
    biased = describe((q, k, k), "none", Features(**said, bias=torch.zeros(1, 5)))
    assert wide.prepare(row_of(), biased, PRESETS["l4"]).launch is not None


def test_rows_of_fmas_take_any_alignment_but_that_of_a_bias(kernels: FakeKernels, recwarn: pytest.WarningsRecorder):
    q, k = made(torch.float32, 3, 4, 33), made(torch.float32, 8, 2, 50)[..., 1:34]
    bias = torch.randn(1, 4, 1, 8)
    launch(row_of(), q, k, k, bias=bias)
    p = kernels.last
    assert (p.q, p.k, p.head_dim) == (q.data_ptr(), k.data_ptr(), 33)
    assert p.bias == bias.data_ptr() and p.bias_stride == (0, 8, 0, 1)
    launch(row_of(), q, k, k, bias=torch.randn(33)[1:].view(1, 4, 1, 8))
    assert kernels.last.bias % 16 == 0
    said = {"mask": torch.arange(8) < 5, "bias": torch.tensor([0.0] * 5 + [torch.inf, torch.nan, 1.0])}
    out, lse = launch(row_of(), q, k, k, **said)  # whatever is added to a hidden key
    oracle_features.compare(out, lse, q, k[:, :5], k[:, :5], 0.5).check()
    assert launch(row_of(), q, k, k, mask=torch.tensor(True), bias=torch.tensor(1.0)) and not recwarn.list


def test_what_is_not_aligned_is_copied_and_told(kernels: FakeKernels, caplog: pytest.LogCaptureFixture):
    row = row_of("float16")
    q, k = made(torch.float16, 3, 2, 264), made(torch.float16, 5, 2, 300)[..., :264]
    with caplog.at_level(logging.WARNING, "cutlass_fmha"):
        for _ in range(2):
            out, lse = launch(row, q, k, k[..., :261])
    assert out.is_contiguous() and kernels.last.q == q.data_ptr() and kernels.last.partial_o != 0
    assert all(address % 16 == 0 for address in (kernels.last.k, kernels.last.v, kernels.last.o))
    oracle_features.compare(out, lse, q, k, k[..., :261], 0.5).check()
    q = made(torch.float32, 3, 4, 300)  # whose vectors are four numbers
    assert plan.prepare((q, q, q), "none", None, said={"softcap": 1.0}).launch is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "k and v have an address, a stride or a head dim that is not a multiple of 16 bytes: "
        f"{row.name} runs on a padded copy, which takes time and memory"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scored_row_reads_what_is_given_beside_copies(kernels: FakeKernels, dtype: str):
    """Of unaligned tensors, too: masks and biases as they are, heads packed, keys split."""
    row, q = scored_row(dtype), made(DTYPES[dtype], 1, 4, 261)
    k = made(DTYPES[dtype], 304, 2, 261)
    said = {"mask": torch.rand(304) > 0.2, "bias": torch.randn(1, 304), "sinks": torch.randn(4), "num_splits": 3}
    said |= {"softcap": 3.0, "page_table": torch.arange(2).int().view(2, 1)}
    call = describe((q, k, k), "bottom-right", Features(**said))
    prepared = wide_scored.prepare(row, call, PRESETS["l4"])
    assert prepared.launch is not None
    out, lse = prepared.launch((q, k, k), 0.5, True, said)
    p = kernels.last
    assert (p.pack, p.splits, p.head_dim % 4, p.bias_type) == (2, 3, 0, "float32") and p.bias == said["bias"].data_ptr()
    oracle_features.compare(out, lse, q, k, k, 0.5, "bottom-right", **said).check()
    fitting = describe((made(DTYPES[dtype], 3, 4, 264),) + 2 * (made(DTYPES[dtype], 9, 2, 264),), "none", Features())
    assert wide_scored.prepare(row, fitting, PRESETS["l4"]).launch is None


@pytest.mark.parametrize("dim", [264, 261])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_result_that_is_given_is_written_to_or_copied_to(kernels: FakeKernels, dim: int, queries: int):
    row = row_of("float16")
    q, k = made(torch.float16, queries, 2, 264), made(torch.float16, 5, 2, 264)
    v = k[..., :dim]
    for pad in (8, 9):
        room = torch.full((2, queries, 2, 264 + pad), torch.nan, dtype=torch.float16)
        given, lse = room[..., :dim], torch.full((2, 2, queries), torch.nan)
        for view in (given, given.as_strided(given.shape, (given.stride(0), 7, *given.stride()[2:]))[:, :1]):
            asked = q[:, : view.shape[1]]
            out, found = launch(row, asked, k, v, out=view, lse=lse[..., : view.shape[1]].contiguous())
            assert out is view and (kernels.last.o == view.data_ptr()) == (dim == 264 and pad == 8)
            oracle_features.compare(out, found, asked, k, v, 0.5).check()
        assert room[..., dim:].isnan().all()


def test_nothing_is_launched_for_nothing_nor_for_a_bias_of_another_dtype(kernels: FakeKernels):
    for batch, seqlen, heads in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
        q = torch.randn(batch, seqlen, heads, 32)
        out, lse = launch(row_of(), q, q, q)
        assert lse is not None and out.shape == q.shape and lse.shape == (batch, heads, seqlen)
    q = made(torch.float16, 3, 2, 264)
    with pytest.raises(UnsupportedError, match=r"this one is float32: pass bias.to\(torch.float16\)"):
        launch(row_of("float16"), q, q, q, bias=torch.zeros(3, 3))
    assert kernels.launches == []
