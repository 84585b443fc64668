"""The scored rows against dense fp64: every feature, alone and mixed.

A simulator's rows can be tested, too; a GPU's own behaviour (graphs, far strides) is left to the GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import gpu
import hypothesis
import pytest
import torch
from general import GeneralLaunch, compare, fit
from listed_general import GROUPS
from parity_report import ParityReport
from problems import poison
from problems_general import GeneralProblem, problems

import cutlass_fmha
from cutlass_fmha import _C

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = gpu.device()
ROWS = gpu.scored_rows()
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
on_a_gpu = pytest.mark.skipif(
    gpu.simulated(), reason="a simulator has no graphs, no far strides and no plain calls"
)


def check(launch: GeneralLaunch, parity: ParityReport) -> None:
    launch.run()
    parity.check(launch, launch.problem)


@by_row
@pytest.mark.parametrize("group", GROUPS)
def test_listed_problems(row: _C.Template, group: str, parity: ParityReport):
    for problem in dict.fromkeys(fit(problem, row) for problem in GROUPS[group]):
        check(GeneralLaunch.of(row, problem, DEVICE), parity)


@by_row
def test_drawn_problems(row: _C.Template, parity: ParityReport):
    @hypothesis.settings(hypothesis.settings.get_profile("parity"))
    @hypothesis.given(problem=problems())
    def agrees(problem: GeneralProblem) -> None:
        check(GeneralLaunch.of(row, problem, DEVICE), parity)

    agrees()


# ---- the way through the package ---------------------------------------------------------------------------


def attend(
    problem: GeneralProblem, dtype: torch.dtype, template: str | None = None, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """attention() on a problem, compared with the oracle."""
    call = problem.call(dtype, DEVICE)
    features = {**call.features, **more}
    out, lse = cutlass_fmha.attention(
        call.q,
        call.k,
        call.v,
        scale=call.scale,
        causal=call.causal,
        return_lse=True,
        template=template,
        **features,
    )
    if out.numel():
        compare(call, out, lse).check()
    return out, lse


@by_row
def test_attention_runs_the_row_it_is_told_to(row: _C.Template):
    for problem in [
        *GROUPS["lengths"][::3],
        *GROUPS["decode"][::4],
        *GROUPS["masks"][::5],
        *GROUPS["scores"][::5],
    ]:
        attend(fit(problem, row), gpu.torch_dtype(row), row.name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_picks_a_row_that_can(dtype: torch.dtype):
    @hypothesis.settings(hypothesis.settings.get_profile("parity"))
    @hypothesis.given(problem=problems())
    def agrees(problem: GeneralProblem) -> None:
        if problem.num_heads:
            attend(replace(problem, blocks=None), dtype)

    agrees()


@on_a_gpu
@by_row
def test_a_plain_problem_may_be_given_to_a_scored_row(row: _C.Template):
    for layout in ("bshd", "unaligned"):
        problem = fit(GeneralProblem(70, 130, causal="bottom-right", layout=layout, seed=3), row)
        attend(problem, gpu.torch_dtype(row), row.name)


# ---- bits --------------------------------------------------------------------------------------------------


@by_row
def test_dropout_is_that_of_the_public_mask(row: _C.Template):
    """Equal probabilities and the identity as values: what is dropped is 0."""
    dim, heads, queries = row.head_dim_v, 3, row.tile_m + 5
    dtype = gpu.torch_dtype(row)
    q = torch.zeros(2, queries, heads, row.head_dim, dtype=dtype, device=DEVICE)
    k = torch.zeros(2, dim, 1, row.head_dim, dtype=dtype, device=DEVICE)
    v = torch.eye(dim, dtype=dtype, device=DEVICE).view(1, dim, 1, dim).expand(2, -1, -1, -1)
    for p in (0.3, 0.9999, 1e-6):
        out = cutlass_fmha.attention(q, k, v, dropout_p=p, dropout_seed=11, template=row.name)
        mask = cutlass_fmha.dropout_mask(11, 2, heads, queries, dim, p, device=DEVICE)
        assert torch.equal(out.transpose(1, 2) != 0, mask)


@by_row
def test_repeats_are_bitwise_equal(row: _C.Template, parity: ParityReport):
    for problem in (
        GeneralProblem(300, 500, causal="bottom-right", window=(120, 0), softcap=9.0, dropout=0.3, seed=5),
        GeneralProblem(3, 900, num_heads=8, num_splits=5, pack=True, used_k=True, fill="outliers", seed=6),
    ):
        launch = GeneralLaunch.of(row, problem, DEVICE)
        check(launch, parity)
        assert launch.lse is not None
        out, lse = launch.out.view.clone(), launch.lse.view.clone()
        for _ in range(3 if gpu.simulated() else 50):
            launch.run()
            assert torch.equal(launch.out.view, out) and torch.equal(launch.lse.view, lse)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["dense", "packed", "paged", "decode", "cache"])
def test_batch_invariant_sequences_do_not_notice_the_others(kind: str):
    """Alone, in a batch, and in a batch with longer sequences: the same bits."""
    problem = {
        "dense": GeneralProblem(65, 130, batch=4, num_heads=4, causal="bottom-right"),
        "packed": GeneralProblem(
            70, 130, batch=4, num_heads=4, packed_q=True, packed_k=True, causal="bottom-right"
        ),
        "paged": GeneralProblem(2, 300, batch=4, num_heads=4, num_heads_kv=1, page_size=16, used_k=True),
        "decode": GeneralProblem(1, 700, batch=4, num_heads=8, num_heads_kv=2),
        "cache": GeneralProblem(
            3, 400, batch=4, num_heads=4, num_heads_kv=2, used_k=True, causal="bottom-right"
        ),
    }[kind]
    problem = replace(problem, seed=17)
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
        alone, alone_lse = cutlass_fmha.attention(
            q, k, v, causal=call.causal, return_lse=True, batch_invariant=True, **f
        )
        assert same_bits(alone, mine) and same_bits(alone_lse, mine_lse), f"{kind}: sequence {b}"


@by_row
def test_nan_in_a_query_row_stays_in_that_row(row: _C.Template, parity: ParityReport):
    problem = fit(
        GeneralProblem(100, 200, num_heads=4, num_heads_kv=2, pack=True, window=(60, 5), seed=3), row
    )
    launch = GeneralLaunch.of(row, problem, DEVICE)
    launch.call.q[1, 77, 1, 0] = torch.nan
    check(launch, parity)
    assert launch.out.view[1, 77, 1].isnan().all()


@by_row
def test_keys_beyond_a_window_are_never_touched(row: _C.Template):
    """Tiles that no query sees are not read: their NaN would come through a probability of 0."""
    problem = fit(GeneralProblem(64, 1000, window=(50, 0), causal="bottom-right", seed=4), row)
    launch = GeneralLaunch.of(row, problem, DEVICE)
    launch.run()
    before = launch.out.view.clone()
    launch.call.k[:, : 1000 - 64 - 50 - 128] = torch.nan
    launch.call.v[:, : 1000 - 64 - 50 - 128] = torch.nan
    launch.run()
    assert torch.equal(launch.out.view, before)


# ---- a GPU's own -------------------------------------------------------------------------------------------


@on_a_gpu
@by_row
def test_a_graph_reads_lengths_tables_and_the_seed_anew(row: _C.Template, parity: ParityReport):
    problem = GeneralProblem(
        2,
        600,
        batch=3,
        num_heads=8,
        num_heads_kv=2,
        page_size=64,
        used_k=True,
        dropout=0.25,
        num_splits=3,
        pack=True,
    )
    launch = GeneralLaunch.of(row, replace(problem, seed=21), DEVICE)
    launch.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for seed in (22, 23):
        other = GeneralLaunch.of(row, replace(problem, seed=seed), DEVICE)
        for name in ("q", "k", "v"):
            getattr(launch.call, name).copy_(getattr(other.call, name))
        for name in ("seqused_k", "page_table", "dropout_seed"):
            launch.call.features[name].copy_(other.call.features[name])
        launch.out.view.fill_(torch.nan)
        graph.replay()
        parity.record(row.name, f"{problem} replayed, seed {seed}", launch.errors())


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
@by_row
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "seqlen", "heads"])
def test_offsets_beyond_31_bits(row: _C.Template, axis: int, parity: ParityReport):
    buffer = poison(gpu.torch_dtype(row), gpu.FAR + 4096 + 4 * gpu.REGION, DEVICE)
    dims = {"head_dim": min(64, row.head_dim), "head_dim_v": min(64, row.head_dim_v)}
    problem = GeneralProblem(65, 65, causal="bottom-right", num_heads=3, num_heads_kv=3, seed=8, **dims)
    launch = GeneralLaunch.of(row, problem, DEVICE)
    far = [gpu.far_view(buffer, i, tuple(launch.call.q.shape), axis) for i in range(4)]
    for name, view, x in zip("qkvo", far, (*launch.call[:3], launch.out.view), strict=True):
        view.copy_(x)
        setattr(launch.params, name, view.data_ptr())
        setattr(launch.params, f"{name}_stride", view.stride()[:3])
    launch.run()
    launch.out.view.copy_(far[3])
    parity.record(
        row.name, f"{problem} with a far {('batch', 'seqlen', 'heads')[axis]} stride", launch.errors()
    )
