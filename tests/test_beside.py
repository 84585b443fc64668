"""The ops beside attention: what they refuse, schemas, gradients, compiling, autocast; the way to their kernels."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import resources
import torch
from tensors import ints, randn
from torch import Tensor
from torch.autograd import gradcheck

from cutlass_fmha import _C, attention, explain_swiglu_mlp, rms_norm, silu_and_mul, swiglu, swiglu_mlp
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.errors import UnsupportedError
from cutlass_fmha.launch import helpers
from cutlass_fmha.qk_norm_rope import qk_norm_rope
from cutlass_fmha.rotary import rotary_qk

OPS = torch.ops.cutlass_fmha
X, W = torch.randn(2, 3, 8), torch.randn(8)
RSTD = torch.ones(2, 3)
UP, DOWN = torch.randn(12, 8), torch.randn(5, 6)
COS, SIN = (f(torch.outer(torch.arange(20.0), 100.0 ** -(torch.arange(6) / 6))) for f in (torch.cos, torch.sin))
Q, K = randn(1, 3, 2, 16, dtype=torch.float64), randn(1, 3, 1, 16, dtype=torch.float64, seed=1)
WEIGHTS = (randn(16, dtype=torch.float64, seed=2), randn(16, dtype=torch.float64, seed=3))
SAID: tuple[dict[str, Any], ...] = (
    {"cos": COS, "sin": SIN, "offsets": ints(3)},
    {"inv_freq": torch.rand(8), "interleaved": True, "positions": ints(9, 0, 17).view(1, 3)},
)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def test_no_second_derivative_and_no_forward_mode():
    """Of no op with a kernel for its gradient; test_torch_func.py asks torch.func for them."""
    x, up, down = double(3, 4), double(6, 4), double(5, 3)
    of_mlp = functools.partial(swiglu_mlp, w_gate_up=up, w_down=down, recompute=True)
    heads = (lambda x: attention(*3 * [x[None, None]]), lambda x: qk_norm_rope(*2 * [x[None, None]])[0])
    for call in (rms_norm, silu_and_mul, of_mlp, *heads):
        (once,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="can be differentiated once"):
            once.sum().backward()
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.func.jvp(call, (x.detach(),), (x.detach(),))


def test_gradients_where_little_is_asked_or_given():
    """test_parity_beside.py has all others beside fp64."""
    both = double(2, 3, 6), double(2, 3, 6)
    for n in (0, 1):  # the output alone, the sum alone
        assert gradcheck(lambda x, r, n=n: rms_norm(x, residual=r)[n], both)
    for call in (rms_norm, silu_and_mul):  # a sum's gradient is expanded, and so it stays without rows
        assert torch.autograd.grad(call(both[0][:0]).sum(), both[0])[0].abs().max() == 0


def test_nothing_is_kept_but_what_the_guide_says():
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu_mlp(*leaves(torch.randn(16, 8), UP, DOWN), recompute=True)
    assert kept and (16, 6) not in {tuple(t.shape) for t in kept}


def test_autocast_leaves_rows_alone_and_casts_products_and_what_is_new_to_a_cache():
    weights, half, w = leaves(UP, DOWN), X.bfloat16(), W.bfloat16()
    caches = dict(zip(("k_cache", "v_cache"), torch.zeros(2, 1, 16, 1, 16, dtype=torch.bfloat16), strict=True))
    said = {"cos": COS.half(), "sin": SIN.half(), **caches, "cache_seqlens": 3}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rms_norm(X, W).dtype == swiglu(X, half).dtype == torch.float32
        mixed = rms_norm(half, w, residual=X)
        torch.testing.assert_close(mixed, rms_norm(half.float(), w.float(), residual=X))
        to = torch.empty_like(X), torch.empty_like(X)
        assert all(map(torch.equal, rms_norm(half, w, residual=X, out=to), mixed))
        with pytest.raises(ValueError, match="w_gate_up must have x's dtype float64, got float32"):
            swiglu_mlp(X.double(), UP, DOWN)
        found = [swiglu_mlp(X, *weights, recompute=recompute) for recompute in (False, True)]
        assert qk_norm_rope(Q.float(), K.bfloat16(), K.bfloat16(), **said)[0].dtype == torch.bfloat16
    assert found[0].dtype == torch.bfloat16 and torch.equal(*found)
    for out in found:
        assert {x.dtype for x in torch.autograd.grad(out.float().sum(), weights)} == {torch.float32}


def test_explain_says_what_runs_and_why():
    text = explain_swiglu_mlp(X, UP, DOWN)
    assert text.count("\n") == 3 and "one product [6, 8] x [8, 12] by torch's CPU library" in text
    assert "0.58 to 0.84" in text and "not measured" in text


def test_rotations_have_gradients_of_every_order():
    """test_parity_rope.py has those of norms beside fp64."""
    for said in SAID:
        rotated = functools.partial(rotary_qk, **said)
        assert gradcheck(rotated, leaves(Q, K)) and torch.autograd.gradgradcheck(rotated, leaves(Q, K))


def test_ops_agree_with_their_schemas():
    x, weight = leaves(X, W)
    caches = torch.zeros(2, 1, 16, 1, 16, dtype=torch.float64).unbind(0)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("rms_norm", (x, weight, weight, x, 1e-6, 1.0, None), {}),
        ("rms_norm", (X, None, None, None, 1e-6, 0.0, torch.bfloat16, True), {}),
        ("rms_norm_out", (X, W, None, X, torch.empty_like(X), torch.empty_like(X), 1e-6, 0.0), {}),
        ("rms_norm_backward", (X, X, X, W, W, RSTD, 1.0, [True, False]), {}),
        *(("gated", (x, up, "silu"), {}) for up in (x, None)),
        ("gated_out", (X, None, torch.empty(2, 3, 4), "gelu"), {}),
        ("gated_backward", (X[..., :4], X, None, "gelu_tanh", True), {}),
    ]
    for said in SAID:
        calls += [
            ("rotary_qk", tuple(leaves(Q, K)), said),
            ("rotary_qk_", (Q.clone(), K.clone()), said),
            ("qk_norm_rope", tuple(leaves(Q, K, *WEIGHTS)), said),
            ("qk_norm_rope_backward", (Q, K, Q, K, *WEIGHTS), said),
            ("qk_norm_rope_append_", (*caches, Q, K, K, ints(3), *WEIGHTS), said),
        ]
    for name, given, said in calls:
        torch.library.opcheck(getattr(OPS, name).default, given, said)


def mlp(recompute: bool, x: Tensor, weight: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, ...]:
    normed, total = rms_norm(x, weight, residual=x * 2)
    return (total[..., :5] + swiglu_mlp(normed, w_gate_up, w_down, recompute=recompute),)


def turned(q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    q, k = qk_norm_rope(q, k, None, *weights, **SAID[0])
    return rotary_qk(q, k, inv_freq=SAID[1]["inv_freq"], offsets=2)


BLOCKS = {
    "mlp": (functools.partial(mlp, False), (X, W, UP, DOWN)),
    "recomputed": (functools.partial(mlp, True), (X, W, UP, DOWN)),
    "heads": (turned, (Q, K, *WEIGHTS)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_compiled_whole(name: str):
    block, given = BLOCKS[name]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=name != "heads" or None)
    for rows in (3, 2):
        inputs = leaves(*(x[:, :rows] if x.dim() > 2 else x for x in given))
        found, expected = compiled(*inputs), block(*inputs)
        torch.testing.assert_close(found, expected)
        sums = (sum(x.square().sum() for x in outputs) for outputs in (found, expected))
        torch.testing.assert_close(*(torch.autograd.grad(total, inputs) for total in sums))


def test_every_architecture_has_every_kernel():
    architectures, found = _C.build_info()["architectures"], _C.helpers()
    names = {name for name in resources.manifest_rows() if int(name.split("_")[1][2:]) in architectures}
    short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
    assert [row.name for row in found] == [f"{row.family}_sm{row.arch}_{short[row.dtype]}" for row in found]
    assert {row.name for row in found} == resources.helper_names(names) and len(found) == len({x.name for x in found})
    blocks = {"rms_norm": 512, "rms_norm_backward": 512, "gated": 256, "gated_backward": 256}
    assert all(row.threads == blocks.get(row.family, 128) and row.name in repr(row) for row in found)
    assert {row.family for row in found if row.smem_bytes} == {"rms_norm_backward"}
    for row in found:
        with pytest.raises(AttributeError, match=f"{row.name} has no head_dim"):
            row.head_dim  # noqa: B018


def test_a_devices_kernels_are_its_rows_or_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    def build(*architectures: int) -> None:
        monkeypatch.setattr(_C, "helpers", lambda: [SimpleNamespace(arch=arch) for arch in architectures])

    monkeypatch.setattr(tables, "this_build", lambda: tables.Table(()))
    build(89, 90, 120)
    for gpu, forced in (("l4", ""), ("h200", "89")):
        monkeypatch.setattr(devices, "of_index", lambda index, gpu=gpu: devices.PRESETS[gpu])
        monkeypatch.setenv(devices.FORCE_ARCH, forced)
        assert helpers._arch(0) == 89
    monkeypatch.setattr(devices, "of_index", lambda index: Device("an A100", (8, 0), 108, 163 * 1024))
    build(89, 120)
    for forced in ("", "120"):  # also where it is told to take code that it can't execute
        monkeypatch.setenv(devices.FORCE_ARCH, forced)
        with pytest.raises(UnsupportedError, match="for sm_89, sm_120, and none of them runs on an A100"):
            helpers._arch(0)
    build()
    with pytest.raises(UnsupportedError, match="CUTLASS_FMHA_CUDA=OFF"):
        helpers._arch(0)


NESTED = {"rotary": _C.Rotary, "query": _C.RotaryParams}


def told(params: Any, fields: dict[str, Any]) -> Any:
    for name, value in fields.items():
        setattr(params, name, told(NESTED[name](), value) if isinstance(value, dict) else value)
    return params


def launch(family: str, fields: dict[str, Any], of: str = "") -> None:
    """A row of its own family, or of another, with parameters of the family."""
    params = told(getattr(_C, f"{family.title().replace('_', '')}Params")(), fields)
    row = next((row.index for row in _C.helpers() if row.family == (of or family)), 0)
    _C.run(row, params, 0, 0)


def rows(*addresses: str) -> dict[str, Any]:
    return {"sizes": (1, 2, 3), "dim": 8, **dict.fromkeys(addresses, 4096)}


BEYOND: tuple[dict[str, Any], str] = ({"sizes": (2**20, 2**20, 1), "dim": 8}, "at most 2147483647 rows can be taken")
TURNS = [({"head_dim": 16, "rotary": {"cos": 4096, "sin": 4096, "dim": n}}, f"head_dim 16, got {n}") for n in (7, 18)]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "merge": [
        ({"batch": -1}, "batch must be between 0 and 536870912, got -1"),
        ({"seqlen_q": 2**29 + 1}, "seqlen_q must be between"),
        ({"head_dim_v": -8}, "head_dim_v must be between"),
        ({"o_stride": (-1, 0, 0)}, "o_stride must be between"),
    ],
    "append": [
        ({"capacity": 2**30}, "capacity must be between"),
        ({"query": {"x": 4096, "batch": 1, "seqlen": 1, "num_heads": 1}}, "a query is rotated: it needs a rotary"),
        ({"page_table": 4096}, "page_table needs page_size"),
        *TURNS,
    ],
    "rotary": [({"rotary": {"positions": -1}}, "positions must be between"), *TURNS],
    "combine": [
        ({"splits": 65}, "splits must be between 1 and 64, got 65"),
        ({"splits": 0}, "splits must be between 1 and 64, got 0"),
        ({"head_dim_v": 257}, "head_dim_v must be between 1 and 256, got 257"),
    ],
    "rms_norm": [
        ({"dim": 65537}, "dim must be between 1 and 65536, got 65537"),
        ({"eps": float("inf")}, "eps must be a finite float, got inf"),
        ({"out_type": "int8"}, "out_type is none of those that there are: int8"),
        (rows("x"), "x and out must be addresses"),
        (rows("x", "out", "sum"), "residual and sum go together"),
        BEYOND,
    ],
    "rms_norm_backward": [
        (rows("x", "dout", "rstd", "dx", "dweight"), "dweight needs parts, and partial for them"),
        BEYOND,
    ],
    "gated": [
        ({"activation": "relu"}, "activation is none of those that there are: relu"),
        (rows("gate", "out"), "gate, up and out must be addresses"),
        BEYOND,
    ],
    "gated_backward": [(rows("gate", "up"), "dgate and dup must be address"), BEYOND],
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_a_kernel_is_told_is_checked_and_without_rows_it_needs_no_gpu(family: str):
    for fields, message in REFUSED[family]:
        with pytest.raises(ValueError, match=message):
            launch(family, fields)
    if _C.build_info()["cuda"]:
        launch(family, {})
        with pytest.raises(ValueError, match=f"is of family merge_tail.* parameters of family {family}"):
            launch(family, {}, "merge_tail")
    else:
        with pytest.raises(RuntimeError, match="CUTLASS_FMHA_CUDA=OFF"):
            launch(family, {})
