"""Plain rows in a program: layouts, streams, devices, graphs, torch.compile, large tensors, errors on a GPU."""

import functools
import itertools
from dataclasses import replace

import gpu
import oracle_features
import pytest
import torch
from launches import Launch
from operands import CAUSAL, poison
from parity_report import ParityReport
from problems import Problem
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = torch.device("cuda", 0)
ROWS = gpu.rows()
by_row = gpu.by_row(ROWS)
PROBLEM = Problem(300, 257, "bottom-right", num_heads=4, seed=11)


def attend(row: _C.Row, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return cutlass_fmha.attention(q, k, v, causal=PROBLEM.causal, return_lse=True, row=row.name)


def record(parity: ParityReport, row: _C.Row, what: str, out: Tensor, lse: Tensor, inputs: tuple[Tensor, ...]) -> None:
    errors = oracle_features.compare(out, lse, *inputs, causal=PROBLEM.causal)
    parity.record(row.name, f"{PROBLEM} {what}", errors)


@by_row
def test_attention_runs_the_row_it_is_told_to(row: _C.Row, parity: ParityReport):
    shaped = [Problem(113, 140, causal, num_heads=4, seed=1) for causal in CAUSAL]
    memories = ("packed", "expanded", "bhsd") + (("unaligned",) if row.alignment == 2 else ())
    shaped += [Problem(70, 70, "bottom-right", num_heads=4, layout=memory, seed=2) for memory in memories]
    for problem, layout in itertools.product((*shaped, Problem(5, 0), Problem(0, 5)), ("bshd", "bhsd")):
        inputs = problem.inputs(gpu.torch_dtype(row), row.head_dim, DEVICE)
        given = [x.transpose(1, 2) for x in inputs] if layout == "bhsd" else inputs
        out, lse = cutlass_fmha.attention(*given, causal=problem.causal, return_lse=True, layout=layout, row=row.name)
        out = out.transpose(1, 2) if layout == "bhsd" else out
        parity.record(row.name, problem, oracle_features.compare(out, lse, *inputs, causal=problem.causal))


@by_row
def test_calls_are_of_their_stream_and_a_launch_neither_waits_nor_allocates(row: _C.Row, parity: ParityReport):
    values = PROBLEM.inputs(gpu.torch_dtype(row), row.head_dim, DEVICE)
    inputs = tuple(poison(x.dtype, x.numel(), DEVICE).view(x.shape) for x in values)
    attend(row, *values)  # loads the kernel, for which the device may have to be idle
    launch = Launch.of(row, PROBLEM, DEVICE)
    launch.run()
    launch.q, launch.k, launch.v = inputs
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)
    with gpu.held(stream), torch.cuda.stream(stream):
        # The inputs are NaN until the stream gets to the copy: a launch on another stream would read that.
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        out, lse = attend(row, *inputs)
        allocations = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
        for _ in range(10):
            launch.run()
        assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == allocations
        assert not stream.query(), "a call waited for the stream"
    record(parity, row, "on a side stream", out, lse, inputs)
    parity.check(launch, f"{PROBLEM} behind other work")


@by_row
def test_last_device(row: _C.Row, parity: ParityReport):
    # With one GPU this is the first one; with more, the current device differs from that of the tensors.
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(DEVICE)
    inputs = PROBLEM.inputs(gpu.torch_dtype(row), row.head_dim, last)
    out, lse = attend(row, *inputs)
    assert out.device == lse.device == last
    assert torch.cuda.current_device() == DEVICE.index
    torch.cuda.synchronize(last)
    record(parity, row, f"on {last}", out, lse, inputs)


def chain(row: _C.Row, k: Tensor, x: Tensor, calls: int) -> Tensor:
    """Each call moves the rows of x by one, exactly: query i finds key i + 1 and no other. It reads what the
    call before wrote, and writes where that one read: the allocator gives it the memory again."""
    q = k.roll(-1, dims=1)
    for _ in range(calls):
        x = cutlass_fmha.attention(q, k, x, scale=100.0, row=row.name)
    return x


@by_row
def test_a_call_waits_for_the_calls_ahead(row: _C.Row):
    generator = torch.Generator(DEVICE).manual_seed(5)
    shape = (1, 333, 4, row.head_dim)
    k = torch.randint(0, 2, shape, generator=generator, device=DEVICE) * 2 - 1
    assert all(len(k[0, :, head].unique(dim=0)) == shape[1] for head in range(shape[2]))
    k = k.to(gpu.torch_dtype(row))
    x = torch.randn(shape, generator=generator, device=DEVICE).to(k.dtype)
    for _ in range(3):
        assert torch.equal(chain(row, k, x, 40), x.roll(-40, dims=1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(row, k, x, 40)
    for _ in range(3):
        x.copy_(x.roll(1, dims=1))
        graph.replay()
        assert torch.equal(out, x.roll(-40, dims=1))


def test_attention_synchronises_nothing_and_allocates_its_outputs_only():
    q, k, v = PROBLEM.inputs(torch.bfloat16, 64, DEVICE)
    cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
        result = cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
        assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] - before == len(result)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("much_memory")
@gpu.by_row([row for row in ROWS if row.head_dim == 64 and row.dtype == "bfloat16"])
def test_tensors_of_more_than_two_to_the_31_elements(row: _C.Row, parity: ParityReport):
    batch = gpu.FAR // (64 * 8 * 64) + 2
    x = torch.empty(batch, 64, 8, 64, dtype=torch.bfloat16, device=DEVICE).normal_()
    out = cutlass_fmha.attention(x, x, x, causal=True, row=row.name)
    for i in (0, batch // 2, batch - 1):
        errors = oracle_features.compare(out[i : i + 1], None, *[x[i : i + 1]] * 3, causal="bottom-right")
        parity.record(row.name, f"batch {i} of {batch} x 64 x 8 x 64", errors)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_as_one_graph_with_dynamic_shapes(backend: str):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cutlass_fmha.attention(q + 1, k, v, causal=True) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for seqlen in (64, 113, 300):
        q, k, v = replace(PROBLEM, seqlen_q=seqlen).inputs(torch.float16, 64, DEVICE)
        oracle_features.compare(compiled(q, k, v) / 2, None, q + 1, k, v, causal="bottom-right").check()


def test_opcheck():
    for layout, return_lse in itertools.product(("bshd", "packed", "unaligned"), (True, False)):
        inputs = replace(PROBLEM, layout=layout).inputs(torch.bfloat16, 32, DEVICE)
        torch.library.opcheck(torch.ops.cutlass_fmha.forward.default, (*inputs, 0.3, "bottom-right", return_lse, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_runs_what_casting_by_hand_runs(dtype: torch.dtype):
    operands = PROBLEM.inputs(torch.float32, 64, DEVICE)
    once = tuple(x.to(dtype) for x in operands)
    bias = torch.randn(PROBLEM.seqlen_q, PROBLEM.seqlen_k, device=DEVICE)
    for said in ({}, {"bias": bias}):
        expected = cutlass_fmha.attention(*once, **{name: x.to(dtype) for name, x in said.items()})
        call = functools.partial(cutlass_fmha.attention, **said)
        with torch.autocast("cuda", dtype=dtype):
            for attend in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
                for given in (operands, (operands[0], *once[1:]), once):
                    assert torch.equal(attend(*given), expected)
            with torch.autocast("cuda", enabled=False):
                assert call(*operands).dtype == torch.float32


def test_a_packed_step_in_a_graph_follows_its_lengths():
    """As serving engines replay it: prompts, parts of them, single tokens, in pages, at most so many rows."""
    generator = torch.Generator(DEVICE).manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(torch.bfloat16)

    def ints(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    q, k, v = (randn(24, heads, 64) for heads in (8, 2, 2))
    caches = [randn(12, 16, 2, 64) for _ in range(2)]  # pages of 16 rows, three for each of four sequences
    said = {"rotary_cos": randn(48, 32).float(), "rotary_sin": randn(48, 32).float(), "causal": True}
    said |= {"max_seqlen_q": 24, "max_seqlen_k": 48}
    given = {"cu_seqlens_q": ints([0] * 5), "cache_seqlens": ints([0] * 4), "page_table": ints([0] * 12).view(4, 3)}

    def step(k_cache: Tensor, v_cache: Tensor, given: dict[str, Tensor]) -> Tensor:
        return cutlass_fmha.with_kv_cache(q, k_cache, v_cache, k, v, **said, **given)

    step(*caches, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(*caches, given)
    for begins, used in (([0, 1, 2, 3, 4], [5, 40, 0, 17]), ([0, 20, 20, 21, 24], [0, 3, 33, 44])):
        order = torch.randperm(12, generator=generator, device=DEVICE)
        for tensor, value in zip(given.values(), (ints(begins), ints(used), order.view(4, -1)), strict=True):
            tensor.copy_(value)
        expected = [cache.clone() for cache in caches]
        found = step(*expected, {name: tensor.clone() for name, tensor in given.items()})
        graph.replay()
        assert torch.equal(output[: begins[-1]], found[: begins[-1]])
        assert all(torch.equal(one, other) for one, other in zip(caches, expected, strict=True))


def test_errors_are_one_sentence_and_leave_the_device_usable():
    q, k, v = PROBLEM.inputs(torch.float16, 64, DEVICE)
    row = next(row for row in ROWS if row.alignment == 16 and row.dtype == "float16" and row.head_dim == 64)
    with pytest.raises(ValueError, match="k must be on q's device cuda:0, got cpu"):
        cutlass_fmha.attention(q, k.cpu(), v)
    with pytest.raises(cutlass_fmha.UnsupportedError, match=f"{row.name}.*aligned to 16 bytes"):
        cutlass_fmha.attention(*replace(PROBLEM, layout="unaligned").inputs(q.dtype, 64, DEVICE), row=row.name)
    with pytest.raises(cutlass_fmha.UnsupportedError, match="drop softcap"):
        cutlass_fmha.attention(*PROBLEM.inputs(q.dtype, 520, DEVICE), softcap=30.0)
    launch, beyond = Launch.of(row, PROBLEM, DEVICE), torch.cuda.device_count()
    with pytest.raises(RuntimeError, match=rf"cudaSetDevice\({beyond}\)"):
        _C.run(row.index, launch.params(), beyond, 0)
    launch.check()
    oracle_features.compare(cutlass_fmha.attention(q, k, v), None, q, k, v).check()


def test_device_properties_are_those_that_torch_reads():
    for index in range(torch.cuda.device_count()):
        ours, theirs = _C.device_properties(index), torch.cuda.get_device_properties(index)
        assert (ours.name, ours.major, ours.minor) == (theirs.name, theirs.major, theirs.minor)
        assert ours.multiprocessor_count == theirs.multi_processor_count
        assert ours.shared_memory_per_block_optin >= 99 * 1024
    assert _C.device_count() == torch.cuda.device_count()
