"""What is special about rows that copy by TMA: descriptors of tensors, made on the host and kept per thread.

Where the rows under test have none, conftest.py leaves the file out, and says so.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gpu
import oracle_features
import pytest
import torch
from launches import Launch
from operands import GUARD, place, poison
from parity_report import ParityReport
from problems import Problem
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.dispatch.blocks import Tail

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = gpu.device()
ROWS = [row for row in gpu.rows() if row.copy == "tma"]
OF_EACH_HEAD_DIM = [[row for row in ROWS if row.head_dim == dim] for dim in sorted({row.head_dim for row in ROWS})]
by_row = gpu.by_row(ROWS)
by_own_row = gpu.by_row([row for row in ROWS if row.kv_warps == 1])  # whose warps have query rows of their own
#: For tests of hundreds of launches. Which dtype and tile it is, changes from one head dim to the next.
by_head_dim = gpu.by_row([rows[i % len(rows)] for i, rows in enumerate(OF_EACH_HEAD_DIM)])
CACHED = 64  # descriptors that a thread keeps (src/tensor_map.cpp)


def test_there_are_rows_to_test():
    assert ROWS, gpu.without_tma()


def attend(row: _C.Row, inputs: tuple[Tensor, ...], parity: ParityReport, what: str) -> None:
    out, lse = cutlass_fmha.attention(*inputs, causal=True, return_lse=True, row=row.name)
    parity.record(row.name, what, oracle_features.compare(out, lse, *inputs, causal="bottom-right"))


@by_own_row
def test_the_keys_of_the_last_tiles_may_be_divided(row: _C.Row, parity: ParityReport):
    """From one tile in two parts to all of them in as many as there are key tiles, the last one cut short. The first
    keys outweigh all others by 2^1000, or the last ones do."""
    for beyond in (0, 5):
        heads = {"batch": 2, "num_heads": 4, "num_heads_kv": 2}
        problem = Problem(row.tile_m + 17, 5 * row.tile_n + beyond, scale=-0.3, seed=40, **heads)
        tiles, keys = 2 * 2 * 4, 5 + bool(beyond)
        for tail in ((1, 2, keys - 1, 1), (3, 3, 1, keys // 2), (5, 3, keys - 3, 2), (tiles, keys, 1, 1)):
            launch = Launch.of(row, problem, DEVICE)
            launch.run(tail=Tail(*tail))
            parity.check(launch, f"{problem} {tail}")
    for seed, part in enumerate((slice(0, 7), slice(-7, None))):
        launch = Launch.of(row, Problem(70, 4 * row.tile_n, batch=1, num_heads=2, seed=41 + seed), DEVICE)
        launch.k[:, part] *= 100
        launch.run(tail=Tail(2, 3, 2, 1))
        parity.check(launch, f"{launch.problem} scores of {part}")


def with_stride(x: Tensor, odd: int, dims: list[int]) -> Tensor:
    """x, the strides of its dimensions ``dims``, all of size 1, replaced."""
    assert all(x.shape[dim] == 1 for dim in dims)
    return x.as_strided(x.shape, [odd if dim in dims else stride for dim, stride in enumerate(x.stride())])


@by_row
@pytest.mark.parametrize("stride", [1, 3, 12345, 0, 2**40])
def test_a_dimension_of_one_element_may_have_any_stride(row: _C.Row, stride: int, parity: ParityReport):
    for problem, q_dims, kv_dims in (
        (Problem(70, 90, "bottom-right", batch=1, num_heads=4, seed=32), [0], [0]),
        (Problem(70, 90, batch=2, num_heads=2, num_heads_kv=1, seed=33), [], [2]),
        (Problem(1, 90, batch=2, num_heads=2, seed=34), [1], []),
        (Problem(70, 1, batch=2, num_heads=2, seed=35), [], [1]),
        (Problem(1, 1, batch=1, num_heads=1, num_heads_kv=1, seed=36), [0, 1, 2], [0, 1, 2]),
    ):
        launch = Launch.of(row, problem, DEVICE)
        launch.q = with_stride(launch.q, stride, q_dims)
        launch.k, launch.v = (with_stride(x, stride, kv_dims) for x in (launch.k, launch.v))
        launch.run()
        parity.check(launch, f"{problem} stride {stride} where there is one element")
        attend(row, (launch.q, launch.k, launch.v), parity, f"{problem} stride {stride} of one element")


def amid(x: Tensor, dim: int) -> Tensor:
    """The middle of a dimension three times as long, with NaN right before and behind."""
    size = x.shape[dim]
    nan = poison(x.dtype, x.numel(), x.device).view(x.shape)
    return place(torch.cat([nan, x, nan], dim)).narrow(dim, size, size)


def every_other_head(x: Tensor) -> Tensor:
    whole = place(poison(x.dtype, 2 * x.numel(), x.device).view(*x.shape[:2], -1, x.shape[3]))
    return whole[:, :, 1::2].copy_(x)


def first_of(*dims: int) -> Callable[[Tensor], Tensor]:
    """Stride 0 along ``dims``: what is first there, read as all of it."""
    first = tuple(slice(1) if dim in dims else slice(None) for dim in range(4))
    return lambda x: place(x[first]).expand(x.shape)


#: How q lies, and how k and v do. A driver that refuses strides of 0 fails with its sentence, in these rows
#: only: selection must not offer them then.
MEMORY: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    **{f"k and v expanded over {dims}": (first_of(), first_of(*dims)) for dims in ((0,), (2,), (1,), (0, 2))},
    **{f"q expanded over {dim}": (first_of(dim), first_of()) for dim in range(3)},
    "everything over everything": (first_of(0, 1, 2),) * 2,
    "hsbd": (lambda x: place(x, "hsbd"),) * 2,
    "shifted": (lambda x: place(x, offset=GUARD + 8),) * 2,  # 16 bytes behind an address that is a multiple of 512
    "bhsd padded": (lambda x: place(x, "bhsd", row_pad=8, offset=GUARD + 24),) * 2,
    "slice of head_dim": (lambda x: amid(x, 3),) * 2,
    "slice of seqlen": (lambda x: amid(x, 1),) * 2,  # the last box of K and V ends in NaN: it reads as zeros
    "slice of heads": (every_other_head,) * 2,
}


@by_row
@pytest.mark.parametrize("memory", MEMORY)
def test_views(row: _C.Row, memory: str, parity: ParityReport):
    problem = Problem(150, 113, "bottom-right", batch=3, num_heads=6, num_heads_kv=3, seed=37)
    launch = Launch.of(row, problem, DEVICE)
    of_q, of_kv = MEMORY[memory]
    launch.q, launch.k, launch.v = of_q(launch.q), of_kv(launch.k), of_kv(launch.v)
    launch.run()
    parity.check(launch, f"{problem} {memory}")


# Sizes (batch, seqlen_q, seqlen_k, heads) and strides of (batch, seqlen, heads), in rows of head_dim + 8
# elements. Each differs from the one before in one thing that a descriptor says.
IN_TURN = [
    ((2, 150, 300, 4), (2048, 4, 1)),
    ((2, 150, 290, 4), (2048, 4, 1)),  # the descriptor of 300 keys would read ten rows of NaN
    ((2, 130, 290, 4), (2048, 4, 1)),  # that of 150 queries would write twenty rows too many
    ((1, 130, 290, 4), (2048, 4, 1)),
    ((2, 130, 290, 4), (2048, 4, 1)),
    ((2, 130, 290, 2), (2048, 4, 1)),
    ((2, 130, 290, 2), (2048, 2, 1)),
    ((2, 130, 290, 2), (1024, 2, 1)),
    ((2, 130, 290, 2), (1024, 1, 512)),
    ((2, 150, 300, 4), (2048, 4, 1)),
]


@by_row
def test_the_same_addresses_with_other_shapes_and_strides(row: _C.Row, parity: ParityReport):
    dtype, width = gpu.torch_dtype(row), row.head_dim + 8
    nan = poison(dtype, 2**21, DEVICE)
    buffers = [nan.clone() for _ in range(4)]
    for seed, ((batch, seqlen_q, seqlen_k, heads), strides) in enumerate(IN_TURN):
        problem = Problem(seqlen_q, seqlen_k, batch=batch, num_heads=heads, num_heads_kv=heads, seed=seed)
        launch = Launch.of(row, problem, DEVICE)
        in_elements = (*(width * stride for stride in strides), 1)
        operands = zip(buffers, (launch.q, launch.k, launch.v, launch.out.view), strict=True)
        there = [buffer.copy_(nan).as_strided(x.shape, in_elements, GUARD).copy_(x) for buffer, x in operands]
        launch.q, launch.k, launch.v = there[:3]
        launch.out = gpu.Guarded.around(there[3])
        launch.run()
        parity.check(launch, f"{problem} where others were, strides {strides}")


@pytest.mark.parametrize("dtype", sorted({row.dtype for row in ROWS}))
def test_the_same_addresses_for_rows_of_other_tiles_and_head_dims(dtype: str, parity: ParityReport):
    """Rows differ in the boxes that they copy, of which the tensors say nothing."""
    rows = [row for row in ROWS if row.dtype == dtype]
    width = max(row.head_dim for row in rows) + 8
    buffers = [poison(gpu.torch_dtype(rows[0]), 2 * 300 * 2 * width + 2 * GUARD, DEVICE).normal_() for _ in range(3)]
    for row in (*rows, *reversed(rows)):
        problem = Problem(300, 300, "bottom-right", seed=40)
        launch = Launch.of(row, problem, DEVICE)
        strides = (300 * 2 * width, 2 * width, width, 1)
        views = [buffer.as_strided((2, 300, 2, row.head_dim), strides, GUARD) for buffer in buffers]
        launch.q, launch.k, launch.v = views
        launch.run()
        parity.check(launch, f"{problem} of the same memory as other rows'")


@by_head_dim
def test_more_tensors_than_are_kept(row: _C.Row, parity: ParityReport):
    """Descriptors push each other out, and calls come back to all of them."""
    problems = [Problem(65 + i % 5, 70 + i % 7, "none", 1, 2, 2, seed=i) for i in range(CACHED + 10)]
    launches = [Launch.of(row, problem, DEVICE) for problem in problems]
    for launch, problem in zip(launches, problems, strict=True):
        launch.run()
        parity.check(launch, f"{problem} one of many")
    first = [launch.out.view.clone() for launch in launches]
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for step in (1, 3, 7):  # coprime to the number of launches: all of them, in another order
        for i in range(len(launches)):
            launch = launches[i * step % len(launches)]
            launch.out.view.fill_(torch.nan)
            launch.run()
        for launch, out in zip(launches, first, strict=True):
            differs |= (launch.out.view != out).any()
    assert not differs.item(), f"{row.name}: a repeated call gave another result"
    assert all(launch.intact() for launch in launches)


@by_row
def test_a_graph_keeps_its_descriptors(row: _C.Row, parity: ParityReport):
    """Those of a captured call are in its parameters: they outlive what the thread keeps, and its tensors'
    memory may be described otherwise meanwhile."""
    dtype = gpu.torch_dtype(row)
    problem = Problem(300, 257, "bottom-right", num_heads=4, seed=42)
    inputs = problem.inputs(dtype, row.head_dim, DEVICE)
    # Loads the kernel, which no capture would survive.
    attend(row, Problem(5, 5).inputs(dtype, row.head_dim, DEVICE), parity, "before a capture")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the inputs are described for the first time in here
        out, lse = cutlass_fmha.attention(*inputs, causal=True, return_lse=True, row=row.name)
    for seed in (43, 44):
        attend(row, tuple(x[:, :100] for x in inputs), parity, "between replays")  # at the same addresses
        for i in range(CACHED):
            Launch.of(row, Problem(20, 30 + i, batch=1, seed=i), DEVICE).run()
        for x, y in zip(inputs, replace(problem, seed=seed).inputs(dtype, row.head_dim, DEVICE), strict=True):
            x.copy_(y)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        errors = oracle_features.compare(out, lse, *inputs, causal=problem.causal)
        parity.record(row.name, f"{problem} replayed after other shapes, seed {seed}", errors)


@by_head_dim
def test_other_threads(row: _C.Row, parity: ParityReport):
    """Each with descriptors and a stream of its own, all at once, the same tensors among them."""
    shared = Problem(200, 300, "bottom-right", num_heads=4, seed=45)
    inputs = shared.inputs(gpu.torch_dtype(row), row.head_dim, DEVICE)
    torch.cuda.synchronize(DEVICE)

    def work(worker: int) -> list[tuple[Launch, Tensor]]:
        found, stream = [], torch.cuda.Stream(DEVICE)
        with torch.cuda.stream(stream):
            for i in range(20):
                problem = Problem(50 + 10 * worker, 60 + i, "bottom-right", batch=1 + i % 3, seed=100 * worker + i)
                launch = Launch.of(row, problem, DEVICE)
                launch.run()
                found.append((launch, cutlass_fmha.attention(*inputs, causal=True, row=row.name)))
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        results = [result for found in pool.map(work, range(4)) for result in found]
    assert len(results) == 80
    for launch, out in results:
        parity.check(launch, f"{launch.problem} in another thread")
        assert torch.equal(out, results[0][1]), f"{row.name}: threads disagree on the same tensors"
    errors = oracle_features.compare(results[0][1], None, *inputs, causal=shared.causal)
    parity.record(row.name, f"{shared} in another thread", errors)


@by_head_dim
def test_devices_in_turn(row: _C.Row, parity: ParityReport):
    """With one GPU this is a repetition; with more, the thread's descriptors are of several devices."""
    devices = [DEVICE, torch.device("cuda", torch.cuda.device_count() - 1)]
    torch.cuda.set_device(DEVICE)
    problem = Problem(113, 140, "bottom-right", seed=46)
    launches = [(device, Launch.of(row, problem, device)) for device in devices * 3]
    for _, launch in launches:
        launch.run()
    assert torch.cuda.current_device() == DEVICE.index
    for device, launch in launches:
        torch.cuda.synchronize(device)
        parity.check(launch, f"{problem} on {device}")
