"""flash_attn's names beside attention: norms, units, rotary embedding, padding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from oracle_helpers import rotate
from tensors import ints, laid, randn, starts
from torch import Tensor

from cutlass_fmha.flash_attn import bert_padding
from cutlass_fmha.flash_attn.layers import rotary
from cutlass_fmha.flash_attn.ops import activations, rms_norm
from cutlass_fmha.flash_attn.ops.triton import layer_norm
from cutlass_fmha.flash_attn.ops.triton.rotary import apply_rotary

# ---- norms, units ------------------------------------------------------------------------------------------

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "of_residual", "of_weight", "in_fp32"),
    [
        (F64, F64, F64, False),
        (F64, None, F64, True),
        (BF16, BF16, F32, False),
        (BF16, F32, BF16, False),
        (BF16, None, BF16, True),
        (BF16, None, BF16, False),
        (F32, BF16, F64, False),
    ],
)
def test_norms_are_those_of_plain_math(dtype: Any, of_residual: Any, of_weight: Any, in_fp32: bool, bias: bool):
    """The sum is of the residual's dtype, the output of x's; any dtypes together; gradients too."""
    given = {
        "x": laid(randn(3, 5, 24, dtype=dtype), "last dimension"),
        "weight": randn(24, dtype=of_weight, seed=1),
        "bias": randn(24, dtype=F32 if of_weight == BF16 else of_weight, seed=2) if bias else None,
        "residual": None if of_residual is None else randn(3, 5, 24, dtype=of_residual, seed=3),
    }
    given = {name: None if x is None else x.requires_grad_() for name, x in given.items()}
    said = {"eps": 1e-3, "prenorm": True, "residual_in_fp32": in_fp32, "zero_centered_weight": True}
    y, total, *masks = layer_norm.layer_norm_fn(**given, **said, is_rms_norm=True, return_dropout_mask=True)
    kept = of_residual or (F32 if in_fp32 and dtype == BF16 else dtype)
    assert (y.dtype, total.dtype, masks) == (dtype, kept, [None, None])

    same = {name: None if x is None else x.detach().double().requires_grad_() for name, x in given.items()}
    wanted_total = same["x"] if of_residual is None else same["x"] + same["residual"]
    wanted = wanted_total / (wanted_total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + same["weight"])
    wanted = wanted + same["bias"] if bias else wanted
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == F64 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(y.double(), wanted, **close)
    torch.testing.assert_close(total.double(), wanted_total, **close)
    factors = randn(2, 3, 5, 24, dtype=F64, seed=4)
    leaves = [[x for x in each.values() if x is not None] for each in (given, same)]
    found, grads = (
        torch.autograd.grad((one * factors[0] + other * factors[1]).sum(), own)
        for one, other, own in ((y, total, leaves[0]), (wanted, wanted_total, leaves[1]))
    )
    for one, other in zip(found, grads, strict=True):
        torch.testing.assert_close(one.double(), other, **close)

    # under other names, and to places of the caller's
    x, weight, _, residual = (x if x is None else x.detach() for x in given.values())
    y, total = layer_norm.rms_norm_fn(x, weight, None, residual, prenorm=True, residual_in_fp32=in_fp32)
    rest = {"prenorm": True, "residual_in_fp32": in_fp32, "return_dropout_mask": True}
    again = rms_norm.dropout_add_rms_norm(x, residual, weight, None, 0.0, 1e-6, **rest)
    assert torch.equal(again[0], y) and torch.equal(again[1], total)
    assert again[2].dtype == torch.uint8 and again[2].shape == x.shape and again[2].all()
    alone = rms_norm.dropout_add_rms_norm(x, residual, weight, None, 0.0, 1e-6, return_dropout_mask=True)
    assert torch.equal(alone[0], y) and alone[1].all()
    module = rms_norm.DropoutAddRMSNorm(24, True, 0.0, 1e-6, in_fp32)
    module.weight.data = weight
    assert all(torch.equal(*pair) for pair in zip(module(x, residual), (y, total), strict=True))
    places = {"out": torch.empty(3, 5, 24, dtype=F32), "residual_out": torch.empty_like(total)}
    found = layer_norm.rms_norm_fn(
        x, weight, None, residual, **places, **said | {"zero_centered_weight": False, "eps": 1e-6}
    )
    assert all(one is other for one, other in zip(found, places.values(), strict=True))
    torch.testing.assert_close(found[0].to(y.dtype), y)
    assert torch.equal(found[1], total)


def test_modules_of_norms_begin_as_one():
    x, ones = randn(3, 8), torch.ones(8)
    expected = rms_norm.rms_norm(x, ones, 1e-5)
    torch.testing.assert_close(expected, torch.nn.functional.rms_norm(x, (8,), ones, 1e-5))
    centered = layer_norm.RMSNorm(8, zero_centered_weight=True)
    drops = rms_norm.DropoutAddRMSNorm(8, p=0.5), layer_norm.RMSNorm(8, dropout_p=0.5)
    for module in (rms_norm.RMSNorm(8), layer_norm.RMSNorm(8), centered, *drops):
        assert torch.equal(module.eval()(x), expected)
        assert module.bias is None and [*module.state_dict()] == ["weight"]
    found = layer_norm.RMSNorm(8)(x.bfloat16(), x, prenorm=True, residual_in_fp32=True)
    assert (found[0].dtype, found[1].dtype) == (BF16, F32)


def test_swiglu_is_that_of_plain_math():
    x, y = (randn(3, 10, dtype=F64, seed=seed).t().requires_grad_() for seed in (0, 1))
    torch.testing.assert_close(activations.swiglu(x, y), torch.nn.functional.silu(x) * y)
    assert torch.autograd.gradcheck(activations.swiglu, (x, y))


# ---- rotary, padding ---------------------------------------------------------------------------------------


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [rows, heads, head_dim] by plain arithmetic; a row beyond the table as it is."""
    inside, at = (positions < len(cos))[:, None, None], positions.clamp(max=len(cos) - 1)
    return torch.where(inside, rotate(x, cos, sin, at, interleaved).to(x.dtype), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, int])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_of_their_signature(packed: bool, interleaved: bool, inplace: bool, dtype: Any):
    cos, sin = torch.rand(2, 16, 6, dtype=F64)
    lengths = [4, 2, 0, 2, 4] if packed else [4, 4, 4]
    offsets = [7] * len(lengths) if dtype is int else [3, 40, 15, 16, 14][: len(lengths)]
    offset = 7 if dtype is int else torch.tensor(offsets, dtype=dtype)
    positions = torch.cat([torch.arange(n) + first for n, first in zip(lengths, offsets, strict=True)])
    leaf = randn(12, 2, 16, dtype=F64).requires_grad_()
    x = (leaf if packed else leaf.view(3, 4, 2, 16)) * 1.0
    given = {"cu_seqlens": starts(*lengths), "max_seqlen": torch.tensor(5)} if packed else {}
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, offset, **given)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    expected = turned(leaf, cos, sin, positions, interleaved)
    torch.testing.assert_close(out.reshape(expected.shape), expected)
    if dtype is int and not packed:
        rows = [t[7:11].expand(3, 4, 6) for t in (cos, sin)]
        by_torch = rotary.apply_rotary_emb_torch(leaf.view(3, 4, 2, 16), *rows, interleaved)
        torch.testing.assert_close(by_torch.view(expected.shape), expected)
    weight = randn(12, 2, 16, dtype=F64, seed=5)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.reshape(weight.shape), leaf, weight) for each in (out, expected))
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_has_gradients_of_gradients(inplace: bool):
    cos, sin, leaf = *torch.rand(2, 3, 2, dtype=F64), randn(1, 3, 1, 4, dtype=F64).requires_grad_()
    call = functools.partial(rotary.apply_rotary_emb, cos=cos, sin=sin, inplace=inplace)
    assert torch.autograd.gradgradcheck(lambda x: call(x * 1.0).pow(3), (leaf,))


@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_is_rotated_in_place_too(view: bool):
    cos, sin, leaf = *torch.rand(2, 3, 2, dtype=F64), randn(1, 3, 2, 1, 4, dtype=F64)
    found = []
    for kept in (1.0, None):
        own = leaf.clone().requires_grad_()
        x = own * kept if kept else own.view_as(own) if view else own
        out = rotary.apply_rotary_emb_kv_(x, cos, sin)
        assert out.data_ptr() == x.data_ptr()
        found.append((out.detach(), *torch.autograd.grad(out.pow(3).sum(), own)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [3, [3, 0]])
@pytest.mark.parametrize("shape", ["qkv", "grouped", "q and kv"])
def test_rotary_embedding_in_place(shape: str, offset: Any, interleaved: bool, scale_base: int | None):
    """By angles in fp32; with xPos q is scaled by what k is divided by."""
    heads = (4, 2, 2) if shape == "grouped" else (3, 3, 3)
    leaf = randn(2, 5, sum(heads), 16, dtype=F64).requires_grad_()
    module = rotary.RotaryEmbedding(12, 100.0, interleaved, scale_base).half()
    given: Any = {"max_seqlen": 9} if isinstance(offset, list) else {}
    given["seqlen_offset"] = torch.tensor(offset) if given else offset
    x = leaf * 1.0
    if shape == "q and kv":
        q, kv = leaf[:, :, :3] * 1.0, leaf[:, :, 3:].unflatten(2, (2, 3)) * 1.0
        found = module(q, kv, **given)
        assert [each.data_ptr() for each in found] == [q.data_ptr(), kv.data_ptr()]
        out = torch.cat((found[0], found[1].flatten(2, 3)), 2)
    elif shape == "grouped":
        out = module(x, num_heads_q=4, **given)
    else:
        out = module(x.unflatten(2, (3, 3)), **given).flatten(2, 3)
    assert shape == "q and kv" or out.data_ptr() == x.data_ptr()

    length = 9 if isinstance(offset, list) else 8
    assert module._seq_len_cached == length and module._cos_cached.dtype == F64 and not module.state_dict()
    pairs, positions = torch.arange(0, 12, 2, dtype=F64), torch.arange(length, dtype=F64)[:, None]
    cos, sin = (f(positions * 100.0 ** (-pairs / 12)) for f in (torch.cos, torch.sin))
    scale = 1.0
    if scale_base is not None:
        scale = ((pairs + 0.4 * 12) / (1.4 * 12)) ** ((positions - length // 2) / scale_base)
    first = torch.tensor(offset if isinstance(offset, list) else [offset] * 2)
    at = (first[:, None] + torch.arange(5)).flatten()
    q, k, v = leaf.flatten(0, 1).split(heads, 1)
    q, k = turned(q, cos * scale, sin * scale, at, interleaved), turned(k, cos / scale, sin / scale, at, interleaved)
    expected = torch.cat((q, k, v), 1).view(out.shape)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weight = randn(*out.shape, dtype=F64, seed=1)
    grads = [torch.autograd.grad((each * weight).sum(), leaf)[0] for each in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_tables_grow_and_follow_the_dtype():
    module = rotary.RotaryEmbedding(8)
    module._update_cos_sin_cache(9, device=torch.device("cpu"), dtype=F32)
    first = module._cos_cached
    module(randn(1, 4, 3, 2, 8))
    assert module._cos_cached is first, "it is long enough"
    module(randn(1, 4, 3, 2, 8), seqlen_offset=6)
    assert torch.equal(module._cos_cached[:9], first) and len(module._cos_cached) == 10
    module(randn(1, 4, 3, 2, 8).bfloat16())
    assert module._cos_cached.shape == (4, 4) and module._cos_cached.dtype == BF16
    with torch.inference_mode():
        rotary.RotaryEmbedding.forward(module.eval(), randn(1, 9, 3, 2, 8))
    assert module._cos_cached.is_inference()
    module.train()(randn(1, 4, 3, 2, 8).requires_grad_() * 1.0).sum().backward()
    assert not module._cos_cached.is_inference()


@pytest.mark.parametrize("how", ["plain", "last dimension"])
def test_rotations_by_hand_go_back_by_conjugate(how: str):
    """As ModernBERT's code of transformers does it: packed qkv, whose q and k are one view."""
    angles = torch.outer(torch.arange(6.0), 100.0 ** -(torch.arange(4) / 4)).double()
    cos, sin = angles.cos(), angles.sin()
    x = laid(randn(9, 4, 8, dtype=F64), how).clone(memory_format=torch.preserve_format)
    before, rest = x.clone(), {"cu_seqlens": ints(0, 6, 6, 9), "max_seqlen": 6}
    expected = rotary.apply_rotary_emb(x, cos, sin, **rest)
    assert apply_rotary(x, cos, sin, **rest, inplace=True) is x and torch.equal(x, expected)
    torch.testing.assert_close(apply_rotary(x, cos, sin, **rest, conjugate=True), before)


@pytest.mark.parametrize("mask", [[[1, 1, 0], [0, 1, 1]], [[1, 1, 1], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_goes_and_comes_back(mask: list[list[int]], dtype: torch.dtype):
    x, keep = randn(2, 3, 2, 4).requires_grad_(), torch.tensor(mask, dtype=dtype)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, keep)
    assert torch.equal(rows, x[keep.bool()]) and isinstance(longest, int)
    counts = [sum(row) for row in mask]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, counts[0], sum(counts)], max(counts), counts)
    assert cu_seqlens.dtype == used.dtype == torch.int32
    back = bert_padding.pad_input(rows, indices, 2, 3)
    assert torch.equal(back, x * keep.bool()[..., None, None])
    back.sum().backward()
    assert torch.equal(x.grad, keep.bool()[..., None, None].expand_as(x).float())
    again, residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(again, rows) and torch.equal(residual, x.flatten(0, 1))


def test_rows_that_nobody_uses_and_several_sequences_in_a_row():
    x = randn(2, 4, 3)
    keep, unused = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, keep, unused)
    found = indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
    assert found == ([0, 1, 2, 4], [0, 3, 4], 3, [2, 1])
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    lengths = torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0]])
    found = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert (found[1].tolist(), found[2].tolist(), found[3]) == ([0, 1, 2, 4, 5, 6, 7], [0, 2, 3, 7], 4)
