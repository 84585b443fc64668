"""Calls of every function and op where nothing is wrong, and what becomes of them where an argument is.

Of small tensors on the CPU. ``...`` stands for an argument that is left out.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensors import ints
from torch import Tensor

import cutlass_fmha as fmha
from cutlass_fmha import UnsupportedError, attention, nn, scaled_dot_product_attention
from cutlass_fmha.arguments.signature import FOREIGN

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, DIM = 2, 6, 10, 4, 2, 16
Q = torch.randn(BATCH, SEQLEN_Q, HEADS, DIM)
K, V = torch.randn(2, BATCH, SEQLEN_K, HEADS_KV, DIM)
PACKED = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}
PAGED = {name: torch.randn(4, 16, HEADS_KV, DIM) for name in "kv"}
CU_Q, CU_K, TABLE = ints(0, 6, 12), ints(0, 10, 20), ints(0, 1, 2, 3).view(2, 2)
VARLEN = {**PACKED, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
PACKED_Q = {"q": PACKED["q"], "cu_seqlens_q": CU_Q}
PACKED_K = {"k": PACKED["k"], "v": PACKED["v"], "cu_seqlens_k": CU_K}
PAGES = {**PAGED, "page_table": TABLE}
POOL = {f"{name}_cache": pool for name, pool in PAGED.items()}
MASK, BIAS = torch.ones(SEQLEN_Q, SEQLEN_K, dtype=torch.bool), torch.zeros(SEQLEN_Q, SEQLEN_K)
BLOCKS = (torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 3, dtype=torch.int32), (4, 4))

IMAGINARY = torch.zeros(BATCH, SEQLEN_Q, HEADS, DIM, dtype=torch.complex64)
S = torch.randn(2, 4, 5, 16)
with warnings.catch_warnings():  # torch is fond of neither
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.randn(n, HEADS, DIM) for n in (3, 5)])
    JAGGED = torch.nested.nested_tensor([torch.randn(n, HEADS, DIM) for n in (3, 5)], layout=torch.jagged)
    HEADS_FIRST = JAGGED.transpose(1, 2)
    QUANTIZED = torch.quantize_per_tensor(K, 0.1, 0, torch.quint8)
TWO_HEADS = torch.nested.nested_tensor_from_jagged(HEADS_FIRST.values()[:2], JAGGED.offsets(), jagged_dim=2)
OTHERS = torch.nested.nested_tensor_from_jagged(JAGGED.values(), torch.tensor([0, 4, 8]))
HOLES = torch.nested.nested_tensor_from_jagged(JAGGED.values(), JAGGED.offsets(), torch.tensor([2, 5]))
FEWER = torch.nested.nested_tensor_from_jagged(JAGGED.values(), torch.tensor([0, 3, 5, 8]))
DOCUMENTS, OF_HEADS = dict.fromkeys("qkv", JAGGED), dict.fromkeys(("query", "key", "value"), HEADS_FIRST)
ARRAY = np.zeros((BATCH, SEQLEN_Q, HEADS, DIM), dtype=np.float32)
COS, SHORT_COS = torch.ones(12, DIM // 2), torch.ones(9, DIM // 2)
TURNED = {"rotary_cos": SHORT_COS, "rotary_sin": SHORT_COS}
NEW = torch.randn(BATCH, 2, HEADS_KV, DIM)
PACKED_NEW = NEW.flatten(0, 1)
NEW6, WEIGHT = torch.randn(BATCH, SEQLEN_Q, HEADS_KV, DIM), torch.randn(DIM)
LSE, WIDE_LSE = torch.zeros(BATCH, HEADS, SEQLEN_Q), torch.zeros(BATCH, HEADS, SEQLEN_Q + 1)[..., :-1]
OUT, LEAF = torch.zeros_like(Q), Q.clone().requires_grad_()
SIDE_BY_SIDE = torch.zeros(2, 3, 2, 4, 5, 16).transpose(0, 1)

LONG = torch.empty_strided((1, 2**29 + 1, 1, 16), (0, 0, 0, 1), device="meta")
LONG_PACKED = dict.fromkeys("qkv", LONG[0])
LONG_PACKED |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.empty(3, dtype=torch.int32, device="meta"))

OPS = torch.ops.cutlass_fmha
CACHES, ANGLES = {"k_cache": K, "v_cache": V}, {"cos": COS, "sin": COS}
PACKING = {**CACHES, "cache_seqlens": ints(0, 3), "cu_seqlens_q": ints(0, 1, 4)}
CALL, RESULTS = {"q": Q, "k": K, "v": V}, {"out": OUT, "lse": LSE, "return_lse": True}
SAID = {"softcap": 1.0, "seqused_k": ints(1, 2), "cache_batch_idx": ints(0, 1)}
SAID |= dict.fromkeys(("alibi_slopes", "sinks"), torch.ones(4))
TWELVE = ints(*range(12)).view(2, 6)
SIZES = ("batch", "num_heads", "seqlen_q", "seqlen_k")
OP = {"query": Q, "key": K, "value": V, "scale": 1.0, "causal": "none", "return_lse": True, "row": None}
#: What is called, and its arguments where nothing is wrong.
BAD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (attention, CALL),
    "features": (attention, {**CALL, **SAID, **RESULTS}),
    "arrays": (attention, {name: x.numpy() for name, x in CALL.items()}),
    "by position": (lambda more: attention(Q, K, V, *more), {}),
    "varlen": (attention, VARLEN),
    "paged": (attention, {"q": Q, **PAGES}),
    "sdpa": (scaled_dot_product_attention, {"query": S, "key": S, "value": S}),
    "with_kv_cache": (fmha.with_kv_cache, {"q": Q, **CACHES}),
    "append": (fmha.with_kv_cache, {"q": Q, **CACHES, "k": NEW, "v": NEW, "cache_seqlens": 3, "return_lse": True}),
    "append_kv_": (OPS.append_kv_, {**CACHES, "key": NEW, "value": NEW, "cache_seqlens": ints(0, 3)}),
    "packed append": (fmha.with_kv_cache, {**PACKING, "q": PACKED["q"][:4], "k": PACKED_NEW, "v": PACKED_NEW}),
    "packed append_kv_": (OPS.append_kv_, {**PACKING, "key": PACKED_NEW, "value": PACKED_NEW}),
    "cascade": (fmha.cascade_attention, {"q": Q, "k_shared": K[0], "v_shared": V[0], "k": K, "v": V}),
    "merge_states": (fmha.merge_states, {"o_a": Q, "lse_a": LSE, "o_b": Q, "lse_b": LSE}),
    "rotary": (fmha.rotary, {"x": Q, **ANGLES, "positions": ints(0, 1)}),
    "packed rotary": (fmha.rotary, {"x": PACKED["q"], **ANGLES, "positions": ints(0, 1), "cu_seqlens": CU_Q}),
    "rotary_qk": (fmha.rotary_qk, {"q": Q, "k": NEW6, **ANGLES}),
    "qk_norm_rope": (fmha.qk_norm_rope, {"q": Q, "k": NEW6, **ANGLES, "q_weight": WEIGHT}),
    "norm append": (fmha.qk_norm_rope, {"q": Q, "k": NEW6, "v": NEW6, **ANGLES, **CACHES, "cache_seqlens": ints(0, 3)}),
    "dropout_mask": (fmha.dropout_mask, {**dict.fromkeys(SIZES, 1), "dropout_seed": 1, "dropout_p": 0.5}),
    "set_deterministic_workspace": (fmha.set_deterministic_workspace, {}),
    "nn.SwiGLU": (nn.SwiGLU, {"in_features": 4, "hidden_features": 4}),
    "nn.Attention": (nn.Attention, {"embed_dim": 16, "num_heads": 4}),
    "a norm": (nn.RMSNorm((3, 8)), {"x": torch.randn(3, 8)}),
    "a layer": (nn.Attention(16, 2), {"x": S[0]}),
    "explain": (fmha.explain, CALL),
    "shape": (fmha.explain, {"shape": (1, 8, 4, 64), "device": "l4"}),
    "backward": (
        OPS.attend_backward,
        {"dout": Q, **OP, "output": Q, "softmax_lse": LSE, "dlse": LSE, "return_lse": ...},
    ),
    "forward": (OPS.forward, OP),
    "attend": (OPS.attend, OP),
}


class Opaque:
    """An array, of which no memory is to be had."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self) -> Any:
        raise BufferError("this memory is not for others")


class Closed(Opaque):
    def __array_namespace__(self) -> Any:
        return object()


def in_every_second_place(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack((x, x), -1).flatten(-2)[..., ::2]


Alike = list[tuple[type[Exception], str, Any, dict[str, str]]]
Refusals = dict[tuple[str, type[Exception]], list[tuple[dict[str, Any], str]]]

#: By what a call says and what tensors are like: on any device.
REFUSED: Refusals = {
    ("attention", TypeError): [
        ({"lse": LSE}, "lse is only taken with return_lse=True"),
        ({"scale": "1"}, "scale must be a float or None, got str"),
        ({"row": 3}, "row must be the name of a row or None, got int"),
        ({"max_seqlen_k": True}, "max_seqlen_k must be an int or None, got bool"),
        ({"dropout_p": 0.1, "dropout_seed": 1.5}, "dropout_seed must be an int or None, got float"),
        ({"window": (1, 2, 3)}, r"window must be a pair \(left, right\) or None, got \(1, 2, 3\)"),
        ({"block_mask": BLOCKS[0]}, r"block_mask must be a triple \(block_counts, .* got Tensor"),
        ({"block_mask": (*BLOCKS[:2], 64)}, r"block_mask must end with a pair \(block_m, block_n\), got 64"),
        ({"block_mask": (None, BLOCKS[1], (4, 4))}, "block_counts must be a torch.Tensor or .* got NoneType"),
        ({"block_mask": (*BLOCKS[:2], (4, "4"))}, "block_n must be an int, got str"),
        ({"q": 1, "softcap": 1.0}, "q must be a torch.Tensor, got int"),
        ({"v": ...}, "'v'"),
        ({"window": torch.tensor([1, 2])}, "window must be .* got Tensor: pass a mask, or num"),
        ({"window": [Q] * 9}, r"window must be .* got \[Tensor, .*, \.\.\.\]"),
    ],
    ("attention", ValueError): [
        ({"out": OUT, "layout": "bhsd", "k": Q, "v": Q[..., :8]}, r"out must have shape \(2, 6, 4, 8\), got"),
        ({"out": OUT[:, :1].expand(OUT.shape)}, r"out .* neither be expanded .* strides \(384, 0, 16, 1"),
        ({"out": OUT.as_strided(Q.shape, (64, 64, 16, 1))}, "out is written to, .* that share memory"),
        ({"lse": WIDE_LSE, "return_lse": True, "softcap": 1.0}, r"lse must be contiguous.* \(28, 7, 1\)"),
        ({"q": Q[0]}, r"q must have 4 dimensions, \[batch, .* num_heads, head_dim\], got shape \(6, 4, 16\)"),
        ({"k": K[0], "layout": "bhsd", "softcap": 1.0}, r"k .* 4 .* \[batch, num_heads, seqlen, head_dim"),
        ({"v": V[:1]}, "v must have q's batch size 2, got 1"),
        ({"k": K[..., :8]}, r"k must have q's head_dim \(last dimension\) 16, got 8"),
        *[({x: Q[..., :0]}, rf"{x} must have a head_dim \(last dimension\) of at least 1, got 0") for x in "qv"],
        ({"v": V[:, :3]}, "v must have k's seqlen 10, got 3"),
        ({"q": Q[:, :, :3]}, "k must have a number of heads that divides q's 3, got 2"),
        ({"k": K[:, :, :0], "v": V[:, :, :0]}, "k must have a number of heads that divides q's 4, got 0"),
        *[({"scale": x}, "scale must be .* of magnitude 2e38 .*, got -?[3i]") for x in (-3e38, 10**400, -(10**400))],
        *[({"causal": x}, f"causal must be .* got {told}$") for x, told in ((1, "1"), (ARRAY, "ndarray"))],
        *[({"layout": x}, "layout must be .* got .*b+") for x in (["bshd"], "b" * 999)],
        ({**PAGES, "cu_seqlens_k": CU_K}, "page_table and cu_seqlens_k exclude each other: both"),
        ({**PAGES, "cache_batch_idx": ints(0, 1)}, "page_table and cache_batch_idx exclude each other"),
        ({**VARLEN, "cache_batch_idx": ints(0, 1)}, "cache_batch_idx and cu_seqlens_k exclude each"),
        ({"batch_invariant": True, "num_splits": 2}, "batch_invariant and num_splits exclude each other"),
        ({"max_seqlen_q": 6}, "max_seqlen_q is only taken with cu_seqlens_q"),
        ({**PAGES, "max_seqlen_k": 6}, "max_seqlen_k is only taken with cu_seqlens_k or seqused_k"),
        ({**VARLEN, "layout": "bhsd"}, "layout must be .bshd. with cu_seqlens_q or cu_seqlens_k:"),
        ({**PACKED_Q, "mask": MASK}, "mask with packed sequences needs max_seqlen_q: it says"),
        ({**PACKED_K, "bias": torch.zeros(20)}, "bias with packed sequences needs max_seqlen_k"),
        ({**PACKED_Q, "block_mask": BLOCKS}, "block_mask with packed sequences needs max_seqlen_q"),
        ({"window": (-2, 3)}, r"window_left must be -1 \(no limit\) or 0 to 2\*\*29, got -2"),
        ({"window": (3, 2**29 + 1)}, r"window_right must be -1 \(no limit\) or 0 to 2\*\*29, got 536870913"),
        *[({"softcap": x}, rf"softcap must be 0 \(none\) or positive, .* got {x}") for x in (-1.0, math.inf, math.nan)],
        *[({"dropout_p": x}, f"dropout_p must be at least 0 and less than 1, got {x}") for x in (1.0, -0.1)],
        ({"q": LONG[:, :1], "k": LONG, "v": LONG}, r"k must have a seqlen of 2\*\*29 at most, got 536870913$"),
        ({**LONG_PACKED, "max_seqlen_k": 9}, r"q must have a seqlen of 2\*\*29 at most, got 536870913: pass"),
        ({"deterministic_workspace": -1, "deterministic": True}, "deterministic_workspace must be 0 bytes .*, got -1"),
        ({"num_splits": 65}, "num_splits must be 1 to 64 or None, got 65"),
        ({"num_splits": 0}, "num_splits must be 1 to 64 .* None has a number chosen"),
        ({"dropout_p": 0.1, "dropout_seed": 2**63}, "dropout_seed must fit .* bits, got 9223372036854775808"),
        ({**VARLEN, "max_seqlen_q": -1}, r"max_seqlen_q must be 0 to 2\*\*29, got -1"),
        ({"cu_seqlens_q": CU_Q}, r"q must have 3 dimensions, \[total tokens, .* cu_seqlens_q, got shape"),
        ({"cu_seqlens_k": CU_K}, r"k must have 3 dimensions, .* cu_seqlens_k, got shape \(2, 10, 2, 16\)"),
        ({**PACKED, "softcap": 1.0}, r"q .* 4 dimensions, \[batch, seqlen, num_heads, head_dim\], got shape"),
        ({"v": V[0], "page_table": TABLE, "k": PAGED["k"]}, r"v must have 4 dimensions, \[pages, page size,"),
        ({"softcap": 1.0, "v": V[:, :3]}, r"v must have k's shape but for the last dimension, \(2, 10, 2\),"),
        ({"softcap": 1.0, "k": K[:1], "v": V[:1]}, "k must have q's batch size 2, got 1"),
        ({**PACKED_Q, "cu_seqlens_q": ints(0, 5, 6, 12)}, "k must have cu_seqlens_q's batch size 3, got 2"),
        *[({**PAGES, "k": K[:, :n], "v": V[:, :n]}, f"k must .* multiple of 16 keys, got {n}") for n in (0, 10)],
        ({**VARLEN, "cu_seqlens_q": ints()}, r"cu_seqlens_q must have shape \[batch \+ 1\], got \(0,\)"),
        ({**VARLEN, "cu_seqlens_k": ints(0, 20)}, r"cu_seqlens_k must have shape \(3,\), got \(2,\)"),
        ({**PAGES, "page_table": TABLE[0]}, r"page_table must have 2 .* \[batch, pages\], got shape \(2,\)"),
        ({**PAGES, "page_table": TABLE[:1]}, r"page_table must have a .* of 2 sequences, got shape \(1, 2\)"),
        ({"mask": BIAS}, "mask must be bool, got float32: what is added to scores is a bias"),
        ({"mask": MASK[:, :9]}, r"mask must be .* \[batch, num_heads, .*\(2, 4, 6, 10\), got shape \(6, 9\)"),
        ({"mask": MASK[None, None, None]}, r"mask must be broadcastable to .* got shape \(1, 1, 1, 6, 10\)"),
        ({"bias": BIAS.half()}, "bias must have q's dtype float32, got float16"),
        ({"bias": BIAS.expand(3, 1, 6, 10)}, r"bias must be broadcastable to .* got shape \(3, 1, 6, 10\)"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(2,\)"),
        ({"sinks": torch.ones(4).half()}, "sinks must be float32 or of the tensors' dtype .* got float16"),
        ({"sinks": torch.ones(2)}, r"sinks must have shape \(4,\), got \(2,\)"),
        ({"dropout_p": 0.1, "dropout_seed": ints(3)}, r"dropout_seed must be int64 of shape .* int32 of shape \(1,\)"),
        ({"block_mask": (*BLOCKS[:2], (0, 4))}, r"block_mask must have blocks of at least 1 query and 1 key"),
        ({"block_mask": (BLOCKS[0].long(), *BLOCKS[1:])}, "block_counts must be int32, got int64"),
        ({"block_mask": (BLOCKS[0][..., :1], *BLOCKS[1:])}, r"block_counts .* query blocks, got \(1, 1, 1\)"),
        ({"block_mask": (BLOCKS[0], BLOCKS[0], (4, 4))}, r"block_indices must have .* entries at most\] .*"),
        ({"block_mask": (BLOCKS[0].expand(1, 3, 2), *BLOCKS[1:])}, r"block_counts must .* got \(1, 3, 2\)"),
    ],
    ("by position", TypeError): [
        ({"more": x}, f"q, k and v by position .* by name.* got {3 + len(x)} po") for x in ((True,), (None, 0.1, True))
    ],
    ("sdpa", TypeError): [({"softmax_scale": 1.0}, "softmax_scale")],
    ("sdpa", ValueError): [
        ({"out": S[0]}, r"out must have shape \(2, 4, 5, 16\), got \(4, 5, 16\)"),
        ({"query": SIDE_BY_SIDE, "out": S}, r"out must have shape \(3, 2, 2, 4, 5, 16\), got \(2, 4, 5, 16"),
        ({"query": SIDE_BY_SIDE, "out": SIDE_BY_SIDE}, "out .* leading .* in memory as one, got strides"),
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.float16)}, "attn_mask must be .* float32, got float16"),
        ({"attn_mask": torch.zeros(2, 1, 4, 5)}, r"attn_mask must be .* 5, 5\), .* got shape \(2, 1, 4, 5\)"),
        ({"attn_mask": torch.zeros(1, 1, 1, 5, 5)}, r"attn_mask must .* 5\), .* got shape \(1, 1, 1, 5, 5\)"),
        ({"attn_mask": torch.zeros(5, 5), "is_causal": True}, "attn_mask and is_causal exclude each other"),
        ({"query": S[0, 0, 0]}, r"query .* least 2 dimensions, \[..., seqlen, head_dim\], got shape \(16,\)"),
        ({"key": S[0, 0], "enable_gqa": True}, r"key must have at least .* head_dim\], got shape \(5, 16\)"),
        ({"key": S[:, :3], "value": S[:, :3], "enable_gqa": True}, "heads that divides query's 4, got 3"),
        ({"value": S[:, :2], "enable_gqa": True}, "value must have key's num_heads 4, got 2"),
        ({"query": torch.randn(3, 4, 5, 16)}, r"dimensions that broadcast, .*\(enable_gqa=True lets key"),
        ({"query": torch.randn(3, 4, 5, 16), "enable_gqa": True}, r"dimensions that broadcast, got .* 16\)$"),
    ],
    ("attention", NotImplementedError): [
        ({"q": JAGGED, "k": NESTED}, "k is a nested tensor, .* takes jagged q"),
        ({"q": NESTED, "layout": "bhsd", "softcap": 1.0}, "q is a nested tensor"),
        ({"q": LEAF, "cache_batch_idx": ints(0, 1)}, "no backward yet with cache_b"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "no backward yet for alibi_slopes: pass it de"),
    ],
    ("forward", NotImplementedError): [({"key": QUANTIZED}, "key is quant")],
    ("forward", TypeError): [({"query": None, "key": None, "value": None}, "query must be a torch.Tensor")],
    ("cascade", TypeError): [({"window": (3, 0)}, "cascade_attention.* 'window': help")],
    ("rotary", TypeError): [
        ({"positions": x}, r"positions must be an int32 .*\[batch\] or an int") for x in (1.0, True)
    ],
    ("rotary_qk", TypeError): [({"offsets": 1.0}, "offsets must be an int, an int32 tensor .* got float")],
    ("rotary_qk", ValueError): [
        ({"q": Q[0, 0]}, r"q must have shape \[batch, .*\] or \[total, .* got \(4, 16\)"),
        ({"k": NEW6[0]}, r"k must have q's 4 dimensions, got shape \(6, 2, 16\)"),
        ({"k": NEW}, r"k must have q's shape but for the heads, \(2, 6\) and head_dim 16"),
        ({"sin": None}, "cos and sin go together"),
        ({"inv_freq": WEIGHT[:8]}, "pass one of the two"),
        ({"cos": None, "sin": None}, "nothing to rotate by: pass cos and sin, or inv_freq"),
        ({"cos": None, "sin": None, "inv_freq": WEIGHT}, "inv_freq must be float32, of at most half of q's"),
        ({"cos": None, "sin": None, "inv_freq": COS}, r"inv_freq must have 1 dimensions"),
        ({"offsets": 7}, "rotary_cos has positions 0 to 11, and a row has position 12"),
        ({"offsets": 2**31}, "offsets must fit in 32 bits, got 2147483648"),
        ({"inplace": True, "out": (Q, NEW6)}, "inplace and out exclude each other"),
        *[({"offsets": x, "positions": TWELVE}, "offsets and positions exclude each other") for x in (1, ints(0, 1))],
        ({"positions": ints(0, 1)}, r"positions must be int32 with a number for each row, \(2, 6\)"),
        ({"cu_seqlens": CU_Q}, "q must be packed"),
        ({"k": NEW6[..., :1, :].expand_as(NEW6), "inplace": True}, "k is written to, and must neither be"),
    ],
    ("qk_norm_rope", ValueError): [
        ({"eps": -1.0}, "eps must be 0 or more, and finite, got -1.0"),
        ({"weight_offset": math.inf}, "weight_offset must be finite, got inf"),
        ({"q_weight": WEIGHT[:8]}, r"q_weight must have shape \(16,\), as q's heads, got \(8,\)"),
        ({"q_weight": WEIGHT.half()}, "q_weight must have q's dtype float32 or float32, got float16"),
        ({"v": NEW6}, "v is for a cache: k_cache, v_cache, v and cache_seqlens go together"),
        ({"cos": None, "sin": None, "offsets": 1}, "offsets and positions are for angles"),
    ],
    ("norm append", ValueError): [
        ({"v": None}, "v is None, and k_cache, v_cache, v and cache_seqlens go together"),
        ({"cache_seqlens": 5}, "leave room for 6 new rows among the 10 .* got 5"),
        ({"v": NEW6[..., :8]}, r"v must have v_cache's heads and head_dim \(2, 16\)"),
        ({"cos": COS[:9], "sin": COS[:9], "cache_seqlens": 4}, "rotary_cos has positions 0 to 8, and"),
        ({"page_table": TABLE, "cache_batch_idx": ints(0, 1)}, "page_table and cache_batch_idx exclude"),
    ],
    ("norm append", NotImplementedError): [({"q": LEAF}, "no backward of qk_norm_rope with a")],
    ("rotary_qk", NotImplementedError): [
        ({"q": LEAF, "inplace": True}, "inplace is not taken where a gradient is wanted"),
        ({"q": LEAF, "sin": COS.clone().requires_grad_()}, "no backward yet for sin: pass it"),
    ],
    ("packed rotary", ValueError): [
        ({"x": Q}, r"x must have 3 dimensions, \[total, num_heads, head_dim\], got shape"),
        ({"cu_seqlens": CU_K[0], "positions": 0}, r"cu_seqlens must have shape \[batch \+ 1\], got \(\)"),
    ],
    ("append", TypeError): [
        *[({"cache_seqlens": x}, f"cache_seqlens must be .* got {type(x).__name__}") for x in (True, 3.0)],
        ({**TURNED, "rotary_seqlens": [1]}, r"rotary_seqlens must be an int32 tensor .* or an int, got list"),
    ],
    ("append", ValueError): [
        ({"cache_seqlens": 2**70}, "cache_seqlens must"),
        ({"cache_seqlens": 9}, "cache_seqlens must leave room for 2 new rows"),
        ({"cache_seqlens": ...}, "cache_seqlens is None"),
        ({"v": ...}, "k and v go together"),
        ({"k": None, "v": None, "cache_seqlens": -1}, "leave room for 0 new rows among the 10 .* got -1"),
        ({**TURNED, "cache_seqlens": 8}, "rotary_cos has positions 0 to 8, and a row has position 9"),
        ({**TURNED, "rotary_seqlens": 8}, "rotary_cos has positions 0 to 8, and a row has position 9"),
        ({**TURNED, "cache_seqlens": 4, "causal": True}, "rotary_cos has positions 0 .* row has position 9"),
        ({**TURNED, "rotary_seqlens": 2**31}, "rotary_seqlens must fit in 32 bits, got 2147483648"),
    ],
    ("packed append", ValueError): [
        ({"q": Q}, r"q must have 3 dimensions, \[total_q, num_heads, head_dim\], got shape \(2, 6, 4, 16\)"),
        ({"k": NEW}, r"k must have 3 dimensions, \[total_q, num_heads_kv, head_dim\], got shape"),
        ({"k": PACKED_NEW[1:]}, "k must be packed as q, with 4 rows, got 3: cu_seqlens_q is about both"),
        ({"v": NEW}, r"value must have 3 dimensions, \[total_q, num_heads_kv, head_dim\]"),
        ({"cu_seqlens_q": CU_Q[None]}, r"cu_seqlens_q must have shape \[batch \+ 1\], got \(1, 3\)"),
        ({"cu_seqlens_q": ints(0, 4), "cache_seqlens": 3}, "k_cache must have cu_seqlens_q's batch size 1"),
        ({"max_seqlen_k": 4, "cache_seqlens": ..., "k": ..., "v": ...}, "max_seqlen_k is only taken with"),
        ({"cu_seqlens_q": ...}, "q must have 4 dimensions"),
    ],
    ("packed append_kv_", ValueError): [
        ({"key": NEW}, r"key must have 3 dimensions, \[total_q, num_heads_kv, head_dim\]"),
        ({"query": PACKED["q"], **TURNED}, "query must have key's total_q 4 and head_dim 16, got 12 and 16"),
        ({"query": Q, **TURNED}, r"query must have 3 dimensions, \[total_q, num_heads, head_dim\]"),
    ],
    ("with_kv_cache", ValueError): [
        ({"max_seqlen_q": 4}, "max_seqlen_q is only taken with cu_seqlens_q"),
        ({"rotary_cos": COS}, "rotary embedding is of k and v that are appended"),
    ],
    ("cascade", ValueError): [({"k_shared": K}, r"k_shared must have 3 dimensions, \[seqlen_shared, num_heads_kv")],
    ("merge_states", ValueError): [
        ({"out": OUT[..., :8]}, r"out must have shape \(2, 6, 4, 16\), got \(2, 6, 4, 8\)"),
        ({"o_a": torch.tensor(1.0)}, r"o_a must have shape .* got \(\)"),
        ({"o_b": Q[..., :8]}, r"o_b must have o_a's shape \(2, 6, 4, 16\), got \(2, 6, 4, 8\)"),
        ({"o_a": Q.int(), "o_b": Q.int()}, "o_a must be float16 or"),
    ],
    ("rotary", ValueError): [
        ({"positions": 99}, "rotary_cos has positions 0 to 11, and a row has position 104"),
        ({"cos": torch.ones(12, 17), "sin": torch.ones(12, 17)}, "half of x's head_dim 16 .* 17"),
        ({"cos": COS[0]}, "rotary_cos must have 2 dimensions"),
        ({"cos": COS[:11]}, r"rotary_sin must have rotary_cos's shape \(11, 8\)"),
        ({"sin": COS.half()}, "rotary_sin must have x's dtype float32 or float32, got float16"),
        ({"x": torch.randn(2, 13, 4, 16)}, "rotary_cos must have a position for each of x's 13 rows, got 12"),
    ],
    ("forward", ValueError): [({"value": V[:, :3]}, "value must have key's seqlen 10, got 3")],
    ("backward", ValueError): [({"key": K[:, :, :1]}, "value must have key's")],
    ("nn.SwiGLU", ValueError): [({"activation": "relu"}, "activation must be 'silu'")],
    ("nn.Attention", ValueError): [
        *[({"num_heads_kv": n}, f"num_heads must be a multiple of num_heads_kv {n}") for n in (3, 0)],
        ({"embed_dim": 15}, "embed_dim must be a multiple of num_heads 4"),
    ],
    ("attend", ValueError): [
        ({"dropout_p": 0.1}, "dropout_p is only taken with dropout_seed"),
        ({"block_counts": BLOCKS[0]}, "block_counts is only taken with block_indices"),
        ({"block_indices": BLOCKS[1], "block_m": 4, "block_n": 4}, "block_indices is .* with block_counts"),
        ({"sinks": torch.ones(4).half()}, "sinks must be float32, got float16"),
    ],
    ("explain", TypeError): [
        ({"out": OUT}, "out is where a call writes to, which is none of its problem: leave it out"),
        ({"features": ("bias",)}, "features and head_dim_v describe a shape"),
        ({"shape": (1, 2, 3, 4)}, "explain takes tensors or a shape, got both"),
        ({"q": ...}, "explain needs q, k and v, or a shape"),
        ({"is_causal": True}, "unexpected keyword argument 'is_causal': pass causal=True"),
    ],
    ("set_deterministic_workspace", ValueError): [({"size": -2}, "size must be 0 bytes or more, or None, got -2")],
    ("set_deterministic_workspace", TypeError): [({"size": 1.5}, "size must be an int, got float")],
    ("explain", ValueError): [
        ({"backward": True, "measure": True}, "explain measures no backward"),
        ({"device": 99}, "device cuda:99 does not exist"),
        ({"arch": 75}, "arch must be one of 80, 86, 87, 89, 90, 120, 121, got 75"),
    ],
    ("shape", ValueError): [
        ({"shape": (1, 2, 3)}, r"four sizes \(batch, seqlen_q, num_heads, head_dim\), got \(1, 2, 3\)"),
        *[({"shape": x}, "shape must be four sizes") for x in (3, (1, 2, 3, True), (1, 2, 3, "4"), (1, 1, 1, -64))],
        ({"head_dim_v": 0}, "head_dim_v must be at least 1, got 0"),
        *[({"num_heads_kv": n}, f"num_heads_kv must divide num_heads 4, got {n}") for n in (3, 0)],
        ({"features": ["biases"]}, "features must be among window, mask, .*, got 'biases'"),
        ({"page_size": 24}, "a problem must have pages of a multiple of 16 keys, got 24"),
        ({"block_size": (64, 0)}, "block_size must have sides of at least 1"),
        ({"num_splits": 1000}, "num_splits must be 1 to 64"),
        ({"alignment": 3}, "alignment must be 1, 2, 4, 8 or 16 bytes, got 3"),
        ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, .*, got 'int8'"),
        ({"row": 3}, "3 is not a row"),
        ({"seqlen_k": -1}, "seqlen_k must be at least 0, got -1"),
        ({"seqlen_k": 2**29 + 1}, r"a seqlen must be 2\*\*29 at most, got 536870913"),
        ({"shape": (1, 1, 4, 0)}, "head_dim must be at least 1, got 0"),
        *[({"device": x}, f"device must be cuda, .* got '{x}'") for x in ("gtx1080", "sm_75")],
        ({"device": "cuda:99"}, r"device cuda:99 does not exist: there are \d+ CUDA devices"),
        ({"device": ..., "arch": 89, "sm_count": 0}, "sm_count must be at least 1, got 0"),
    ],
    ("shape", TypeError): [
        ({"features": 3}, "features must be names"),
        ({"window": ("a", 3)}, "window_left must be an int or None, got str"),
        ({"softcap": 3.0}, "explain got 'softcap', which says nothing of a shape"),
        ({"sm_count": 4}, "takes arch with or without sm_count, or device, but not both"),
    ],
    ("dropout_mask", ValueError): [
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
        ({"num_heads": -1}, "num_heads must be 0 or more, got -1"),
        ({"dropout_seed": 2**63}, "dropout_seed must fit in 64 bits, got 9223372036854775808"),
        ({"dropout_seed": torch.tensor(3)}, r"dropout_seed must be int64 of shape \(1,\), got"),
    ],
    ("dropout_mask", TypeError): [
        ({"seqlen_q": 2.0}, "seqlen_q must be an int, got float"),
        ({"dropout_seed": None}, "dropout_seed must be an int or a torch.Tensor, got NoneType"),
    ],
    ("cascade", NotImplementedError): [({"k": K.clone().requires_grad_()}, "no backward yet")],
    **{
        (name, NotImplementedError): [({x: BAD[name][1][x].clone().requires_grad_()}, "no backward yet")]
        for name, x in (("merge_states", "o_a"), ("append_kv_", "key"), ("rotary", "x"))
    },
    ("append_kv_", ValueError): [
        ({"v_cache": K[:, :9]}, r"v_cache must have k_cache's shape but for .* \(2, 10, 2\)"),
        ({"value": NEW[:, :1]}, "value must have key's shape but for the last dimension"),
        ({"value": NEW[..., :8]}, r"v_cache's heads and head_dim \(2, 16\), got \(2, 8\)"),
        ({"k_cache": K[:1], "v_cache": V[:1]}, "batch size 2 without cache_batch_idx, got 1"),
        ({"k_cache": K[:1].expand(2, -1, -1, -1)}, "k_cache is written to and must not"),
        ({"page_table": TABLE[0]}, "page_table must have 2 dimensions"),
        ({"page_table": TABLE[:1]}, "page_table must be int32 with a row for"),
        ({"page_table": TABLE}, "k_cache must have pages of a multiple of 16 keys, got 10"),
        ({"page_table": TABLE, "cache_batch_idx": ints(0, 1)}, "exclude each other"),
        ({"rotary_cos": COS}, "rotary_cos and rotary_sin go together"),
        ({"query": Q}, "query and rotary_seqlens are for rotary embedding"),
        ({"query": Q[..., :8], "rotary_cos": COS, "rotary_sin": COS}, "head_dim 16"),
        ({"query": torch.randn(2, 13, 4, 16), "rotary_cos": COS, "rotary_sin": COS}, "13 rows, got 12"),
        ({"rotary_cos": COS[:1], "rotary_sin": COS[:1]}, "rotary_cos must have a position for each .* got 1"),
    ],
}

#: By what tensors hold and where they are.
REFUSED_ON_CPU: Refusals = {
    ("sdpa", ValueError): [
        (OF_HEADS | {"key": TWO_HEADS, "value": TWO_HEADS}, r"same batch .* \(2, 4, j\d+, 16\), .*enable_gqa"),
        (OF_HEADS | {"attn_mask": torch.ones(5, 5)}, "attn_mask must be broadcastable to"),
        (dict.fromkeys(OF_HEADS, JAGGED), r"query must be .* head_dim\] whose seqlen is jagged, got .*\(2, j"),
    ],
    ("attention", ValueError): [
        (DOCUMENTS | {"layout": "bhsd"}, "q must be a jagged tensor .* whose seqlen is jagged, got shape"),
        (DOCUMENTS | {"k": FEWER, "v": FEWER}, "k must have q's batch size 2, got 3"),
        (DOCUMENTS | {"v": OTHERS}, r"v must have k's sequences: .*nested_tensor_from_jagged\(values, k.off"),
        *[(DOCUMENTS | {"v": v}, "v must have k's sequences") for v in (HOLES, JAGGED.values())],
        (DOCUMENTS | {"out": OUT}, "out is not taken with jagged tensors: pass their values"),
        (DOCUMENTS | {"cu_seqlens_k": CU_K}, "cu_seqlens_k is not taken with jagged tensors, which say it"),
        (dict.fromkeys("qkv", HOLES) | {"seqused_q": ints(1, 1)}, "seqused_q is not taken with jagged"),
        (DOCUMENTS | {"max_seqlen_k": 4}, "max_seqlen_k is 4, and cu_seqlens_k has a sequence of 5"),
        ({"q": IMAGINARY, "k": IMAGINARY, "v": IMAGINARY}, "q must be float16 or bfloat16 .* got complex64"),
        ({**VARLEN, "cu_seqlens_k": ints(0, 10, 9)}, r"cu_seqlens_k must rise from 0 to .* got \[0, 10, 9\]"),
        ({**VARLEN, "max_seqlen_q": 5}, "max_seqlen_q is 5, and cu_seqlens_q has a sequence of 6"),
        ({"seqused_k": ints(3, 6), "max_seqlen_k": 5}, "max_seqlen_k is 5, and seqused_k has a sequence of"),
        ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must hold numbers of 0 to 1, got 2"),
        ({**PAGES, "page_table": TABLE + 1}, "page_table must hold numbers of 0 to 3, got 4"),
        ({**PAGES, "page_table": TABLE - 1, "seqused_k": ints(5, 5)}, "page_table must hold .* got -1"),
        ({"block_mask": (BLOCKS[0] * 4, *BLOCKS[1:])}, "block_counts must hold numbers of 0 to 3, got 4"),
        ({"block_mask": (BLOCKS[0] * 2, *BLOCKS[1:])}, "block_indices must ascend"),
        ({"block_mask": (BLOCKS[0], BLOCKS[1] - 1, (4, 4))}, "block_indices .* numbers of 0 or more, got -1"),
    ],
    ("arrays", TypeError): [
        ({"k": [1.0]}, "k must be a torch.Tensor, got list"),
        ({"out": np.zeros(1)}, "out is not taken where q is a numpy.ndarray"),
        ({"k": Opaque()}, "k, a .*Opaque, can't be shared by DLPack: this memory is not for others"),
        ({"q": Closed()}, "whose library has no from_dlpack to take the result with"),
        ({"k": K.half().requires_grad_()}, "k requires a gradient, and q is"),
        ({"k": K.numpy()[:, ::-1]}, "k, a numpy.ndarray, has a negative stride"),
        ({"q": np.ma.zeros(Q.shape, "f")}, "q, a numpy.ma array, may hide elements: pass q.filled"),
        ({"mask": np.ma.zeros((6, 10), bool)}, "mask, a numpy.ma array, may hide elements"),
        ({"q": np.zeros(Q.shape, "U1")}, "q, a numpy.ndarray, can't be shared by DLPack: "),
    ],
    ("a norm", ValueError): [
        ({"x": Q}, r"x must end in \(3, 8\), .* \(2, 6, 4, 16"),
        ({"x": torch.zeros(3, 8).int()}, "x must be float16"),
    ],
    ("a layer", TypeError): [({"layout": "bhsd"}, "layout is not for a layer")],
    ("a layer", ValueError): [({"x": S[0, 0]}, r"x must have 3 dimensions, \[batch, seqlen, ")],
    ("merge_states", ValueError): [({"out": OUT, "lse": OUT.flatten()[:48].view(LSE.shape)}, "lse .* memory with out")],
    ("append", ValueError): [({"q": Q[:, :4], "out": K[:, :8].view(2, 4, 4, 16)}, "out .* memory with k_cache")],
    ("rotary", ValueError): [({"positions": ints(0, 99)}, "has positions 0 to 11, and a row has position 104")],
    ("packed append", ValueError): [
        ({"cache_seqlens": 8}, "leave room for 3 new rows among the 10 .* got 8"),
        ({**TURNED, "cache_seqlens": 7}, "rotary_cos has positions 0 to 8, and a row has position 9"),
    ],
    ("append_kv_", ValueError): [
        ({"cache_seqlens": ints(3, 9)}, "leave room for 2 new rows among the 10 .* got 9"),
        *[({**POOL, "page_table": TABLE + n}, "page_table must name one of the cache's 4") for n in (9, -9)],
        ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must name one of the cache's 2"),
    ],
}

#: What functions refuse alike: the error, what an argument must be, another or what makes one of it, and whose it is.
ALIKE: Alike = [
    # Whose contents are not shown.
    (TypeError, "must be .*got ndarray", ARRAY, {
        "attention": "k bias return_lse scale window out", "append": "v cache_seqlens page_table rotary_cos",
        "cascade": "q", "merge_states": "o_b", "rotary": "cos interleaved", "sdpa": "query is_causal",
    }),
    (TypeError, "must be a torch.Tensor, got NoneType", None, {
        "attention": "q", "sdpa": "query", "forward": "query", "attend": "value", "with_kv_cache": "v_cache",
        "cascade": "k_shared", "merge_states": "lse_a", "rotary": "sin", "rotary_qk": "k",
    }),
    (TypeError, "must be a torch.Tensor or None, got list", [1], {
        "attention": "out cu_seqlens_q", "sdpa": "attn_mask", "rotary_qk": "positions", "append": "page_table",
        "qk_norm_rope": "k_weight", "packed append": "cu_seqlens_q", "packed rotary": "cu_seqlens",
    }),
    (TypeError, "must be a bool, got int", 1, {
        "attention": "batch_invariant return_lse", "sdpa": "is_causal", "with_kv_cache": "return_lse",
        "cascade": "return_lse", "rotary": "interleaved", "rotary_qk": "inplace interleaved",
        "append": "rotary_interleaved",
    }),
    (TypeError, "must be a float, got str", "1", {
        "attention": "softcap", "sdpa": "dropout_p", "qk_norm_rope": "eps", "dropout_mask": "dropout_p",
    }),
    (TypeError, "must be an int or None, got float", 2.0, {
        "attention": "num_splits", "shape": "seqlen_k num_heads_kv head_dim_v page_size",
        "explain": "deterministic_workspace",
    }),
    (TypeError, "must be a pair", 3, {"explain": "window", "append": "window", "shape": "window block_size"}),
    (ValueError, "must be float32, as the result is, got float16", OUT.half(), {
        "attention": "out", "append": "out", "cascade": "out", "rotary": "out",
    }),
    (ValueError, 'must be False, True, "none", "top-left" or "bottom-right", got .left', "left", {
        "attention": "causal", "append": "causal", "cascade": "causal", "shape": "causal",
    }),
    (ValueError, 'must be "bshd" or "bhsd", got .sbhd', "sbhd", {"attention": "layout", "shape": "layout"}),
    (ValueError, 'must be "none", "top-left" or "bottom-right", got .left', "left", {
        "forward": "causal", "attend": "causal", "backward": "causal",
    }),
    (ValueError, "must be contiguous in its last dimension", in_every_second_place, {
        "attention": "k", "features": "v out lse", "forward": "value", "merge_states": "o_a",
        "paged": "page_table",
    }),
    (ValueError, "must be contiguous: pass", in_every_second_place, {
        "features": "sinks cache_batch_idx seqused_k", "append_kv_": "cache_seqlens", "packed append": "cu_seqlens_q",
        "varlen": "cu_seqlens_q cu_seqlens_k",
    }),
    (ValueError, "must be float32.* got float64", LSE.double(), {
        "features": "lse alibi_slopes sinks", "merge_states": "lse_a", "backward": "softmax_lse",
    }),
    (ValueError, "must be float16 or", Tensor.int, {"rotary": "x"}),
    (ValueError, r"must have shape \(2, 6, 4, 16\), got \(2, 6, 4\)", Q[..., 0], {
        "attention": "out", "backward": "dout output", "append": "out", "merge_states": "out",
    }),
    (ValueError, r"must have shape \(2, 4, 6\),.* got \(1, 4, 6\)", LSE[:1], {
        "features": "lse", "append": "lse", "merge_states": "lse_b", "backward": "softmax_lse dlse",
    }),
    (ValueError, "must have [24] dimensions", torch.tensor(1.0), {"append": "k rotary_cos"}),
    (ValueError, "must be finite and of magnitude", math.nan, {
        "sdpa": "scale", "forward": "scale", "attend": "scale", "backward": "scale",
    }),
    (ValueError, "must be int32,? .*got int64", torch.tensor([0, 1]), {
        "attention": "seqused_k", "append": "cache_seqlens", "append_kv_": "cache_seqlens", "rotary": "positions",
        "packed rotary": "cu_seqlens", "packed append": "cu_seqlens_q", "varlen": "cu_seqlens_q", "paged": "page_table",
    }),
    (ValueError, r"must have shape \(2,\), got \(1,\)", ints(0), {
        "attention": "seqused_q leftpad_k prefix_lengths", "with_kv_cache": "cache_seqlens", "rotary_qk": "offsets",
        "append_kv_": "cache_seqlens", "rotary": "positions",
    }),
    (ValueError, "must have 4 dimensions", Q[0], {"with_kv_cache": "q", "cascade": "q", "rotary": "x"}),
    (ValueError, "must have q's dtype float32, got float16", Tensor.half, {
        "attention": "k v", "explain": "k", "rotary_qk": "k", "norm append": "k", "with_kv_cache": "k_cache",
    }),
    (ValueError, "must have o_a's dtype float32, got float16", Tensor.half, {"merge_states": "o_b"}),
    (ValueError, "must have query's dtype float32, got float16", Tensor.half, {"sdpa": "key", "backward": "dout"}),
    (ValueError, "must have k_cache's dtype float32, got", Tensor.half, {"norm append": "v", "append_kv_": "key"}),
]  # fmt: skip

#: What no kernel takes, of arguments of every function.
STRANGE = {
    "attention": "q k mask bias sinks", "with_kv_cache": "q k_cache", "append": "k cache_seqlens rotary_cos",
    "cascade": "k_shared v", "merge_states": "o_a lse_b", "rotary": "x cos positions", "explain": "q",
    "forward": "query", "attend": "value", "sdpa": "query attn_mask",
}  # fmt: skip
ALIKE_ON_CPU: Alike = [
    (UnsupportedError, "fwd is a CUDA kernel, and the tensors are on the CPU", "fwd", {
        "attention": "row", "features": "row", "with_kv_cache": "row", "forward": "row",
    }),
    (ValueError, "must hold numbers of 0 or more, got -1", ints(3, -1), {
        "attention": "seqused_k seqused_q leftpad_k prefix_lengths",
    }),
    (ValueError, "must not share memory with (o_a|q|x), which is read or written in the same call", Q, {
        "merge_states": "out", "append": "out", "rotary": "out",
    }),
    (ValueError, r"must rise from 0 to (4|12) at most, got \[0, 6, 13\]", ints(0, 6, 13), {
        "varlen": "cu_seqlens_q", "packed append": "cu_seqlens_q", "packed rotary": "cu_seqlens",
    }),
    (ValueError, "must be on .* device cpu, got meta", lambda x: x.to("meta"), {
        "attention": "v", "features": "seqused_k", "backward": "dlse", "merge_states": "lse_b",
        "packed rotary": "cu_seqlens", "packed append_kv_": "cu_seqlens_q",
    }),
    (NotImplementedError, "is a nested tensor, which no kernel takes: pack", NESTED, STRANGE),
    (NotImplementedError, "must be a dense tensor, got the layout sparse_coo: pass", Q.to_sparse(), STRANGE),
]  # fmt: skip


def alike(table: Alike) -> list[tuple[str, dict[str, Any], str, type[Exception]]]:
    return [
        (name, {argument: x(BAD[name][1][argument]) if callable(x) else x}, f"^{argument} {what}", error)
        for error, what, x, functions in table
        for name, arguments in functions.items()
        for argument in arguments.split()
    ]


CALLS = [
    *[(name, *row, error) for (name, error), rows in REFUSED.items() for row in rows],
    *alike(ALIKE),
    *[("attention", {word: None}, f"'{word}': {re.escape(told)}", TypeError) for word, told in FOREIGN.items()],
    ("attention", {"windows": None}, r"'windows': help\(cutlass_fmha.attention\)", TypeError),
    ("with_kv_cache", {"softmax_scale": 1.0}, "'softmax_scale': pass scale", TypeError),
    ("with_kv_cache", {"block_table": None}, "'block_table': pass page_table", TypeError),
    ("with_kv_cache", {"dropout": 0.1}, r"'dropout': help\(cutlass_fmha.with_kv_cache\)", TypeError),
    ("cascade", {"sm_scale": 1.0}, "'sm_scale': pass scale", TypeError),
]
CALLS_ON_CPU = [(name, *row, error) for (name, error), rows in REFUSED_ON_CPU.items() for row in rows]
CALLS_ON_CPU += alike(ALIKE_ON_CPU)
