"""flash_attn's names: signatures, meanings and return values are FlashAttention-2's."""

import copy
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
from tensors import ints, laid, randn, starts
from torch import Tensor

from cutlass_fmha import attention, flash_attn, with_kv_cache
from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.flash_attn import bert_padding, flash_attn_interface
from cutlass_fmha.flash_attn.layers import rotary
from cutlass_fmha.flash_attn.ops import activations, rms_norm
from cutlass_fmha.flash_attn.ops.triton import layer_norm
from cutlass_fmha.flash_attn.ops.triton.rotary import apply_rotary
from cutlass_fmha.integrations import hub

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def test_functions_of_a_kind_take_the_same():
    """That they are those of release 2.8.3 is what tools/check_engines.py finds out."""

    def parameters(call: Any) -> list[str]:
        return [str(each.replace(annotation=each.empty)) for each in inspect.signature(call).parameters.values()]

    usual, norm = parameters(flash_attn.flash_attn_func)[3:], parameters(layer_norm.rms_norm_fn)
    own = {"qkvpacked": 1, "kvpacked": 2, "varlen": 7, "varlen_qkvpacked": 3, "varlen_kvpacked": 6}
    for kind, first in own.items():
        assert parameters(getattr(flash_attn, f"flash_attn_{kind}_func"))[first : first + len(usual)] == usual, kind
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        assert parameters(getattr(hub, name)) == [*parameters(getattr(flash_attn, name)), "s_aux=None"]
    assert [each for each in parameters(layer_norm.layer_norm_fn) if each != "is_rms_norm=False"] == norm


SIDES = st.sampled_from((-1, -7, 0, 3, 20))
OPTIONS = st.fixed_dictionaries(
    {"causal": st.booleans(), "window_size": st.tuples(SIDES, SIDES), "deterministic": st.booleans()},
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


@settings(max_examples=120)
@given(
    batch=st.sampled_from((None, 0, 1, 3)),
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4),
    options=OPTIONS,
    number=st.sampled_from((int, np.int64, torch.tensor)),
    how=st.sampled_from(("plain", "last dimension", "heads first")),
)
def test_functions(batch: int | None, lengths: Any, options: dict[str, Any], number: Any, how: str):
    """Of packed sequences with these lengths, or of a batch whose sequences are all as long as the first."""
    both = [*zip(*lengths, strict=True)]
    cu, longest = [starts(*each) for each in both], [number(max(each)) for each in both]
    packed = batch is None
    of_q, of_k = ((int(x[-1]),) if packed else (batch, n) for x, n in zip(cu, lengths[0], strict=True))
    q, kv, qkv = randn(*of_q, 4, 12), randn(*of_k, 2, 2, 12, seed=1), randn(*of_q, 3, 4, 12, seed=2)
    k, v = kv.unbind(-3)
    given, of_one = ((*cu, *longest), (cu[0], longest[0])) if packed else ((), ())
    said, full = dict(zip(LENGTHS, cu * packed, strict=False)), {**options, "return_attn_probs": True}
    names = (f"flash_attn_{'varlen_' if packed else ''}{kind}func" for kind in ("", "kvpacked_", "qkvpacked_"))
    call, of_kv, of_qkv = (getattr(flash_attn, name) for name in names)
    with mock.patch.object(flash_attn_interface, "attention", wraps=attention) as heard:
        found = call(*(laid(x, how) for x in (q, k, v)), *given, **full)
        assert all(map(torch.equal, of_kv(q, kv, *given, **full), found))
        agree(of_qkv(qkv, *of_one, **full), options, *qkv.unbind(-3), **dict.fromkeys(said, cu[0]))
    assert [each.kwargs.get("deterministic", False) for each in heard.mock_calls] == [options["deterministic"]] * 3
    agree(found, options, q, k, v, **said)
    left, right = options["window_size"]
    of_tensors = {**options, "window_size": [torch.tensor(left), torch.tensor([right])]}
    assert torch.equal(call(q, k, v, *given, **of_tensors), found[0])
    if packed:  # the same keys in pages of 16, in any order
        pages = randn(12, 16, 2, 2, 12, seed=3)
        table = (torch.arange(2 * len(lengths), dtype=torch.int32) * 5 % 12).view(-1, 2)
        for two, rows in zip(table.tolist(), kv.split(both[1]), strict=True):
            for page, part in zip(two, (rows[:16], rows[16:]), strict=True):
                pages[page, : len(part)] = part
        agree(call(q, *pages.unbind(2), *given, **full, block_table=table), options, q, k, v, **said)
        # The forward that others call hears of padding, and of lengths whatever cu_seqlens_k says.
        rest = {"leftpad_k": torch.full_like(cu[0][1:], 3), "seqused_k": cu[1].diff()}
        numbers = (0.0, options.get("softmax_scale"), options["causal"], left, right, options.get("softcap", 0.0))
        forward, around = flash_attn_interface._wrapped_flash_attn_varlen_forward, (options.get("alibi_slopes"), False)
        lengths_q = {"cu_seqlens_q": cu[0], "max_seqlen_q": longest[0]}
        found = forward(q, *pages.unbind(2), cu[0], 16 * cu[0], longest[0], 32, *numbers, *around, table, **rest)
        agree(found[:3], options, q, *pages.unbind(2), **lengths_q, page_table=table, **rest)


def test_the_dropout_mask_is_that_of_the_output():
    """With values that are one-hot the output is the probabilities."""
    q, k, v = randn(2, 5, 2, 16), randn(2, 7, 2, 16, seed=1), torch.eye(7, 16)[None, :, None].expand(2, 7, 2, 16)
    call, packed = functools.partial(flash_attn.flash_attn_func, q, k, v, 0.4), (ints(0, 5, 10), ints(0, 7, 14), 5, 7)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    dense = call(return_attn_probs=True)
    for out, _, mask in (dense, flash_attn.flash_attn_varlen_func(*rows, *packed, 0.4, return_attn_probs=True)):
        assert mask.shape == (2, 2, 128, 128) and set(mask.unique().tolist()) == {-1.0, 1.0}
        assert torch.equal(out.view(2, 5, 2, 16)[..., :7].transpose(1, 2) > 0, mask[:, :, :5, :7] > 0)
    assert not torch.equal(call(), call()), "each call draws others"


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
        said |= dict(zip(LENGTHS, lengths, strict=True))
    name = f"_wrapped_flash_attn_{'varlen_' if packed else ''}"
    forward, backward = (getattr(flash_attn_interface, name + each) for each in ("forward", "backward"))
    torch.manual_seed(0)
    out, lse, mask, state = forward(q, k, v, *lengths, *numbers, slopes, False)
    assert (mask.shape, state.shape, state.dtype) == ((0,), (2,), torch.int64)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_is_theirs(paged: bool, interleaved: bool | None, causal: bool):
    """Pairs are neighbours by default, and positions count left padding. The hub's takes sinks, too."""
    cos, sin = torch.rand(2, 32, 4)
    q, k, v = randn(2, 3, 4, 16), randn(2, 3, 2, 16, seed=1), randn(2, 3, 2, 16, seed=2)
    shape = (4, 16, 2, 16) if paged else (3, 32, 2, 16)
    theirs, ours = ([randn(*shape, seed=s) for s in (3, 4)] for _ in range(2))
    where = {"block_table": ints(3, 0, 2, 1).view(2, 2)} if paged else {"cache_batch_idx": ints(2, 0)}
    used, pad, rest = ints(4, 20), ints(1, 5), {} if interleaved is None else {"rotary_interleaved": interleaved}
    both = {"causal": causal, "cache_seqlens": used, "rotary_cos": cos, "rotary_sin": sin, "softcap": 5.0}
    sinks, call = (randn(4), hub.flash_attn_with_kvcache) if paged else (None, flash_attn.flash_attn_with_kvcache)
    rest |= {"s_aux": sinks} if paged else {}
    found = call(
        q, *theirs, k, v, cache_leftpad=pad, window_size=(9, 9), softmax_scale=0.3, return_softmax_lse=True,
        num_splits=2, **both, **where, **rest,
    )  # fmt: skip
    expected = with_kv_cache(
        q, *ours, k, v, rotary_interleaved=interleaved is not False, scale=0.3, rotary_seqlens=used, leftpad_k=pad,
        window=(9, 9), return_lse=True, sinks=sinks,
        **both, **({"page_table": where["block_table"]} if paged else where),
    )  # fmt: skip
    assert all(map(torch.equal, (*found, *theirs), (*expected, *ours)))
    nothing = flash_attn.flash_attn_with_kvcache(q, *theirs, cache_seqlens=0, return_softmax_lse=True, **where)
    assert (nothing[0] == 0).all() and (nothing[1] == math.inf).all()


X, ROWS, ONES, TABLE = randn(1, 4, 2, 16), randn(2, 8), torch.ones(8), (torch.rand(9, 4), torch.rand(9, 4))
#: Whose dropout is for training.
DROPS = (rms_norm.DropoutAddRMSNorm(8, p=0.5), layer_norm.RMSNorm(8, dropout_p=0.5))
ANOTHERS = {"dropout_p": 0.5, "rowscale": ROWS, "x1": ROWS, "weight1": ONES, "bias1": ONES}
of_x, of_rows = functools.partial(rotary.apply_rotary_emb, X), functools.partial(layer_norm.rms_norm_fn, ROWS)
without_state = (*[X] * 5, X[..., 0], *[None] * 3, 0.3, 0.25, False, -1, -1, 0.0, None, False)
DECLINED: list[tuple[type[Exception], Any, str]] = [
    (ValueError, lambda: flash_attn.flash_attn_qkvpacked_func(X),
     r"qkv must be \[batch, seqlen, 3, num_heads, head_dim\], got \(1, 4, 2, 16\)"),
    (ValueError, lambda: flash_attn.flash_attn_varlen_kvpacked_func(X[0], X[0], ints(0, 4), ints(0, 4), 4, 4),
     r"kv must be \[total, 2, num_heads, head_dim\], got \(4, 2, 16\)"),
    (ValueError, lambda: of_x(*TABLE, cu_seqlens=ints(0, 4)), "cu_seqlens is only taken with max_seqlen"),
    (ValueError, lambda: of_x(*TABLE, seqlen_offsets=6), "have 9 positions, and 4 rows begin at position 6"),
    *((ValueError, lambda n=n: rotary.apply_rotary_emb_qkv_(X, *TABLE, num_heads_q=n),
       f"needs num_heads_q.*half of the others are keys: got {n} of 2") for n in (None, 3, 1)),
    (ValueError, lambda: apply_rotary(X[0], *TABLE), "x must have 4 dimensions"),
    (ValueError, lambda: rotary.RotaryEmbedding(8)(X, X, ints(1)), "seqlen_offset is a tensor: pass max_seq"),
    (ValueError, lambda: flash_attn_interface._wrapped_flash_attn_backward(*without_state),
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
    added = randn(24, dtype=F32 if of_weight == BF16 else of_weight, seed=2) if bias else None
    residual = None if of_residual is None else randn(3, 5, 24, dtype=of_residual, seed=3)
    given = [None if each is None else each.requires_grad_() for each in (x, weight, added, residual)]
    said = {"eps": 1e-3, "prenorm": True, "residual_in_fp32": in_fp32, "zero_centered_weight": True}
    y, total, *masks = layer_norm.layer_norm_fn(*given, **said, is_rms_norm=True, return_dropout_mask=True)
    kept = of_residual or (F32 if in_fp32 and dtype == BF16 else dtype)
    assert (y.dtype, total.dtype, masks) == (dtype, kept, [None, None])

    same = [None if each is None else each.detach().double().requires_grad_() for each in given]
    wanted_total = same[0] if of_residual is None else same[0] + same[3]
    wanted = wanted_total / (wanted_total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + same[1])
    wanted = wanted + same[2] if bias else wanted
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == F64 else {"rtol": 2e-2, "atol": 4e-2}
    factors, pairs = randn(2, 3, 5, 24, dtype=F64, seed=4), []
    for one, other, own in ((y, total, given), (wanted, wanted_total, same)):
        loss = (one * factors[0] + other * factors[1]).sum()
        gradients = torch.autograd.grad(loss, [each for each in own if each is not None])
        pairs.append([each.double() for each in (one, other, *gradients)])
    torch.testing.assert_close(*pairs, **close)

    # under other names, and to places of the caller's
    x, weight, _, residual = (x if x is None else x.detach() for x in given)
    y, total = layer_norm.rms_norm_fn(x, weight, None, residual, prenorm=True, residual_in_fp32=in_fp32)
    again = functools.partial(rms_norm.dropout_add_rms_norm, x, residual, weight, None, 0.0, 1e-6)
    *found, mask = again(prenorm=True, residual_in_fp32=in_fp32, return_dropout_mask=True)
    assert all(map(torch.equal, found, (y, total))) and torch.equal(again(return_dropout_mask=True)[0], y)
    assert mask.dtype == torch.uint8 and mask.shape == x.shape and mask.all()
    module = rms_norm.DropoutAddRMSNorm(24, True, 0.0, 1e-6, in_fp32)
    module.weight.data = weight
    assert all(map(torch.equal, module(x, residual), (y, total)))
    places = {"out": torch.empty(3, 5, 24, dtype=F32), "residual_out": torch.empty_like(total)}
    found = layer_norm.rms_norm_fn(x, weight, None, residual, **places, prenorm=True, residual_in_fp32=in_fp32)
    assert all(one is other for one, other in zip(found, places.values(), strict=True))
    torch.testing.assert_close(found[0].to(y.dtype), y)
    assert torch.equal(found[1], total)


def test_modules_of_norms_begin_as_one():
    x, ones = randn(3, 8), torch.ones(8)
    expected = rms_norm.rms_norm(x, ones, 1e-5)
    torch.testing.assert_close(expected, torch.nn.functional.rms_norm(x, (8,), ones, 1e-5))
    centered = layer_norm.RMSNorm(8, zero_centered_weight=True)
    for module in (rms_norm.RMSNorm(8), layer_norm.RMSNorm(8), centered, *map(copy.copy, DROPS)):
        assert torch.equal(module.eval()(x), expected)
        assert module.bias is None and [*module.state_dict()] == ["weight"]
    found = layer_norm.RMSNorm(8)(x.bfloat16(), x, prenorm=True, residual_in_fp32=True)
    assert (found[0].dtype, found[1].dtype) == (BF16, F32)
    torch.testing.assert_close(activations.swiglu(x.t(), expected.t()).t(), torch.nn.functional.silu(x) * expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, int])
@pytest.mark.parametrize("place", ["new", "own", "a leaf's"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_of_their_signature(packed: bool, interleaved: bool, place: str, dtype: Any):
    """And back, as ModernBERT's code of transformers does it. A leaf, or a view of it, is written to as well."""
    angles = torch.rand(16, 6, dtype=F64)
    cos, sin = angles.cos(), angles.sin()
    lengths = [4, 2, 0, 2, 4] if packed else [4, 4, 4]
    offsets = [7] * len(lengths) if dtype is int else [3, 40, 15, 16, 14][: len(lengths)]
    offset = 7 if dtype is int else torch.tensor(offsets, dtype=dtype)
    positions = torch.cat([torch.arange(n) + first for n, first in zip(lengths, offsets, strict=True)])
    leaf, own = (randn(12, 2, 16, dtype=F64).requires_grad_() for _ in range(2))
    x, inplace = own if packed else own.view(3, 4, 2, 16), place != "new"
    x = x if place == "a leaf's" else laid(x * 1.0, "last dimension" if interleaved else "plain")
    given = {"cu_seqlens": starts(*lengths), "max_seqlen": torch.tensor(5)} if packed else {}
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, offset, **given)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    rotated = rotate(leaf, cos, sin, positions.clamp(max=15), interleaved)
    expected = torch.where((positions < 16)[:, None, None], rotated, leaf).view(x.shape)
    if dtype is int and not packed:
        rows = [t[7:11].expand(3, 4, 6) for t in (cos, sin)]
        torch.testing.assert_close(rotary.apply_rotary_emb_torch(leaf.view(x.shape), *rows, interleaved), expected)
    pairs = []
    for each, of in ((out, own), (expected, leaf)):
        (first,) = torch.autograd.grad(each.pow(3).sum(), of, create_graph=True)
        pairs.append((each, first, *torch.autograd.grad(first.pow(3).sum(), of)))
    torch.testing.assert_close(*pairs)
    said = {"seqlen_offsets": offset, "interleaved": interleaved, "inplace": inplace, "conjugate": True}
    back, out = leaf.detach().view(x.shape), out.detach()
    found = apply_rotary(out, cos, sin, **given, **said)
    torch.testing.assert_close(found, back)
    assert (found is out) == inplace


@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("offset", "length"), [(3, 8), (torch.tensor([3, 0]), 9)])
@pytest.mark.parametrize("shape", ["qkv", "grouped", "q and kv"])
def test_rotary_embedding_in_place(shape: str, offset: Any, length: int, interleaved: bool, scale_base: int | None):
    """By angles in fp32; with xPos q is scaled by what k is divided by."""
    heads, said = (4, 2, 2) if shape == "grouped" else (3, 3, 3), {"max_seqlen": length if length == 9 else None}
    leaf = randn(2, 5, sum(heads), 16, dtype=F64).requires_grad_()
    module, x = rotary.RotaryEmbedding(12, 100.0, interleaved, scale_base).half(), leaf * 1.0
    given = (x if shape == "grouped" else x.unflatten(2, (3, 3)),)
    if shape == "q and kv":
        given = x[:, :, :3], x[:, :, 3:].unflatten(2, (2, 3))
    found = module(*given, seqlen_offset=offset, **said, num_heads_q=4 if shape == "grouped" else None)
    found = found if shape == "q and kv" else (found,)
    assert [y.data_ptr() for y in found] == [y.data_ptr() for y in given]
    out = torch.cat([y.flatten(2, -2) for y in found], 2)
    assert module._seq_len_cached == length and module._cos_cached.dtype == F64 and not module.state_dict()

    pairs, positions = torch.arange(0, 12, 2, dtype=F64), torch.arange(length, dtype=F64)[:, None]
    angles, scale = positions * 100.0 ** (-pairs / 12), torch.ones(length, 6, dtype=F64)
    if scale_base is not None:
        scale = ((pairs + 0.4 * 12) / (1.4 * 12)) ** ((positions - length // 2) / scale_base)
    q, k, v = leaf.split(heads, 2)
    q, k = (
        rotary.apply_rotary_emb(x, angles.cos() * by, angles.sin() * by, interleaved, seqlen_offsets=offset)
        for x, by in ((q, scale), (k, 1 / scale))
    )
    weight, expected = randn(*out.shape, dtype=F64, seed=1), torch.cat((q, k, v), 2)
    pair = [(y, torch.autograd.grad(y, leaf, weight)[0]) for y in (out, expected)]
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


def test_tables_grow_and_follow_the_dtype():
    module, x = rotary.RotaryEmbedding(8), randn(1, 4, 3, 2, 8)
    module._update_cos_sin_cache(9, device=torch.device("cpu"), dtype=F32)
    first = module._cos_cached
    assert torch.equal(module.inv_freq, rotary.RotaryEmbedding(8, 10000.0).inv_freq)
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


@pytest.mark.parametrize(
    "mask", [[[1, 1, 0], [0, 1, 1]], [[1, 1, 2, 0], [2, 2, 1, 0]], [[1, 1, 1], [0, 0, 0]], [[0], [0]]]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_goes_and_comes_back(mask: list[list[int]], dtype: torch.dtype):
    """Rows with a 2 are kept, but nobody uses them."""
    x, numbers = randn(2, len(mask[0]), 2, 4).requires_grad_(), torch.tensor(mask)
    unused, kept = [(numbers == 2).to(dtype)] if numbers.max() > 1 else [], numbers > 0
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, (numbers == 1).to(dtype), *unused)
    counts = kept.sum(1).tolist()
    assert torch.equal(rows, x[kept]) and cu_seqlens.dtype == used.dtype == torch.int32 and isinstance(longest, int)
    assert (cu_seqlens.tolist(), longest) == ([0, counts[0], sum(counts)], max(counts))
    assert used.tolist() == [row.count(1) for row in mask]
    back = bert_padding.pad_input(rows, indices, *numbers.shape)
    back.sum().backward()
    assert torch.equal(back, x * kept[..., None, None]) and torch.equal(x.grad, (back != 0).float())
    again, residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(again, rows) and torch.equal(residual, x.flatten(0, 1))


def test_several_sequences_in_a_row():
    x, lengths = randn(2, 4, 3), torch.tensor([[2, 1, 0, 0], [4, 0, 0, 0]])
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, x.flatten(0, 1)[indices]) and indices.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert (starts.tolist(), longest) == ([0, 2, 3, 7], 4)


# ---- `import flash_attn` finds this package, and code written for it runs unmodified --------------------------


def test_install_answers_everyone_who_asks_and_is_reversible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def installed() -> bool:
        return "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None

    assert not installed()
    flash_attn.install()
    flash_attn.install()
    try:
        for name in ("flash_attn_func", "bert_padding.unpad_input", "ops.triton.layer_norm.rms_norm_fn"):
            found, ours = (pkgutil.resolve_name(f"{root}.{name}") for root in ("flash_attn", flash_attn.__name__))
            assert found is ours
        assert flash_attn.__spec__.name == "cutlass_fmha.flash_attn" and sys.modules["flash_attn"] is flash_attn
        versions = {importlib.metadata.version(name) for name in ("flash_attn", "flash-attn", "Flash_Attn")}
        assert versions == {flash_attn.__version__} == {"2.8.3"}
        assert "flash_attn" in importlib.metadata.packages_distributions()
        specs = [importlib.util.find_spec(f"flash_attn{part}") for part in ("", ".layers.rotary", ".losses")]
        assert [spec is not None for spec in specs] == [True, True, False]
        with pytest.raises(ModuleNotFoundError, match="flash_attn.modules"):
            importlib.import_module("flash_attn.modules.mha")
    finally:
        flash_attn.uninstall()
    flash_attn.uninstall()
    assert not installed() and not any(name.startswith("flash_attn") for name in sys.modules)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    # An installed one is replaced only when told.
    (tmp_path / "flash_attn.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        with pytest.raises(ImportError, match="flash_attn is installed here: remove it, or take"):
            flash_attn.install()
        theirs = importlib.import_module("flash_attn")
        flash_attn.install(replace=True)
        assert importlib.import_module("flash_attn") is flash_attn is not theirs
        flash_attn.uninstall()
        assert importlib.import_module("flash_attn") is theirs


def far(found: Any, wanted: Any) -> Tensor:
    """The largest difference, as a share of the largest number of each."""
    return max((x - y).abs().max() / y.abs().max() for x, y in zip(found, wanted, strict=True))


def generation() -> Tensor:
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
    from flash_attn.layers.rotary import apply_rotary_emb

    project = torch.nn.Parameter(torch.randn(64, 3 * 64) / 8)
    q, k, v = (torch.randn(2, 17, 64) @ project).unflatten(-1, (3, 4, 16)).unbind(2)
    angles = torch.outer(torch.arange(64), 10000.0 ** -(torch.arange(8) / 8)).to(q)
    cos, sin = angles.cos(), angles.sin()
    caches, lengths, steps = torch.zeros(2, 2, 64, 4, 16).unbind(0), torch.zeros(2, dtype=torch.int32), []
    said = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "cache_seqlens": lengths}
    for new in (slice(0, 5), *(slice(i, i + 1) for i in range(5, 17))):
        steps.append(flash_attn_with_kvcache(q[:, new], *caches, k[:, new], v[:, new], **said, causal=True))
        lengths += steps[-1].shape[1]
    assert not any(step.requires_grad for step in steps)
    whole = flash_attn_func(apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v, causal=True)
    return far([torch.cat(steps, 1)], [whole])


def encoder() -> Tensor:
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import pad_input, unpad_input

    layers = torch.nn.ModuleList(torch.nn.Linear(128, 3 * 128) for _ in range(2))
    mask = torch.arange(17) < torch.tensor([17, 5, 0])[:, None]
    hidden = torch.randn(3, 17, 128).requires_grad_()

    def flash(x: Tensor, dropout_p: float = 0.0) -> Tensor:
        x, indices, cu_seqlens, max_seqlen, *_ = unpad_input(x, mask)
        for layer in layers:
            qkv = layer(x).unflatten(-1, (3, 4, 32))
            x = x + flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p).flatten(-2)
        return pad_input(x, indices, 3, 17)

    def eager(x: Tensor) -> Tensor:
        for layer in layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT * 32**-0.5).masked_fill(~mask[:, None, None], -1e4)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return x * mask[..., None]

    assert flash(hidden, 0.1).shape == hidden.shape
    outs = flash(hidden), eager(hidden)
    return far(*((x, *torch.autograd.grad(x.pow(2).sum(), (hidden, *layers.parameters()))) for x in outs))


def transformers() -> Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)).eval().requires_grad_(False)
    ids, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    found = []
    for name in ("flash_attention_2", "eager"):
        model.set_attn_implementation(name)
        found.append([model(ids, attention_mask=mask).logits[mask.bool()]])
    return far(*found)


def diffusers() -> Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn as call

    q, k, v = torch.randn(3, 2, 7, 4, 32)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    flash = [call(q, k, v, backend="flash", is_causal=True), call(q, k, v, backend="flash_varlen", attn_mask=mask)]
    native = [call(q, k, v, backend="native", **said) for said in ({"is_causal": True}, {"attn_mask": mask})]
    return (torch.stack(flash) - torch.stack(native)).abs().max()


def script(name: str, device: str, dtype: str) -> None:
    """Prints how often it called ours, and its error."""
    flash_attn.install()
    if device == "cpu":  # transformers would not ask for flash_attn
        torch.cuda.is_available = lambda: True
    torch.set_default_device(device)
    torch.set_default_dtype(getattr(torch, dtype))
    torch.manual_seed(0)
    with CountCalls() as counter:
        error = globals()[name]()
    print(counter.calls, float(error))


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [("cpu", "float32", 1e-5), pytest.param("cuda", "float16", 1e-2, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(("name", "calls"), [("generation", 14), ("encoder", 4), ("transformers", 2), ("diffusers", 2)])
def test_a_script_written_for_it_runs_unmodified(name: str, calls: int, device: str, dtype: str, tolerance: float):
    """In a process of its own: what is imported there is imported nowhere else."""
    if name in ("transformers", "diffusers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_flash_attn as tests"
    command = [sys.executable, "-c", f"{code}; tests.script({name!r}, {device!r}, {dtype!r})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counted, error = done.stdout.split()[-2:]
    assert int(counted) == calls and float(error) <= tolerance


def test_a_compiled_call_is_whole():
    def call(qkv: Tensor, cos: Tensor, sin: Tensor) -> Any:
        qkv = rotary.apply_rotary_emb_qkv_(qkv * 1.0, cos, sin, num_heads_q=4)
        return flash_attn.flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True, window_size=(3, 0), softcap=9.0)

    def drop(x: Tensor, *_: Tensor) -> Any:
        return flash_attn.flash_attn_func(x, x, x, 0.3, return_attn_probs=True)

    given = randn(2, 5, 8, 16), torch.rand(9, 4), torch.rand(9, 4)
    for each in (call, drop):
        found = []
        for function in (torch.compile(each, fullgraph=True, backend="aot_eager"), each):
            torch.manual_seed(0)
            found.append(function(*given))
        torch.testing.assert_close(*found, rtol=0, atol=0)
