"""Jagged nested tensors, against fp64 math of each document alone."""

import math
from typing import Any

import oracle_features
import pytest
import torch
import torch.nn.functional as F
from tensors import randn, starts
from test_sdpa import _fresh  # noqa: F401, for each test
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cutlass_fmha import attention, jagged, scaled_dot_product_attention, sdpa

Q, K = [5, 0, 9, 2], [7, 3, 12, 0]  # a document without queries, and one without keys
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom-right"},
    "window, softcap": {"causal": "top-left", "window": (3, None), "softcap": 2.0},
    "sinks": {"sinks": SINKS},
}


def make(lengths: list[int], heads: int, dim: int, seed: int, offsets: Tensor | None = None) -> Tensor:
    values = randn(sum(lengths), heads, dim, dtype=torch.float64, seed=seed)
    offsets = starts(*lengths).long() if offsets is None else offsets
    found: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=max(lengths))
    return found.requires_grad_()


def operands(cross: bool = True, heads_kv: int = 2, dim_v: int = 24) -> list[Tensor]:
    q = make(Q, 4, 16, 1)
    k = make(K if cross else Q, heads_kv, 16, 2, None if cross else q.offsets())
    return [q, k, make(K if cross else Q, heads_kv, dim_v, 3, k.offsets())]


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_nested:
        return x.values(), x.offsets()
    return x.flatten(0, 1), torch.arange(len(x) + 1) * x.shape[1]


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    rows = packed(out)[0] if out.dim() == 4 else out
    given = torch.autograd.grad((rows * randn(*rows.shape, seed=9).to(rows)).sum(), tensors)
    return [rows.detach(), *(packed(x)[0] if x.dim() == 4 else x for x in given)]


def exact(tensors: list[Tensor], **said: Any) -> tuple[list[Tensor], Tensor]:
    """``with_gradients`` and the LSE, [heads, rows]."""
    rows, (of_q, of_k, _) = zip(*map(packed, tensors), strict=True)
    out, lse = oracle_features.attention(*rows, cu_seqlens_q=of_q, cu_seqlens_k=of_k, **said)
    return with_gradients(out, tensors), lse.detach()


def laid(tensors: list[Tensor], layout: str) -> list[Tensor]:
    return tensors if layout == "bshd" else [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_documents_are_attended_alone_and_the_result_is_as_the_query(name: str, layout: str, cross: bool):
    tensors = operands(cross)
    given = laid(tensors, layout)
    out, lse = attention(*given, layout=layout, return_lse=True, **CALLS[name])
    assert out.shape[:3] == given[0].shape[:3] and lse.shape == (4, 4, tensors[0].shape[1])
    assert out.offsets() is tensors[0].offsets()
    want, want_lse = exact(tensors, **CALLS[name])
    torch.testing.assert_close(with_gradients(*laid([out], layout), tensors), want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse.values(), want_lse.to(lse.dtype), rtol=1e-5, atol=1e-5)
    (q, k, v), rows = tensors, randn(4, 6, 4, 16, dtype=torch.float64).requires_grad_()
    for one_dense in ([rows, k, v], [q, rows[:, :, :2], rows[:, :, :2]]):
        out = attention(*laid(one_dense, layout), layout=layout, causal=True)
        want, _ = exact(one_dense, causal="bottom-right")
        torch.testing.assert_close(with_gradients(*laid([out], layout), one_dense), want, rtol=1e-9, atol=1e-9)
    single = [x.detach().float() for x in given]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        out = attention(*single, layout=layout, **CALLS[name])
    assert torch.equal(out.values(), attention(*(x.bfloat16() for x in single), layout=layout, **CALLS[name]).values())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_torchs_signature_and_torchs_own_function_inside_the_override(theirs: bool, compiled: bool):
    function = F.scaled_dot_product_attention if theirs else scaled_dot_product_attention
    tensors, own = operands(), torch.nested._internal.ops.jagged_scaled_dot_product_attention

    def call(*x: Tensor) -> Tensor:
        return function(*(each.transpose(1, 2) for each in x), is_causal=True, enable_gqa=True)

    with sdpa("cpu"):
        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        out = run(*tensors)
    want, _ = exact(tensors, causal="top-left")
    torch.testing.assert_close(with_gradients(out.transpose(1, 2), tensors), want, rtol=1e-9, atol=1e-9)
    assert (sdpa.counts["scaled_dot_product_attention"] > 0) is theirs and not sdpa.declined
    assert torch.nested._internal.ops.jagged_scaled_dot_product_attention is own


def test_holes_are_neither_seen_nor_written_nor_in_a_gradient():
    begin, lengths = torch.tensor([[1], [0], [2]]), torch.tensor([[3], [9], [5]])
    inside = (torch.arange(9) >= begin) & (torch.arange(9) < begin + lengths)
    padded = randn(3, 9, 4, 16, dtype=torch.float64).masked_fill(~inside[..., None, None], math.nan).requires_grad_()
    x = torch.nested.narrow(padded, 1, begin[:, 0], lengths[:, 0], layout=torch.jagged)
    out, lse = attention(x, x, x, causal=True, return_lse=True)
    assert out.lengths() is x.lengths() and torch.isinf(lse.values()[:, ~inside.flatten()]).all()
    packing = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts(3, 9, 5))
    rows, _ = oracle_features.attention(*3 * [padded[inside]], causal="bottom-right", **packing)
    want = torch.zeros(27, 4, 16, dtype=torch.float64).index_put((inside.flatten(),), rows)
    torch.testing.assert_close(with_gradients(out.values(), [padded]), with_gradients(want, [padded]))


@pytest.mark.parametrize("lengths", [None, [2, 0, 4]])
def test_values_of_any_strides_and_with_rows_of_nobody_around(lengths: list[int] | None):
    """torch's signature copies a last dimension that is not contiguous."""
    used = lengths or [3, 2, 5]
    inside = torch.cat([torch.arange(n) + first for n, first in zip(used, [2, 5, 7], strict=True)])
    rows = randn(14, 16, 4, dtype=torch.float64)
    values = torch.full_like(rows, math.nan).index_copy(0, inside, rows[inside]).requires_grad_()
    held = None if lengths is None else torch.tensor(lengths)
    x = torch.nested.nested_tensor_from_jagged(values.transpose(1, 2), torch.tensor([2, 5, 7, 12]), held)
    out = scaled_dot_product_attention(*3 * [x.transpose(1, 2)], is_causal=True).transpose(1, 2).values()[inside]
    packing = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts(*used))
    want, _ = oracle_features.attention(*3 * [values.transpose(1, 2)[inside]], causal="top-left", **packing)
    torch.testing.assert_close(with_gradients(out, [values]), with_gradients(want, [values]))


@pytest.mark.parametrize("bound", [None, 9])
def test_no_number_of_the_device_is_asked_for(bound: int | None, monkeypatch: pytest.MonkeyPatch):
    packed: list[jagged.Packed] = []
    real = jagged.pack
    monkeypatch.setattr(jagged, "pack", lambda *given: packed.append(real(*given)) or packed[-1])
    with FakeTensorMode(shape_env=ShapeEnv()):  # asking raises
        values = torch.empty(16, 4, 16, device="cuda", dtype=torch.float16)
        offsets = torch.empty(5, device="cuda", dtype=torch.int64)
        x = torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=bound)
        out = scaled_dot_product_attention(*3 * [x.transpose(1, 2)])
    assert out.values().device.type == "cuda" and out.offsets() is offsets
    features = packed[0].arguments
    assert features["cu_seqlens_q"] is features["cu_seqlens_k"]  # cast once
    assert features.get("max_seqlen_q") == features.get("max_seqlen_k") == bound


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_jagged_tensors_on_a_gpu_are_the_packed_call(name: str):
    said = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in CALLS[name].items()}
    q, k, v = (x.detach().half().cuda() for x in operands())
    bounds = {"max_seqlen_q": max(Q), "max_seqlen_k": max(K)}
    starts = {"cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": k.offsets().int()}
    rows = [x.values().clone().requires_grad_() for x in (q, k, v)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.cuda.device(q.device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = attention(q, k, v, **said)
            packed = attention(*rows, **starts, **bounds, **said)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # dq is summed in the blocks' order.
    torch.testing.assert_close(with_gradients(packed, rows), with_gradients(out, leaves), rtol=1e-2, atol=1e-2)
