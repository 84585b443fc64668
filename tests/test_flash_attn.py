"""flash_attn's names: signatures, meanings, return values are FlashAttention-2's; scripts run unmodified."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import math
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import oracle_features
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_helpers import rotate
from tensors import ints, randn, starts
from torch import Tensor

from cutlass_fmha import attention, flash_attn, with_kv_cache
from cutlass_fmha.flash_attn import bert_padding, flash_attn_interface
from cutlass_fmha.flash_attn.layers import rotary
from cutlass_fmha.flash_attn.ops import activations, rms_norm
from cutlass_fmha.flash_attn.ops.triton import layer_norm
from cutlass_fmha.flash_attn.ops.triton.rotary import apply_rotary
from cutlass_fmha.integrations import hub

#: Of release 2.8.3, but for annotations.
SIGNATURES = {
    "flash_attn_func": "q, k, v, {usual}",
    "flash_attn_qkvpacked_func": "qkv, {usual}",
    "flash_attn_kvpacked_func": "q, kv, {usual}",
    "flash_attn_varlen_func": "q, k, v, {lengths}, {usual}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, {usual}",
    "flash_attn_varlen_kvpacked_func": "q, kv, {lengths}, {usual}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
    "_wrapped_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, return_softmax",
    "_wrapped_flash_attn_varlen_forward": "q, k, v, {lengths}, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
    "_wrapped_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, {gradients}",
    "_wrapped_flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, {lengths}, "
    "{gradients}, zero_tensors=False",
    "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "rotate_half": "x, interleaved=False",
    "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
    "num_heads_q=None",
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
    "index_put_first_axis": "values, indices, first_axis_dim",
    "layers.rotary.RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    "layers.rotary.RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, "
    "num_heads_q=None",
    "layers.rotary.RotaryEmbedding._update_cos_sin_cache": "self, seqlen, device=None, dtype=None",
    "ops.triton.rotary.apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, "
    "interleaved=False, inplace=False, conjugate=False",
    "ops.triton.layer_norm.rms_norm_fn": "{norm}, {places}",
    "ops.triton.layer_norm.layer_norm_fn": "{norm}, is_rms_norm=False, {places}",
    "ops.triton.layer_norm.RMSNorm": "hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, "
    "device=None, dtype=None",
    "ops.triton.layer_norm.RMSNorm.forward": "self, x, residual=None, prenorm=False, residual_in_fp32=False",
    "ops.rms_norm.rms_norm": "x, weight, epsilon",
    "ops.rms_norm.dropout_add_rms_norm": "x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, "
    "layerscale=None, prenorm=False, residual_in_fp32=False, return_dropout_mask=False",
    "ops.rms_norm.RMSNorm": "hidden_size, eps=1e-05, device=None, dtype=None",
    "ops.rms_norm.DropoutAddRMSNorm": "hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, "
    "device=None, dtype=None",
    "ops.rms_norm.DropoutAddRMSNorm.forward": "self, x0, residual=None",
    "ops.activations.swiglu": "x, y",
}  # fmt: skip
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
#: What several have.
SHARED = {
    "usual": "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False",
    "norm": "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
    "rowscale=None, prenorm=False, residual_in_fp32=False, zero_centered_weight=False",
    "gradients": "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
    "deterministic, rng_state=None",
    "places": "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None",
    "lengths": LENGTHS,
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_theirs(name: str):
    modules = ("flash_attn_interface", "layers.rotary", "bert_padding")
    [found] = {
        pkgutil.resolve_name(f"cutlass_fmha.flash_attn.{name if '.' in name else f'{module}.{name}'}")
        for module in modules
        if "." in name or hasattr(pkgutil.resolve_name(f"cutlass_fmha.flash_attn.{module}"), name)
    }
    given = inspect.signature(found).parameters.values()
    plain = [str(each.replace(annotation=inspect.Parameter.empty)) for each in given]
    assert ", ".join(plain) == SIGNATURES[name].format(**SHARED)


# ---- what the functions compute ----------------------------------------------------------------------------

SIDES = st.sampled_from((-1, -7, 0, 3, 20))
OPTIONS = st.fixed_dictionaries(
    {"causal": st.booleans(), "window_size": st.tuples(SIDES, SIDES)},
    optional={
        "softmax_scale": st.sampled_from((0.3, 1.0)),
        "softcap": st.sampled_from((0.0, 5.0)),
        "alibi_slopes": st.just(torch.tensor([0.1, 0.2, 0.3, 0.4])),
        "deterministic": st.booleans(),
    },
)


def agree(found: Any, options: dict[str, Any], *operands: Tensor, **lengths: Any) -> None:
    """Output and LSE, +inf where a row has no keys, are those of dense fp64 math."""
    out, lse, mask = found
    sides = [None if side < 0 else side for side in options["window_size"]]
    said = {name: options[name] for name in ("softcap", "alibi_slopes") if name in options}
    causal = "bottom-right" if options["causal"] else "none"
    wanted, wanted_lse = oracle_features.attention(
        *operands, options.get("softmax_scale"), causal, window=sides, **said, **lengths
    )
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        lse.double(), wanted_lse.masked_fill(wanted_lse == -math.inf, math.inf), rtol=1e-4, atol=1e-5
    )
    assert mask.shape == (0,) and mask.dtype == out.dtype and lse.dtype == torch.float32


def laid(x: Tensor, how: str) -> Tensor:
    """The same numbers, with a last dimension that is not contiguous, or heads first."""
    if how == "last dimension":
        return torch.stack((x, x), -1)[..., 0]
    return x.transpose(-2, -3).contiguous().transpose(-2, -3) if how == "heads first" else x


def deterministic_if_told(test: Any) -> Any:
    """Gradients of the CPU are anyway: each call hears of it."""

    @functools.wraps(test)
    def heard(options: dict[str, Any], **rest: Any) -> None:
        with mock.patch.object(flash_attn_interface, "attention", wraps=attention) as calls:
            test(options=options, **rest)
        said = {call.kwargs.get("deterministic", False) for call in calls.call_args_list}
        assert said == {options.get("deterministic", False)}

    return heard


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 12)),
    options=OPTIONS,
    how=st.sampled_from(("plain", "last dimension", "heads first")),
)
@deterministic_if_told
def test_dense_functions(sizes: tuple[int, int, int], options: dict[str, Any], how: str):
    batch, seqlen_q, seqlen_k = sizes
    q, kv = randn(batch, seqlen_q, 4, 12), randn(batch, seqlen_k, 2, 2, 12, seed=1)
    k, v = kv.unbind(2)
    full = {**options, "return_attn_probs": True}
    found = flash_attn.flash_attn_func(*(laid(x, how) for x in (q, k, v)), **full)
    agree(found, options, q, k, v)
    left, right = options["window_size"]
    of_tensors = {**options, "window_size": [torch.tensor(left), torch.tensor([right])]}
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **of_tensors), found[0])
    packed = flash_attn.flash_attn_kvpacked_func(q, kv, **full)
    assert all(torch.equal(one, other) for one, other in zip(packed, found, strict=True))
    qkv = randn(batch, seqlen_q, 3, 4, 12, seed=2)
    agree(flash_attn.flash_attn_qkvpacked_func(qkv, **full), options, *qkv.unbind(2))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4),
    options=OPTIONS,
    tensors=st.booleans(),
)
@deterministic_if_told
def test_packed_functions(lengths: list[tuple[int, int]], options: dict[str, Any], tensors: bool):
    cu_q, cu_k = (starts(*each) for each in zip(*lengths, strict=True))
    longest = [max(each) for each in zip(*lengths, strict=True)]
    given = [torch.tensor(n) for n in longest] if tensors else longest
    q, kv = randn(int(cu_q[-1]), 4, 12), randn(int(cu_k[-1]), 2, 2, 12, seed=1)
    k, v = kv.unbind(1)
    full = {**options, "return_attn_probs": True}
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    found = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *given, **full)
    agree(found, options, q, k, v, **cu)
    packed = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, *given, **full)
    assert all(torch.equal(one, other) for one, other in zip(packed, found, strict=True))
    qkv = randn(int(cu_q[-1]), 3, 4, 12, seed=2)
    found = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, given[0], **full)
    agree(found, options, *qkv.unbind(1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_q)

    # the same keys in pages of 16, in any order
    pages = randn(12, 16, 2, 2, 12, seed=3)
    table = (torch.arange(2 * len(lengths), dtype=torch.int32) * 5 % 12).view(-1, 2)
    for b, (_, length) in enumerate(lengths):
        rows = kv[int(cu_k[b]) : int(cu_k[b + 1])]
        pages[int(table[b, 0]), : min(16, length)] = rows[:16]
        pages[int(table[b, 1]), : max(0, length - 16)] = rows[16:]
    paged = flash_attn.flash_attn_varlen_func(q, *pages.unbind(2), cu_q, cu_k, *given, **full, block_table=table)
    agree(paged, options, q, k, v, **cu)


@pytest.mark.parametrize("call", [flash_attn.flash_attn_varlen_func, hub.flash_attn_varlen_func, attention])
def test_longest_lengths_may_be_numpys(call: Any):
    x, cu = randn(6, 4, 16), ints(0, 2, 6)
    found = [call(x, x, x, **dict(zip(LENGTHS.split(", "), (cu, cu, n, n), strict=True))) for n in (np.int64(4), 4)]
    assert torch.equal(*found)


def test_the_dropout_mask_is_that_of_the_output():
    """With values that are one-hot the output is the probabilities."""
    q, k = randn(2, 5, 2, 16), randn(2, 7, 2, 16, seed=1)
    v = torch.eye(7, 16)[None, :, None].expand(2, 7, 2, 16)
    torch.manual_seed(3)
    out, _, mask = flash_attn.flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
    assert mask.shape == (2, 2, 128, 128) and set(mask.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(out[..., :7].transpose(1, 2) > 0, mask[:, :, :5, :7] > 0)
    out, _, mask = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ints(0, 5, 10), ints(0, 7, 14), 5, 7, 0.4,
        return_attn_probs=True,
    )  # fmt: skip
    assert torch.equal(out.view(2, 5, 2, 16)[..., :7].transpose(1, 2) > 0, mask[:, :, :5, :7] > 0)
    again = [flash_attn.flash_attn_func(q, k, v, 0.4) for _ in range(2)]
    assert not torch.equal(*again), "each call draws others"
    *_, state = flash_attn_interface._wrapped_flash_attn_forward(q, k, v, 0.4, 0.25, False, -1, -1, 0.0, None, False)
    assert state.shape == (2,) and state.dtype == torch.int64
    same = attention(q, k, v, scale=0.25, dropout_p=0.4, dropout_seed=int(state[0]))
    assert torch.equal(_[0], same) and _[2].shape == (0,)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("numbers", [(0.0, 0.3, True, 3, -1, 0.0), (0.4, 0.25, False, -1, -1, 2.0)])
def test_the_backward_that_others_call_is_that_of_autograd(numbers: tuple[Any, ...], packed: bool):
    """More queries than keys: rows without keys have an LSE of +inf."""
    dropout_p, scale, causal, *sides, softcap = numbers
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    q, k, v = (randn(2, n, h, 16, seed=n + h) for n, h in ((9, 4), (5, 2), (5, 2)))
    dout, lengths = randn(2, 9, 4, 16, seed=1), ()
    said = {"scale": scale, "causal": causal, "window": tuple(None if s < 0 else s for s in sides)}
    if packed:
        q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
        lengths = (ints(0, 9, 18), ints(0, 5, 10), 9, 5)
        said |= dict(zip(LENGTHS.split(", "), lengths, strict=True))
    kind = "varlen_" if packed else ""
    forward, backward = (
        getattr(flash_attn_interface, f"_wrapped_flash_attn_{kind}{each}") for each in ("forward", "backward")
    )
    torch.manual_seed(0)
    out, lse, _, state = forward(q, k, v, *lengths, *numbers, slopes, False)
    places = [torch.full_like(x, math.nan) for x in (q, k, v)]
    ops, deterministic = torch.ops.cutlass_fmha, dropout_p == 0.0
    with mock.patch.object(ops, "attend_backward", wraps=ops.attend_backward) as heard:
        backward(dout, q, k, v, out, lse, *places, *lengths, *numbers, slopes, deterministic, rng_state=state)
    assert heard.call_args.kwargs["deterministic"] is deterministic
    # The op's word for a row without keys is -inf; the CPU minds neither.
    assert (lse == math.inf).any() == causal and torch.equal(heard.call_args.args[5] == -math.inf, lse == math.inf)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dropout = {"dropout_p": dropout_p, "dropout_seed": state[:1]} if dropout_p else {}
    same = attention(*leaves, softcap=softcap, alibi_slopes=slopes, **said, **dropout)
    torch.testing.assert_close(places, list(torch.autograd.grad(same, leaves, dout)))


def test_a_forward_that_others_call_hears_of_padding_and_lengths():
    """Over pages; the lengths are those of seqused_k, whatever cu_seqlens_k says."""
    q, k, v = randn(5, 4, 16), *randn(2, 3, 16, 2, 16, seed=1)
    cu, rest = ints(0, 2, 5), {"leftpad_k": ints(3, 1), "seqused_k": ints(9, 20)}
    table = ints(2, 2, 0, 1).view(2, 2)
    out, lse, *_ = flash_attn_interface._wrapped_flash_attn_varlen_forward(
        q, k, v, cu, ints(0, 16, 48), 3, 32, 0.0, 0.3, True, block_table=table, **rest
    )
    wanted = oracle_features.attention(
        q, k, v, 0.3, "bottom-right", cu_seqlens_q=cu, max_seqlen_q=3, page_table=table, **rest
    )
    torch.testing.assert_close((out.double(), lse.double()), wanted[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_is_theirs(paged: bool, interleaved: bool | None, causal: bool):
    """Pairs are neighbours by default, and positions count left padding."""
    cos, sin = torch.rand(32, 4), torch.rand(32, 4)
    q, k, v = randn(2, 3, 4, 16), randn(2, 3, 2, 16, seed=1), randn(2, 3, 2, 16, seed=2)
    shape = (4, 16, 2, 16) if paged else (3, 32, 2, 16)
    theirs, ours = ([randn(*shape, seed=s) for s in (3, 4)] for _ in range(2))
    where = {"block_table": ints(3, 0, 2, 1).view(2, 2)} if paged else {"cache_batch_idx": ints(2, 0)}
    used, pad = ints(4, 20), ints(1, 5)
    rest = {} if interleaved is None else {"rotary_interleaved": interleaved}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *theirs, k, v, cos, sin, used, cache_leftpad=pad, causal=causal, window_size=(9, 9), softmax_scale=0.3,
        return_softmax_lse=True, num_splits=2, **where, **rest,
    )  # fmt: skip
    expected = with_kv_cache(
        q, *ours, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved is not False,
        rotary_seqlens=used, cache_seqlens=used, leftpad_k=pad, causal=causal, window=(9, 9), return_lse=True,
        page_table=where.get("block_table"), cache_batch_idx=where.get("cache_batch_idx"), scale=0.3,
    )  # fmt: skip
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    nothing = flash_attn.flash_attn_with_kvcache(q, *theirs, cache_seqlens=0, return_softmax_lse=True, **where)
    assert (nothing[0] == 0).all() and (nothing[1] == math.inf).all()


X, ROWS, ONES, TABLE = randn(1, 4, 2, 16), randn(2, 8), torch.ones(8), (torch.rand(9, 4), torch.rand(9, 4))
#: Whose dropout is for training.
DROPS = (rms_norm.DropoutAddRMSNorm(8, p=0.5), layer_norm.RMSNorm(8, dropout_p=0.5))
ANOTHERS = {"dropout_p": 0.5, "rowscale": ROWS, "x1": ROWS, "weight1": ONES, "bias1": ONES}
of_x, of_rows = functools.partial(rotary.apply_rotary_emb, X), functools.partial(layer_norm.rms_norm_fn, ROWS)
wrong_state = ((*[X] * 5, X[..., 0], *[None] * 3), (0.3, 0.25, False, -1, -1, 0.0, None, False))
DECLINED: list[tuple[type[Exception], Any, str]] = [
    (ValueError, lambda: flash_attn.flash_attn_qkvpacked_func(X),
     r"qkv must be \[batch, seqlen, 3, num_heads, head_dim\], got \(1, 4, 2, 16\)"),
    (ValueError, lambda: flash_attn.flash_attn_varlen_kvpacked_func(X[0], X[0], ints(0, 4), ints(0, 4), 4, 4),
     r"kv must be \[total, 2, num_heads, head_dim\], got \(4, 2, 16\)"),
    (ValueError, lambda: of_x(*TABLE, cu_seqlens=ints(0, 4)), "cu_seqlens is only taken with max_seqlen"),
    (ValueError, lambda: of_x(*TABLE, seqlen_offsets=6), "have 9 positions, and 4 rows begin at position 6"),
    *((ValueError, lambda n=n: rotary.apply_rotary_emb_qkv_(X, *TABLE, num_heads_q=n),
       f"needs num_heads_q.*half of the others are keys: got {n} of 2") for n in (None, 3, 1)),
    (ValueError, lambda: flash_attn.flash_attn_with_kvcache(X, X, X, num_splits=65), "num_splits must be 1 to 64"),
    (ValueError, lambda: apply_rotary(X[0], *TABLE), "x must have 4 dimensions"),
    (ValueError, lambda: rotary.RotaryEmbedding(8)(X, X, ints(1)), "seqlen_offset is a tensor: pass max_seq"),
    (ValueError, lambda: flash_attn_interface._wrapped_flash_attn_backward(*wrong_state[0], *wrong_state[1]),
     "rng_state must be what the forward returned last"),
    *((NotImplementedError, lambda said={name: x}: of_rows(ONES, None, **said), f"^{name} must be .* here: ")
      for name, x in ANOTHERS.items()),
    *((NotImplementedError, lambda norm=norm: norm(ROWS), "dropout_p must be 0 here: let") for norm in DROPS),
    (NotImplementedError, lambda: rms_norm.dropout_add_rms_norm(ROWS, None, ONES, None, 0.0, 0.1, None, ONES),
     "layerscale must be None here"),
    (NotImplementedError, lambda: layer_norm.layer_norm_fn(ROWS, ONES, None), "is_rms_norm must be True"),
    (ValueError, lambda: of_rows(ONES, None, X[0, 0, 0]), r"residual must have x's shape \(2, 8\), got \(16"),
    (TypeError, lambda: of_rows(None, None), "weight must be"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "sentence"), DECLINED)
def test_what_is_declined_says_why(error: type[Exception], call: Any, sentence: str):
    with pytest.raises(error, match=sentence):
        call()


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
    for module in (rms_norm.RMSNorm(8), layer_norm.RMSNorm(8), centered, *DROPS):
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


# ---- import flash_attn -------------------------------------------------------------------------------------

REFUSED = "flash_attn is installed here: remove it, or take"


def run(script: str, *path: Path) -> str:
    """In a process of its own: what is imported there is imported nowhere else."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(each) for each in path]!r}\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_answers_everyone_who_asks_and_is_reversible():
    assert "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None
    flash_attn.install()
    flash_attn.install()
    try:
        for name in (
            "flash_attn_func", "bert_padding.unpad_input", "layers.rotary.RotaryEmbedding",
            "flash_attn_interface._wrapped_flash_attn_backward", "layers.rotary.apply_rotary_emb",
            "ops.activations.swiglu", "ops.rms_norm.RMSNorm", "ops.triton.layer_norm.rms_norm_fn",
        ):  # fmt: skip
            found, ours = (pkgutil.resolve_name(f"{root}.{name}") for root in ("flash_attn", flash_attn.__name__))
            assert found is ours
        assert flash_attn.__spec__.name == "cutlass_fmha.flash_attn" and sys.modules["flash_attn"] is flash_attn
        for name in ("flash_attn", "flash-attn", "Flash_Attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
        assert "flash_attn" in importlib.metadata.packages_distributions()
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.layers.rotary") is not None
        assert importlib.util.find_spec("flash_attn.losses") is None
        with pytest.raises(ModuleNotFoundError, match="flash_attn.modules"):
            importlib.import_module("flash_attn.modules.mha")
    finally:
        flash_attn.uninstall()
    flash_attn.uninstall()
    assert "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    assert not any(name.startswith("flash_attn") for name in sys.modules)


def test_an_installed_one_is_replaced_only_when_told(tmp_path: Path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("real = True\n")
    found = run(
        "from cutlass_fmha.flash_attn import install, uninstall\n"
        "try: install()\n"
        "except ImportError as error: print(error)\n"
        "import flash_attn; print(flash_attn.real)\n"
        "install(replace=True)\n"
        "import flash_attn as ours; print(ours.__version__, hasattr(ours, 'real'))\n"
        "uninstall()\n"
        "import flash_attn as theirs; print(theirs is flash_attn)\n",
        tmp_path,
    ).splitlines()
    assert found[0].startswith(REFUSED) and found[1:] == ["True", "2.8.3 False", "True"]


GENERATION = """
import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

torch.manual_seed(0)
project = torch.nn.Parameter(torch.randn(64, 3 * 64) / 8)
q, k, v = (torch.randn(2, 17, 64) @ project).unflatten(-1, (3, 4, 16)).unbind(2)
angles = torch.outer(torch.arange(64), 10000.0 ** -(torch.arange(8) / 8)).to(q)
cos, sin = angles.cos(), angles.sin()
k_cache, v_cache = torch.zeros(2, 2, 64, 4, 16).unbind(0)
lengths, steps = torch.zeros(2, dtype=torch.int32), []
for new in (slice(0, 5), *(slice(i, i + 1) for i in range(5, 17))):
    steps.append(flash_attn_with_kvcache(
        q[:, new], k_cache, v_cache, k[:, new], v[:, new], rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
        causal=True, rotary_interleaved=False,
    ))
    assert not steps[-1].requires_grad
    lengths += steps[-1].shape[1]
q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
whole = flash_attn_func(q, k, v, causal=True)
print(whole.shape, (torch.cat(steps, 1) - whole).abs().max().item() / whole.abs().max().item())
"""

ENCODER = """
import torch
from flash_attn import flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import pad_input, unpad_input

torch.manual_seed(0)
batch, seqlen, heads, head_dim = 3, 17, 4, 32
layers = torch.nn.ModuleList(torch.nn.Linear(heads * head_dim, 3 * heads * head_dim) for _ in range(2))
mask = torch.arange(seqlen) < torch.tensor([17, 5, 0])[:, None]
hidden = torch.randn(batch, seqlen, heads * head_dim).requires_grad_()

def flash(x, p=0.0):
    x, indices, cu_seqlens, max_seqlen, *_ = unpad_input(x, mask)
    for layer in layers:
        qkv = layer(x).unflatten(-1, (3, heads, head_dim))
        x = x + flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=p).flatten(-2)
    return pad_input(x, indices, batch, seqlen)

def eager(x):
    for layer in layers:
        q, k, v = layer(x).unflatten(-1, (3, heads, head_dim)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT * head_dim**-0.5).masked_fill(~mask[:, None, None], -1e4)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    return x * mask[..., None]

results = []
for call in (flash, eager):
    out = call(hidden)
    results.append((out, *torch.autograd.grad(out.pow(2).sum(), (hidden, *layers.parameters()))))
worst = max((x - y).abs().max().item() / y.abs().max().item() for x, y in zip(*results))
print(flash(hidden, 0.1).shape, worst)
"""

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).eval()
ids, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
mask[1, :3] = 0
found = []
for name in ("flash_attention_2", "eager"):
    model.set_attn_implementation(name)
    with torch.no_grad():
        found.append(model(ids, attention_mask=mask).logits[mask.bool()])
print(found[0].shape, (found[0] - found[1]).abs().max().item() / found[1].abs().max().item())
"""

DIFFUSERS = """
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 7, 4, 32)
mask = torch.arange(7) < torch.tensor([[7], [4]])
flash = dispatch_attention_fn(q, k, v, backend="flash", is_causal=True)
flash = torch.stack((flash, dispatch_attention_fn(q, k, v, backend="flash_varlen", attn_mask=mask)))
native = dispatch_attention_fn(q, k, v, backend="native", is_causal=True)
native = torch.stack((native, dispatch_attention_fn(q, k, v, backend="native", attn_mask=mask)))
print(flash.shape, (flash - native).abs().max().item())
"""

#: What each needs, its calls of ours, and the shape that it prints.
SCRIPTS = {
    "generation": (GENERATION, None, 14, [2, 17, 4, 16]),
    "encoder": (ENCODER, None, 4, [3, 17, 128]),
    "transformers, flash_attention_2": (LLAMA, "transformers", 2, [15, 50]),
    "diffusers, flash": (DIFFUSERS, "diffusers", 2, [2, 2, 7, 4, 32]),
}


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", "float32", 1e-5), pytest.param("cuda", "float16", 1e-2, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_was_written_for_it_runs_unmodified(
    tmp_path: Path, name: str, device: str, dtype: str, tolerance: float
):
    """As it is started: on a device, in a dtype. The last number that it prints is its error."""
    script, package, calls, shape = SCRIPTS[name]
    if package is not None:
        pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "script.py").write_text(script)
    begin = "import runpy, torch; from cutlass_fmha.flash_attn import install; install()\n"
    begin += "from cutlass_fmha.demo.measure import CountCalls\n"
    if device == "cpu":  # transformers would not ask for flash_attn
        begin += "torch.cuda.is_available = lambda: True\n"
    begin += f"torch.set_default_device({device!r}); torch.set_default_dtype(torch.{dtype})\n"
    script = f"with CountCalls() as counter: runpy.run_path({str(tmp_path / 'script.py')!r})\n"
    *_, found, counted = run(f"{begin}{script}print(counter.calls)", tmp_path).splitlines()
    printed, _, error = found.rpartition(" ")
    assert (printed, int(counted)) == (f"torch.Size({shape})", calls) and float(error) <= tolerance


def test_a_compiled_call_is_whole():
    def call(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        qkv = rotary.apply_rotary_emb_qkv_(qkv * 1.0, cos, sin, num_heads_q=4)
        q, k, v = qkv.split((4, 2, 2), 2)
        return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), softcap=9.0)

    def drop(x: Tensor, *_: Tensor) -> Any:
        return flash_attn.flash_attn_func(x, x, x, 0.3, return_attn_probs=True)

    given = randn(2, 5, 8, 16), torch.rand(9, 4), torch.rand(9, 4)
    for each in (call, drop):
        found = []
        for function in (torch.compile(each, fullgraph=True, backend="aot_eager"), each):
            torch.manual_seed(0)
            found.append(function(*given))
        torch.testing.assert_close(*found, rtol=0, atol=0)
