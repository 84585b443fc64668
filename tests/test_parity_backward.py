"""Gradients by every row of this GPU's architecture, against dense fp64: ``make parity``."""

from __future__ import annotations

from dataclasses import replace

import gpu
import hypothesis
import pytest
import torch
from backward_launch import OVERFLOWING, BackwardLaunch, listed
from operands import CAUSAL
from parity_report import ParityReport
from problems import Problem, problems

import cutlass_fmha
from cutlass_fmha import _C

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = gpu.device()
ROWS = gpu.backward_rows()
by_row = gpu.by_row(ROWS)
on_a_gpu = pytest.mark.skipif(gpu.simulated(), reason="a simulator has no graphs and no far strides")


def check(row: _C.Row, problem: Problem, parity: ParityReport) -> BackwardLaunch:
    launch = BackwardLaunch.drawn(row, problem, DEVICE)
    launch.run()
    parity.check(launch, launch.problem)
    return launch


@by_row
def test_listed_problems(row: _C.Row, parity: ParityReport):
    for problem in listed(row):
        check(row, problem, parity)


@by_row
def test_drawn_problems(row: _C.Row, parity: ParityReport):
    @hypothesis.settings(hypothesis.settings.get_profile("parity"))
    @hypothesis.given(problem=problems())
    def agrees(problem: Problem) -> None:
        if problem.num_heads:
            check(row, problem, parity)

    agrees()


@gpu.by_row([row for row in ROWS if row.dtype == "float16"])
def test_only_gradients_of_what_float16_has_no_number_for_are_not_finite(row: _C.Row, parity: ParityReport):
    finite = []
    for problem in OVERFLOWING:
        launch = BackwardLaunch.overflowing(row, problem, DEVICE)
        launch.run()
        parity.check(launch, launch.problem)
        finite.append([bool(launch.found[name].isfinite().all()) for name in "qk"])
    assert not any(map(all, zip(*finite, strict=True)))


@by_row
def test_memory_of_whatever_contents_becomes_gradients(row: _C.Row, parity: ParityReport):
    """NaN in what torch.empty returns: gradients, sums of dQ and terms of rows."""
    for problem in listed(row)[::5]:
        launch = BackwardLaunch.drawn(row, problem, DEVICE)
        torch.use_deterministic_algorithms(True)  # then torch.utils.deterministic fills it; the oracle takes minutes so
        try:
            launch.run()
        finally:
            torch.use_deterministic_algorithms(False)
        parity.check(launch, launch.problem)


@by_row
@pytest.mark.parametrize("causal", CAUSAL)
def test_gradients_have_the_same_bits_each_time(row: _C.Row, causal: str, parity: ParityReport):
    """Those of keys and values; that of queries where it is asked, of a row that can."""
    length = 300 if row.family == "backward_wide" else 1500  # a hundred launches of those take a minute otherwise
    shortest = min(length, 700) if gpu.simulated() else length
    problem = Problem(shortest, length, causal, num_heads=8, num_heads_kv=2, seed=3)
    launch = check(row, problem, parity)
    first = launch.found
    for _ in range(1 if gpu.simulated() else 100):
        launch.run()
        for name in "qkv" if launch.deterministic else "kv":
            assert torch.equal(launch.found[name], first[name]), f"d{name}"


@by_row
def test_a_gradient_is_the_same_without_the_others(row: _C.Row, parity: ParityReport):
    launch = check(row, Problem(200, 330, "bottom-right", num_heads=4, sinks="normal", seed=4), parity)
    every = launch.found
    for alone in every:
        launch.wanted = (alone,)
        launch.run()
        assert list(launch.found) == [alone]
        same = launch.found[alone] == every[alone]
        assert same.all() or alone == "q"
    launch.wanted = ("q",)
    launch.run()
    error = (launch.found["q"] - every["q"]).abs().max() / every["q"].abs().max()
    assert error <= 2 * torch.finfo(every["q"].dtype).eps


@by_row
def test_nan_in_a_query_stays_with_it_and_its_keys(row: _C.Row):
    """Under a diagonal, a query's NaN reaches its own gradient and those of keys in tiles that it sees."""
    launch = BackwardLaunch.of(row, Problem(600, 600, "bottom-right", seed=4), DEVICE)
    launch.dout[1, 60, 1] = torch.nan
    launch.run()
    assert not launch.found["q"][1, :60].isnan().any() and not launch.found["q"][1, 61:].isnan().any()
    assert launch.found["q"][1, 60, 1].isnan().all()
    for name in "kv":
        assert launch.found[name][1, :61, 1].isnan().all()
        assert not launch.found[name][1, row.tile_n :].isnan().any()
    assert not launch.found["v"][0].isnan().any()


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autograd_finds_the_gradients_of_the_op(dtype: torch.dtype, compiled: bool):
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
        return out.float().square().sum() + lse.sum()

    for heads, kv, n, dim in ((4, 4, 100, 64), (8, 2, 333, 128), (2, 1, 64, 40), (2, 1, 99, 320)):
        inputs = [torch.randn(2, n, h, dim, device=DEVICE, dtype=dtype, requires_grad=True) for h in (heads, kv, kv)]
        call = torch.compile(loss, fullgraph=True) if compiled else loss
        found = torch.autograd.grad(call(*inputs), inputs)
        wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(loss(*wide), wide)
        for x, y in zip(found, expected, strict=True):
            error = (x.cpu().double() - y).abs().max() / y.abs().max()
            # float32's products may be off by SPLIT_ERROR half ulps.
            assert error <= (8 if dtype != torch.float32 else 64) * torch.finfo(dtype).eps


@on_a_gpu
@by_row
def test_a_graph_computes_new_gradients(row: _C.Row, parity: ParityReport):
    problem = Problem(130, 260, "bottom-right", batch=3, used_k=True, num_heads=4, seed=21)
    launch = BackwardLaunch.of(row, problem, DEVICE)
    launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for seed in (25, 29):
        other = BackwardLaunch.of(row, replace(problem, seed=seed), DEVICE)
        inputs = [(*x.call[:3], x.dout, *x.forward, x.call.features["seqused_k"], x.dlse) for x in (launch, other)]
        for to, x in zip(*inputs, strict=True):
            if to is not None:
                to.copy_(x)
        graph.replay()
        parity.check(launch, f"{problem} replayed, seed {seed}")


@on_a_gpu
@pytest.mark.usefixtures("much_memory")
@by_row
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_offsets_beyond_31_bits(row: _C.Row, axis: int, parity: ParityReport):
    dtype = gpu.torch_dtype(row)
    buffer = torch.full((gpu.FAR + 4096 + 4 * gpu.REGION,), torch.nan, dtype=dtype, device=DEVICE)
    dim = min(64, row.head_dim)
    problem = Problem(65, 65, "bottom-right", num_heads=3, num_heads_kv=3, head_dim=dim, head_dim_v=dim, seed=8)
    launch = BackwardLaunch.of(row, problem, DEVICE)
    far = [gpu.far_view(buffer, i, tuple(launch.call.q.shape), axis) for i in range(4)]
    for view, x in zip(far, (*launch.call[:3], launch.dout), strict=True):
        view.copy_(x)
    launch.call, launch.dout = launch.call._replace(q=far[0], k=far[1], v=far[2]), far[3]
    launch.run()
    parity.check(launch, f"{problem} with a far {('batch', 'seqlen', 'heads')[axis]} stride")


@on_a_gpu
@pytest.mark.usefixtures("much_memory")
@gpu.by_row([row for row in ROWS if row.head_dim == 64][:1])
def test_a_workspace_of_more_than_two_to_the_31_elements(row: _C.Row):
    """Packed documents of few rows, each of which has a whole tile."""
    dtype, length, heads = gpu.torch_dtype(row), 8, 8
    count = gpu.FAR // (heads * row.tile_m * row.head_dim) + 2
    shape = (count * length, heads, 64)
    q, dout = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(count * length, 1, 64, device=DEVICE, dtype=dtype).expand(shape) for _ in range(2))
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * length
    said = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    ops = torch.ops.cutlass_fmha
    out, lse = ops.attend(q, k, v, 0.125, "none", True, None, **said)
    found = ops.attend_backward(dout, q, k, v, out, lse, None, 0.125, "none", row=row.name, **said)
    for number in (0, count // 2, count - 1):
        own = slice(number * length, (number + 1) * length)
        wide = [x[own].double().cpu()[None].requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(cutlass_fmha.attention(*wide, scale=0.125), wide, dout[own].double().cpu()[None])
        for x, y in zip(found[:3], expected, strict=True):
            error = (x[own].double().cpu() - y[0]).abs().max() / y.abs().max()
            assert error <= 8 * torch.finfo(dtype).eps, f"document {number}"
