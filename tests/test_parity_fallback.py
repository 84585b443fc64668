"""Every wide row against dense fp64, on this machine's GPU or, in a simulator build, on the CPU.

Outputs lie in buffers full of NaN, as in the other parity tests. Problems are those of scored rows, less
what these rows don't know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gpu
import hypothesis
import oracle_general
import pytest
import torch
from general import GeneralLaunch, compare, outputs
from listed_general import GROUPS
from parity_report import ParityReport
from problems import poison
from problems_general import GeneralProblem, problems

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.arguments.check_features import check_features
from cutlass_fmha.arguments.op_arguments import op_arguments
from cutlass_fmha.dispatch.families import wide
from cutlass_fmha.features import Features

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = gpu.device()
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS = gpu.wide_rows()
ROW_DTYPES = sorted({DTYPES[row.dtype] for row in ROWS}, key=str)
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
on_a_gpu = pytest.mark.skipif(
    gpu.simulated(), reason="a simulator has neither graphs nor memory for far strides"
)

#: Head dim from which on there are no other rows: problems have such ones every second time.
LARGEST = 256
#: In 3xTF32 a factor is a truncated TF32 number and a TF32-rounded rest, off by 2^-21 at most; the product of
#: two rests, 2^-20 at most, is left out. Together 2^-19, in half ulps of fp32:
SPLIT_ERROR = 32.0


def fitted(row: _C.Template, p: GeneralProblem) -> GeneralProblem:
    """The problem without what the row does not know, and with head dims that it is for."""
    dims = [min(dim, row.head_dim) for dim in (p.head_dim, p.head_dim_v)]
    if row.head_dim > LARGEST and max(dims) <= LARGEST and p.seed % 2:
        dims = [dim + LARGEST for dim in dims] if p.seed % 4 == 1 else [dims[0], dims[1] + LARGEST]
    bias = p.bias
    if bias is not None and row.dtype != "float32":
        bias = (bias[0], "same", bias[2])
    fill = p.fill
    if row.mma == "tf32x3" and fill.endswith("minus-inf"):
        fill = "normal"  # an infinity has no rest: inf - inf
    return replace(
        p,
        head_dim=dims[0],
        head_dim_v=dims[1],
        window=None if p.window is None else (-1, p.window[1]),
        bias=bias,
        fill=fill,
        prefix=False,
        blocks=None,
        softcap=0.0,
        alibi="",
        sinks="",
        dropout=0.0,
        page_size=0,
        num_splits=None,
        pack=False,
    )


@dataclass
class Launch(GeneralLaunch):
    """One call of ``wide.run`` into guarded outputs, ready to be made any number of times."""

    @classmethod
    def of(cls, row: _C.Template, problem: GeneralProblem) -> Launch:  # type: ignore[override]
        problem = fitted(row, problem)
        call = problem.call(DTYPES[row.dtype], DEVICE)
        room = outputs(problem, call, wide.padded(row, call.v.shape[-1]), aligned=True)
        split = SPLIT_ERROR if row.mma == "tf32x3" else 0.0
        return cls(row, problem, call, *room, product_error=split)

    def run(self) -> None:  # type: ignore[override]
        call, features = self.call, Features(**op_arguments(self.call.q, self.call.features))
        tensors = (call.q, call.k, call.v)
        scale = self.problem.head_dim**-0.5 if call.scale is None else call.scale
        lse = None if self.lse is None else self.lse.view
        sizes = check_features(tensors, features)
        wide.run(self.row, tensors, self.out.view, lse, scale, call.causal, features, sizes)


def run(row: _C.Template, problem: GeneralProblem, parity: ParityReport) -> Launch:
    launch = Launch.of(row, problem)
    launch.run()
    parity.check(launch, launch.problem)
    return launch


@by_row
@pytest.mark.parametrize("group", GROUPS)
def test_listed_problems(row: _C.Template, group: str, parity: ParityReport):
    for problem in dict.fromkeys(fitted(row, problem) for problem in GROUPS[group]):
        run(row, problem, parity)


@by_row
def test_drawn_problems(row: _C.Template, parity: ParityReport):
    @hypothesis.settings(hypothesis.settings.get_profile("parity"))
    @hypothesis.given(problem=problems(longest=300))
    def agrees(problem: GeneralProblem) -> None:
        run(row, problem, parity)

    agrees()


# ---- what the example does not do by itself ----------------------------------------------------------------


@by_row
@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.0])
def test_scores_of_minus_zero_are_scores(row: _C.Template, scale: float, parity: ParityReport):
    """The example's maximum takes -0 for less than -inf: kernel.cuh makes none."""
    for seqlen_k in (1, 300):
        launch = Launch.of(row, GeneralProblem(3, seqlen_k, causal="none", scale=scale))
        launch.call.q.zero_()
        launch.call.k.clamp_(max=-0.5)  # a negative sum of products times 0 is -0
        launch.run()
        parity.check(launch, f"{launch.problem} with queries of 0")


@by_row
def test_rows_whose_bias_hides_everything_are_empty(row: _C.Template, parity: ParityReport):
    problem = GeneralProblem(70, 200, bias=("bhqk", "same", "plain"), num_heads=4, num_heads_kv=2)
    launch = Launch.of(row, problem)
    bias = launch.call.features["bias"]
    bias[:, :, 5:9] = -torch.inf
    bias[0, 1, 20, :150] = -torch.inf  # whole steps before the first key that is seen
    launch.run()
    parity.check(launch, f"{launch.problem} with hidden rows")
    assert launch.lse is not None
    assert (launch.out.view[:, 5:9] == 0).all() and (launch.lse.view[:, :, 5:9] == -torch.inf).all()


@by_row
def test_one_query_is_computed_with_its_group(row: _C.Template, parity: ParityReport):
    for causal in ("none", "top-left", "bottom-right"):
        for heads in ((8, 2), (70, 1), (3, 3)):
            problem = GeneralProblem(1, 300, causal=causal, num_heads=heads[0], num_heads_kv=heads[1])
            bias = ("bhqk", "same", "plain") if causal == "bottom-right" else None
            run(row, replace(problem, bias=bias, used_k=True, seed=2), parity)
    run(row, GeneralProblem(1, 90, batch=4, num_heads=6, num_heads_kv=2, packed_q=True, used_q=True), parity)


@by_row
def test_repeats_are_bitwise_equal(row: _C.Template, parity: ParityReport):
    launch = run(row, GeneralProblem(150, 300, causal="bottom-right", fill="outliers", seed=6), parity)
    assert launch.lse is not None
    out, lse = launch.out.view.clone(), launch.lse.view.clone()
    for _ in range(3 if gpu.simulated() else 50):
        launch.run()
        assert torch.equal(launch.out.view, out) and torch.equal(launch.lse.view, lse)


@by_row
def test_nan_in_a_query_row_stays_in_that_row(row: _C.Template, parity: ParityReport):
    launch = Launch.of(row, GeneralProblem(100, 200, num_heads=4, num_heads_kv=2, seed=4))
    launch.call.q[1, 77, 1, 0] = torch.nan
    launch.run()
    parity.check(launch, f"{launch.problem} with NaN in a query")
    assert launch.out.view[1, 77, 1].isnan().all()


@by_row
def test_keys_beyond_the_diagonal_are_never_touched(row: _C.Template):
    launch = Launch.of(row, GeneralProblem(64, 900, causal="top-left", seed=8))
    launch.run()
    before = launch.out.view.clone()
    launch.call.k[:, 64:] = torch.nan
    launch.call.v[:, 64:] = torch.nan
    launch.run()
    assert torch.equal(launch.out.view, before)


# ---- the way through the package ---------------------------------------------------------------------------


@pytest.fixture
def run_kernels_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a simulator build ``attend`` launches them there, too."""
    if gpu.simulated():
        monkeypatch.setenv("CUTLASS_FMHA_SIMULATE", "1")


def attend(problem: GeneralProblem, dtype: torch.dtype, template: str | None, product_error: float) -> None:
    """The op on a problem, compared with the oracle."""
    call = problem.call(dtype, DEVICE)
    scale = problem.head_dim**-0.5 if call.scale is None else call.scale
    arguments: dict[str, Any] = op_arguments(call.q, call.features)
    out, lse = torch.ops.cutlass_fmha.attend(
        call.q, call.k, call.v, scale, call.causal, True, template, **arguments
    )
    assert out.is_contiguous()
    compare(call, out, lse, product_error).check()


@pytest.mark.usefixtures("run_kernels_on_cpu_tensors")
@by_row
def test_attend_runs_the_row_it_is_told_to(row: _C.Template):
    for problem in [*GROUPS["lengths"][::4], *GROUPS["masks"][::6], *GROUPS["shapes"][1::9]]:
        problem = fitted(row, replace(problem, seed=4 * problem.seed + 1))
        if row.dtype != "float32":
            problem = replace(problem, head_dim=264 + problem.head_dim % 256)
        if problem.num_heads:
            attend(problem, DTYPES[row.dtype], row.name, SPLIT_ERROR)


@pytest.mark.usefixtures("run_kernels_on_cpu_tensors")
@pytest.mark.parametrize("head_dims", [(64, 64), (33, 70), (100, 128), (300, 40), (257, 513)])
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_attend_picks_a_row_that_can(dtype: torch.dtype, head_dims: tuple[int, int]):
    if dtype != torch.float32:  # with large head dims only
        head_dims = (head_dims[0] + LARGEST, head_dims[1])
    for layout in ("bshd", "unaligned"):
        problem = GeneralProblem(70, 130, causal="bottom-right", layout=layout, num_heads=4)
        problem = replace(problem, head_dim=head_dims[0], head_dim_v=head_dims[1])
        attend(problem, dtype, None, SPLIT_ERROR)


@on_a_gpu
@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
def test_sdpa_takes_what_only_wide_rows_take(dtype: torch.dtype):
    shape = (2, 4, 100, 320 if dtype != torch.float32 else 80)
    q, k, v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3))
    ours = cutlass_fmha.scaled_dot_product_attention(q, k, v, is_causal=True)
    bshd = [x.transpose(1, 2) for x in (q, k, v)]
    errors = oracle_general.compare(
        ours.transpose(1, 2), None, *bshd, causal="top-left", product_error=SPLIT_ERROR
    )
    errors.check()


# ---- a GPU's own -------------------------------------------------------------------------------------------


@on_a_gpu
@by_row
def test_a_graph_reads_lengths_anew(row: _C.Template, parity: ParityReport):
    problem = GeneralProblem(70, 300, batch=3, num_heads=4, num_heads_kv=2, used_k=True, seed=24)
    launch = run(row, problem, parity)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for seed in (28, 32):
        other = Launch.of(row, replace(problem, seed=seed))
        for name in ("q", "k", "v"):
            getattr(launch.call, name).copy_(getattr(other.call, name))
        launch.call.features["seqused_k"].copy_(other.call.features["seqused_k"])
        launch.out.view.fill_(torch.nan)
        graph.replay()
        parity.check(launch, f"{launch.problem} replayed, seed {seed}")


@on_a_gpu
@by_row
def test_long_sums_are_as_exact_as_unfused_math(row: _C.Template):
    """Tensor cores cut off what they sum, which the simulator does not: rows sum in float32 often enough."""
    launch = Launch.of(row, GeneralProblem(64, 4000, seed=8))
    launch.run()
    launch.product_error = 0.0
    launch.errors().check()


@on_a_gpu
@by_row
@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_more_heads_and_batches_than_a_grid_dimension_holds(
    row: _C.Template, axis: int, parity: ParityReport
):
    many = {"batch": 70000, "num_heads": 1, "num_heads_kv": 1}
    if axis == 2:
        many = {"batch": 1, "num_heads": 70000, "num_heads_kv": 70000}
    launch = Launch.of(row, GeneralProblem(2, 3, return_lse=False, **many))
    launch.run()
    out = launch.out.view[..., : launch.problem.head_dim_v]
    assert launch.out.intact() and not out.isnan().any()
    # The oracle takes sequence by sequence: some of them.
    some = torch.tensor([0, 1, 65535, 65536, 69999], device=DEVICE)
    call = launch.call._replace(
        **{x: getattr(launch.call, x).index_select(axis, some) for x in ("q", "k", "v")}
    )
    errors = compare(call, out.index_select(axis, some), None, launch.product_error)
    parity.record(row.name, f"{launch.problem}, five of them", errors)


@pytest.mark.usefixtures("much_memory")
@on_a_gpu
@by_row
@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "heads"])
def test_batches_and_heads_may_be_far_apart(row: _C.Template, axis: int, parity: ParityReport):
    dims = {"head_dim": min(64, row.head_dim), "head_dim_v": min(64, row.head_dim)}
    launch = Launch.of(row, GeneralProblem(65, 65, causal="bottom-right", seed=8, **dims))
    buffer = poison(DTYPES[row.dtype], gpu.FAR + 4096 + 3 * gpu.REGION, DEVICE)
    far = [gpu.far_view(buffer, i, tuple(launch.call.q.shape), axis) for i in range(3)]
    for view, x in zip(far, launch.call[:3], strict=True):
        view.copy_(x)
    launch.call = launch.call._replace(q=far[0], k=far[1], v=far[2])
    launch.run()
    parity.check(launch, f"{launch.problem} with a far {('batch', '', 'heads')[axis]} stride")


@pytest.mark.usefixtures("much_memory")
@on_a_gpu
@by_row
def test_keys_may_not_be_far_apart(row: _C.Template):
    launch = Launch.of(row, GeneralProblem(65, 65, seed=8))
    shape = tuple(launch.call.k.shape)
    buffer = poison(DTYPES[row.dtype], gpu.FAR + 4096 + 3 * gpu.REGION, DEVICE)
    launch.call = launch.call._replace(k=gpu.far_view(buffer, 1, shape, 1))
    with pytest.raises(ValueError, match="its offsets are 32-bit, and k spans"):
        launch.run()
