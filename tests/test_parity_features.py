"""Every row of this GPU's architecture against dense fp64, those of gradients, too: ``make parity``.

A simulator's rows can be tested, too; a GPU's own behaviour (graphs, far strides) is left to the GPU.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import gpu
import hypothesis
import oracle_features
import oracle_gradients
import pytest
import torch
from backward_launch import OVERFLOWING, BackwardLaunch
from backward_launch import listed as listed_gradients
from hypothesis import strategies as st
from launches import LARGEST, SPLIT_ERROR, Launch, compare, fit
from operands import CAUSAL, Call, poison
from parity_report import ParityReport
from problems import GROUPS, Problem, is_short, listed, problems
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.arguments.op_arguments import op_arguments

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = gpu.device()
PLAIN, SCORED, WIDE = gpu.rows(), gpu.scored_rows(), gpu.wide_rows()
ROWS = [*PLAIN, *SCORED, *WIDE]
WIDE_DTYPES = sorted({gpu.torch_dtype(row) for row in WIDE}, key=str)
GRADIENTS = gpu.backward_rows()
by_row, by_scored_row, by_wide_row, by_row_of_gradients = map(gpu.by_row, (ROWS, SCORED, WIDE, GRADIENTS))
drawn = hypothesis.settings(hypothesis.settings.get_profile("parity"))
on_a_gpu = pytest.mark.skipif(gpu.simulated(), reason="no graphs, far strides and plain calls in a simulator")


def launch_of(row: _C.Row, problem: Problem) -> Any:
    return (BackwardLaunch.drawn if row in GRADIENTS else Launch.of)(row, problem, DEVICE)


def check(launch: Any, parity: ParityReport) -> Any:
    """In memory of NaN: what is computed, sums of dQ and terms of rows."""
    # Then torch.utils.deterministic fills what torch.empty returns; the oracle takes minutes so.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        launch.run()
    finally:
        torch.use_deterministic_algorithms(False)
    parity.check(launch, launch.problem)
    return launch


@pytest.mark.parametrize(
    ("row", "group"),
    [
        *((row, group) for row in ROWS for group in (["plain"] if row in PLAIN else GROUPS)),
        *((row, "gradients") for row in GRADIENTS),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_listed_problems(row: _C.Row, group: str, parity: ParityReport):
    made = GROUPS.get(group) or (listed_gradients(row) if group == "gradients" else listed())
    for problem in made if group == "gradients" else dict.fromkeys(fit(problem, row) for problem in made):
        if group != "plain" or is_short(problem) or not gpu.simulated():
            check(launch_of(row, problem), parity)


@gpu.by_row([*ROWS, *GRADIENTS])
@drawn
@hypothesis.given(data=st.data())
def test_drawn_problems(row: _C.Row, parity: ParityReport, data: st.DataObject):
    check(launch_of(row, data.draw(problems(longest=300 if row in WIDE else 700))), parity)


def attend(problem: Problem, dtype: torch.dtype, row: str | None = None, **more: object) -> tuple[Tensor, Tensor]:
    """attention() on a problem, compared with the oracle."""
    call = problem.call(dtype, DEVICE)
    said = {"scale": call.scale, "causal": call.causal, "row": row, **call.features, **more}
    out, lse = cutlass_fmha.attention(call.q, call.k, call.v, return_lse=True, **said)
    if out.numel():
        compare(call, out, lse, SPLIT_ERROR if dtype == torch.float32 else 0.0).check()
    return out, lse


@by_scored_row
def test_attention_runs_the_row_it_is_told_to(row: _C.Row):
    some = [GROUPS["lengths"][::3], GROUPS["decode"][::4], GROUPS["masks"][::5], GROUPS["scores"][::5]]
    if not gpu.simulated():
        plain = Problem(70, 130, causal="bottom-right", seed=3)
        some.append([plain, replace(plain, layout="unaligned")])
    for problem in itertools.chain(*some):
        attend(fit(problem, row), gpu.torch_dtype(row), row.name)


@pytest.mark.parametrize("family", [None, *sorted({row.family for row in SCORED if not row.scored})])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@drawn
@hypothesis.given(problem=problems())
def test_attention_picks_a_row_that_can(dtype: torch.dtype, family: str | None, problem: Problem):
    """Of all problems, and of those that rows of a family can take, of as many head dims as they have."""
    rows = [row for row in SCORED if row.family == family]
    problem = fit(problem, rows[problem.seed % len(rows)]) if rows else problem
    attend(replace(problem, blocks=None), dtype)


@gpu.by_row([row for row in SCORED if row.scored])
def test_dropout_is_that_of_the_public_mask(row: _C.Row):
    """Equal probabilities and the identity as values: what is dropped is 0."""
    dim, heads, queries = row.head_dim_v, 3, row.tile_m + 5
    dtype = gpu.torch_dtype(row)
    q = torch.zeros(2, queries, heads, row.head_dim, dtype=dtype, device=DEVICE)
    k = torch.zeros(2, dim, 1, row.head_dim, dtype=dtype, device=DEVICE)
    v = torch.eye(dim, dtype=dtype, device=DEVICE).view(1, dim, 1, dim).expand(2, -1, -1, -1)
    for p in (0.3, 0.9999, 1e-6):
        out = cutlass_fmha.attention(q, k, v, dropout_p=p, dropout_seed=11, row=row.name)
        mask = cutlass_fmha.dropout_mask(11, 2, heads, queries, dim, p, device=DEVICE)
        assert torch.equal(out.transpose(1, 2) != 0, mask)


MIXED = [
    Problem(300, 500, causal="bottom-right", window=(120, 0), softcap=9.0, dropout=0.3, seed=5),
    Problem(3, 900, num_heads=8, num_splits=5, pack=True, used_k=True, fill="outliers", seed=6),
    Problem(150, 300, causal="bottom-right", fill="outliers", seed=6),
]
LONG = [
    Problem(1023, 1023, "bottom-right", num_heads=4, fill="outliers", seed=5),
    Problem(300, 2000, num_heads=4, num_heads_kv=1, fill="ramp", seed=6),
    Problem(17, 113, batch=64, seed=7),
]


@by_row
def test_repeats_are_bitwise_equal(row: _C.Row, parity: ParityReport):
    noise = None if gpu.simulated() else torch.cuda.Stream(DEVICE)
    load = torch.randn(1024, 1024, device=DEVICE)
    for problem in MIXED if gpu.simulated() else MIXED + LONG:
        launch = Launch.of(row, problem, DEVICE)
        check(launch, parity)
        assert launch.lse is not None
        out, lse = launch.out.view.clone(), launch.lse.view.clone()
        differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for i in range(100 if noise else 3):
            if noise and i % 4 == 0:  # other work on the GPU moves blocks and warps against each other
                with torch.cuda.stream(noise):
                    load = load @ load
                    load /= load.norm()
            launch.run()
            differs |= (launch.out.view != out).any() | (launch.lse.view != lse).any()
        assert not differs.item(), f"{row.name}: {problem}: its runs gave more than one result"


BATCHES = {
    "dense": Problem(65, 130, causal="bottom-right", batch=4, num_heads=4, seed=17),
    "packed": Problem(70, 130, "bottom-right", packed_q=True, packed_k=True, batch=4, num_heads=4, seed=17),
    "paged": Problem(2, 300, page_size=16, used_k=True, batch=4, num_heads=4, num_heads_kv=1, seed=17),
    "decode": Problem(1, 700, batch=4, num_heads=8, num_heads_kv=2, seed=17),
    "cache": Problem(3, 400, "bottom-right", used_k=True, batch=4, num_heads=4, num_heads_kv=2, seed=17),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batch_invariant_sequences_do_not_notice_the_others(kind: str):
    """Alone, in a batch, and in a batch with longer sequences: the same bits."""
    problem = BATCHES[kind]
    call, lengths = problem.call(torch.bfloat16, DEVICE), problem.lengths()
    out, lse = attend(problem, torch.bfloat16, batch_invariant=True)
    for b in range(problem.batch):
        f = dict(call.features)
        if problem.packed_q:
            rows = slice(*f["cu_seqlens_q"].tolist()[b : b + 2])
            keys = slice(*f["cu_seqlens_k"].tolist()[b : b + 2])
            q, k, v = call.q[rows], call.k[keys], call.v[keys]
            for side, length in (("q", lengths.rows_q[b]), ("k", lengths.rows_k[b])):
                f[f"cu_seqlens_{side}"] = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
                f[f"max_seqlen_{side}"] = length
            mine, mine_lse = out[rows], lse[:, rows]
        else:
            q, mine, mine_lse = call.q[b : b + 1], out[b : b + 1], lse[b : b + 1]
            k, v = (call.k, call.v) if problem.page_size else (call.k[b : b + 1], call.v[b : b + 1])
            for name in ("seqused_k", "page_table"):
                if name in f:
                    f[name] = f[name][b : b + 1]
        if problem.page_size:  # a table that is only as wide as the sequence needs
            f["page_table"] = f["page_table"][:, : max(1, -(-lengths.used_k[b] // problem.page_size))]
        f |= {"causal": call.causal, "return_lse": True, "batch_invariant": True}
        alone = cutlass_fmha.attention(q, k, v, **f)
        same = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": f"{kind}: sequence {b}"}
        torch.testing.assert_close(alone, (mine, mine_lse), **same)


@by_row
@pytest.mark.parametrize("splits", [None, 3])
def test_nan_in_a_query_row_stays_in_that_row(row: _C.Row, splits: int | None, parity: ParityReport):
    problem = Problem(100, 200, num_heads=4, num_heads_kv=2, pack=True, window=(60, 5), num_splits=splits, seed=3)
    launch = Launch.of(row, problem, DEVICE)
    launch.q[1, 77, 1, 0] = torch.nan
    check(launch, parity)
    assert launch.out.view[1, 77, 1].isnan().all()


@pytest.mark.parametrize(
    ("row", "beyond"),
    [*((row, "the diagonal") for row in ROWS), *((row, "a window") for row in SCORED)],
    ids=lambda x: getattr(x, "name", x),
)
def test_keys_that_no_query_sees_are_never_touched(row: _C.Row, beyond: str):
    """Tiles of them are not read: their NaN would come through a probability of 0."""
    problem = Problem(64, 900, causal="top-left", seed=8)
    unseen = slice(64 + row.tile_n * getattr(row, "kv_warps", 1), None)
    if beyond == "a window":
        problem = fit(Problem(64, 1000, window=(50, 0), causal="bottom-right", seed=4), row)
        unseen = slice(1000 - 64 - 50 - 128)
    launch = Launch.of(row, problem, DEVICE)
    launch.run()
    before = launch.out.view.clone()
    launch.k[:, unseen] = launch.v[:, unseen] = torch.nan
    launch.run()
    assert torch.equal(launch.out.view, before)


def read(launch: Launch | BackwardLaunch) -> list[Tensor]:
    """What it reads that a replay may find changed."""
    features = launch.call.features
    found = [*launch.call[:3], *(features[x] for x in ("seqused_k", "page_table", "dropout_seed") if x in features)]
    if isinstance(launch, BackwardLaunch):
        found += [launch.dout, *launch.forward, *([] if launch.dlse is None else [launch.dlse])]
    return found


@on_a_gpu
@gpu.by_row([*SCORED, *WIDE, *GRADIENTS])
def test_a_graph_reads_everything_anew(row: _C.Row, parity: ParityReport):
    decode = {"page_size": 64, "dropout": 0.25, "num_splits": 3, "pack": True}
    problem = Problem(2, 600, batch=3, num_heads=8, num_heads_kv=2, used_k=True, **decode)
    if row in GRADIENTS:
        problem = Problem(130, 260, "bottom-right", batch=3, used_k=True, num_heads=4)
    make = BackwardLaunch.of if row in GRADIENTS else Launch.of
    launch = make(row, replace(problem, seed=21), DEVICE)
    launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for seed in (25, 29):  # of the same head dims
        other = make(row, replace(problem, seed=seed), DEVICE)
        for to, x in zip(read(launch), read(other), strict=True):
            to.copy_(x)
        if isinstance(launch, Launch):
            launch.out.view.fill_(torch.nan)
        graph.replay()
        parity.check(launch, f"{problem} replayed, seed {seed}")


@on_a_gpu
def test_attention_in_a_graph_draws_a_new_seed_each_time():
    q = torch.randn(1, 64, 2, 64, device=DEVICE, dtype=torch.float16)
    cutlass_fmha.attention(q, q, q, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cutlass_fmha.attention(q, q, q, dropout_p=0.5)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(out.clone())
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))


@on_a_gpu
@pytest.mark.usefixtures("much_memory")
@gpu.by_row([*ROWS, *GRADIENTS])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_offsets_beyond_31_bits(row: _C.Row, axis: int, parity: ParityReport):
    """Operands with strides of 2^31 elements and more lie interleaved in 4.3 GB of NaN."""
    buffer = poison(gpu.torch_dtype(row), gpu.FAR + 4096 + 4 * gpu.REGION, DEVICE)
    dims = {name: min(64, getattr(row, name, row.head_dim)) for name in ("head_dim", "head_dim_v")}
    problem = Problem(65, 65, causal="bottom-right", num_heads=3, num_heads_kv=3, seed=8, **dims)
    launch = (BackwardLaunch.of if row in GRADIENTS else Launch.of)(row, problem, DEVICE)
    near = (*launch.call[:3], launch.dout if isinstance(launch, BackwardLaunch) else launch.out.view)
    far = [gpu.far_view(buffer, i, tuple(x.shape), axis) for i, x in enumerate(near)]
    if row in WIDE and axis == 1:
        launch.k = far[1]
        with pytest.raises(ValueError, match="its offsets are 32-bit, and k spans"):
            launch.run()
        return
    for view, x in zip(far, near, strict=True):
        view.copy_(x)
    launch.call = launch.call._replace(q=far[0], k=far[1], v=far[2])
    if isinstance(launch, BackwardLaunch):
        launch.dout = far[3]
    elif row not in WIDE:
        launch.out.view = far[3]
    launch.run()
    what = f"{problem} with a far {('batch', 'seqlen', 'heads')[axis]} stride"
    parity.record(row.name, what, launch.errors())
    assert row in ROWS or launch.intact()


@by_wide_row
def test_what_the_example_does_not_do_by_itself(row: _C.Row, parity: ParityReport):
    """Its maximum takes -0 for less than -inf: kernel.cuh makes none. Rows whose bias hides everything are empty. One
    query is computed with its group."""
    for seqlen_k, scale in itertools.product((1, 300), (-1.0, 0.0, 1.0)):
        launch = Launch.of(row, Problem(3, seqlen_k, causal="none", scale=scale), DEVICE)
        launch.call.q.zero_()
        launch.call.k.clamp_(max=-0.5)  # a negative sum of products times 0 is -0
        check(launch, parity)
    launch = Launch.of(row, Problem(70, 200, bias=("bhqk", "same", "plain"), num_heads=4), DEVICE)
    bias = launch.call.features["bias"]
    bias[:, :, 5:9] = -torch.inf
    bias[0, 1, 20, :150] = -torch.inf  # whole steps before the first key that is seen
    check(launch, parity)
    assert launch.lse is not None
    assert (launch.out.view[:, 5:9] == 0).all() and (launch.lse.view[:, :, 5:9] == -torch.inf).all()
    for causal, (heads, heads_kv) in itertools.product(CAUSAL, ((8, 2), (70, 1), (3, 3))):
        biased = ("bhqk", "same", "plain") if causal == "bottom-right" else None
        problem = Problem(1, 300, causal, num_heads=heads, num_heads_kv=heads_kv, bias=biased, used_k=True, seed=2)
        check(Launch.of(row, problem, DEVICE), parity)
    packed = Problem(1, 90, batch=4, num_heads=6, num_heads_kv=2, packed_q=True, used_q=True)
    check(Launch.of(row, packed, DEVICE), parity)


def attend_wide(problem: Problem, dtype: torch.dtype, row: str | None, **more: object) -> None:
    """The op, which a simulator has for problems without features, too, compared with the oracle."""
    call = replace(problem, **more).call(dtype, DEVICE)
    scale = problem.head_dim**-0.5 if call.scale is None else call.scale
    arguments = op_arguments(call.q, call.features)
    out, lse = torch.ops.cutlass_fmha.attend(call.q, call.k, call.v, scale, call.causal, True, row, **arguments)
    assert out.is_contiguous()
    compare(call, out, lse, SPLIT_ERROR).check()


@by_wide_row
def test_attend_runs_the_wide_row_it_is_told_to(row: _C.Row):
    for problem in [*GROUPS["lengths"][::4], *GROUPS["masks"][::6], *GROUPS["shapes"][1::9]]:
        problem = fit(replace(problem, seed=4 * problem.seed + 1), row)
        if row.dtype != "float32":
            problem = replace(problem, head_dim=264 + problem.head_dim % 256)
        if problem.num_heads:
            attend_wide(problem, gpu.torch_dtype(row), row.name)


@pytest.mark.parametrize("head_dims", [(64, 64), (33, 70), (100, 128), (300, 40), (257, 513)])
@pytest.mark.parametrize("dtype", WIDE_DTYPES, ids=str)
def test_attend_and_sdpa_pick_a_wide_row_that_can(dtype: torch.dtype, head_dims: tuple[int, int]):
    if dtype != torch.float32:  # with large head dims only
        head_dims = (head_dims[0] + LARGEST, head_dims[1])
    dims = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    for layout in ("bshd", "unaligned"):
        problem = Problem(70, 130, causal="bottom-right", layout=layout, num_heads=4, **dims)
        attend_wide(problem, dtype, None)
        if max(head_dims) <= 512:
            more = {"window": (40, -1), "softcap": 9.0, "sinks": "normal", "mask": ("qk", "plain"), "num_splits": 2}
            attend_wide(problem, dtype, None, **more)
    if head_dims[1] == 64 and not gpu.simulated():
        q, k, v = (torch.randn(2, 4, 100, dims["head_dim"], device=DEVICE).to(dtype) for _ in range(3))
        ours = cutlass_fmha.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        bshd = [x.transpose(1, 2) for x in (q, k, v)]
        oracle_features.compare(ours, None, *bshd, causal="top-left", product_error=SPLIT_ERROR).check()


@on_a_gpu
@by_wide_row
def test_long_sums_are_as_exact_as_unfused_math(row: _C.Row):
    """Tensor cores cut off what they sum, which the simulator does not: rows sum in float32 often enough."""
    launch = Launch.of(row, Problem(64, 4000, seed=8), DEVICE)
    launch.run()
    launch.product_error = 0.0
    launch.errors().check()


@on_a_gpu
@by_wide_row
@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_more_heads_and_batches_than_a_grid_dimension_holds(row: _C.Row, axis: int, parity: ParityReport):
    batch, heads = (70000, 1) if axis == 0 else (1, 70000)
    problem = Problem(2, 3, batch=batch, num_heads=heads, num_heads_kv=heads, return_lse=False)
    launch = Launch.of(row, problem, DEVICE)
    launch.run()
    out = launch.out.view[..., : launch.problem.head_dim_v]
    assert launch.out.intact() and not out.isnan().any()
    # The oracle takes sequence by sequence: some of them.
    some = torch.tensor([0, 1, 65535, 65536, 69999], device=DEVICE)
    call = launch.call._replace(**{x: getattr(launch, x).index_select(axis, some) for x in "qkv"})
    errors = compare(call, out.index_select(axis, some), None, launch.product_error)
    parity.record(row.name, f"{launch.problem}, five of them", errors)


@gpu.by_row([row for row in GRADIENTS if row.dtype == "float16"])
def test_only_gradients_of_what_float16_has_no_number_for_are_not_finite(row: _C.Row, parity: ParityReport):
    finite = []
    for problem in OVERFLOWING:
        launch = check(BackwardLaunch.overflowing(row, problem, DEVICE), parity)
        finite.append([bool(launch.found[name].isfinite().all()) for name in "qk"])
    assert not any(map(all, zip(*finite, strict=True)))


@gpu.by_row([row for row in GRADIENTS if row.scored])
def test_a_nan_of_a_key_reaches_no_other_heads_bias(row: _C.Row):
    launch = BackwardLaunch.of(row, Problem(113, 70, bias=("bhqk", "float32", "plain"), num_heads=2, batch=1), DEVICE)
    launch.call.k[:, 3, 0] = math.nan
    launch.run()
    of_its_own, of_other = launch.found["bias"][0]
    assert of_its_own[:, 3].isnan().all() and of_other.isfinite().all() and launch.intact()


@gpu.by_row([row for row in GRADIENTS if row.scored])
def test_a_hidden_key_has_no_gradient_whatever_it_is(row: _C.Row):
    launch = BackwardLaunch.of(row, Problem(113, 70, mask=("bhqk", "plain"), softcap=2.0, batch=1), DEVICE)
    launch.said["mask"][..., 3] = False
    launch.call.k[:, 3, 0] = math.nan
    launch.run()
    assert (launch.found["k"][:, 3] == 0).all() and (launch.found["v"][:, 3] == 0).all() and launch.intact()


@by_row_of_gradients
def test_queries_that_are_not_in_use_have_no_gradient_whatever_keys_are(row: _C.Row):
    launch = BackwardLaunch.drawn(row, Problem(113, 70, used_q=True, seed=1), DEVICE)
    launch.call.k[:, 3] = math.nan
    launch.run()
    used = launch.said["seqused_q"].tolist()
    assert min(used) < 113 and all((launch.found["q"][n, count:] == 0).all() for n, count in enumerate(used))


@by_row_of_gradients
@pytest.mark.parametrize("causal", CAUSAL)
def test_gradients_have_the_same_bits_each_time(row: _C.Row, causal: str, parity: ParityReport):
    """Those of keys and values; that of queries where it is asked, of a row that can."""
    length = 300 if row.family == "backward_wide" else 1500  # a hundred launches of those take a minute otherwise
    shortest = min(length, 700) if gpu.simulated() else length
    problem = Problem(shortest, length, causal, num_heads=8, num_heads_kv=2, seed=3)
    launch = check(launch_of(row, problem), parity)
    first = launch.found
    for _ in range(1 if gpu.simulated() else 100):
        launch.run()
        for name in "qkv" if launch.deterministic else "kv":
            assert torch.equal(launch.found[name], first[name]), f"d{name}"


@by_row_of_gradients
def test_a_gradient_is_the_same_without_the_others(row: _C.Row, parity: ParityReport):
    launch = check(launch_of(row, Problem(200, 330, "bottom-right", num_heads=4, sinks="normal", seed=4)), parity)
    every = launch.found
    for alone in every:
        launch.wanted = (alone,)
        launch.run()
        assert list(launch.found) == [alone]
        assert alone == "q" or torch.equal(launch.found[alone], every[alone])
    launch.wanted = ("q",)
    launch.run()
    error = (launch.found["q"] - every["q"]).abs().max() / every["q"].abs().max()
    assert error <= 2 * torch.finfo(every["q"].dtype).eps


@by_row_of_gradients
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
    def loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = cutlass_fmha.attention(q, k, v, causal=True, return_lse=True)
        return out.float().square().sum() + lse.sum(), out.detach(), lse.detach()

    for heads, kv, n, dim in ((4, 4, 100, 64), (8, 2, 333, 128), (2, 1, 64, 40), (2, 1, 99, 320)):
        inputs = [torch.randn(2, n, h, dim, device=DEVICE, dtype=dtype, requires_grad=True) for h in (heads, kv, kv)]
        total, out, lse = (torch.compile(loss, fullgraph=True) if compiled else loss)(*inputs)
        found = dict(zip("qkv", torch.autograd.grad(total, inputs), strict=True))
        call = Call(*(x.detach() for x in inputs), None, "bottom-right", {}, False)
        product_error = SPLIT_ERROR if dtype == torch.float32 else 0.0
        oracle_gradients.compare(call, found, 2.0 * out, torch.ones_like(lse), product_error).check()


@on_a_gpu
@pytest.mark.usefixtures("much_memory")
@gpu.by_row([row for row in GRADIENTS if row.head_dim == 64][:1])
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
