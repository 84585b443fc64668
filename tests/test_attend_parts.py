"""flash_attn's functions of packed q, k and v: their gradients are parts of one tensor, without a copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tensors import randn
from torch import Tensor

from cutlass_fmha import attention, flash_attn
from cutlass_fmha.arguments import results
from cutlass_fmha.flash_attn import flash_attn_interface
from cutlass_fmha.launch import gradients

ON_GPU = pytest.param("cuda", torch.float16, marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ON_GPU])
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SAID = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "scores": {"window_size": (7, 3), "softcap": 2.0, "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
}


def one_tensor(kind: str, varlen: bool, device: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Any]]:
    """What is packed; q of kvpacked; and lengths: rows before the first sequence and behind the last are nobody's."""
    rows = (33,) if varlen else (2, 17)
    heads, count = (2, 2) if kind == "kv" else (4, 3)
    packed = randn(*rows, count, heads, 16, seed=1).to(device, dtype).requires_grad_()
    query = [randn(*rows, 4, 16).to(device, dtype).requires_grad_()] if kind == "kv" else []
    ends = torch.tensor([2, 2, 15, 31], dtype=torch.int32, device=device)
    lengths = [ends] * (1 + len(query)) + [16] * (1 + len(query)) if varlen else []
    return packed, query, lengths


def said_of(name: str, device: str) -> dict[str, Any]:
    return {each: x.to(device) if isinstance(x, Tensor) else x for each, x in SAID[name].items()}


def usual(packed: Tensor, query: list[Tensor], lengths: list[Any], said: dict[str, Any]) -> Tensor:
    """The same through ``attention``, whose autograd puts the parts together."""
    ours = {"softmax_scale": "scale", "window_size": "window"}
    given = dict(zip(LENGTHS, lengths if query else lengths[:1] * 2 + lengths[1:] * 2, strict=False))
    return attention(*query, *packed.unbind(-3), **{ours.get(each, each): x for each, x in said.items()}, **given)


def function_of(kind: str, varlen: bool) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(flash_attn, f"flash_attn_{'varlen_' if varlen else ''}{kind}packed_func")
    return found


@DEVICES
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("kind", ["qkv", "kv"])
@pytest.mark.parametrize("said", SAID)
def test_gradients_are_written_where_they_belong(said: str, kind: str, varlen: bool, device: str, dtype: torch.dtype):
    packed, query, lengths = one_tensor(kind, varlen, device, dtype)
    options = {**said_of(said, device), "deterministic": True}
    out = function_of(kind, varlen)(*query, packed, *lengths, **options)
    dout = randn(*out.shape, seed=3).to(out)
    with mock.patch.object(gradients, "launch", wraps=gradients.launch) as launched:
        found = torch.autograd.grad(out, (packed, *query), dout)
    expected_out = usual(packed, query, lengths, options)
    expected = torch.autograd.grad(expected_out, (packed, *query), dout)
    own = slice(2, 31) if varlen else slice(None)  # nobody writes the others
    assert torch.equal(out[own], expected_out[own]) and all(map(torch.equal, found, expected))
    assert found[0].is_contiguous() and "_Parts" in out.grad_fn.name()
    if device == "cuda":  # the kernel's own stores
        places = launched.call_args.kwargs["into"][:3]
        parts = (*found[1:], *found[0].unbind(-3))
        assert [x.data_ptr() for x in places] == [x.data_ptr() for x in parts]


@DEVICES
def test_dropout_is_the_forwards(device: str, dtype: torch.dtype):
    packed, _, _ = one_tensor("qkv", False, device, dtype)
    torch.manual_seed(5)
    out = flash_attn.flash_attn_qkvpacked_func(packed, 0.4, deterministic=True)
    torch.manual_seed(5)
    same = usual(packed, [], [], {"dropout_p": 0.4, "deterministic": True})
    both = (torch.autograd.grad(x, packed, torch.ones_like(x))[0] for x in (out, same))
    assert torch.equal(out, same) and torch.equal(*both)


@DEVICES
@pytest.mark.parametrize("wanted", ["query", "packed"])
def test_nobody_asks_for_the_others_gradient(wanted: str, device: str, dtype: torch.dtype):
    packed, (query,), _ = one_tensor("kv", False, device, dtype)
    (query if wanted == "packed" else packed).requires_grad_(False)
    call = flash_attn.flash_attn_kvpacked_func
    out, same = call(query, packed, deterministic=True), usual(packed, [query], [], {"deterministic": True})
    leaf = query if wanted == "query" else packed
    assert torch.equal(*(torch.autograd.grad(x.sum(), leaf)[0] for x in (out, same)))


def test_it_is_differentiated_once():
    packed, _, _ = one_tensor("qkv", False, "cpu", torch.float64)
    out = flash_attn.flash_attn_qkvpacked_func(packed)
    (found,) = torch.autograd.grad(out.sum(), packed, create_graph=True)
    assert torch.equal(found, torch.autograd.grad(flash_attn.flash_attn_qkvpacked_func(packed).sum(), packed)[0])
    with pytest.raises(NotImplementedError, match="no backward yet of its backward: attention can be differentiated"):
        found.sum().backward()


def test_it_has_the_gradients_of_finite_differences():
    packed, _, _ = one_tensor("qkv", False, "cpu", torch.float64)
    call = flash_attn.flash_attn_qkvpacked_func
    assert torch.autograd.gradcheck(lambda x: call(x[:1, :5], causal=True, window_size=(2, 0)), packed)


def test_other_calls_go_the_usual_way(monkeypatch: pytest.MonkeyPatch):
    packed, _, _ = one_tensor("qkv", False, "cpu", torch.float32)
    call = flash_attn.flash_attn_qkvpacked_func

    def node(out: Tensor) -> str:
        return "" if out.grad_fn is None else out.grad_fn.name()

    assert "_Parts" in node(call(packed))
    with torch.no_grad():
        assert node(call(packed)) == ""
    assert node(call(packed.detach())) == ""
    expected = torch.autograd.grad(call(packed).sum(), packed)[0]
    assert "_Parts" not in node(call(packed, return_attn_probs=True)[0])
    transposed = packed.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
    assert "_Parts" not in node(call(transposed))
    with torch.autocast("cpu", torch.bfloat16):
        assert "_Parts" not in node(call(packed)) and call(packed).dtype == torch.bfloat16
        assert "_Parts" in node(call(packed.detach().bfloat16().requires_grad_()))
    under_transform = torch.func.grad(lambda x: call(x).sum())(packed.detach())
    torch.testing.assert_close(under_transform, expected)
    compiled = torch.compile(lambda x: call(x).sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(packed), packed)[0], expected)
    with pytest.raises(NotImplementedError, match="no backward yet for alibi_slopes: pass it detached"):
        call(packed, alibi_slopes=torch.ones(4, requires_grad=True))


def test_room_that_something_else_lies_in_is_copied_to():
    """Kernels write gradients while they read: q's own memory, say, or one tensor for two gradients."""
    q, k, whole = randn(2, 5, 4, 16), randn(2, 5, 4, 16, seed=1), randn(2, 5, 3, 4, 16, seed=2)
    assert results.are_apart([torch.empty_like(q), torch.empty_like(k)], [q, k])
    assert results.are_apart(list(whole.unbind(2)), [q, k])
    for written in ([q], [whole[:, :, 0], whole[:, :, 0]], [whole[:, :, :2], whole[:, :, 1:]]):
        assert not results.are_apart(written, [q, k])
    assert not results.are_apart([torch.empty(1, 1, 4, 16).expand(2, 5, 4, 16)], [q, k])


@DEVICES
@pytest.mark.parametrize(
    "room", ["as it is written", "q's own", "of rows that end apart", "of another dtype", "for k alone"]
)
def test_the_backward_that_others_call_writes_where_it_is_told(room: str, device: str, dtype: torch.dtype):
    q, k, v = (randn(2, 17, 4, 16, seed=n).to(device, dtype) for n in range(3))
    numbers = (0.0, 0.25, True, -1, -1, 0.0, None)
    out, lse, _, _ = flash_attn_interface._flash_attn_forward(q, k, v, *numbers, False)
    apart = q.new_full((2, 17, 4, 20), math.nan)
    places: list[Tensor | None] = [apart[..., :16], *(torch.full_like(x, math.nan) for x in (k, v))]
    if room == "as it is written":
        places[0] = torch.full_like(q, math.nan)
    elif room == "of another dtype":
        places = [torch.full(x.shape, math.nan, device=device) for x in (q, k, v)]
    elif room == "for k alone":
        places[0] = places[2] = None
    dout = randn(*out.shape, seed=4).to(out)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    if room == "q's own":
        places[0] = q
    flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, *places, *numbers, True)
    same = attention(*leaves, causal=True, deterministic=True)
    for to, expected in zip(places, torch.autograd.grad(same, leaves, dout), strict=True):
        assert to is None or torch.equal(to, expected.to(to.dtype))
    assert apart[..., 16:].isnan().all()
