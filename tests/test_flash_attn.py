"""flash_attn's names: signatures, meanings, return values are FlashAttention-2's; scripts run unmodified."""

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
from tensors import ints, laid, randn, starts
from torch import Tensor

from cutlass_fmha import attention, flash_attn, with_kv_cache
from cutlass_fmha.flash_attn import flash_attn_interface
from cutlass_fmha.flash_attn.layers import rotary
from cutlass_fmha.flash_attn.ops import rms_norm
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
