"""RMSNorm and gated units against fp64: the CPU backend, and the kernels, on a GPU or in a simulator."""

import itertools
import math
from typing import Any

import gpu
import pytest
import test_parity_helpers
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_helpers import Gated, Mlp, RmsNorm
from test_parity_helpers import DTYPES, backend, by_dtype, drawn, kernels_only, laid_out, randn  # noqa: F401

from cutlass_fmha.gates import geglu, gelu_and_mul, silu_and_mul, swiglu, swiglu_mlp
from cutlass_fmha.launch import helpers
from cutlass_fmha.norm import rms_norm

OPS = torch.ops.cutlass_fmha


HOW = ("packed", "padded", "odd", "swapped")
#: Dimensions before a row's.
LEADING = st.lists(st.integers(0, 4), max_size=4)
SEEDS = st.integers(0, 99)


def run_norm(
    shape: tuple[int, ...], dtype: torch.dtype, how: str = "packed", *, weighted: torch.dtype | None = None,
    biased: bool = False, summed: bool = False, out_dtype: torch.dtype | None = None, seed: int = 0, **options: Any,
) -> None:  # fmt: skip
    """One call and its gradients, against the oracle."""
    x, residual = (laid_out(randn(*shape, dtype=dtype, seed=seed + n), how).requires_grad_() for n in (0, 1))
    asked = ((2, weighted), (3, weighted if biased else None))
    factors = [dt and randn(shape[-1], dtype=dt, seed=seed + n).requires_grad_() for n, dt in asked]
    given = residual if summed else None
    found = rms_norm(x, *factors, residual=given, out_dtype=out_dtype, **options)
    results = list(found) if summed else [found]
    assert results[0].dtype == (out_dtype or dtype) and results[0].is_contiguous()
    grads = [laid_out(randn(*shape, dtype=t.dtype, seed=seed + n), how) for n, t in enumerate(results, 4)]
    eps, offset = options.get("eps", 1e-6), options.get("weight_offset", 0.0)
    expected = RmsNorm(x.detach(), *factors, given, eps, offset, grads[0], grads[1] if summed else None)
    expected.out.check(results[0])
    if summed:
        assert torch.equal(results[1].cpu(), expected.sum)
    inputs = [t for t in (x, *factors, given) if t is not None]
    wanted = [expected.dx, expected.dweight, expected.dbias, *[expected.dx] * summed]
    gradients = torch.autograd.grad(results, inputs, grads)
    for gradient, each, like in zip(gradients, (e for e in wanted if e is not None), inputs, strict=True):
        assert gradient.dtype == like.dtype
        each.check(gradient)


#: Lanes of a part of a warp, a warp, several; 1 to 8 vectors; rows that are read twice; odd ones. Several rows of each
#: group of lanes, and the last groups without one; partial sums of all blocks.
SHAPES = [(3, n) for n in (1, 7, 8, 40, 64, 128, 520, 1000, 1024, 2056, 4096, 8192, 8200, 16384, 20001, 65536)]
SHAPES += [(301, 64), (37, 1536), (1, 2048)]


@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    for weight_offset in (0.0, 1.0):
        run_norm(shape, dtype, weighted=dtype, weight_offset=weight_offset)
        weighted = torch.float32 if dtype != torch.float64 else dtype
        run_norm(shape, dtype, weighted=weighted, summed=True, weight_offset=weight_offset)
        # Few rows are those whose blocks all run at once: none in a simulator, which has room for two.
        monkeypatch.setattr(helpers, "resident_blocks", lambda x, per_sm: 132 * per_sm)


@by_dtype
@pytest.mark.parametrize("how", HOW)
def test_rms_norm_from_any_layout(how: str, dtype: torch.dtype):
    """And into any dtype."""
    others = {torch.float32: DTYPES, torch.float64: (None,)}.get(dtype, (None, torch.float32))
    for shape, out_dtype in itertools.product(((3, 5, 64), (2, 3, 2, 96), (2, 3, 1, 2, 40), (24,), (5, 1000)), others):
        said = {"weighted": dtype, "biased": True, "summed": True, "weight_offset": 1.0}
        run_norm(shape, dtype, how, out_dtype=out_dtype, **said)


@kernels_only
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_launches(dtype: torch.dtype):
    """From 4 MiB on: a block has several rows, and reads ahead."""
    for dim in (64, 768):
        run_norm((2**22 // (dim * dtype.itemsize) + 1, dim), dtype, weighted=dtype, summed=dim == 768)
    run_gated((2**22 // (704 * dtype.itemsize) + 1, 704), dtype, "silu")


@st.composite
def norms(draw: Any) -> dict[str, Any]:
    """Arguments of ``run_norm``."""
    dtype = draw(st.sampled_from(DTYPES))
    dim = draw(st.one_of(st.integers(1, 80), st.integers(1, 3000)))
    return {
        "shape": (*draw(LEADING), dim), "dtype": dtype, "how": draw(st.sampled_from(HOW)),
        "weighted": draw(st.sampled_from((None, dtype, torch.float32))), "biased": draw(st.booleans()),
        "summed": draw(st.booleans()), "seed": draw(SEEDS),
        "out_dtype": draw(st.sampled_from((None, torch.float32))), "eps": draw(st.sampled_from((0.0, 1e-6, 0.5))),
    }  # fmt: skip


@by_dtype
def test_results_are_written_where_they_are_told(dtype: torch.dtype):
    x, residual, weight = (randn(*s, dtype=dtype, seed=n) for n, s in enumerate(((3, 4, 72), (3, 4, 72), (72,))))
    out, total = (laid_out(torch.zeros_like(x), how) for how in ("padded", "odd"))
    plain = rms_norm(x, weight, residual=residual)
    found = rms_norm(x, weight, residual=residual, out=(out, total))
    assert found[0] is out and found[1] is total and torch.equal(total, plain[1])
    torch.testing.assert_close(found, plain)
    assert torch.equal(rms_norm(x, weight, out=torch.empty_like(x)), rms_norm(x, weight))
    half = laid_out(torch.zeros_like(x[..., :36]), "odd")
    assert silu_and_mul(x, out=half) is half and torch.equal(half, silu_and_mul(x))


@kernels_only
def test_weight_gradients_have_the_same_bits_each_time():
    x, weight = randn(700, 512, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16).requires_grad_()
    found = [torch.autograd.grad(rms_norm(x, weight), weight, x)[0] for _ in range(2)]
    assert torch.equal(*found)


@by_dtype
def test_rms_norm_of_extremes(dtype: torch.dtype):
    x = torch.zeros(4, 64, dtype=dtype, device=test_parity_helpers.DEVICE)
    x[1], x[2, 5], x[3, 7] = 2.0**-14, torch.nan, torch.inf
    out = rms_norm(x, eps=1e-6)
    assert (out[0] == 0).all() and out[2].isnan().all() and out[1].isfinite().all()
    assert out[3].isnan().sum() == 1 and (out[3] == 0).sum() == 63


UNITS = {
    "silu": (swiglu, silu_and_mul),
    "gelu": (geglu, gelu_and_mul),
    "gelu_tanh": (lambda g, u: geglu(g, u, "tanh"), lambda x: gelu_and_mul(x, "tanh")),
}


def run_gated(shape: tuple[int, ...], dtype: torch.dtype, name: str, how: str = "packed", seed: int = 0) -> None:
    """Both forms of a unit and their gradients, the product in the same pass too."""
    dim = shape[-1]
    x = laid_out(4 * randn(*shape[:-1], 2 * dim, dtype=dtype, seed=seed), how).requires_grad_()
    gate, up = (laid_out(t, how).requires_grad_() for t in x.detach().chunk(2, -1))
    dout = laid_out(randn(*shape, dtype=dtype, seed=seed + 1), how)
    expected = Gated(gate, up, name, dout)
    apart, packed = UNITS[name]
    for out, inputs in ((apart(gate, up), (gate, up)), (packed(x), (x,))):
        assert out.is_contiguous() and out.dtype == dtype
        expected.out.check(out)
        found = torch.autograd.grad(out, inputs, dout)
        dgate, dup = found if len(found) == 2 else found[0].chunk(2, -1)
        expected.dgate.check(dgate)
        expected.dup.check(dup)
    dx, _, product = OPS.gated_backward(dout, x.detach(), None, name, True)
    expected.out.check(product)
    expected.dup.check(dx.chunk(2, -1)[1])


@by_dtype
@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("how", HOW)
def test_gated(how: str, name: str, dtype: torch.dtype):
    for shape in ((5, 64), (2, 3, 129), (3, 2, 2, 40), (2, 1, 3, 2, 24), (7,), (1,)):
        run_gated(shape, dtype, name, how)


@kernels_only
@pytest.mark.skipif(gpu.simulated(), reason="gigabytes")
@pytest.mark.parametrize(("rows", "dtype"), [(2**17, torch.float16), (2**17 + 8, torch.float32)], ids=str)
def test_gated_of_more_bytes_than_an_int_counts(rows: int, dtype: torch.dtype, much_memory: None):
    gate = torch.zeros(rows, 2**13, dtype=dtype, device=gpu.device())
    gate[-1] = 3.0
    out = OPS.gated(gate, gate, "silu")
    assert (out[-1] > 8.5).all() and out.count_nonzero() == 2**13


def shapes(longest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(LEADING, st.integers(1, longest)).map(lambda dims: (*dims[0], dims[1]))


def units() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of ``run_gated``."""
    kinds = {"name": st.sampled_from(list(UNITS)), "how": st.sampled_from(HOW), "dtype": st.sampled_from(DTYPES)}
    return st.fixed_dictionaries({"shape": shapes(300), **kinds, "seed": SEEDS})


@by_dtype
def test_gated_of_extremes(dtype: torch.dtype):
    gate = torch.tensor([0.0, -60000.0, 60000.0, -800.0, math.nan], dtype=dtype, device=test_parity_helpers.DEVICE)
    for name, (apart, _) in UNITS.items():
        out = apart(gate, torch.ones_like(gate))
        assert out[:2].tolist() == [0.0, 0.0] and out[2] == gate[2] and out[3] == 0 and out[4].isnan(), name
        dgate, dup, _ = OPS.gated_backward(torch.ones_like(gate), gate, torch.ones_like(gate), name)
        assert dgate[[1, 2, 3]].tolist() == [0.0, 1.0, 0.0] and dup[3] == 0, name


def run_mlp(shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, recompute: bool, seed: int = 0):
    """One call of rows [..., dim] by weights of so many units and results, and its gradients."""
    sizes = shape, (2 * dims[0], shape[-1]), (dims[1], dims[0])
    inputs = [(randn(*s, dtype=dtype, seed=seed + n) / 4).requires_grad_() for n, s in enumerate(sizes)]
    dout = randn(*shape[:-1], dims[1], dtype=dtype, seed=seed + 3)
    out = swiglu_mlp(*inputs, recompute=recompute)
    assert out.shape == dout.shape
    expected = Mlp(*inputs, dout)
    for found, right in zip((out, *torch.autograd.grad(out, inputs, dout)), expected.all, strict=True):
        assert found.dtype == dtype
        right.check(found.reshape(right.value.shape))


def mlps() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of ``run_mlp``."""
    kinds = {"dtype": st.sampled_from(DTYPES), "recompute": st.booleans(), "seed": SEEDS}
    return st.fixed_dictionaries({"shape": shapes(96), "dims": st.tuples(*[st.integers(1, 64)] * 2), **kinds})


@pytest.mark.parametrize("op", ["norm", "gated", "mlp"])
@drawn
@given(st.data())
def test_anything(backend: str, op: str, data: st.DataObject):  # noqa: F811
    run, drawn_of = {"norm": (run_norm, norms), "gated": (run_gated, units), "mlp": (run_mlp, mlps)}[op]
    run(**data.draw(drawn_of()))
