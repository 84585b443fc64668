"""Calls that must be refused: by one of four kinds of exception, in a sentence that names what is at fault.

No other exception may leave the package, whatever is passed. ``...`` stands for an argument that is left out.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import cutlass_fmha
from cutlass_fmha import UnsupportedError, attention, features, scaled_dot_product_attention
from cutlass_fmha.arguments.signature import FOREIGN
from cutlass_fmha.ops import dispatcher

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, DIM = 2, 6, 10, 4, 2, 16
Q = torch.randn(BATCH, SEQLEN_Q, HEADS, DIM)
K, V = torch.randn(2, BATCH, SEQLEN_K, HEADS_KV, DIM)
PACKED = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}
PAGED = {name: torch.randn(4, 16, HEADS_KV, DIM) for name in "kv"}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CU_Q, CU_K, TABLE = ints(0, 6, 12), ints(0, 10, 20), ints(0, 1, 2, 3).view(2, 2)
MASK, BIAS = torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool), torch.zeros(SEQLEN_Q, SEQLEN_K)
BLOCKS = (torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32), (4, 4))

IMAGINARY = torch.zeros(BATCH, SEQLEN_Q, HEADS, DIM, dtype=torch.complex64)
S = torch.randn(2, 4, 5, 16)
with warnings.catch_warnings():  # torch is fond of neither
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.randn(n, HEADS, DIM) for n in (3, 5)])
    JAGGED = torch.nested.nested_tensor([torch.randn(n, HEADS, DIM) for n in (3, 5)], layout=torch.jagged)
    QUANTIZED = torch.quantize_per_tensor(K, 0.1, 0, torch.quint8)
ARRAY = np.zeros((BATCH, SEQLEN_Q, HEADS, DIM), dtype=np.float32)
COS = torch.ones(12, DIM // 2)
NEW = torch.randn(BATCH, 2, HEADS_KV, DIM)
LSE = torch.zeros(BATCH, HEADS, SEQLEN_Q)

OPS = torch.ops.cutlass_fmha
BAD = {
    "attention": (attention, {"q": Q, "k": K, "v": V}),
    "sdpa": (scaled_dot_product_attention, {"query": S, "key": S, "value": S}),
    "with_kv_cache": (cutlass_fmha.with_kv_cache, {"q": Q, "k_cache": K.clone(), "v_cache": V.clone()}),
    "append": (
        cutlass_fmha.with_kv_cache,
        {"q": Q, "k_cache": K.clone(), "v_cache": V.clone(), "k": NEW, "v": NEW, "cache_seqlens": 3},
    ),
    "cascade": (
        cutlass_fmha.cascade_attention,
        {"q": Q, "k_shared": K[0], "v_shared": V[0], "k": K, "v": V},
    ),
    "merge_states": (cutlass_fmha.merge_states, {"o_a": Q, "lse_a": LSE, "o_b": Q, "lse_b": LSE}),
    "rotary": (cutlass_fmha.rotary, {"x": Q, "cos": COS, "sin": COS, "positions": ints(0, 1)}),
    "explain": (cutlass_fmha.explain, {"q": Q, "k": K, "v": V}),
    "shape": (cutlass_fmha.explain, {"shape": (1, 8, 4, 64), "device": "l4"}),
    "forward": (
        OPS.forward,
        {
            "query": Q,
            "key": K,
            "value": V,
            "scale": 1.0,
            "causal": "none",
            "return_lse": True,
            "row": None,
        },
    ),
    "attend": (
        OPS.attend,
        {
            "query": Q,
            "key": K,
            "value": V,
            "scale": 1.0,
            "causal": "none",
            "return_lse": True,
            "row": None,
        },
    ),
}

ATTENTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 3}, TypeError, "q must be a torch.Tensor, got int"),
    ({"k": None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    ({"v": [1.0]}, TypeError, "v must be a torch.Tensor, got list"),
    (
        {"q": Q[0]},
        ValueError,
        r"q must have 4 dimensions, \[batch, seqlen, num_heads, head_dim\], got shape \(6, 4, 16\)",
    ),
    (
        {"k": K[0], "layout": "bhsd"},
        ValueError,
        r"k must have 4 dimensions, \[batch, num_heads, seqlen, head_dim\], got shape \(10, 2, 16\)",
    ),
    ({"k": K.half()}, ValueError, "k must have q's dtype float32, got float16"),
    ({"v": V.double()}, ValueError, "v must have q's dtype float32, got float64"),
    ({"v": V.to("meta")}, ValueError, "v must be on q's device cpu, got meta"),
    (
        {"q": IMAGINARY, "k": IMAGINARY, "v": IMAGINARY},
        ValueError,
        "q must be float16 or bfloat16 or float32 or float64 on cpu, got complex64",
    ),
    ({"k": K[:1]}, ValueError, "k must have q's batch size 2, got 1"),
    ({"v": V[:1]}, ValueError, "v must have q's batch size 2, got 1"),
    ({"k": K[..., :8]}, ValueError, r"k must have q's head_dim \(last dimension\) 16, got 8"),
    ({"v": V[..., :0]}, ValueError, r"v must have a head_dim \(last dimension\) of at least 1, got 0"),
    ({"v": V[:, :3]}, ValueError, "v must have k's seqlen 10, got 3"),
    ({"v": V[:, :, :1]}, ValueError, "v must have k's num_heads 2, got 1"),
    ({"q": Q[:, :, :3]}, ValueError, "k must have a number of heads that divides q's 3, got 2"),
    (
        {"k": K[:, :, :0], "v": V[:, :, :0]},
        ValueError,
        "k must have a number of heads that divides q's 4, got 0",
    ),
    ({"q": Q[..., :0]}, ValueError, r"q must have a head_dim \(last dimension\) of at least 1, got 0"),
    (
        {"k": K.transpose(2, 3).contiguous().transpose(2, 3)},
        ValueError,
        r"k must be contiguous in its last dimension, got a stride of 2 there: pass k.contiguous\(\)",
    ),
    ({"scale": math.inf}, ValueError, "scale must be finite and of magnitude 2e38 at most, got inf"),
    ({"scale": math.nan}, ValueError, "scale must be finite and of magnitude 2e38 at most, got nan"),
    ({"scale": -3e38}, ValueError, "scale must be finite and of magnitude 2e38 at most, got -3e.38"),
    ({"scale": "1"}, TypeError, "scale must be a float or None, got str"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a float or None, got Tensor"),
    (
        {"causal": "left"},
        ValueError,
        'causal must be False, True, "none", "top-left" or "bottom-right", got \'left\'',
    ),
    ({"causal": 1}, ValueError, "causal must be .* got 1"),
    ({"layout": "sbhd"}, ValueError, 'layout must be "bshd" or "bhsd", got \'sbhd\''),
    ({"layout": ["bshd"]}, ValueError, "layout must be .* got \\['bshd'\\]"),
    ({"row": 3}, TypeError, "row must be the name of a row or None, got int"),
    (
        {"row": "fwd"},
        cutlass_fmha.UnsupportedError,
        "row fwd is a CUDA kernel, and the tensors are on the CPU",
    ),
]

#: Of another type: TypeError.
TYPES = [
    ({"mask": [[True]]}, "mask must be a torch.Tensor or None, got list"),
    ({"cu_seqlens_q": [0, 12]}, "cu_seqlens_q must be a torch.Tensor or None, got list"),
    ({"num_splits": 2.0}, "num_splits must be an int or None, got float"),
    ({"max_seqlen_k": True}, "max_seqlen_k must be an int or None, got bool"),
    ({"softcap": "30"}, "softcap must be a float, got str"),
    ({"dropout_p": torch.tensor(0.1)}, "dropout_p must be a float, got Tensor"),
    ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed must be an int or None, got float"),
    ({"batch_invariant": 1}, "batch_invariant must be a bool, got int"),
    ({"window": 3}, r"window must be a pair \(left, right\) or None, got 3"),
    ({"window": (1, 2, 3)}, r"window must be a pair \(left, right\) or None, got \(1, 2, 3\)"),
    ({"window": (1.0, 2)}, "window_left must be an int or None, got float"),
    ({"block_mask": BLOCKS[0]}, r"block_mask must be a triple \(block_counts, .* got Tensor"),
    ({"block_mask": (*BLOCKS[:2], 64)}, r"block_mask must end with a pair \(block_m, block_n\), got 64"),
    ({"block_mask": (None, BLOCKS[1], (4, 4))}, "block_counts must be a torch.Tensor or None, got NoneType"),
    ({"block_mask": (*BLOCKS[:2], (4, "4"))}, "block_n must be an int, got str"),
    ({"q": 1, "softcap": 1.0}, "q must be a torch.Tensor, got int"),
]

#: Of a wrong value: ValueError.
VALUES = [
    # combinations
    (
        {**PAGED, "page_table": TABLE, "cu_seqlens_k": CU_K},
        "page_table and cu_seqlens_k exclude each other: both say where the keys of a sequence are",
    ),
    (
        {**PAGED, "page_table": TABLE, "cache_batch_idx": ints(0, 1)},
        "page_table and cache_batch_idx exclude each other: a row of the page table already belongs",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "cache_batch_idx": ints(0, 1)},
        "cache_batch_idx and cu_seqlens_k exclude each other: packed keys have no batch entries",
    ),
    (
        {"batch_invariant": True, "num_splits": 2},
        "batch_invariant and num_splits exclude each other: batch_invariant fixes the split itself",
    ),
    ({"max_seqlen_q": 6}, "max_seqlen_q is only taken with cu_seqlens_q"),
    ({"max_seqlen_k": 6}, "max_seqlen_k is only taken with cu_seqlens_k"),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "layout": "bhsd"},
        'layout must be "bshd" with cu_seqlens_q or cu_seqlens_k: packed tensors are',
    ),
    (
        {"q": PACKED["q"], "cu_seqlens_q": CU_Q, "mask": MASK},
        "mask with packed sequences needs max_seqlen_q: it says how long its rows must be",
    ),
    (
        {"k": PACKED["k"], "v": PACKED["v"], "cu_seqlens_k": CU_K, "bias": torch.zeros(20)},
        "bias with packed sequences needs max_seqlen_k",
    ),
    (
        {"q": PACKED["q"], "cu_seqlens_q": CU_Q, "block_mask": BLOCKS},
        "block_mask with packed sequences needs max_seqlen_q",
    ),
    # numbers
    ({"window": (-2, 3)}, r"window_left must be -1 \(no limit\) or 0 to 2\*\*29, got -2"),
    ({"window": (3, 2**29 + 1)}, r"window_right must be -1 \(no limit\) or 0 to 2\*\*29, got 536870913"),
    ({"softcap": -1.0}, r"softcap must be 0 \(none\) or positive, 2e38 at most, got -1.0"),
    ({"softcap": math.inf}, r"softcap must be 0 \(none\) or positive, 2e38 at most, got inf"),
    ({"softcap": math.nan}, r"softcap must be 0 \(none\) or positive, 2e38 at most, got nan"),
    ({"dropout_p": 1}, "dropout_p must be at least 0 and less than 1, got 1.0"),
    ({"dropout_p": -0.1}, "dropout_p must be at least 0 and less than 1, got -0.1"),
    ({"num_splits": 0}, "num_splits must be 1 to 64 or None, got 0"),
    ({"num_splits": 65}, "num_splits must be 1 to 64 or None, got 65"),
    ({"dropout_p": 0.1, "dropout_seed": 2**63}, "dropout_seed must fit in 64 bits, got 9223372036854775808"),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": -1},
        r"max_seqlen_q must be 0 to 2\*\*29, got -1",
    ),
    # operands
    (
        {"cu_seqlens_q": CU_Q},
        r"q must have 3 dimensions, \[total tokens, num_heads, head_dim\] with cu_seqlens_q, got shape",
    ),
    ({"cu_seqlens_k": CU_K}, r"k must have 3 dimensions, .* with cu_seqlens_k, got shape \(2, 10, 2, 16\)"),
    (
        {**PACKED, "softcap": 1.0},
        r"q must have 4 dimensions, \[batch, seqlen, num_heads, head_dim\], got shape",
    ),
    (
        {"v": V[0], "page_table": TABLE, "k": PAGED["k"]},
        r"v must have 4 dimensions, \[pages, page size, num_heads, head_dim\] with page_table, got shape",
    ),
    ({"softcap": 1.0, "layout": "bhsd", "k": K[0]}, r"k must have 4 dimensions, \[batch, num_heads, seqlen"),
    ({"softcap": 1.0, "q": Q[..., :0]}, r"q must have a head_dim \(last dimension\) of at least 1, got 0"),
    ({"softcap": 1.0, "k": K[..., :8]}, r"k must have q's head_dim \(last dimension\) 16, got 8"),
    ({"softcap": 1.0, "v": V[:, :3]}, r"v must have k's shape but for the last dimension, \(2, 10, 2\), got"),
    ({"softcap": 1.0, "q": Q[:, :, :3]}, "k must have a number of heads that divides q's 3, got 2"),
    ({"softcap": 1.0, "k": K[:1], "v": V[:1]}, "k must have q's batch size 2, got 1"),
    (
        {"q": PACKED["q"], "cu_seqlens_q": ints(0, 5, 6, 12)},
        "k must have cu_seqlens_q's batch size 3, got 2",
    ),
    (
        {"softcap": 1.0, "v": torch.empty(2, 10, DIM, 2).mT},
        r"v must be contiguous in its last dimension, got a stride of 2 there: pass v.contiguous\(\)",
    ),
    ({"softcap": 1.0, "k": K.half()}, "k must have q's dtype float32, got float16"),
    (
        {"k": PAGED["k"][:, :0], "v": PAGED["v"][:, :0], "page_table": TABLE},
        "k must have pages of a multiple of 16 keys, got 0",
    ),
    (
        {"k": PAGED["k"][:, :10], "v": PAGED["v"][:, :10], "page_table": TABLE},
        "k must have pages of a multiple of 16 keys, got 10",
    ),
    # lengths
    ({"seqused_k": ints(1, 2).long()}, "seqused_k must be int32, got int64"),
    ({"seqused_q": ints(1)}, r"seqused_q must have shape \(2,\), got \(1,\)"),
    ({"leftpad_k": ints(1, 2, 3)}, r"leftpad_k must have shape \(2,\), got \(3,\)"),
    ({"prefix_lengths": ints(1, 2).view(2, 1)}, r"prefix_lengths must have shape \(2,\), got \(2, 1\)"),
    ({"cache_batch_idx": ints(1, 2, 3, 4)[::2]}, r"cache_batch_idx must be contiguous: pass cache_batch_idx"),
    ({"seqused_k": ints(1, 2).to("meta")}, "seqused_k must be on q's device cpu, got meta"),
    ({**PACKED, "cu_seqlens_q": CU_Q.long(), "cu_seqlens_k": CU_K}, "cu_seqlens_q must be int32, got int64"),
    (
        {**PACKED, "cu_seqlens_q": ints(), "cu_seqlens_k": CU_K},
        r"cu_seqlens_q must have shape \[batch \+ 1\], got \(0,\)",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": ints(0, 20)},
        r"cu_seqlens_k must have shape \(3,\), got \(2,\)",
    ),
    ({**PAGED, "page_table": TABLE.long()}, "page_table must be int32, got int64"),
    (
        {**PAGED, "page_table": TABLE[0]},
        r"page_table must have 2 dimensions, \[batch, pages\], got shape \(2,\)",
    ),
    ({**PAGED, "page_table": TABLE.T}, "page_table must be contiguous in its last dimension"),
    (
        {**PAGED, "page_table": TABLE[:1]},
        r"page_table must have a row for each of 2 sequences, got shape \(1, 2\)",
    ),
    # scores
    ({"mask": BIAS}, "mask must be bool, got float32: what is added to scores is a bias"),
    (
        {"mask": MASK[:, :9]},
        r"mask must be broadcastable to \[batch, num_heads, seqlen_q, seqlen_k\], \(2, 4, 6, 10\), got shape "
        r"\(6, 9\)",
    ),
    ({"mask": MASK[None, None, None]}, r"mask must be broadcastable to .* got shape \(1, 1, 1, 6, 10\)"),
    ({"bias": BIAS.half()}, "bias must have q's dtype float32, got float16"),
    ({"bias": BIAS.expand(3, 1, 6, 10)}, r"bias must be broadcastable to .* got shape \(3, 1, 6, 10\)"),
    ({"alibi_slopes": torch.ones(4).half()}, "alibi_slopes must be float32, got float16"),
    (
        {"alibi_slopes": torch.ones(2)},
        r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(2,\)",
    ),
    ({"sinks": torch.ones(4).half()}, "sinks must be float32 or of the tensors' dtype float32, got float16"),
    ({"sinks": torch.ones(2)}, r"sinks must have shape \(4,\), got \(2,\)"),
    ({"sinks": torch.ones(8)[::2]}, r"sinks must be contiguous: pass sinks.contiguous\(\)"),
    (
        {"dropout_p": 0.1, "dropout_seed": ints(3)},
        r"dropout_seed must be int64 of shape \(1,\), got int32 of shape \(1,\)",
    ),
    (
        {"dropout_p": 0.1, "dropout_seed": torch.tensor(3)},
        r"dropout_seed must be int64 of shape \(1,\), got int64 of shape \(\)",
    ),
    ({"block_mask": (*BLOCKS[:2], (0, 4))}, r"block_mask must have blocks of at least 1 query and 1 key"),
    ({"block_mask": (BLOCKS[0].long(), *BLOCKS[1:])}, "block_counts must be int32, got int64"),
    (
        {"block_mask": (BLOCKS[0][..., :1], *BLOCKS[1:])},
        r"block_counts must have shape \[batch or 1, num_heads or 1, query blocks\] with batch 2, "
        r"num_heads 4 and 2 query blocks, got \(1, 1, 1\)",
    ),
    (
        {"block_mask": (BLOCKS[0], BLOCKS[0], (4, 4))},
        r"block_indices must have shape \[batch or 1, num_heads or 1, query blocks, entries at most\] .* got",
    ),
    ({"block_mask": (BLOCKS[0].expand(1, 3, 2), *BLOCKS[1:])}, r"block_counts must .* got \(1, 3, 2\)"),
    # contents
    (
        {**PACKED, "cu_seqlens_q": ints(0, 6, 13), "cu_seqlens_k": CU_K},
        r"cu_seqlens_q must rise from 0 to 12 at most, got \[0, 6, 13\]",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": ints(0, 10, 9)},
        r"cu_seqlens_k must rise from 0 to 20 at most, got \[0, 10, 9\]",
    ),
    (
        {**PACKED, "cu_seqlens_q": ints(-1, 6, 12), "cu_seqlens_k": CU_K},
        "cu_seqlens_q must rise from 0 to 12 at most",
    ),
    (
        {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 5},
        "max_seqlen_q is 5, and cu_seqlens_q has a sequence of 6",
    ),
    ({"seqused_k": ints(3, -1)}, "seqused_k must hold numbers of 0 or more, got -1"),
    ({"seqused_q": ints(-3, 1)}, "seqused_q must hold numbers of 0 or more, got -3"),
    ({"leftpad_k": ints(3, -1)}, "leftpad_k must hold numbers of 0 or more, got -1"),
    ({"prefix_lengths": ints(3, -1)}, "prefix_lengths must hold numbers of 0 or more, got -1"),
    ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must hold numbers of 0 to 1, got 2"),
    ({**PAGED, "page_table": TABLE + 1}, "page_table must hold numbers of 0 to 3, got 4"),
    ({**PAGED, "page_table": TABLE - 1, "seqused_k": ints(5, 5)}, "page_table must hold .* got -1"),
    ({"block_mask": (BLOCKS[0] * 4, *BLOCKS[1:])}, "block_counts must hold numbers of 0 to 3, got 4"),
    ({"block_mask": (BLOCKS[0] * 2, *BLOCKS[1:])}, "block_indices must ascend"),
    (
        {"block_mask": (BLOCKS[0], BLOCKS[1] - 1, (4, 4))},
        "block_indices must hold numbers of 0 or more, got -1",
    ),
]

SDPA: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attn_mask": 1}, TypeError, "attn_mask must be a torch.Tensor or None, got int"),
    (
        {"attn_mask": torch.zeros(5, 5, dtype=torch.float16)},
        ValueError,
        "attn_mask must be bool, or of query's dtype float32 or float32, got float16",
    ),
    (
        {"attn_mask": torch.zeros(2, 1, 4, 5)},
        ValueError,
        r"attn_mask must be broadcastable to \(2, 4, 5, 5\), .* got shape \(2, 1, 4, 5\)",
    ),
    (
        {"attn_mask": torch.zeros(1, 1, 1, 5, 5)},
        ValueError,
        r"attn_mask must be broadcastable to \(2, 4, 5, 5\), .* got shape \(1, 1, 1, 5, 5\)",
    ),
    (
        {"attn_mask": torch.zeros(5, 5), "is_causal": True},
        ValueError,
        "attn_mask and is_causal exclude each other, as in torch: use cutlass_fmha.attention",
    ),
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and less than 1, got 1.0"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p must be a float, got str"),
    ({"query": 1}, TypeError, "query must be a torch.Tensor, got int"),
    ({"key": S.half()}, ValueError, "key must have query's dtype float32, got float16"),
    (
        {"query": S[0, 0, 0]},
        ValueError,
        r"query must have at least 2 dimensions, \[..., seqlen, head_dim\], got shape \(16,\)",
    ),
    (
        {"key": S[0, 0], "enable_gqa": True},
        ValueError,
        r"key must have at least 3 dimensions, \[..., num_heads, seqlen, head_dim\], got shape \(5, 16\)",
    ),
    (
        {"key": S[:, :3], "value": S[:, :3], "enable_gqa": True},
        ValueError,
        "key must have a number of heads that divides query's 4, got 3",
    ),
    ({"value": S[:, :2], "enable_gqa": True}, ValueError, "value must have key's num_heads 4, got 2"),
    ({"value": S[:, :, :3]}, ValueError, "value must have key's seqlen 5, got 3"),
    ({"scale": math.inf}, ValueError, "scale must be finite"),
    (
        {"query": torch.randn(3, 4, 5, 16), "enable_gqa": True},
        ValueError,
        r"dimensions that broadcast, got shapes \(3, 4, 5, 16\), \(2, 4, 5, 16\), \(2, 4, 5, 16\)$",
    ),
    ({"query": NESTED}, NotImplementedError, "query is a nested tensor"),
    ({"value": JAGGED}, NotImplementedError, "value is a nested tensor"),
    (
        {"query": S.to_sparse()},
        NotImplementedError,
        "query must be a dense tensor, got the layout sparse_coo",
    ),
    ({"attn_mask": NESTED}, NotImplementedError, "attn_mask is a nested tensor"),
    ({"is_causal": 1}, TypeError, "is_causal must be a bool, got int"),
    ({"softmax_scale": 1.0}, TypeError, "softmax_scale"),
]

OTHERS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    # what no kernel takes
    *[
        (name, {argument: tensor}, NotImplementedError, f"^{argument} {sentence}")
        for name, argument in [
            ("attention", "q"),
            ("attention", "k"),
            ("attention", "mask"),
            ("attention", "bias"),
            ("attention", "sinks"),
            ("with_kv_cache", "q"),
            ("with_kv_cache", "k_cache"),
            ("append", "k"),
            ("append", "cache_seqlens"),
            ("append", "rotary_cos"),
            ("cascade", "k_shared"),
            ("cascade", "v"),
            ("merge_states", "o_a"),
            ("merge_states", "lse_b"),
            ("rotary", "x"),
            ("rotary", "cos"),
            ("rotary", "positions"),
            ("explain", "q"),
            ("forward", "query"),
            ("attend", "value"),
        ]
        for tensor, sentence in [
            (NESTED, "is a nested tensor, which no kernel takes: pack"),
            (Q.to_sparse(), "must be a dense tensor, got the layout sparse_coo: pass"),
            (Q.to_mkldnn(), "must be a dense tensor, got the layout _mkldnn: pass"),
        ]
    ],
    ("attention", {"q": JAGGED, "k": JAGGED, "v": JAGGED}, NotImplementedError, "q is a nested tensor"),
    (
        "attention",
        {"q": NESTED, "layout": "bhsd", "softcap": 1.0},
        NotImplementedError,
        "q is a nested tensor",
    ),
    (
        "forward",
        {"key": QUANTIZED},
        NotImplementedError,
        "key is quant",
    ),
    # what says nothing where something must be said
    ("forward", {"query": None}, TypeError, "query must be a torch.Tensor, got NoneType"),
    ("forward", {"query": None, "key": None, "value": None}, TypeError, "query must be a torch.Tensor"),
    ("attend", {"value": None}, TypeError, "value must be a torch.Tensor, got NoneType"),
    ("attention", {"v": ...}, TypeError, "'v'"),
    ("with_kv_cache", {"v_cache": None}, TypeError, "v_cache must be a torch.Tensor, got NoneType"),
    ("cascade", {"k_shared": None}, TypeError, "k_shared must be a torch.Tensor, got NoneType"),
    ("merge_states", {"lse_a": None}, TypeError, "lse_a must be a torch.Tensor, got NoneType"),
    ("rotary", {"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ("rotary", {"sin": None}, TypeError, "sin must be a torch.Tensor, got NoneType"),
    # arrays and lists, whose contents are not shown
    *[
        (name, {argument: ARRAY}, TypeError, f"{argument} must be .*got ndarray")
        for name, argument in [
            ("attention", "k"),
            ("attention", "bias"),
            ("attention", "return_lse"),
            ("attention", "scale"),
            ("attention", "window"),
            ("append", "v"),
            ("append", "cache_seqlens"),
            ("append", "page_table"),
            ("append", "rotary_cos"),
            ("cascade", "q"),
            ("merge_states", "o_b"),
            ("rotary", "cos"),
            ("rotary", "interleaved"),
            ("sdpa", "query"),
            ("sdpa", "is_causal"),
        ]
    ],
    ("attention", {"causal": ARRAY}, ValueError, "causal must be .* got ndarray$"),
    ("attention", {"layout": Q}, ValueError, "layout must be .* got Tensor$"),
    (
        "attention",
        {"window": torch.tensor([1, 2])},
        TypeError,
        "window must be .* got Tensor: pass a mask, or num",
    ),
    (
        "attention",
        {"window": (torch.tensor(1), 2)},
        TypeError,
        "window_left must be an int or None, got Tensor",
    ),
    ("attention", {"window": [Q] * 9}, TypeError, r"window must be .* got \[Tensor, .*, \.\.\.\]"),
    ("attention", {"layout": "b" * 999}, ValueError, "layout must be"),
    # numbers
    ("attention", {"scale": 10**400}, ValueError, "scale must be finite .* got inf"),
    ("attention", {"scale": -(10**400)}, ValueError, "scale must be finite .* got -inf"),
    ("attention", {"softcap": 10**400}, ValueError, "softcap must be 0 .* got inf"),
    ("attention", {"num_splits": 0}, ValueError, "num_splits must be 1 to 64 .* None has a number chosen"),
    ("attention", {"num_splits": 2**70}, ValueError, "num_splits must be 1 to 64"),
    ("attention", {"window": (2**70, 1)}, ValueError, "window_left must be -1"),
    ("attention", {"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    ("append", {"cache_seqlens": True}, TypeError, "cache_seqlens must be .* got bool"),
    ("append", {"cache_seqlens": 2**70}, ValueError, "cache_seqlens must"),
    ("append", {"cache_seqlens": 3.0}, TypeError, "cache_seqlens must be .* got float"),
    ("append", {"cache_seqlens": 9}, ValueError, "cache_seqlens must leave room for 2 new rows"),
    ("append", {"cache_seqlens": torch.tensor([3, 3])}, ValueError, "cache_seqlens must be int32, got int64"),
    ("append", {"cache_seqlens": ...}, ValueError, "cache_seqlens is None"),
    ("append", {"v": ...}, ValueError, "k and v go together"),
    ("append", {"k": torch.tensor(1.0)}, ValueError, "k must have 4 dimensions"),
    ("append", {"rotary_cos": torch.tensor(1.0)}, ValueError, "rotary_cos must have 2 dimensions"),
    ("append", {"window": 3}, TypeError, r"window must be a pair \(left, right\) or None, got 3"),
    ("append", {"window": torch.tensor([1, 2])}, TypeError, "window must be a pair .* got Tensor"),
    ("append", {"causal": "left"}, ValueError, "causal must be"),
    ("append", {"rotary_interleaved": "yes"}, TypeError, "rotary_interleaved must be a bool, got str"),
    (
        "with_kv_cache",
        {"cache_seqlens": ints(3)},
        ValueError,
        r"cache_seqlens must have shape \(2,\), got \(1,\)",
    ),
    ("with_kv_cache", {"k_cache": K.half()}, ValueError, "k_cache must have q's dtype float32, got float16"),
    ("with_kv_cache", {"v_cache": V[:, :3]}, ValueError, "v_cache must have k_cache's seqlen 10, got 3"),
    ("with_kv_cache", {"k_cache": K[0]}, ValueError, "k_cache must have 4 dimensions"),
    ("with_kv_cache", {"return_lse": "yes"}, TypeError, "return_lse must be a bool, got str"),
    ("with_kv_cache", {"num_splits": 0}, ValueError, "num_splits must be 1 to 64"),
    ("with_kv_cache", {"rotary_cos": COS}, ValueError, "rotary embedding is of k and v that are appended"),
    ("with_kv_cache", {"q": Q[0]}, ValueError, "q must have 4 dimensions"),
    ("with_kv_cache", {"row": "fwd"}, UnsupportedError, "row fwd is a CUDA kernel"),
    ("cascade", {"k_shared": K}, ValueError, "k_shared must have 3 dimensions"),
    ("cascade", {"q": Q[0]}, ValueError, "q must have 4 dimensions"),
    ("cascade", {"window": (3, 0)}, TypeError, "cascade_attention.* 'window': help"),
    ("cascade", {"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    ("cascade", {"causal": 1}, ValueError, "causal must be"),
    ("merge_states", {"o_a": torch.tensor(1.0)}, ValueError, r"o_a must have shape .* got \(\)"),
    ("merge_states", {"o_b": Q.half()}, ValueError, "o_b must have o_a's dtype float32, got float16"),
    ("merge_states", {"lse_a": LSE.double()}, ValueError, "lse_a must be float32, got float64"),
    ("merge_states", {"lse_b": LSE[0]}, ValueError, r"lse_b must have shape \(2, 4, 6\)"),
    ("merge_states", {"lse_b": LSE.to("meta")}, ValueError, "lse_b must be on o_a's device cpu, got meta"),
    ("rotary", {"interleaved": "yes"}, TypeError, "interleaved must be a bool, got str"),
    ("rotary", {"positions": None}, TypeError, "positions must be .* got NoneType"),
    ("rotary", {"positions": 99}, ValueError, "rotary_cos has positions 0 to 11, and a row has position"),
    (
        "rotary",
        {"positions": ints(0, 99)},
        ValueError,
        "rotary_cos has positions 0 to 11, and a row has position",
    ),
    ("rotary", {"x": Q[0]}, ValueError, "x must have 4 dimensions"),
    ("rotary", {"x": Q.int()}, ValueError, "x must be float16 or"),
    # the ops, whose arguments' types torch itself checks
    ("forward", {"causal": "left"}, ValueError, "causal must be"),
    ("forward", {"scale": math.nan}, ValueError, "scale must be finite"),
    ("forward", {"row": "fwd"}, UnsupportedError, "row fwd is a CUDA kernel"),
    ("forward", {"value": V[:, :3]}, ValueError, "value must have key's seqlen 10, got 3"),
    ("attend", {"window_left": -5}, ValueError, "window_left must be -1"),
    ("attend", {"dropout_p": 0.1}, ValueError, "dropout_p is only taken with dropout_seed"),
    ("attend", {"softcap": math.nan}, ValueError, "softcap must be 0"),
    ("attend", {"block_counts": BLOCKS[0]}, ValueError, "block_counts is only taken with block_indices"),
    # explain
    ("explain", {"shape": (1, 2, 3, 4)}, TypeError, "explain takes tensors or a shape, got both"),
    ("explain", {"q": ...}, TypeError, "explain needs q, k and v, or a shape"),
    ("explain", {"k": K.half()}, ValueError, "k must have q's dtype float32, got float16"),
    ("explain", {"device": "foo"}, ValueError, "device must be cuda"),
    ("explain", {"device": 99}, ValueError, "device cuda:99 does not exist"),
    ("explain", {"arch": 75}, ValueError, "arch must be one of"),
    ("explain", {"is_causal": True}, TypeError, "unexpected keyword argument 'is_causal': pass causal=True"),
    ("explain", {"window": 3}, TypeError, "window must be a pair"),
    ("shape", {"shape": (1, 2, 3)}, ValueError, "shape must be four sizes"),
    ("shape", {"shape": 3}, ValueError, "shape must be four sizes"),
    ("shape", {"shape": (1, 2, 3, True)}, ValueError, "shape must be four sizes"),
    ("shape", {"shape": (1, 2, 3, "4")}, ValueError, "shape must be four sizes"),
    ("shape", {"seqlen_k": "x"}, TypeError, "seqlen_k must be an int or None, got str"),
    ("shape", {"num_heads_kv": 2.0}, TypeError, "num_heads_kv must be an int or None, got float"),
    ("shape", {"head_dim_v": "x"}, TypeError, "head_dim_v must be an int or None, got str"),
    ("shape", {"head_dim_v": 0}, ValueError, "head_dim_v must be at least 1, got 0"),
    ("shape", {"num_heads_kv": 3}, ValueError, "num_heads_kv must divide"),
    ("shape", {"features": 3}, TypeError, "features must be names"),
    ("shape", {"features": ["biases"]}, ValueError, "features must be among"),
    ("shape", {"window": 3}, TypeError, "window must be a pair"),
    ("shape", {"window": ("a", 3)}, TypeError, "window_left must be an int or None, got str"),
    ("shape", {"block_size": 3}, TypeError, "block_size must be a pair"),
    ("shape", {"block_size": (64, 0)}, ValueError, "block_size must have sides of at least 1"),
    ("shape", {"page_size": "x"}, TypeError, "page_size must be an int or None, got str"),
    ("shape", {"num_splits": 1000}, ValueError, "num_splits must be 1 to 64"),
    ("shape", {"alignment": "x"}, ValueError, "alignment must be"),
    ("shape", {"dtype": 3}, ValueError, "dtype must be one of"),
    ("shape", {"causal": 3}, ValueError, "causal must be"),
    ("shape", {"row": 3}, ValueError, "3 is not a row"),
    ("shape", {"softcap": 3.0}, TypeError, "explain got 'softcap'"),
    # what a gradient would need
    ("attention", {"q": Q.clone().requires_grad_()}, NotImplementedError, "no backward yet"),
    ("attention", {"sinks": torch.ones(4, requires_grad=True)}, NotImplementedError, "no backward yet"),
    ("merge_states", {"o_a": Q.clone().requires_grad_()}, NotImplementedError, "no backward yet"),
    ("rotary", {"x": Q.clone().requires_grad_()}, NotImplementedError, "no backward yet"),
]

#: Another library's word, and what the sentence tells who uses it.
WORDS = {
    "window_size": "window=",
    "is_causal": "causal=",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "attn_mask": "mask",
    "attention_mask": "bias",
    "key_padding_mask": "mask=",
    "deterministic": "leave it out",
    "dropout": "dropout_p",
    "block_table": "page_table",
    "cache_seqlens": "with_kv_cache",
    "tensor_layout": "layout=",
    "enable_gqa": "leave it out",
    "return_attn_probs": "return_lse",
    "s_aux": "sinks",
    "score_mod": "softcap",
    "q_descale": "FP8",
    "windows": r"help\(cutlass_fmha.attention\)",
}

CALLS = [
    *[("attention", *row) for row in ATTENTION],
    *[("attention", arguments, TypeError, message) for arguments, message in TYPES],
    *[("attention", arguments, ValueError, message) for arguments, message in VALUES],
    *[("sdpa", *row) for row in SDPA],
    *[("attention", {word: None}, TypeError, f"'{word}': .*{told}") for word, told in WORDS.items()],
    ("with_kv_cache", {"softmax_scale": 1.0}, TypeError, "'softmax_scale': pass scale"),
    ("with_kv_cache", {"block_table": None}, TypeError, "'block_table': pass page_table"),
    ("with_kv_cache", {"dropout": 0.1}, TypeError, r"'dropout': help\(cutlass_fmha.with_kv_cache\)"),
    ("cascade", {"sm_scale": 1.0}, TypeError, "'sm_scale': pass scale"),
    *OTHERS,
]


def refusal(name: str, arguments: dict[str, Any]) -> Exception:
    function, usual = BAD[name]
    given = {argument: value for argument, value in (usual | arguments).items() if value is not ...}
    try:
        function(**given)
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(("name", "arguments", "error", "message"), CALLS)
def test_a_bad_call_is_refused_in_a_sentence(
    name: str, arguments: dict[str, Any], error: type[Exception], message: str
):
    found = refusal(name, arguments)
    assert type(found) is error, repr(found)
    assert re.search(message, str(found)), str(found)
    assert len(str(found)) <= 600 and "\n" not in str(found)


def test_there_are_many_of_them():
    assert len(CALLS) >= 120 and {name for name, *_ in CALLS} == set(BAD)
    assert {error for *_, error, _ in CALLS} == {TypeError, ValueError, NotImplementedError, UnsupportedError}


@pytest.mark.parametrize("more", [(True,), (None, 0.1, True)])
def test_arguments_by_position_are_refused(more: tuple[Any, ...]):
    with pytest.raises(
        TypeError, match=rf"takes q, k and v by position .* by name.* got {3 + len(more)} posi"
    ):
        attention(Q, K, V, *more)


@pytest.mark.parametrize("tensor", [NESTED, Q.to_sparse()], ids=["nested", "sparse"])
def test_what_has_no_shape_is_refused_past_the_dispatcher(tensor: torch.Tensor, monkeypatch):
    monkeypatch.setattr(dispatcher, "can_skip_dispatcher", lambda *tensors: True)
    for said in ({}, {"softcap": 1.0}):
        with pytest.raises(NotImplementedError, match="q (is a nested|must be a dense) tensor"):
            attention(tensor, K, V, **said)


def test_signatures_list_the_features():
    listed = inspect.signature(attention).parameters
    said = set(features.FeatureArguments.__annotations__)
    assert set(listed) == {"q", "k", "v", "scale", "causal", "return_lse", "layout", "row"} | said
    assert [name for name, each in listed.items() if each.kind != each.KEYWORD_ONLY] == ["q", "k", "v"]
    assert listed["window"].annotation == "tuple[int | None, int | None] | None"
    for function in (cutlass_fmha.with_kv_cache, cutlass_fmha.cascade_attention):
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert not set(FOREIGN) & set(listed)
