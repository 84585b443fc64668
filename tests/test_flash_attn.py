"""flash_attn's names: signatures, meanings, return values are FlashAttention-2's; scripts run unmodified."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracle_features
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import ints, randn
from torch import Tensor

from cutlass_fmha import attention, flash_attn, with_kv_cache
from cutlass_fmha.flash_attn import bert_padding, flash_attn_interface
from cutlass_fmha.flash_attn.layers import rotary

#: Of release 2.8.3, but for annotations.
SIGNATURES = {
    "flash_attn_func": "q, k, v, {}",
    "flash_attn_qkvpacked_func": "qkv, {}",
    "flash_attn_kvpacked_func": "q, kv, {}",
    "flash_attn_varlen_func": "q, k, v, {lengths}, {}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv, cu_seqlens, max_seqlen, {}",
    "flash_attn_varlen_kvpacked_func": "q, kv, {lengths}, {}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    "num_splits=0, return_softmax_lse=False",
    "_wrapped_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, "
    "window_size_right, softcap, alibi_slopes, return_softmax",
    "_wrapped_flash_attn_varlen_forward": "q, k, v, {lengths}, dropout_p, softmax_scale, causal, "
    "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
    "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False",
    "apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    "apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
    "num_heads_q=None",
    "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
    "index_put_first_axis": "values, indices, first_axis_dim",
}  # fmt: skip
USUAL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_theirs(name: str):
    [found] = {
        getattr(module, name)
        for module in (flash_attn_interface, rotary, bert_padding)
        if hasattr(module, name)
    }
    given = inspect.signature(found).parameters.values()
    plain = [str(each.replace(annotation=inspect.Parameter.empty)) for each in given]
    assert ", ".join(plain) == SIGNATURES[name].format(USUAL, lengths=LENGTHS)


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
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options), found[0])
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
def test_packed_functions(lengths: list[tuple[int, int]], options: dict[str, Any], tensors: bool):
    cu_q, cu_k = (
        ints(0, *(sum(n[side] for n in lengths[: b + 1]) for b in range(len(lengths)))) for side in (0, 1)
    )
    longest = [max(n[side] for n in lengths) for side in (0, 1)]
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
    table = (
        torch.randperm(12, generator=torch.Generator().manual_seed(1))
        .to(torch.int32)[: 2 * len(lengths)]
        .view(-1, 2)
    )
    for b, (_, length) in enumerate(lengths):
        rows = kv[int(cu_k[b]) : int(cu_k[b + 1])]
        pages[int(table[b, 0]), : min(16, length)] = rows[:16]
        pages[int(table[b, 1]), : max(0, length - 16)] = rows[16:]
    paged = flash_attn.flash_attn_varlen_func(
        q, *pages.unbind(2), cu_q, cu_k, *given, **full, block_table=table
    )
    agree(paged, options, q, k, v, **cu)


def test_a_window_may_be_of_tensors_and_a_negative_side_is_no_limit():
    q, k, v = randn(3, 1, 9, 2, 16).unbind(0)
    expected = attention(q, k, v, window=(3, None))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=(torch.tensor(3), -5)), expected)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=[3, torch.tensor([-1])]), expected)


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
    *_, state = flash_attn_interface._wrapped_flash_attn_forward(
        q, k, v, 0.4, 0.25, False, -1, -1, 0.0, None, False
    )
    assert state.shape == (2,) and state.dtype == torch.int64
    same = attention(q, k, v, scale=0.25, dropout_p=0.4, dropout_seed=int(state[0]))
    assert torch.equal(_[0], same) and _[2].shape == (0,)


@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_is_theirs(paged: bool, interleaved: bool | None):
    """Pairs are neighbours by default, and positions count left padding."""
    cos, sin = torch.rand(32, 4), torch.rand(32, 4)
    q, k, v = randn(2, 3, 4, 16), randn(2, 3, 2, 16, seed=1), randn(2, 3, 2, 16, seed=2)
    shape = (4, 16, 2, 16) if paged else (2, 32, 2, 16)
    theirs, ours = ([randn(*shape, seed=s) for s in (3, 4)] for _ in range(2))
    where = {"block_table": ints(3, 0, 2, 1).view(2, 2)} if paged else {}
    used, pad = ints(4, 20), ints(1, 5)
    rest = {} if interleaved is None else {"rotary_interleaved": interleaved}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *theirs, k, v, cos, sin, used, cache_leftpad=pad, causal=True, window_size=(9, 9),
        return_softmax_lse=True, num_splits=2, **where, **rest,
    )  # fmt: skip
    expected = with_kv_cache(
        q, *ours, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved is not False,
        rotary_seqlens=used, cache_seqlens=used, leftpad_k=pad, causal=True, window=(9, 9), return_lse=True,
        page_table=where.get("block_table"),
    )  # fmt: skip
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))
    nothing = flash_attn.flash_attn_with_kvcache(
        q, *theirs, cache_seqlens=0, return_softmax_lse=True, **where
    )
    assert (nothing[0] == 0).all() and (nothing[1] == math.inf).all()


def test_what_is_declined_says_why():
    q = randn(1, 4, 2, 16)
    with pytest.raises(
        ValueError, match=r"qkv must be \[batch, seqlen, 3, num_heads, head_dim\], got \(1, 4, 2, 16\)"
    ):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match=r"kv must be \[total, 2, num_heads, head_dim\], got \(4, 2, 16\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], q[0], ints(0, 4), ints(0, 4), 4, 4)
    with pytest.raises(ValueError, match="cu_seqlens is only taken with max_seqlen"):
        rotary.apply_rotary_emb(q[0], torch.rand(9, 4), torch.rand(9, 4), cu_seqlens=ints(0, 4))
    with pytest.raises(ValueError, match="cos and sin have 9 positions, and 4 rows begin at position 6"):
        rotary.apply_rotary_emb(q, torch.rand(9, 4), torch.rand(9, 4), seqlen_offsets=6)
    with pytest.raises(ValueError, match="needs num_heads_q"):
        rotary.apply_rotary_emb_qkv_(q, torch.rand(9, 4), torch.rand(9, 4))
    with pytest.raises(NotImplementedError, match="no backward yet"):
        flash_attn_interface._wrapped_flash_attn_backward(q)


# ---- rotary, padding ---------------------------------------------------------------------------------------


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [rows, heads, head_dim] by plain arithmetic; a row beyond the table as it is."""
    inside = (positions < len(cos))[:, None, None]
    at = positions.clamp(max=len(cos) - 1)
    c, s, half = cos[at][:, None], sin[at][:, None], cos.shape[1]
    a, b = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    pair = (a * c - b * s, a * s + b * c)
    new = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.where(inside, torch.cat((new, x[..., 2 * half :]), -1), x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, int])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_of_their_signature(packed: bool, interleaved: bool, inplace: bool, dtype: Any):
    cos, sin = torch.rand(16, 6, dtype=torch.float64), torch.rand(16, 6, dtype=torch.float64)
    lengths = [5, 0, 3, 4] if packed else [4, 4, 4]
    offsets = [7] * len(lengths) if dtype is int else [3, 15, 16, 14, 40][: len(lengths)]
    cu = ints(0, *(sum(lengths[: b + 1]) for b in range(len(lengths))))
    rows = randn(12, 2, 16, dtype=torch.float64)
    positions = torch.cat([torch.arange(n) + first for n, first in zip(lengths, offsets, strict=True)])
    leaf = rows.clone().requires_grad_()
    x = (leaf if packed else leaf.view(3, 4, 2, 16)) * 1.0
    given = {"cu_seqlens": cu, "max_seqlen": torch.tensor(5)} if packed else {}
    out = rotary.apply_rotary_emb(
        x, cos, sin, interleaved, inplace, 7 if dtype is int else torch.tensor(offsets, dtype=dtype), **given
    )
    assert (out.data_ptr() == x.data_ptr()) == inplace
    expected_leaf = rows.clone().requires_grad_()
    expected = turned(expected_leaf, cos, sin, positions, interleaved)
    torch.testing.assert_close(out.reshape(expected.shape), expected)
    weight = randn(12, 2, 16, dtype=torch.float64, seed=5)
    (out.reshape(expected.shape) * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(leaf.grad, expected_leaf.grad)


@pytest.mark.parametrize("shape", ["qkv", "grouped", "kv"])
def test_rotary_of_parts_in_place(shape: str):
    cos, sin, cos_k, sin_k = torch.rand(4, 9, 4, dtype=torch.float64).unbind(0)
    size = {"qkv": (2, 3, 3, 4, 8), "grouped": (2, 3, 4 + 2 * 2, 8), "kv": (2, 3, 2, 4, 8)}[shape]
    leaf = randn(*size, dtype=torch.float64).requires_grad_()
    x = leaf * 1.0
    if shape == "kv":
        out = rotary.apply_rotary_emb_kv_(x, cos_k, sin_k, seqlen_offsets=2)
    else:
        out = rotary.apply_rotary_emb_qkv_(
            x, cos, sin, cos_k, sin_k, False, 2, 4 if shape == "grouped" else None
        )
    assert out.data_ptr() == x.data_ptr()
    same = leaf.detach().clone().requires_grad_()
    parts = same.split((4, 2, 2), 2) if shape == "grouped" else same.unbind(2)
    tables = [(cos_k, sin_k)] if shape == "kv" else [(cos, sin), (cos_k, sin_k)]
    new = [
        rotary.apply_rotary_emb(part, *table, seqlen_offsets=2)
        for part, table in zip(parts, tables, strict=False)
    ]
    expected = torch.cat([*new, parts[-1]], 2) if shape == "grouped" else torch.stack([*new, parts[-1]], 2)
    assert torch.equal(out, expected)
    weight = randn(*size, dtype=torch.float64, seed=1)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(leaf.grad, same.grad)


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
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import unpad_input
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward
        from flash_attn.layers.rotary import apply_rotary_emb

        assert flash_attn_func is flash_attn.flash_attn_func
        assert unpad_input is bert_padding.unpad_input
        assert apply_rotary_emb is rotary.apply_rotary_emb
        assert _wrapped_flash_attn_backward is flash_attn_interface._wrapped_flash_attn_backward
        assert (
            flash_attn.__spec__.name == "cutlass_fmha.flash_attn" and sys.modules["flash_attn"] is flash_attn
        )
        for name in ("flash_attn", "flash-attn", "Flash_Attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
        assert "flash_attn" in importlib.metadata.packages_distributions()
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.layers.rotary") is not None
        assert importlib.util.find_spec("flash_attn.losses") is None
        with pytest.raises(ModuleNotFoundError, match="flash_attn.ops"):
            importlib.import_module("flash_attn.ops.triton")
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
dim, heads, vocabulary = 64, 4, 50
embed, project = torch.randn(vocabulary, dim), torch.randn(dim, 3 * dim) / 8
out = torch.randn(dim, vocabulary)
angles = torch.outer(torch.arange(64), 10000.0 ** -(torch.arange(8) / 8))
cos, sin = angles.cos(), angles.sin()

def qkv(tokens):
    return (embed[tokens] @ project).unflatten(-1, (3, heads, dim // heads)).unbind(2)

tokens = torch.randint(vocabulary, (2, 5))
k_cache, v_cache = torch.zeros(2, 2, 64, heads, dim // heads).unbind(0)
lengths, generated, new = torch.zeros(2, dtype=torch.int32), tokens, tokens
for _ in range(12):
    q, k, v = qkv(new)
    context = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, causal=True,
        rotary_interleaved=False,
    )
    lengths += new.shape[1]
    new = (context[:, -1:].flatten(-2) @ out).argmax(-1)
    generated = torch.cat((generated, new), 1)
q, k, v = qkv(generated[:, :-1])
q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
whole = (flash_attn_func(q, k, v, causal=True).flatten(-2) @ out).argmax(-1)
print(torch.equal(whole[:, 4:], generated[:, 5:]), generated.shape)
"""


def test_a_script_that_was_written_for_it_runs_unmodified(tmp_path: Path):
    (tmp_path / "script.py").write_text(GENERATION)
    install = "import runpy; from cutlass_fmha.flash_attn import install; install()\n"
    printed = run(f"{install}runpy.run_path({str(tmp_path / 'script.py')!r})", tmp_path)
    assert printed == "True torch.Size([2, 17])\n"


def test_a_compiled_call_is_whole():
    q, k, v = randn(2, 5, 4, 16), randn(2, 5, 2, 16, seed=1), randn(2, 5, 2, 16, seed=2)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), softcap=9.0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))
