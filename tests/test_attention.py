"""The public functions: what they accept, what they compute, what they refuse and with which sentence."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
from tensors import qkv

import cutlass_fmha
from cutlass_fmha import attention, scaled_dot_product_attention

F = torch.nn.functional
tensors = functools.partial(qkv, dtype=torch.bfloat16)


def test_the_public_names():
    assert set(cutlass_fmha.__all__) == {
        "UnsupportedError", "Workspace", "__version__", "attention", "cascade_attention", "dropout_mask",
        "explain", "explain_swiglu_mlp", "geglu", "gelu_and_mul", "memory_plan", "merge_states",
        "qk_norm_rope", "rms_norm", "rotary", "rotary_qk", "scaled_dot_product_attention", "sdpa",
        "set_deterministic_workspace", "silu_and_mul", "swiglu", "swiglu_mlp", "with_kv_cache",
    }  # fmt: skip
    assert all(hasattr(cutlass_fmha, name) for name in cutlass_fmha.__all__)
    assert cutlass_fmha.__version__[0].isdecimal()


# ---- attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "meaning"), [(False, "none"), (None, "none"), (True, "bottom-right")])
def test_causal_has_two_alignments_and_bottom_right_is_the_default(causal: bool | None, meaning: str):
    found, wanted = (attention(*tensors(), causal=said, return_lse=True) for said in (causal, meaning))
    assert all(map(torch.equal, found, wanted))


def test_the_output_is_new_and_contiguous():
    q, k, v = tensors(heads_kv=4)
    copies = [x.clone() for x in (q, k, v)]
    out, lse = attention(q, k, v, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous() and out.shape == q.shape and lse.shape == (2, 4, 33)
    out.fill_(7)
    assert all(torch.equal(x, copy) for x, copy in zip((q, k, v), copies, strict=True))


def test_float64_is_of_the_cpu():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 8, 1, 64, device="cuda")
        assert attention(q, q, q).dtype == torch.float32
        with pytest.raises(ValueError, match="q must be float16 or bfloat16 or float32 on cuda, got float64"):
            attention(q.double(), q.double(), q.double())


# ---- scaled_dot_product_attention --------------------------------------------------------------------------


def test_the_signature_is_torchs():
    ours = inspect.signature(scaled_dot_product_attention).parameters
    plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in ours.values()]
    torchs = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False"
    assert ", ".join(plain) == torchs + ", out=None"  # the last is ours alone
    assert ours["out"].kind == inspect.Parameter.KEYWORD_ONLY


SHAPES = {
    "4d": ((2, 4, 5, 16), (2, 4, 7, 16)),
    "3d": ((4, 5, 16), (4, 7, 16)),
    "2d": ((5, 16), (7, 16)),
    "5d": ((3, 2, 4, 5, 16), (3, 2, 4, 7, 16)),
    "6d": ((2, 1, 3, 4, 5, 16), (2, 1, 3, 4, 7, 16)),
    "broadcast batch": ((2, 4, 5, 16), (1, 4, 7, 16)),
    "broadcast heads": ((2, 4, 5, 16), (2, 1, 7, 16)),
    "broadcast query": ((1, 1, 5, 16), (2, 3, 7, 16)),
    "broadcast rank": ((2, 4, 5, 16), (4, 7, 16)),
    "more queries": ((2, 4, 9, 16), (2, 4, 5, 16)),
    "as many queries": ((2, 4, 7, 16), (2, 4, 7, 16)),
    "no queries": ((2, 4, 0, 16), (2, 4, 7, 16)),
    "no keys": ((2, 4, 5, 16), (2, 4, 0, 16)),
    "no batch": ((0, 4, 5, 16), (0, 4, 7, 16)),
    "no batch, 5d": ((3, 0, 4, 5, 16), (3, 0, 4, 7, 16)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_mean_what_torch_means(shapes: tuple[tuple[int, ...], tuple[int, ...]], is_causal: bool):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in (shapes[0], shapes[1], shapes[1]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("lead", [(), (2,), (3, 2)])
def test_grouped_heads_mean_what_they_mean_to_torch(lead: tuple[int, ...]):
    q, k, v = torch.randn(*lead, 8, 5, 16), torch.randn(*lead, 2, 7, 16), torch.randn(*lead, 2, 7, 16)
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, scale=0.2, enable_gqa=True), expected)
    with pytest.raises(ValueError, match=r"dimensions that broadcast, .*\(enable_gqa=True lets key"):
        scaled_dot_product_attention(q, k, v)


def test_no_rows_lie_anywhere():
    """contiguous() leaves an empty tensor as it is, strides and all."""
    empty = torch.empty(1, 2, 0, 16, 2)[..., 0]
    assert scaled_dot_product_attention(empty, empty, empty).shape == empty.shape


def test_a_last_dimension_that_is_not_contiguous_is_copied():
    q, k, v = (torch.randn(2, 4, 16, s).transpose(2, 3) for s in (5, 7, 7))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


MASKS = {
    "4d": ((2, 4, 5, 16), (2, 4, 7, 16), [(5, 7), (1, 7), (5, 1), (4, 1, 7), (2, 1, 5, 7), (2, 4, 5, 7)]),
    "3d": ((4, 5, 16), (4, 7, 16), [(5, 7), (4, 5, 7), (1, 1, 7)]),
    "2d": ((5, 16), (7, 16), [(5, 7), (7,)]),
    "6d": ((2, 1, 3, 4, 5, 16), (2, 1, 3, 4, 7, 16), [(5, 7), (3, 4, 5, 7), (3, 1, 1, 7), (2, 1, 1, 1, 5, 7)]),
    "broadcast batch": ((2, 4, 5, 16), (1, 4, 7, 16), [(5, 7), (2, 1, 1, 7)]),
    "broadcast heads": ((2, 4, 5, 16), (2, 1, 7, 16), [(4, 5, 7)]),
}


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_mean_to_torch(name: str, kind: torch.dtype):
    q_shape, k_shape, mask_shapes = MASKS[name]
    dtype = torch.float64 if kind == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(x, generator=generator).to(dtype) for x in (q_shape, k_shape, k_shape))
    for shape in mask_shapes:
        mask = torch.randn(shape, generator=generator).to(dtype)
        if kind == torch.bool:
            mask = mask > -0.5
            mask[..., 0] = True  # torch's kernels have their own ideas of a row without keys
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(out, expected)
        if kind != torch.float64:
            half = scaled_dot_product_attention(q.half(), k.half(), v.half(), attn_mask=mask)
            torch.testing.assert_close(half, expected.half(), rtol=1e-2, atol=1e-2)


def test_a_row_that_a_mask_empties_is_zero():
    q, k, v = torch.randn(3, 1, 2, 4, 16).unbind(0)
    hides = torch.tensor([[True] * 4, [False] * 4, [True] * 4, [False, True, True, True]])
    for mask in (hides, torch.zeros(4, 4).masked_fill(~hides, -math.inf)):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert (out[:, :, 1] == 0).all() and out.isfinite().all()
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(out[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]])
