"""flash_attn's names: signatures, meanings and return values are FlashAttention-2's."""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
from typing import Any
from unittest import mock

import numpy as np
import oracle_features
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_helpers import rotate
from tensors import ints, laid, randn, starts
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
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    "flash_attn_interface._wrapped_flash_attn_forward": "q, k, v, {scores}, return_softmax",
    "flash_attn_interface._wrapped_flash_attn_varlen_forward": "q, k, v, {lengths}, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
    "flash_attn_interface._wrapped_flash_attn_backward": "{gradients}, {scores}, {state}",
    "flash_attn_interface._wrapped_flash_attn_varlen_backward": "{gradients}, {lengths}, {scores}, {state}, "
    "zero_tensors=False",
    "layers.rotary.apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
    "cu_seqlens=None, max_seqlen=None",
    "layers.rotary.apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "layers.rotary.rotate_half": "x, interleaved=False",
    "layers.rotary.apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, "
    "seqlen_offsets=0, num_heads_q=None",
    "layers.rotary.apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "bert_padding.unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
    "bert_padding.index_put_first_axis": "values, indices, first_axis_dim",
    "layers.rotary.RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    "layers.rotary.RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    "layers.rotary.RotaryEmbedding._update_cos_sin_cache": "self, seqlen, device=None, dtype=None",
    "ops.triton.rotary.apply_rotary": "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, "
    "interleaved=False, inplace=False, conjugate=False",
    "ops.triton.layer_norm.rms_norm_fn": "{norm}, {places}",
    "ops.triton.layer_norm.layer_norm_fn": "{norm}, is_rms_norm=False, {places}",
    "ops.triton.layer_norm.RMSNorm": "hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, {like}",
    "ops.triton.layer_norm.RMSNorm.forward": "self, x, residual=None, prenorm=False, residual_in_fp32=False",
    "ops.rms_norm.rms_norm": "x, weight, epsilon",
    "ops.rms_norm.dropout_add_rms_norm": "x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, "
    "layerscale=None, prenorm=False, residual_in_fp32=False, return_dropout_mask=False",
    "ops.rms_norm.RMSNorm": "hidden_size, eps=1e-05, device=None, dtype=None",
    "ops.rms_norm.DropoutAddRMSNorm": "hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, {like}",
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
    "scores": "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes",
    "gradients": "dout, q, k, v, out, softmax_lse, dq, dk, dv",
    "state": "deterministic, rng_state=None",
    "like": "device=None, dtype=None",
    "places": "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None",
    "lengths": LENGTHS,
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_theirs(name: str):
    given = inspect.signature(pkgutil.resolve_name(f"cutlass_fmha.flash_attn.{name}")).parameters.values()
    plain = [str(each.replace(annotation=inspect.Parameter.empty)) for each in given]
    assert ", ".join(plain) == SIGNATURES[name].format(**SHARED)


SIDES = st.sampled_from((-1, -7, 0, 3, 20))
OPTIONS = st.fixed_dictionaries(
    {"causal": st.booleans(), "window_size": st.tuples(SIDES, SIDES)},
    optional={
        "softmax_scale": st.sampled_from((0.3, 1.0)),
        "softcap": st.sampled_from((0.0, 5.0)),
        "alibi_slopes": st.just(torch.tensor([0.1, 0.2, 0.3, 0.4])),
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
    wanted_lse = wanted_lse.masked_fill(wanted_lse == -math.inf, math.inf)
    torch.testing.assert_close((out.double(), lse.double()), (wanted, wanted_lse), rtol=1e-4, atol=1e-5)
    assert mask.shape == (0,) and mask.dtype == out.dtype and lse.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 12)),
    options=OPTIONS,
    how=st.sampled_from(("plain", "last dimension", "heads first")),
)
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
    assert all(map(torch.equal, flash_attn.flash_attn_kvpacked_func(q, kv, **full), found))
    qkv = randn(batch, seqlen_q, 3, 4, 12, seed=2)
    agree(flash_attn.flash_attn_qkvpacked_func(qkv, **full), options, *qkv.unbind(2))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4),
    options=OPTIONS,
    tensors=st.booleans(),
)
def test_packed_functions(lengths: list[tuple[int, int]], options: dict[str, Any], tensors: bool):
    both = [*zip(*lengths, strict=True)]
    cu_q, cu_k = (starts(*each) for each in both)
    given = [torch.tensor(max(each)) if tensors else max(each) for each in both]
    q, kv = randn(int(cu_q[-1]), 4, 12), randn(int(cu_k[-1]), 2, 2, 12, seed=1)
    k, v = kv.unbind(1)
    full = {**options, "return_attn_probs": True}
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    found = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *given, **full)
    agree(found, options, q, k, v, **cu)
    assert all(map(torch.equal, flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, *given, **full), found))
    qkv = randn(int(cu_q[-1]), 3, 4, 12, seed=2)
    found = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, given[0], **full)
    agree(found, options, *qkv.unbind(1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_q)

    # the same keys in pages of 16, in any order
    pages = randn(12, 16, 2, 2, 12, seed=3)
    table = (torch.arange(2 * len(lengths), dtype=torch.int32) * 5 % 12).view(-1, 2)
    for two, rows in zip(table.tolist(), kv.split(both[1]), strict=True):
        for page, part in zip(two, (rows[:16], rows[16:]), strict=True):
            pages[page, : len(part)] = part
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
    call, packed = functools.partial(flash_attn.flash_attn_func, q, k, v, 0.4), (ints(0, 5, 10), ints(0, 7, 14), 5, 7)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    torch.manual_seed(3)
    dense = call(return_attn_probs=True)
    for out, _, mask in (dense, flash_attn.flash_attn_varlen_func(*rows, *packed, 0.4, return_attn_probs=True)):
        assert mask.shape == (2, 2, 128, 128) and set(mask.unique().tolist()) == {-1.0, 1.0}
        assert torch.equal(out.view(2, 5, 2, 16)[..., :7].transpose(1, 2) > 0, mask[:, :, :5, :7] > 0)
    assert not torch.equal(call(), call()), "each call draws others"
    forward = flash_attn_interface._wrapped_flash_attn_forward
    out, _, mask, state = forward(q, k, v, 0.4, 0.25, False, -1, -1, 0.0, None, False)
    assert state.shape == (2,) and state.dtype == torch.int64 and mask.shape == (0,)
    assert torch.equal(out, attention(q, k, v, scale=0.25, dropout_p=0.4, dropout_seed=int(state[0])))


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
    name = f"_wrapped_flash_attn_{'varlen_' if packed else ''}"
    forward, backward = (getattr(flash_attn_interface, name + each) for each in ("forward", "backward"))
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
    forward = flash_attn_interface._wrapped_flash_attn_varlen_forward
    out, lse, *_ = forward(q, k, v, cu, ints(0, 16, 48), 3, 32, 0.0, 0.3, True, block_table=table, **rest)
    said = {"cu_seqlens_q": cu, "max_seqlen_q": 3, "page_table": table, **rest}
    wanted = oracle_features.attention(q, k, v, 0.3, "bottom-right", **said)
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
        q, *ours, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved is not False, scale=0.3,
        rotary_seqlens=used, cache_seqlens=used, leftpad_k=pad, causal=causal, window=(9, 9), return_lse=True,
        **({"page_table": where["block_table"]} if paged else where),
    )  # fmt: skip
    assert all(map(torch.equal, (out, lse, *theirs), (*expected, *ours)))
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


# ---- beside attention: norms, units, rotary embedding, padding ---------------------------------------------

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "of_residual", "of_weight", "in_fp32"), [
    (F64, F64, F64, False), (F64, None, F64, True), (BF16, BF16, F32, False), (BF16, F32, BF16, False),
    (BF16, None, BF16, True), (BF16, None, BF16, False), (F32, BF16, F64, False),
])  # fmt: skip
def test_norms_are_those_of_plain_math(dtype: Any, of_residual: Any, of_weight: Any, in_fp32: bool, bias: bool):
    """The sum is of the residual's dtype, the output of x's; any dtypes together; gradients too."""
    x, weight = laid(randn(3, 5, 24, dtype=dtype), "last dimension"), randn(24, dtype=of_weight, seed=1)
    given = {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "bias": None, "residual": None}
    if bias:
        given["bias"] = randn(24, dtype=F32 if of_weight == BF16 else of_weight, seed=2).requires_grad_()
    if of_residual is not None:
        given["residual"] = randn(3, 5, 24, dtype=of_residual, seed=3).requires_grad_()
    said = {"eps": 1e-3, "prenorm": True, "residual_in_fp32": in_fp32, "zero_centered_weight": True}
    y, total, *masks = layer_norm.layer_norm_fn(**given, **said, is_rms_norm=True, return_dropout_mask=True)
    kept = of_residual or (F32 if in_fp32 and dtype == BF16 else dtype)
    assert (y.dtype, total.dtype, masks) == (dtype, kept, [None, None])

    same = {name: None if x is None else x.detach().double().requires_grad_() for name, x in given.items()}
    wanted_total = same["x"] if of_residual is None else same["x"] + same["residual"]
    wanted = wanted_total / (wanted_total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + same["weight"])
    wanted = wanted + same["bias"] if bias else wanted
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == F64 else {"rtol": 2e-2, "atol": 4e-2}
    factors = randn(2, 3, 5, 24, dtype=F64, seed=4)
    both = ((y, total, given), (wanted, wanted_total, same))
    found, exact = (
        (one, other, *torch.autograd.grad(
            (one * factors[0] + other * factors[1]).sum(), [x for x in own.values() if x is not None]))
        for one, other, own in both
    )  # fmt: skip
    torch.testing.assert_close([x.double() for x in found], [*exact], **close)

    # under other names, and to places of the caller's
    x, weight, _, residual = (x if x is None else x.detach() for x in given.values())
    y, total = layer_norm.rms_norm_fn(x, weight, None, residual, prenorm=True, residual_in_fp32=in_fp32)
    again = functools.partial(rms_norm.dropout_add_rms_norm, x, residual, weight, None, 0.0, 1e-6)
    *found, mask = again(prenorm=True, residual_in_fp32=in_fp32, return_dropout_mask=True)
    assert all(map(torch.equal, found, (y, total)))
    assert mask.dtype == torch.uint8 and mask.shape == x.shape and mask.all()
    alone, mask = again(return_dropout_mask=True)
    assert torch.equal(alone, y) and mask.all()
    module = rms_norm.DropoutAddRMSNorm(24, True, 0.0, 1e-6, in_fp32)
    module.weight.data = weight
    assert all(map(torch.equal, module(x, residual), (y, total)))
    places = {"out": torch.empty(3, 5, 24, dtype=F32), "residual_out": torch.empty_like(total)}
    said |= {"zero_centered_weight": False, "eps": 1e-6}
    found = layer_norm.rms_norm_fn(x, weight, None, residual, **places, **said)
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
    rotated = rotate(leaf, cos, sin, positions.clamp(max=15), interleaved)
    out, expected = out.reshape(leaf.shape), torch.where((positions < 16)[:, None, None], rotated, leaf)
    torch.testing.assert_close(out, expected)
    if dtype is int and not packed:
        rows = [t[7:11].expand(3, 4, 6) for t in (cos, sin)]
        by_torch = rotary.apply_rotary_emb_torch(leaf.view(3, 4, 2, 16), *rows, interleaved)
        torch.testing.assert_close(by_torch.view(expected.shape), expected)
    weight = randn(12, 2, 16, dtype=F64, seed=5)
    torch.testing.assert_close(*(torch.autograd.grad(each, leaf, weight) for each in (out, expected)))


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
    heads, length = (4, 2, 2) if shape == "grouped" else (3, 3, 3), 8
    leaf = randn(2, 5, sum(heads), 16, dtype=F64).requires_grad_()
    module, x, said = rotary.RotaryEmbedding(12, 100.0, interleaved, scale_base).half(), leaf * 1.0, {}
    if isinstance(offset, list):
        offset, length = torch.tensor(offset), 9
        said["max_seqlen"] = length
    if shape == "q and kv":
        given = x[:, :, :3], x[:, :, 3:].unflatten(2, (2, 3))
        found = module(*given, **said, seqlen_offset=offset)
    else:
        given = (x if shape == "grouped" else x.unflatten(2, (3, 3)),)
        found = (module(*given, **said, seqlen_offset=offset, num_heads_q=4 if shape == "grouped" else None),)
    assert [y.data_ptr() for y in found] == [y.data_ptr() for y in given]
    out = torch.cat([y.flatten(2, -2) for y in found], 2)
    assert module._seq_len_cached == length and module._cos_cached.dtype == F64 and not module.state_dict()

    pairs, positions = torch.arange(0, 12, 2, dtype=F64), torch.arange(length, dtype=F64)[:, None]
    cos, sin = (f(positions * 100.0 ** (-pairs / 12)) for f in (torch.cos, torch.sin))
    scale = torch.ones_like(cos)
    if scale_base is not None:
        scale = ((pairs + 0.4 * 12) / (1.4 * 12)) ** ((positions - length // 2) / scale_base)
    q, k, v = leaf.split(heads, 2)
    q = rotary.apply_rotary_emb(q, cos * scale, sin * scale, interleaved, seqlen_offsets=offset)
    k = rotary.apply_rotary_emb(k, cos / scale, sin / scale, interleaved, seqlen_offsets=offset)
    weight, expected = randn(*out.shape, dtype=F64, seed=1), torch.cat((q, k, v), 2)
    pair = [(y, torch.autograd.grad(y, leaf, weight)[0]) for y in (out, expected)]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def test_tables_grow_and_follow_the_dtype():
    module, x = rotary.RotaryEmbedding(8), randn(1, 4, 3, 2, 8)
    module._update_cos_sin_cache(9, device=torch.device("cpu"), dtype=F32)
    first = module._cos_cached
    module(x)
    assert module._cos_cached is first, "it is long enough"
    module(x, seqlen_offset=6)
    assert torch.equal(module._cos_cached[:9], first) and len(module._cos_cached) == 10
    module(x.bfloat16())
    assert module._cos_cached.shape == (4, 4) and module._cos_cached.dtype == BF16
    with torch.inference_mode():
        rotary.RotaryEmbedding.forward(module.eval(), randn(1, 9, 3, 2, 8))
    assert module._cos_cached.is_inference()
    module.train()(x.requires_grad_() * 1.0).sum().backward()
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
