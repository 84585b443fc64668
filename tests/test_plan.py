"""From a call to a launch: what is packed, kept and warned of. The kernels are fakes."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle_features
import pytest
import torch
from fake_build import L4, Row, make_build
from fake_kernels import FakeKernels, skip_dispatcher
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import compare, outputs
from operands import Call
from problems import GROUPS, Problem, fitted, problems
from tensors import ints, qkv
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C, Workspace, log
from cutlass_fmha.arguments.check import NAMES
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.arguments.results import RESULTS
from cutlass_fmha.call import packed_attention
from cutlass_fmha.dispatch import blocks, describe, device
from cutlass_fmha.dispatch.families.family import Prepared
from cutlass_fmha.dispatch.problem import FEATURES
from cutlass_fmha.dispatch.table import Table
from cutlass_fmha.features import Features
from cutlass_fmha.launch import gradients, plan
from cutlass_fmha.launch.recent import Recent
from cutlass_fmha.ops import forward


@pytest.fixture
def kernels(monkeypatch):
    """Launches, computed in Python on a GPU that does not exist."""
    monkeypatch.setattr(device, "simulated", lambda built: L4)
    monkeypatch.setattr(plan, "current_stream", lambda index: 4711)
    found = FakeKernels(make_build((89,)))
    found.install(monkeypatch)
    plan.clear()
    yield found
    plan.clear()


def attend(call: Call, row: str | None = None, return_lse: bool = True, **more: Any) -> tuple[Tensor, Tensor | None]:
    said = op_arguments(call.q, {**call.features, **more}, results=RESULTS)
    return plan.launch(*call[:3], call.scale, call.causal, return_lse, row, "bshd", NAMES, said)


def check(call: Call, row: str | None = None, **more: Any) -> tuple[Tensor, Tensor | None]:
    out, lse = attend(call, row, **more)
    if out.numel():
        compare(call, out, lse).check()
    return out, lse


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_packed_is_what_the_tensors_hold(kernels: FakeKernels, group: str):
    for problem in GROUPS[group]:
        problem = fitted(problem, 256, 256, 64, 64)
        call = problem.call()
        out, lse = check(call)
        assert out.is_contiguous() and lse is not None and lse.is_contiguous()
        rooms = outputs(replace(problem, return_lse=True), call, problem.head_dim_v)
        with Workspace(1 << 22, "cpu"):
            found = check(call, out=rooms[0].view, lse=rooms[1].view)
        assert all(x is room.view and room.intact() for x, room in zip(found, rooms, strict=True))
    assert kernels.of(True)


def described(call: Call) -> describe.Call:
    return describe.describe(call[:3], call.causal, Features(**op_arguments(call.q, call.features)))


def test_features_are_what_a_call_says():
    said = {
        "window": {"window": (3, 4)}, "mask": {"mask": ("bhqk", "plain")}, "bias": {"bias": ("k", "same", "plain")},
        "prefix": {"prefix": True}, "block_mask": {"blocks": (64, 64)}, "softcap": {"softcap": 2.0},
        "alibi": {"alibi": "h"}, "sinks": {"sinks": "low"}, "dropout": {"dropout": 0.1},
        "varlen": {"packed_q": True, "packed_k": True}, "lengths": {"used_k": True}, "leftpad": {"leftpad": True},
        "pages": {"page_size": 16}, "cache_batch_idx": {"indexed": True}, "splits": {"num_splits": 2},
    }  # fmt: skip
    for name in FEATURES:
        assert described(Problem(**said[name]).call()).problem.features == (name,)
    # A window that is a causal mask is one.
    for window, causal, expected in (
        ((-1, -1), "none", (None, "none")), ((-1, 0), "none", (None, "bottom-right")),
        ((-1, 5), "bottom-right", (None, "bottom-right")), ((-1, -1), "top-left", (None, "top-left")),
        ((7, 9), "top-left", ((7, 0), "top-left")), *((x, "none", (x, "none")) for x in ((7, -1), (0, 0))),
    ):  # fmt: skip
        assert describe.window_of(*window, causal) == expected


def test_a_call_that_says_nothing_special_takes_a_plain_row(kernels: FakeKernels):
    call = Problem(70, 130, num_heads=4, num_heads_kv=2).call()
    for more in ({"num_splits": 1}, {"batch_invariant": True}, {"window": (-1, 0)}, {}):
        causal = "bottom-right" if "window" in more else "none"
        oracle_features.compare(*attend(call, **more), call.q, call.k, call.v, causal=causal).check()
    assert kernels.of(True) == [] and len(kernels.of(False)) == 4
    call = Problem(1, 4096, num_heads=8, num_heads_kv=2, batch=1).call()
    check(call)  # but decoding, by what its cost is of
    row, problem = kernels.build.rows[kernels.launches[-1].row], described(call).problem
    assert kernels.last.splits == blocks.split_keys(row, problem, L4) > 1
    assert kernels.last.pack == blocks.packed_heads(row, problem) == 4
    launch(*(torch.as_strided(x, x.shape, (7, 13, 1, 1)) for x in qkv(1, 1, 1, 1, 1, 32)))  # of what is there once
    assert kernels.build.rows[kernels.launches[-1].row].alignment == 16
    assert kernels.last.q_stride == kernels.last.k_stride == kernels.last.v_stride == (0, 0, 0)


@pytest.mark.parametrize("problem", [
    Problem(9, 40, softcap=3.0, bias=("bhqk", "same", "plain"), used_k=True, leftpad=True), Problem(9, 40, num_heads=4),
], ids=["features", "plain"])  # fmt: skip
def test_a_plan_is_made_once(kernels: FakeKernels, monkeypatch, problem: Problem):
    made = []
    original = plan.prepare
    monkeypatch.setattr(plan, "prepare", lambda *said: made.append(said) or original(*said))
    for seed in (1, 2):
        for scale in (0.1, 0.2):
            call = replace(problem, seed=seed, scale=scale).call()
            for return_lse in (False, True):
                check(call, return_lse=return_lse)
    assert len(made) == 1 and len(kernels.launches) == 8
    assert [run.params.scale for run in kernels.launches] == pytest.approx([0.1, 0.1, 0.2, 0.2] * 2)
    name = next(row.name for row in kernels.build.rows if row.scored and row.head_dim == 64)
    changes = [
        {"softcap": 4.0}, {"bias": ("bhqk", "float32", "plain")}, {"bias": ("bhqk", "same", "transposed")},
        {"window": (3, -1)}, {"seqlen_k": 41}, {"seqlen_q": 8}, {"causal": "top-left"}, {"layout": "bhsd"},
        {"layout": "unaligned"}, {"num_splits": 2}, {"dropout": 0.2},
    ]  # fmt: skip
    others = [(replace(problem, **each).call(), None) for each in changes]
    others += [(problem.call(), name), (problem.call(torch.bfloat16), None)]
    for count, (call, row) in enumerate(others, start=2):
        check(call, row)
        assert len(made) == count


@given(st.lists(st.integers(0, 30)), st.integers(2, 12))
def test_what_was_used_last_is_there_and_no_more_than_there_is_room_for(keys, size):
    cache: Recent[int, str] = Recent(size)
    for place, key in enumerate(keys):
        if not (cache.get(key) or cache.revive(key)):
            cache.put(key, str(key))
        assert len(cache) <= size
        before = list(dict.fromkeys(reversed(keys[: place + 1])))[: size // 2]  # the last different ones
        assert all((cache.get(key) or cache.revive(key)) == str(key) for key in reversed(before))
    cache.clear()
    assert len(cache) == 0


def test_threads_do_not_meet_in_a_plan(kernels: FakeKernels):
    def work(seed: int) -> None:
        call = Problem(20, 50, sinks="normal", num_splits=2, seed=seed).call()
        for _ in range(10):
            check(call)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))  # which raises what one of them did


def test_parts_have_room_in_one_allocation(kernels: FakeKernels):
    call = Problem(3, 200, num_heads=4, num_heads_kv=1, head_dim_v=33, num_splits=5).call()
    check(call)
    said, rows = kernels.last, 2 * 4 * 3
    with Workspace(4 * 5 * rows * 35, "cpu") as workspace:
        for _ in range(2):
            check(call)
            assert kernels.last.partial_o == workspace._memory.data_ptr()
    assert workspace.high_water == workspace.size
    assert said.splits == 5 and said.lse_rows == rows
    assert said.partial_o % 16 == 0 and said.partial_lse - said.partial_o == 4 * 5 * rows * 33
    assert said.partial_low - said.partial_lse == 4 * 5 * rows


def test_empty_problems_launch_nothing_and_empty_tensors_have_no_address(kernels: FakeKernels):
    for fields in ({"batch": 0}, {"num_heads": 0, "num_heads_kv": 0}, {"seqlen_q": 0}):
        for softcap in (0.0, 1.0):
            call = Problem(**{"seqlen_q": 5, "softcap": softcap, **fields}).call()
            out, lse = attend(call)
            assert out.shape == call.q.shape and lse is not None and lse.numel() == 0
    assert kernels.launches == []
    no_keys = {"bias": ("bhqk", "float32", "plain"), "mask": ("bhqk", "plain")}
    for fields in (no_keys, {**no_keys, "blocks": (64, 64)}, {"page_size": 16, "used_k": True}):
        out, lse = attend(Problem(5, 0, **fields).call())
        assert (out == 0).all() and lse is not None and (lse == -torch.inf).all()
        assert kernels.last.bias == kernels.last.mask == kernels.last.page_table == 0
    # A table may name pages of which there is none, and a mask be as large as no packed sequence is.
    table = {"page_table": ints(0, 0).view(2, 1), "seqused_k": ints(0, 0)}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 5, "mask": torch.ones(5, 5, dtype=torch.bool)}
    calls = [((2, 1, 4, 64), (0, 16, 2, 64), table)]
    for n, m in ((5, 0), (0, 5)):
        lengths = {"cu_seqlens_q": ints(0, 0, n), "cu_seqlens_k": ints(0, 0, m)}
        calls.append(((n, 4, 64), (m, 2, 64), {**lengths, **longest}))
    for shape_q, shape_k, said in calls:
        q, k = torch.zeros(shape_q).half(), torch.zeros(shape_k).half()
        kernels.launches.clear()
        out, lse = attend(Call(q, k, k, None, "none", said, False))
        assert (out == 0).all() and (lse == -torch.inf).all() and len(kernels.launches) == (len(q) > 0)


DECODING = {"seqlen_q": 1, "seqlen_k": 3000, "num_heads": 8, "used_k": True}
PACKED = {"seqlen_q": 200, "seqlen_k": 300, "packed_q": True, "packed_k": True}
PREFILL = {"seqlen_q": 300, "seqlen_k": 2000, "softcap": 3.0}


@pytest.mark.parametrize("fields", [DECODING, {**DECODING, "page_size": 64}, PACKED, PREFILL])
def test_batch_invariant_plans_do_not_know_the_batch(kernels: FakeKernels, fields: dict[str, Any]):
    kernels.compute = False

    def planned(batch: int, keys: int = 1, batch_invariant: bool = True) -> tuple[str, int, int]:
        call = Problem(batch=batch, **{**fields, "seqlen_k": keys * fields["seqlen_k"]}).call()
        attend(call, batch_invariant=batch_invariant)
        row = kernels.build.rows[kernels.of(True)[-1].row].name
        return row, kernels.last.splits, kernels.last.pack

    assert len({planned(batch) for batch in (1, 2, 64)}) == 1
    if "page_size" in fields or "packed_q" in fields:  # the longest sequence has no say
        assert planned(2, 3) == planned(2)
    if fields["seqlen_q"] == 1:  # without it a full GPU splits less
        assert planned(1, batch_invariant=False)[1] > planned(64, batch_invariant=False)[1]


def launch(q, k, v, scale=None, causal="none", return_lse=True, row=None, layout="bshd", said=plan.NOTHING):
    return plan.launch(q, k, v, scale, causal, return_lse, row, layout, said=said)


def is_aligned(x: Tensor) -> bool:
    """Address and strides to 16 bytes; a dimension of one has no stride."""
    strides = (stride for size, stride in zip(x.shape[:3], x.stride(), strict=False) if size > 1)
    return all(number % 16 == 0 for number in (x.data_ptr(), *(s * x.element_size() for s in strides)))


@settings(max_examples=120)
@given(
    problems(longest=40), st.sampled_from([32, 40, 64, 128]), st.sampled_from(["bshd", "bhsd"]),
    st.sampled_from([torch.float16, torch.bfloat16]), st.booleans(),
)  # fmt: skip
def test_drawn_problems_are_packed_right(kernels, problem: Problem, head_dim: int, layout: str, dtype, given: bool):
    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if layout == "bhsd" else x

    kernels.launches.clear()
    q, k, v = problem.inputs(dtype, head_dim, "cpu")
    problem = replace(problem, return_lse=True, packed_q=False)
    rooms = outputs(problem, Call(q, k, v, None, "none", {}, None), head_dim)
    to = {"out": laid_out(rooms[0].view), "lse": rooms[1].view} if given else {}
    out, lse = launch(*map(laid_out, (q, k, v)), problem.scale, problem.causal, layout=layout, said=to)
    if given:
        assert out is to["out"] and lse is to["lse"] and all(x.intact() for x in rooms)
    out = laid_out(out)
    assert given or (out.is_contiguous() and lse.is_contiguous())
    oracle_features.compare(out, lse, q, k, v, problem.scale, problem.causal).check()
    read = (q, k, v, *([out] if given else []))
    for run in kernels.launches:
        assert (run.device, run.stream) == (0, 4711)  # the tensors' device and its current stream
        row = kernels.build.rows[run.row]
        assert row.scored or (row.copy != "element") == all(map(is_aligned, read))


def test_a_divided_tail_brings_the_memory_of_its_parts(kernels, monkeypatch):
    row = Row(0, 89, "float16", 128, 64, 16, 8, "tma", 98 * 1024, stages=1, q_in_registers=False, ping_pong=True)
    kernels = FakeKernels(Table((row,)))  # type: ignore[arg-type]
    kernels.install(monkeypatch)
    for heads, said in ((80, {}), (58, {}), (80, {"batch_invariant": True})):
        launch(*qkv(1, 64, 2048, heads, heads, 128), return_lse=False, said=said)
    divided, whole, invariant = (launched.params for launched in kernels.launches)
    tail = blocks.Tail(divided.tail_tiles, divided.tail_parts, divided.tail_first, divided.tail_rest)
    assert divided.tail and tail == blocks._tail(80, 128, 58, 10**9) and whole.tail == invariant.tail == 0


def test_slow_copies_are_told_once_per_cause(kernels, caplog):
    caplog.set_level(logging.WARNING, logger="cutlass_fmha")
    q, k, v = qkv()
    odd_stride = torch.nn.functional.pad(k, (0, 3))[..., :-3]
    odd_v, odd_out = (torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape) for x in (v, q))
    odd_dims = Problem(33, 65, head_dim=20, head_dim_v=20, softcap=1.0)
    of_key = " and ".join(f"key's {dimension} stride" for dimension in ("batch", "seqlen", "head"))
    of_heads = " and ".join(f"{name}'s head stride" for name in ("query", "key", "value"))
    for call, told in (
        (lambda n: launch(q[:, :n], odd_stride, v), f"{of_key} are"),
        (lambda n: launch(q, k, odd_v), "value's address is"),
        (lambda n: launch(q, k, v, said={"out": odd_out}), "out's address is"),
        (lambda n: attend(replace(odd_dims, seqlen_q=n).call()), f"{of_heads} and head_dim 20 are"),
        (lambda n: attend(Problem(n, 65, softcap=1.0).call()), ""),
        (lambda n: launch(q, k, v, row="fwd_sm89_f16_d32_m64n64w4_element"), ""),  # asked for, so no surprise
    ):
        caplog.clear()
        for queries in (33, 20):
            call(queries)
        row = kernels.build.rows[kernels.launches[-1].row].name
        copies = f" not a multiple of 16 bytes: {row} copies element by element, which is slower"
        assert caplog.messages == [told + copies] * bool(told)


def test_a_decision_is_a_line_when_its_plan_is_made(kernels, caplog):
    """And none without a level, or when the plan is there."""
    q, k, v = qkv()
    launch(q, k, v)
    assert caplog.records == []
    plan.clear()
    caplog.set_level(logging.INFO, logger="cutlass_fmha")
    for _ in range(2):
        launch(q, k, v)
    ran = kernels.build.rows[kernels.launches[-1].row].name
    line = rf"batch .*, float16, .* on NVIDIA L4 \(.*\): {ran}, [\d.]+ us predicted"
    assert len(caplog.messages) == 1 and re.fullmatch(line, caplog.messages[0])
    caplog.clear()
    caplog.set_level(logging.DEBUG, logger="cutlass_fmha")
    launch(q, k, v, row="fwd_sm89_f16_d32_m64n64w4")
    gradients._prepare((q, k, v), "none", {}, (True,) * 5, None, None)
    forced, backward = caplog.messages
    assert ": fwd_sm89_f16_d32_m64n64w4, forced by name, " in forced
    assert re.search(r"; the default for GPUs .*; others: fwd_sm89_f16_d32_\w+ [\d.]+ us, fwd_", forced)
    assert re.fullmatch(
        r"backward of batch .* on NVIDIA L4 \(.*\): bwd_sm89_f16_d\d+_\w+(; .* us predicted, .*)?", backward
    )


def test_the_environment_says_what_is_logged(monkeypatch, capsys):
    """On stderr where the program has no handlers; its own get it alone."""
    logger = logging.Logger("cutlass_fmha")
    monkeypatch.setattr(log, "logger", logger)
    for asked, level, handlers in (("", logging.NOTSET, 0), ("verbose", logging.NOTSET, 0), ("Debug", 10, 1)):
        monkeypatch.setenv(log.WHICH, asked)
        log.configure()
        assert logger.level == level and len(logger.handlers) == handlers
    for its_own, printed in (([logging.NullHandler()], ""), ([], "cutlass_fmha: hello\n")):
        monkeypatch.setattr(logging.getLogger(), "handlers", its_own)
        logger.info("hello")
        assert capsys.readouterr().err.endswith(printed) and bool(printed) == (not its_own)


def test_the_cuda_implementation_is_the_launch(kernels):
    q, k, v = qkv()
    out, lse = forward.launch(q, k, v, 0.3, "bottom-right", True, None)
    oracle_features.compare(out, lse, q, k, v, 0.3, "bottom-right").check()
    assert forward.launch(q, k, v, 0.3, "none", False, None)[1].shape == (0,)
    with pytest.raises(ValueError, match="scale must be finite"):
        forward.launch(q, k, v, float("inf"), "none", True, None)


def test_torchs_attention_asks_a_known_call_nothing(kernels, monkeypatch):
    """A plan is kept under the rules that it was made by: it serves no call that breaks others."""
    skip_dispatcher(monkeypatch)
    q, k, v = qkv(heads=4, heads_kv=2)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    attend = cutlass_fmha.scaled_dot_product_attention
    mask = torch.ones(33, 65, dtype=torch.bool).tril(20)
    for _ in range(2):
        for said in ({}, {"mask": mask}, {"bias": torch.randn(2, 1, 1, 65)}):
            out = attend(*heads_first, *said.values(), enable_gqa=True).transpose(1, 2)
            oracle_features.compare(out, None, q, k, v, **said).check()
        monkeypatch.setattr(plan, "prepare", None)
    assert len(kernels.launches) == 6
    with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other"):
        attend(*heads_first, mask, is_causal=True, enable_gqa=True)
    with pytest.raises(ValueError, match="leading dimensions that broadcast"):
        attend(*heads_first)
    with pytest.raises(TypeError, match="enable_gqa must be a bool, got int"):
        attend(*heads_first, enable_gqa=0)


@pytest.mark.parametrize("how", ["views", "copies", "a family's own launch"])
def test_packed_sequences_of_heads_first_are_read_where_they_are(kernels, monkeypatch, how: str):
    skip_dispatcher(monkeypatch)
    tensors, exact = [x.transpose(1, 2) for x in qkv(seqlen_k=33)], oracle_features.attention
    if how == "copies":
        tensors = [x.contiguous() for x in tensors]
    elif how != "views":
        own = Prepared(
            _C.AttentionParams(), launch=lambda x, scale, lse, said: (exact(*x, scale, **said)[0].half(), None)
        )
        monkeypatch.setattr(plan, "family", lambda row: SimpleNamespace(prepare=lambda *_: own))
    said = {f"cu_seqlens_{x}": torch.tensor([0, 5, 40, 66], dtype=torch.int32) for x in "qk"}
    rows = [x.transpose(1, 2).flatten(0, 1) for x in tensors]
    for _ in range(2):
        out = packed_attention(*tensors, scale=None, causal=False, **said)
        assert out.shape == (2, 33, 4, 32) and out.is_contiguous()
        oracle_features.compare(out.flatten(0, 1), None, *rows, **said).check()
        monkeypatch.setattr(plan, "prepare", None)
    read = {x.params.q for x in kernels.launches}
    assert not read if how.startswith("a family") else (read == {tensors[0].data_ptr()}) == (how == "views")
