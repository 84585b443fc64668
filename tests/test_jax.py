"""``cutlass_fmha.jax``: attention of JAX arrays under jit, grad and vmap, beside torch's in fp64."""

import importlib
import os
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
from fake_build import make_build
from fake_kernels import FakeKernels
from tensors import ints, qkv, randn
from torch import Tensor
from torch.utils._pytree import tree_map_only

import cutlass_fmha
from cutlass_fmha import _C

jax = pytest.importorskip("jax", reason="requirements/jax.txt is not installed")
fmha = importlib.import_module("cutlass_fmha.jax")  # a broken one is no reason to skip
traced = importlib.import_module("cutlass_fmha.jax.traced")
jnp = jax.numpy

PACKED = {"cu_seqlens_q": ints(0, 20, 33), "cu_seqlens_k": ints(0, 40, 65), "max_seqlen_q": 20, "max_seqlen_k": 40}
#: Of a call its operands and what it says, as ``cutlass_fmha.attention`` takes it.
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "causal": ({"head_dim": 64}, {"causal": True}),
    "top-left, scale": ({"head_dim": 128}, {"causal": "top-left", "scale": 0.2}),
    "other head dims": ({"head_dim": 20, "head_dim_v": 44}, {"causal": True}),
    "window": ({}, {"window": (9, 3)}),
    "softcap, ALiBi": ({}, {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}),
    "mask": ({}, {"mask": randn(2, 1, 33, 65) > -1.0}),
    "bias": ({}, {"bias": randn(4, 33, 65)}),
    "sinks": ({}, {"sinks": randn(4), "causal": True}),
    "dropout": ({}, {"dropout_p": 0.25, "dropout_seed": 7 << 40 | 11}),
    "lengths": ({}, {"seqused_k": ints(65, 20), "leftpad_k": ints(0, 3), "causal": True}),
    "prefixes": ({"heads_kv": 4}, {"prefix_lengths": ints(30, 5), "causal": True}),
    "blocks": ({}, {"block_mask": (ints(1, 1).view(2, 1, 1), ints(0, 0).view(2, 1, 1, 1), (128, 64))}),
    "packed": ({"batch": 1}, {**PACKED, "causal": True}),
}
ARRAY = ("__dlpack__", "__dlpack_device__")
on_gpu = pytest.param("gpu", marks=pytest.mark.gpu)


def array(x: Any) -> Any:
    return tree_map_only(Tensor, lambda each: jnp.asarray(each.numpy()), x)


def problem(name: str, where: str) -> tuple[list[Any], dict[str, Any], list[Tensor], dict[str, Any]]:
    """q, k, v and what is said, as arrays, and as tensors in fp64 that want gradients."""
    sizes, said = CASES[name]
    tensors = list(qkv(**sizes, dtype=torch.float32 if where == "cpu" else torch.float16))
    if name == "packed":
        tensors = [x[0] for x in tensors]
    given = [array(x) for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    wide = {key: x.double().requires_grad_() if key in ("bias", "sinks") else x for key, x in said.items()}
    return given, {key: array(x) for key, x in said.items()}, exact, wide


def close(found: Any, want: Tensor, where: str) -> None:
    want, got = want.detach().double(), torch.from_numpy(numpy.array(found, numpy.float64))
    largest = max(1.0, want.masked_fill(want.isinf(), 0.0).abs().max().item())
    torch.testing.assert_close(got, want, rtol=0.0, atol=(2e-5 if where == "cpu" else 4e-3) * largest)


@pytest.mark.parametrize("where", ["cpu", on_gpu])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_packages_and_an_eager_call_is_compiled_once(name: str, where: str):
    given, said, exact, wide = problem(name, where)
    arrays = {key: x for key, x in said.items() if isinstance(x, jax.Array)}
    numbers = {key: x for key, x in said.items() if key not in arrays}

    @jax.jit
    def call(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        return cutlass_fmha.attention(q * 2, k, v, return_lse=True, **arrays, **numbers)

    out, lse = cutlass_fmha.attention(2 * exact[0], *exact[1:], return_lse=True, **wide)
    found, found_lse = call(*given, arrays)
    assert found.dtype == given[0].dtype and found_lse.dtype == jnp.float32
    close(found, out, where)
    close(found_lse, lse, where)
    # Some rows see no key, and a gradient of their LSE is of nothing.
    weights = randn(*out.shape, seed=3), torch.where(lse.isinf(), 0.0, randn(*lse.shape, seed=4))
    learned = [key for key in arrays if key in ("bias", "sinks")]
    leaves = [*exact, *(wide[key] for key in learned)]
    wanted = torch.autograd.grad((out, lse), leaves, [x.double() for x in weights], allow_unused=True)

    @jax.jit
    def gradients(*x: Any) -> Any:
        back = jax.vjp(lambda *x: call(*x[:3], arrays | dict(zip(learned, x[3:], strict=True))), *x)[1]
        return back((array(weights[0]).astype(found.dtype), array(weights[1])))

    for x, want in zip(gradients(*given, *(arrays[key] for key in learned)), wanted, strict=True):
        close(x, want, where)
    # An eager call, by both names, is compiled anew for other numbers and shapes alone, not for another seed.
    want = cutlass_fmha.attention(*exact, **wide)
    close(fmha.attention(*given, **said), want, where)
    programs = traced._compiled._cache_size()
    close(cutlass_fmha.attention(*given, **said, out=None), want, where)
    if name == "dropout":
        other = cutlass_fmha.attention(*given, **said | {"dropout_seed": numpy.int64(12)})
        assert not jnp.array_equal(other, fmha.attention(*given, **said))
    if name == "window":  # NumPy's and JAX's numbers are numbers
        for pair in (numpy.array([9, 3]), jnp.array([9, 3])):
            close(fmha.attention(*given, window=pair), want, where)
    assert traced._compiled._cache_size() == programs
    fmha.attention(*given, **said | {"scale": 0.25})
    assert traced._compiled._cache_size() == programs + 1


@pytest.mark.parametrize("what", ["a tensor", "a layout", "an array of another library", "no seed"])
def test_what_jax_does_not_take_is_shared_by_dlpack(what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traced, "_compiled", None)
    tensors = qkv(dtype=torch.float32)
    mask = randn(33, 65) > -1.0
    said: dict[str, Any] = {"mask": mask}
    if what == "a layout":
        tensors, said = tuple(x.transpose(1, 2) for x in tensors), {"mask": array(mask), "layout": "bhsd"}
    elif what == "no seed":
        said = {"mask": array(mask), "dropout_p": 1e-9}  # which drops nothing
    elif what != "a tensor":
        said["mask"] = type("Shared", (), {n: lambda _, n=n, **x: getattr(mask, n)(**x) for n in ARRAY})()
    want = cutlass_fmha.attention(*tensors, **said | {"mask": mask})
    found = cutlass_fmha.attention(*map(array, tensors), **said)
    assert isinstance(found, jax.Array)
    close(found, want, "cpu")


MAPPED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "all": ({}, (0, 0, 0)),
    "queries of a batch of one": ({"causal": True, "mask": randn(33, 65) > -1.0}, (0, None, None)),
    "lengths and a mask": ({"seqused_k": ints(65, 20), "mask": randn(33, 65) > -1.0}, (1, None, 0)),
    "a mapped mask": ({"mask": randn(3, 1, 33, 65) > -1.0}, (None, 0, None)),
    "sinks, in a loop": ({"sinks": randn(3, 4)}, (0, None, None)),
    "packed, in a loop": (PACKED, (0, 0, None)),
    "dropout, in a loop": ({"dropout_p": 0.5, "dropout_seed": 3}, (0, None, None)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_each_call_alone(name: str):
    said, axes = MAPPED[name]
    given = [array(x) for x in qkv(dtype=torch.float32)]
    given = [x[0] for x in given] if "packed" in name else [x[:1] for x in given] if "one" in name else given
    given = [x if axis is None else jnp.stack([x, -x, 2 * x], axis) for x, axis in zip(given, axes, strict=True)]
    numbers = {key: x for key, x in said.items() if not isinstance(x, Tensor)}
    arrays = {key: array(x) for key, x in said.items() if key not in numbers}
    mapped = {key: 0 if x.shape[0] == 3 and key in ("mask", "sinks") else None for key, x in arrays.items()}

    def loss(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        return (fmha.attention(q, k, v, **arrays, **numbers) ** 2).sum()

    both = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    found = jax.jit(jax.vmap(both, (*axes, mapped)))(*given, arrays)
    for i in range(3):
        own = [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(given, axes, strict=True)]
        want = both(*own, {key: x if mapped[key] is None else x[i] for key, x in arrays.items()})
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            assert jnp.allclose(x[i], y, rtol=1e-4, atol=1e-4 * jnp.abs(y).max())
    summed = jax.jit(jax.grad(lambda q: jax.vmap(loss, (*axes, mapped))(q, *given[1:], arrays).sum()))(given[0])
    want = found[1][0] if axes[0] is not None else found[1][0].sum(0)
    assert jnp.allclose(summed, jnp.moveaxis(want, 0, axes[0]) if axes[0] else want, rtol=1e-4, atol=1e-3)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, given = [sys.executable, "-P", "-c", code], {**os.environ, **environment}
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=300)


SHARDED = """
import jax, cutlass_fmha.jax as fmha, jax.numpy as jnp, numpy
P, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(numpy.array(jax.devices()), ("x",))
q, w = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(2, 9, 4, 32), (32, 32)]))

def one(q, w):
    return (fmha.attention(q @ w, q, q, causal=True) ** 2).sum()

def of_each(q, w):
    return jax.lax.psum(one(q, w), "x")

over = jax.shard_map(of_each, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
for x, want in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1)))(q, w)) for f in (over, one))):
    assert jnp.allclose(x, want, rtol=1e-4, atol=1e-4), (x, want)
print("alike")
"""


def test_devices_share_a_batch():
    found = python(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    assert found.stdout == "alike\n", found.stderr


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    """JAX's CPU takes what it would say to a GPU, number 3, whose kernels compute in Python on stream 77."""
    from cutlass_fmha.jax import calls

    kernels = FakeKernels(make_build((89,)))
    kernels.install(monkeypatch)
    monkeypatch.setattr(traced, "_cuda_device", lambda: 3)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, cpu, cuda: cuda(*x))

    def on_gpu(call: Any) -> None:
        """What XLA's handler does, but for the launch."""
        if calls.run(call._replace(where=(77, 3))) is calls.KEPT:
            row, params = _C.xla_kept(call.text, 3, call.arguments, call.results)
            kernels(row, params, 3, 77)

    monkeypatch.setattr(calls, "_on_host", on_gpu)
    for clear in (calls.workspace_bytes.cache_clear, calls._prepared.cache_clear, jax.clear_caches):
        clear()
    return kernels


@pytest.mark.parametrize(("seqlen_k", "splits"), [(65, 1), (4096, 2)])
@pytest.mark.parametrize("said", [{}, {"causal": True}, {"seqused_k": ints(60, 20)}, {"sinks": randn(4)}], ids=str)
def test_a_launch_is_on_xlas_stream_with_xlas_memory(gpu: Any, said: Any, seqlen_k: int, splits: int):
    tensors = qkv(seqlen_q=3, seqlen_k=seqlen_k, head_dim=64)
    call = jax.jit(lambda *x: fmha.attention(*x, return_lse=True, **{n: array(y) for n, y in said.items()}))
    out, lse = call(*map(array, tensors))
    want = cutlass_fmha.attention(*(x.double() for x in tensors), return_lse=True, **said)
    close(out, want[0], "gpu")
    close(lse, want[1], "gpu")
    [launch] = gpu.launches
    assert (launch.device, launch.stream) == (3, 77) and (launch.params.splits >= splits or "seqused_k" not in said)
    text = call.lower(*map(array, tensors)).as_text()
    assert ("ui8>" in text) == (launch.params.partial_o != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("said", [{}, {"mask": randn(33, 65) > -1.0}], ids=["nothing", "a mask"])
def test_a_launch_is_repeated_without_python(said: dict[str, Any]):
    given, arrays = [array(x) for x in qkv()], {name: array(x) for name, x in said.items()}
    call = jax.jit(lambda *x, **arrays: fmha.attention(*x, **arrays))
    want, asked = call(*given, **arrays), []
    _C.xla_handlers(lambda *x: str(asked.append(x)))  # what was wrong
    try:
        found = call(*(x + 0 for x in given), **arrays).block_until_ready()
    finally:
        _C.xla_handlers(traced.calls.answer)
    assert not asked and jnp.array_equal(found, want)


SHORT: dict[str, Any] = {"seqlen_q": 3, "seqlen_k": 4, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("said", "error", "sentence"),
    [
        ({"q": [1.0]}, TypeError, "q must be an array of JAX or NumPy, got list"),
        ({"v": numpy.zeros((2, 4, 2, 32), int)}, ValueError, "v must be of float16, .*, got int"),
        ({"k": numpy.zeros((2, 4, 3, 32), "f")}, ValueError, "v must have k.s shape"),
        ({"bias": randn(2, 1, 7, 1)}, ValueError, "bias must be broadcastable"),
        ({"out": randn(2)}, TypeError, "has no out: XLA says where results lie"),
        ({"layout": "bhsd"}, TypeError, "has no layout"),
        ({"windows": (1, 1)}, TypeError, "windows"),
        ({"causal": "diagonal"}, ValueError, "causal must be"),
        ({"softcap": "traced"}, TypeError, "softcap must be known when the function is traced"),
        ({"scale": "traced"}, TypeError, "scale must be known when the function is traced"),
        ({"dropout_p": 0.5}, TypeError, "needs a dropout_seed: an int, or uint32"),
        ({"dropout_p": 0.5, "dropout_seed": ints(1)}, TypeError, "needs a dropout_seed: an int, or uint32"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_when_it_is_traced(said: dict[str, Any], error: type[Exception], sentence: str):
    said = dict(zip("qkv", qkv(**SHORT), strict=True)) | said

    def call(number: Any) -> Any:
        given = {name: number if isinstance(x, str) and x == "traced" else array(x) for name, x in said.items()}
        return fmha.attention(**given)

    with pytest.raises(error, match=sentence):
        jax.jit(call)(2.0)


def test_gradients_have_the_tensors_dtype_or_there_are_none():
    for dtype in ("float16", "bfloat16"):
        given = [array(x).astype(dtype) for x in qkv(dtype=torch.float32)]
        out, lse = jax.jit(lambda *x: fmha.attention(*x, return_lse=True))(*given)
        assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
        gradients = jax.grad(lambda *x: fmha.attention(*x).astype(jnp.float32).var(), (0, 1, 2))(*given)
        assert [x.dtype for x in gradients] == [dtype] * 3 and all(jnp.abs(x).max() > 0 for x in gradients)
    q, k, v = map(array, qkv(**SHORT))
    said = {"cu_seqlens_q": jnp.array([0, 3, 2]), "cu_seqlens_k": jnp.array([0, 2, 4])}
    call = jax.jit(lambda *x: fmha.attention(*x, max_seqlen_q=3, max_seqlen_k=2, **said))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: .*cu_seqlens_q"):
        call(q[0], k[0], v[0]).block_until_ready()
    pages = [x.reshape(1, 4 * 2, 2, 32).repeat(2, 1) for x in (k, v)]
    table = {"page_table": jnp.zeros((2, 1), jnp.int32), "seqused_k": jnp.full(2, 4, jnp.int32)}
    with pytest.raises(NotImplementedError, match="no backward yet with .*page"):
        jax.grad(lambda x: fmha.attention(x, *pages, **table).sum())(q)
    with pytest.raises(NotImplementedError, match="for alibi_slopes: pass jax.lax.stop_gradient of it"):
        jax.grad(lambda x: fmha.attention(q, k, v, alibi_slopes=x).sum())(jnp.ones(4))
    with pytest.raises(Exception, match="differentiat"):
        jax.grad(lambda x: jax.grad(lambda q: fmha.attention(q, k, v).sum())(x).sum())(q)


def test_the_package_is_imported_without_jax():
    code = "import sys, cutlass_fmha; assert 'jax' not in sys.modules; sys.modules['jax'] = None\n"
    code += "try: import cutlass_fmha.jax\nexcept ImportError as error: print(error)"
    found = python(code)
    assert "pip install jax" in found.stdout, found.stderr
