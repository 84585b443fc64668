"""Calls of all functions and ops whose arguments are wrong, or ``...``: left out. They are refused: by one of four
kinds of exception, whatever is passed, in a sentence."""

import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tensors import ints
from torch import Tensor
from torch.utils._pytree import tree_map

import cutlass_fmha as fmha
from cutlass_fmha import UnsupportedError, attention, nn, scaled_dot_product_attention
from cutlass_fmha.arguments.signature import FOREIGN
from cutlass_fmha.ops import dispatcher

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
NEW, NEW6 = (torch.randn(BATCH, n, HEADS_KV, DIM) for n in (2, 6))
PACKED_NEW = NEW.flatten(0, 1)
LSE, WIDE_LSE = torch.zeros(BATCH, HEADS, SEQLEN_Q), torch.zeros(BATCH, HEADS, SEQLEN_Q + 1)[..., :-1]
OUT, LEAF, WEIGHT = torch.zeros_like(Q), Q.clone().requires_grad_(), torch.randn(DIM)
UP, DOWN, OF_SIX = torch.randn(12, DIM), torch.randn(5, 6), torch.empty(2, 3, 1, 1, 9)[..., :8]
SIDE_BY_SIDE = torch.zeros(2, 3, 2, 4, 5, 16).transpose(0, 1)
LONG = torch.empty_strided((1, 2**29 + 1, 1, 16), (0, 0, 0, 1), device="meta")
LONG_PACKED = dict.fromkeys("qkv", LONG[0]) | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), CU_Q.to("meta"))

OPS = torch.ops.cutlass_fmha
CACHES, ANGLES = {"k_cache": K, "v_cache": V}, {"cos": COS, "sin": COS}
PACKING = {**CACHES, "cache_seqlens": ints(0, 3), "cu_seqlens_q": ints(0, 1, 4)}
CALL, RESULTS = {"q": Q, "k": K, "v": V}, {"out": OUT, "lse": LSE, "return_lse": True}
SAID = {"softcap": 1.0, "seqused_k": ints(1, 2), "cache_batch_idx": ints(0, 1)}
SAID |= dict.fromkeys(("alibi_slopes", "sinks"), torch.ones(4))
OUTPUTS = {"output": Q, "softmax_lse": LSE, "dlse": LSE}
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
    "rms_norm": (fmha.rms_norm, {"x": Q, "weight": WEIGHT}),
    "its backward": (lambda rstd: OPS.rms_norm_backward(Q, None, Q, None, None, rstd, 0.0), {"rstd": LSE}),
    "swiglu": (fmha.swiglu, {"gate": Q, "up": Q}),
    "geglu": (fmha.geglu, {"gate": Q, "up": Q}),
    "silu_and_mul": (fmha.silu_and_mul, {"x": Q}),
    "gated": (OPS.gated, {"gate": Q, "up": None, "activation": "silu"}),
    "gated_backward": (OPS.gated_backward, {"dout": Q, "gate": Q, "up": None, "activation": "silu"}),
    "swiglu_mlp": (fmha.swiglu_mlp, {"x": Q, "w_gate_up": UP, "w_down": DOWN}),
    "dropout_mask": (
        fmha.dropout_mask,
        {"batch": 1, "num_heads": 1, "seqlen_q": 1, "seqlen_k": 1, "dropout_seed": 1, "dropout_p": 0.5},
    ),
    "set_deterministic_workspace": (fmha.set_deterministic_workspace, {}),
    "nn.SwiGLU": (nn.SwiGLU, {"in_features": 4, "hidden_features": 4}),
    "nn.Attention": (nn.Attention, {"embed_dim": 16, "num_heads": 4}),
    "a norm": (nn.RMSNorm((3, 8)), {"x": torch.randn(3, 8)}),
    "a layer": (nn.Attention(16, 2), {"x": S[0]}),
    "explain": (fmha.explain, CALL),
    "shape": (fmha.explain, {"shape": (1, 8, 4, 64), "device": "l4"}),
    "backward": (OPS.attend_backward, {"dout": Q, **OP, **OUTPUTS, "return_lse": ...}),
    **{name: (getattr(OPS, name), OP) for name in ("forward", "attend")},
}


class Opaque:
    """An array, of which no memory is to be had, of a library that takes none."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self) -> Any:
        raise BufferError("this memory is not for others")

    def __array_namespace__(self) -> Any:
        return object()


def in_every_second_place(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1).flatten(-2)[..., ::2]


Call = tuple[str, dict[str, Any], str, type[Exception]]
Alike = list[tuple[type[Exception], str, Any, dict[str, str]]]
Refusals = dict[str, list[tuple[Any, ...]]]

#: By what a call says and what tensors are like, on any device: what it says, and the error, if not a ValueError.
REFUSED: Refusals = {
    "attention": [
        ({"lse": LSE}, "lse is only taken with return_lse=True", TypeError),
        ({"row": 3}, "row must be the name of a row or None, got int", TypeError),
        ({"max_seqlen_k": True}, "max_seqlen_k must be an int or None, got bool", TypeError),
        *[({"dropout_p": p, "dropout_seed": 1.5}, "dropout_seed must be an int .* float", TypeError) for p in (0, 0.1)],
        ({"block_mask": BLOCKS[0]}, r"block_mask must be a triple \(block_counts, .* got Tensor", TypeError),
        ({"block_mask": (*BLOCKS[:2], 64)}, r"block_mask must end with a pair \(block_m, block_n\), got 64", TypeError),
        ({"block_mask": (None, BLOCKS[1], (4, 4))}, "block_counts must be a torch.* got None", TypeError),
        ({"block_mask": (*BLOCKS[:2], (4, "4"))}, "block_n must be an int, got str", TypeError),
        ({"window": torch.tensor([1, 2])}, "window must be .* got Tensor: pass a mask, or num", TypeError),
        ({"window": [Q] * 9}, r"window must be .* got \[Tensor, .*, \.\.\.\]", TypeError),
        ({"out": OUT.as_strided(Q.shape, (64, 64, 16, 1))}, "out is written to, .* that share memory"),
        ({"lse": WIDE_LSE, "return_lse": True, "softcap": 1.0}, r"lse must be contiguous.* \(28, 7, 1\)"),
        ({"k": K[0], "layout": "bhsd", "softcap": 1.0}, r"k .* 4 .* \[batch, num_heads, seqlen, head_dim"),
        ({"v": V[:1]}, "v must have q's batch size 2, got 1"),
        ({"k": K[..., :8]}, r"k must have q's head_dim \(last dimension\) 16, got 8"),
        *[({x: Q[..., :0]}, rf"{x} must have a head_dim \(last dimension\) of at least 1, got 0") for x in "qv"],
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
        *[({"window": x}, r"must be -1 \(no limit\) or 0 to 2\*\*29, got [-5]") for x in ((-2, 3), (3, 2**29 + 1))],
        *[({"softcap": x}, rf"softcap must be 0 \(none\) or positive, .* got {x}") for x in (math.inf, math.nan)],
        *[({"dropout_p": x}, f"dropout_p must be at least 0 and less than 1, got {x}") for x in (1.0, -0.1)],
        ({"q": LONG[:, :1], "k": LONG, "v": LONG}, r"k must have a seqlen of 2\*\*29 at most, got 536870913$"),
        ({**LONG_PACKED, "max_seqlen_k": 9}, r"q must have a seqlen of 2\*\*29 at most, got 536870913: pass"),
        ({"num_splits": 0}, "num_splits must be 1 to 64 .* None has a number chosen"),
        ({"dropout_p": 0.1, "dropout_seed": 2**63}, "dropout_seed must fit .* bits, got 9223372036854775808"),
        ({**PACKED, "softcap": 1.0}, r"q .* 4 dimensions, \[batch, seqlen, num_heads, head_dim\], got shape"),
        ({"softcap": 1.0, "k": K[:1], "v": V[:1]}, "k must have q's batch size 2, got 1"),
        ({**PACKED_Q, "cu_seqlens_q": ints(0, 5, 6, 12)}, "k must have cu_seqlens_q's batch size 3, got 2"),
        *[({**PAGES, "k": K[:, :n], "v": V[:, :n]}, f"k must .* multiple of 16 keys, got {n}") for n in (0, 10)],
        ({**VARLEN, "cu_seqlens_q": ints()}, r"cu_seqlens_q must have shape \[batch \+ 1\], got \(0,\)"),
        ({"v": V[0], "page_table": TABLE, "k": PAGED["k"]}, r"v must have 4 dimensions, \[pages, page size,"),
        ({**PAGES, "page_table": TABLE[0]}, r"page_table must have 2 .* \[batch, pages\], got shape \(2,\)"),
        ({**PAGES, "page_table": TABLE[:1]}, r"page_table must have a .* of 2 sequences, got shape \(1, 2\)"),
        ({"mask": BIAS}, "mask must be bool, got float32: what is added to scores is a bias"),
        *[({"mask": x}, r"mask must be broad.*\(2, 4, 6, 10\)") for x in (MASK[:, :9], MASK[None, None, None])],
        ({"bias": BIAS.half()}, "bias must have q's dtype float32, got float16"),
        ({"sinks": torch.ones(4).half()}, "sinks must be float32 or of the tensors' dtype .* got float16"),
        *[({"dropout_p": p, "dropout_seed": ints(3)}, r"dropout_seed must be int64 .* int32 of sh") for p in (0, 0.1)],
        ({"block_mask": (*BLOCKS[:2], (0, 4))}, r"block_mask must have blocks of at least 1 query and 1 key"),
        ({"block_mask": (BLOCKS[0].long(), *BLOCKS[1:])}, "block_counts must be int32, got int64"),
        ({"block_mask": (BLOCKS[0][..., :1], *BLOCKS[1:])}, r"block_counts .* query blocks, got \(1, 1, 1\)"),
        ({"block_mask": (BLOCKS[0], BLOCKS[0], (4, 4))}, r"block_indices must have .* entries at most\] .*"),
        ({"block_mask": (BLOCKS[0].expand(1, 3, 2), *BLOCKS[1:])}, r"block_counts must .* got \(1, 3, 2\)"),
        ({"q": JAGGED, "k": NESTED}, "k is a nested tensor, .* takes jagged q", NotImplementedError),
        ({"q": LEAF, "cache_batch_idx": ints(0, 1)}, "no backward yet with cache_b", NotImplementedError),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "no backward yet for al", NotImplementedError),
    ],
    "by position": [({"more": (None, 0.1, True)}, "q, k and v by position .* by name.* got 6 positional", TypeError)],
    "sdpa": [
        ({"out": S[0]}, r"out must have shape \(2, 4, 5, 16\), got \(4, 5, 16\)"),
        ({"query": SIDE_BY_SIDE, "out": S}, r"out must have shape \(3, 2, 2, 4, 5, 16\), got \(2, 4, 5, 16"),
        ({"query": SIDE_BY_SIDE, "out": SIDE_BY_SIDE}, "out .* leading .* in memory as one, got strides"),
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.float16)}, "attn_mask must be .* float32, got float16"),
        ({"attn_mask": torch.zeros(1, 1, 1, 5, 5)}, r"attn_mask must .* 5\), .* got shape \(1, 1, 1, 5, 5\)"),
        ({"attn_mask": torch.zeros(5, 5), "is_causal": True}, "attn_mask and is_causal exclude each other"),
        ({"query": S[0, 0, 0]}, r"query .* least 2 dimensions, \[..., seqlen, head_dim\], got shape \(16,\)"),
        ({"key": S[0, 0], "enable_gqa": True}, r"key must have at least .* head_dim\], got shape \(5, 16\)"),
        ({"key": S[:, :3], "value": S[:, :3], "enable_gqa": True}, "heads that divides query's 4, got 3"),
        ({"value": S[:, :2], "enable_gqa": True}, "value must have key's num_heads 4, got 2"),
        ({"query": torch.randn(3, 4, 5, 16)}, r"dimensions that broadcast, .*\(enable_gqa=True lets key"),
        ({"query": torch.randn(3, 4, 5, 16), "enable_gqa": True}, r"dimensions that broadcast, got .* 16\)$"),
    ],
    "forward": [
        ({"key": QUANTIZED}, "key is quant", NotImplementedError),
        ({"query": None, "key": None, "value": None}, "query must be a torch.Tensor", TypeError),
        ({"value": V[:, :3]}, "value must have key's seqlen 10, got 3"),
    ],
    "rotary": [
        ({"positions": True}, r"positions must be an int32 .*\[batch\] or an int", TypeError),
        ({"positions": 99}, "rotary_cos has positions 0 to 11, and a row has position 104"),
        ({"cos": torch.ones(12, 17), "sin": torch.ones(12, 17)}, "half of x's head_dim 16 .* 17"),
        ({"cos": COS[0]}, "rotary_cos must have 2 dimensions"),
        ({"cos": COS[:11]}, r"rotary_sin must have rotary_cos's shape \(11, 8\)"),
        ({"sin": COS.half()}, "rotary_sin must have x's dtype float32 or float32, got float16"),
        ({"x": torch.randn(2, 13, 4, 16)}, "rotary_cos must have a position for each of x's 13 rows, got 12"),
        ({"x": LEAF}, "no backward yet", NotImplementedError),
    ],
    "rotary_qk": [
        ({"q": Q[0, 0]}, r"q must have shape \[batch, .*\] or \[total, .* got \(4, 16\)"),
        ({"k": NEW6[0]}, r"k must have q's 4 dimensions, got shape \(6, 2, 16\)"),
        ({"k": NEW}, r"k must have q's shape but for the heads, \(2, 6\) and head_dim 16"),
        ({"sin": None}, "cos and sin go together"),
        ({"inv_freq": WEIGHT[:8]}, "pass one of the two"),
        ({"cos": None, "sin": None}, "nothing to rotate by: pass cos and sin, or inv_freq"),
        *[({"cos": None, "sin": None, "inv_freq": x}, y) for x, y in ((WEIGHT, "at most half of q's"), (COS, "1 dim"))],
        ({"offsets": 7}, "rotary_cos has positions 0 to 11, and a row has position 12"),
        ({"offsets": 2**31}, "offsets must fit in 32 bits, got 2147483648"),
        ({"inplace": True, "out": (Q, NEW6)}, "inplace and out exclude each other"),
        *[({"offsets": x, "positions": CU_Q}, "offsets and positions exclude each other") for x in (1, ints(0, 1))],
        ({"positions": ints(0, 1)}, r"positions must be int32 with a number for each row, \(2, 6\)"),
        ({"cu_seqlens": CU_Q}, "q must be packed"),
        ({"k": NEW6[..., :1, :].expand_as(NEW6), "inplace": True}, "k is written to, and must neither be"),
        ({"q": LEAF, "inplace": True}, "inplace is not taken where a gradient is wanted", NotImplementedError),
        ({"q": LEAF, "sin": COS.clone().requires_grad_()}, "no backward yet for sin: pass it", NotImplementedError),
    ],
    "qk_norm_rope": [
        ({"weight_offset": math.inf}, "weight_offset must be finite, got inf"),
        ({"q_weight": WEIGHT[:8]}, r"q_weight must have shape \(16,\), as q's heads, got \(8,\)"),
        ({"v": NEW6}, "v is for a cache: k_cache, v_cache, v and cache_seqlens go together"),
        ({"cos": None, "sin": None, "offsets": 1}, "offsets and positions are for angles"),
    ],
    "norm append": [
        ({"v": None}, "v is None, and k_cache, v_cache, v and cache_seqlens go together"),
        ({"cache_seqlens": 5}, "leave room for 6 new rows among the 10 .* got 5"),
        ({"cos": COS[:9], "sin": COS[:9], "cache_seqlens": 4}, "rotary_cos has positions 0 to 8, and"),
        ({"q": LEAF}, "no backward of qk_norm_rope with a", NotImplementedError),
    ],
    "packed rotary": [({"cu_seqlens": CU_K[0], "positions": 0}, r"must have shape \[batch \+ 1\], got \(\)")],
    "append": [
        ({"cache_seqlens": 9}, "cache_seqlens must leave room for 2 new rows"),
        ({"cache_seqlens": ...}, "cache_seqlens is None"),
        ({"v": ...}, "k and v go together"),
        ({"k": None, "v": None, "cache_seqlens": -1}, "leave room for 0 new rows among the 10 .* got -1"),
        ({**TURNED, "rotary_seqlens": 8}, "rotary_cos has positions 0 to 8, and a row has position 9"),
        ({**TURNED, "cache_seqlens": 4, "causal": True}, "rotary_cos has positions 0 .* row has position 9"),
        ({**TURNED, "rotary_seqlens": 2**31}, "rotary_seqlens must fit in 32 bits, got 2147483648"),
    ],
    "packed append": [
        ({"k": PACKED_NEW[1:]}, "k must be packed as q, with 4 rows, got 3: cu_seqlens_q is about both"),
        ({"v": NEW}, r"value must have 3 dimensions, \[total_q, num_heads_kv, head_dim\]"),
        ({"cu_seqlens_q": ints(0, 4), "cache_seqlens": 3}, "k_cache must have cu_seqlens_q's batch size 1"),
        ({"max_seqlen_k": 4, "cache_seqlens": ..., "k": ..., "v": ...}, "max_.* is only taken with cache_seqlens"),
    ],
    "packed append_kv_": [
        ({"query": PACKED["q"], **TURNED}, "query must have key's total_q 4 and head_dim 16, got 12 and 16"),
        ({"query": Q, **TURNED}, r"query must have 3 dimensions, \[total_q, num_heads, head_dim\]"),
    ],
    "with_kv_cache": [({"rotary_cos": COS}, "rotary embedding is of k and v that are appended")],
    "rms_norm": [
        ({"weight": 3.0}, "weight must be a torch.Tensor or None, got float", TypeError),
        ({"out_dtype": "half"}, "out_dtype must be a torch.dtype or None, got str", TypeError),
        ({"x": torch.tensor(1.0)}, "x must have at least one dimension"),
        ({"x": Q[..., :0]}, r"x must have rows of 1 to 65536 elements, got shape \(2, 6, 4, 0\)"),
        ({"weight_offset": math.nan}, "weight_offset must be finite, got nan"),
        ({"out": Q[0]}, r"out must have shape \(2, 6, 4, 16\), got \(6, 4, 16\)"),
        ({"x": torch.zeros(1, 65537)}, "x must have rows of 1 to 65536 elements"),
        ({"weight": WEIGHT[:7]}, r"weight must have shape \(16,\), as x's rows, got \(7,\)"),
        ({"x": Q.half(), "weight": WEIGHT.half(), "bias": WEIGHT}, "bias must have weight's dtype float16, got fl"),
        ({"residual": Q, "out": OUT}, r"out must be a tuple \(out, sum\) with a residual", TypeError),
        ({"residual": Q.half()}, "residual must have x's dtype float32, got float16"),
        ({"residual": Q[0]}, r"residual must have x's shape \(2, 6, 4, 16\), got \(6, 4, 16\)"),
        ({"weight": None, "weight_offset": 1.0}, "weight_offset is added to weight, and there is none"),
        ({"x": Q.half(), "weight": None, "out_dtype": torch.bfloat16}, "out_dtype must be float16 or float32 for"),
        ({"out": OUT, "out_dtype": torch.float16}, "out_dtype must be None or out's dtype where"),
        ({"x": Q[:, :3, None, :1, :8], "weight": None, "out": OF_SIX}, "out must be contiguous with more than 3"),
        ({"x": LEAF, "out": OUT}, "out and lse are not taken where a gradient is", NotImplementedError),
    ],
    "swiglu": [({"up": Q[0]}, r"up must have gate's shape \(2, 6, 4, 16\), got \(6, 4, 16\)")],
    "silu_and_mul": [({"x": Q[..., :7]}, "x must have rows of gate and up, an even number of elements")],
    "geglu": [({"approximate": "erf"}, 'approximate must be "none" or "tanh", got .erf.')],
    "gated": [({"activation": "relu"}, "activation must be one of silu, gelu, gelu_tanh, got 'relu'")],
    "gated_backward": [({}, r"dout must have shape \(2, 6, 4, 8\), got \(2, 6, 4, 16\)")],
    "swiglu_mlp": [
        ({"w_gate_up": UP[:, :7]}, "x must have rows of w_gate_up's 7 columns"),
        ({"w_gate_up": UP[:10]}, "w_gate_up must have two rows for each of w_down's 6 columns"),
        ({"w_down": DOWN[0]}, r"w_down must have 2 dimensions, \[dim_out, dim\]"),
    ],
    "merge_states": [
        ({"o_a": torch.tensor(1.0)}, r"o_a must have shape .* got \(\)"),
        ({"o_b": Q[..., :8]}, r"o_b must have o_a's shape \(2, 6, 4, 16\), got \(2, 6, 4, 8\)"),
        ({"o_a": LEAF}, "no backward yet", NotImplementedError),
    ],
    "backward": [({"key": K[:, :, :1]}, "value must have key's")],
    "nn.SwiGLU": [({"activation": "relu"}, "activation must be 'silu'")],
    "nn.Attention": [
        *[({"num_heads_kv": n}, f"num_heads must be a multiple of num_heads_kv {n}") for n in (3, 0)],
        ({"embed_dim": 15}, "embed_dim must be a multiple of num_heads 4"),
    ],
    "attend": [
        ({"dropout_p": 0.1}, "dropout_p is only taken with dropout_seed"),
        *[({f"block_{x}": y}, "is only taken with b") for x, y in (("counts", BLOCKS[0]), ("indices", BLOCKS[1]))],
        ({"sinks": torch.ones(4).half()}, "sinks must be float32, got float16"),
    ],
    "explain": [
        ({"out": OUT}, "out is where a call writes to, which is none of its problem: leave it out", TypeError),
        ({"features": ("bias",)}, "features and head_dim_v describe a shape", TypeError),
        ({"shape": (1, 2, 3, 4)}, "explain takes tensors or a shape, got both", TypeError),
        ({"q": ...}, "explain needs q, k and v, or a shape", TypeError),
        ({"backward": True, "measure": True}, "explain measures no backward"),
        ({"device": 99}, "device cuda:99 does not exist"),
        ({"arch": 75}, "arch must be one of 80, 86, 87, 89, 90, 120, 121, got 75"),
    ],
    "shape": [
        ({"shape": (1, 2, 3)}, r"four sizes \(batch, seqlen_q, num_heads, head_dim\), got \(1, 2, 3\)"),
        *[({"shape": x}, "shape must be four sizes") for x in (3, (1, 2, 3, True), (1, 2, 3, "4"), (1, 1, 1, -64))],
        *[(x, "head_dim(_v)? must be at least 1, got 0") for x in ({"head_dim_v": 0}, {"shape": (1, 1, 4, 0)})],
        *[({"num_heads_kv": n}, f"num_heads_kv must divide num_heads 4, got {n}") for n in (3, 0)],
        ({"features": ["biases"]}, "features must be among window, mask, .*, got 'biases'"),
        ({"page_size": 24}, "a problem must have pages of a multiple of 16 keys, got 24"),
        ({"block_size": (64, 0)}, "block_size must have sides of at least 1"),
        ({"num_splits": 1000}, "num_splits must be 1 to 64"),
        ({"alignment": 3}, "alignment must be 1, 2, 4, 8 or 16 bytes, got 3"),
        ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, .*, got 'int8'"),
        ({"seqlen_k": 2**29 + 1}, r"a seqlen must be 2\*\*29 at most, got 536870913"),
        *[({"device": x}, f"device must be cuda, .* got '{x}'") for x in ("gtx1080", "sm_75")],
        ({"device": ..., "arch": 89, "sm_count": 0}, "sm_count must be at least 1, got 0"),
        ({"features": 3}, "features must be names", TypeError),
        ({"window": ("a", 3)}, "window_left must be an int or None, got str", TypeError),
        ({"softcap": 3.0}, "explain got 'softcap', which says nothing of a shape", TypeError),
        ({"sm_count": 4}, "takes arch with or without sm_count, or device, but not both", TypeError),
    ],
    "dropout_mask": [
        ({"dropout_p": 1.0}, "dropout_p must be at least 0 and less than 1, got 1.0"),
        ({"dropout_seed": 2**63}, "dropout_seed must fit in 64 bits, got 9223372036854775808"),
        ({"dropout_seed": torch.tensor(3)}, r"dropout_seed must be int64 of shape \(1,\), got"),
    ],
    "cascade": [
        ({"k": K.clone().requires_grad_()}, "no backward yet", NotImplementedError),
        ({"v_shared": V[0, ..., :8]}, r"v_shared must have v's head_dim \(last dimension\) 16, got 8"),
    ],
    "append_kv_": [
        ({"key": NEW.clone().requires_grad_()}, "no backward yet", NotImplementedError),
        ({"v_cache": K[:, :9]}, r"v_cache must have k_cache's shape but for .* \(2, 10, 2\)"),
        ({"value": NEW[:, :1]}, "value must have key's shape but for the last dimension"),
        ({"value": NEW[..., :8]}, r"v_cache's heads and head_dim \(2, 16\), got \(2, 8\)"),
        ({"k_cache": K[:1].expand(2, -1, -1, -1)}, "k_cache is written to and must not"),
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
    "sdpa": [
        (OF_HEADS | {"key": TWO_HEADS, "value": TWO_HEADS}, r"same batch .* \(2, 4, j\d+, 16\), .*enable_gqa"),
        (OF_HEADS | {"attn_mask": torch.ones(5, 5)}, "attn_mask must be broadcastable to"),
    ],
    "attention": [
        (DOCUMENTS | {"layout": "bhsd"}, "q must be a jagged tensor .* whose seqlen is jagged, got shape"),
        (DOCUMENTS | {"k": FEWER, "v": FEWER}, "k must have q's batch size 2, got 3"),
        (DOCUMENTS | {"v": OTHERS}, r"v must have k's sequences: .*nested_tensor_from_jagged\(values, k.off"),
        *[(DOCUMENTS | {"v": v}, "v must have k's sequences") for v in (HOLES, JAGGED.values())],
        (DOCUMENTS | {"out": OUT}, "out is not taken with jagged tensors: pass their values"),
        (dict.fromkeys("qkv", HOLES) | {"seqused_q": ints(1, 1)}, "seqused_q is not taken with jagged"),
        (DOCUMENTS | {"max_seqlen_k": 4}, "max_seqlen_k is 4, and cu_seqlens_k has a sequence of 5"),
        (dict.fromkeys("qkv", Q.cfloat()), "q must be float16 or bfloat16 .* got complex64"),
        ({**VARLEN, "cu_seqlens_k": ints(0, 10, 9)}, r"cu_seqlens_k must rise from 0 to .* got \[0, 10, 9\]"),
        ({"seqused_k": ints(3, 6), "max_seqlen_k": 5}, "max_seqlen_k is 5, and seqused_k has a sequence of"),
        ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must hold numbers of 0 to 1, got 2"),
        ({**PAGES, "page_table": TABLE + 1}, "page_table must hold numbers of 0 to 3, got 4"),
        ({**PAGES, "page_table": TABLE - 1, "seqused_k": ints(5, 5)}, "page_table must hold .* got -1"),
        ({"block_mask": (BLOCKS[0] * 4, *BLOCKS[1:])}, "block_counts must hold numbers of 0 to 3, got 4"),
        ({"block_mask": (BLOCKS[0] * 2, *BLOCKS[1:])}, "block_indices must ascend"),
        ({"block_mask": (BLOCKS[0], BLOCKS[1] - 1, (4, 4))}, "block_indices .* numbers of 0 or more, got -1"),
    ],
    "arrays": [
        ({"k": [1.0]}, "k must be a torch.Tensor, got list", TypeError),
        ({"out": np.zeros(1)}, "out is not taken where q is a numpy.ndarray", TypeError),
        ({"k": Opaque()}, "k, a .*Opaque, can't be shared by DLPack: this memory is not for others", TypeError),
        ({"q": Opaque()}, "whose library has no from_dlpack to take the result with", TypeError),
        ({"k": K.half().requires_grad_()}, "k requires a gradient, and q is", TypeError),
        ({"k": K.numpy()[:, ::-1]}, "k, a numpy.ndarray, has a negative stride", TypeError),
        ({"q": np.ma.zeros(Q.shape, "f")}, "q, a numpy.ma array, may hide elements: pass q.filled", TypeError),
        ({"mask": np.ma.zeros((6, 10), bool)}, "mask, a numpy.ma array, may hide elements", TypeError),
        ({"q": np.zeros(Q.shape, "U1")}, "q, a numpy.ndarray, can't be shared by DLPack: ", TypeError),
    ],
    "its backward": [({}, r"rstd must be float32 \(2, 6, 4\)")],
    "silu_and_mul": [({"out": Q[..., :8]}, "out must not share memory with x")],
    "a norm": [({"x": Q}, r"x must end in \(3, 8\), .* \(2, 6, 4, 16")],
    "a layer": [
        ({"layout": "bhsd"}, "layout is not for a layer", TypeError),
        ({"x": S[0, 0]}, r"x must have 3 dimensions, \[batch, seqlen, "),
    ],
    "merge_states": [({"out": OUT, "lse": OUT.flatten()[:48].view(LSE.shape)}, "lse .* memory with out")],
    "append": [
        ({"q": Q[:, :4], "out": K[:, :8].view(2, 4, 4, 16)}, "out .* memory with k_cache"),
        ({**POOL, "page_table": TABLE, "q": LEAF}, "has no backward yet with paged keys", NotImplementedError),
    ],
    "rotary": [({"positions": ints(0, 99)}, "has positions 0 to 11, and a row has position 104")],
    "packed append": [
        ({"cache_seqlens": 8}, "leave room for 3 new rows among the 10 .* got 8"),
        ({**TURNED, "cache_seqlens": 7}, "rotary_cos has positions 0 to 8, and a row has position 9"),
    ],
    "append_kv_": [
        *[({**POOL, "page_table": TABLE + n}, "page_table must name one of the cache's 4") for n in (9, -9)],
        ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must name one of the cache's 2"),
    ],
}

#: What functions refuse alike: the error, what an argument must be, another or what makes one of it, and whose it is.
ALIKE: Alike = [
    # Whose contents are not shown.
    (TypeError, "must be .*got ndarray", ARRAY, {
        "attention": "bias scale", "append": "cache_seqlens page_table", "merge_states": "o_b", "sdpa": "is_causal",
        "rms_norm": "eps",
    }),
    (TypeError, "must be a torch.Tensor, got NoneType", None, {
        "features": "q", "sdpa": "query", "attend": "value", "cascade": "k_shared", "rotary": "sin", "rotary_qk": "k",
        "swiglu": "up", "rms_norm": "x",
    }),
    (TypeError, "must .*got list", [1], {"sdpa": "attn_mask", "qk_norm_rope": "k_weight", "dropout_mask": "dropout_p"}),
    (TypeError, "must be a bool, got int", 1, {
        "attention": "batch_invariant return_lse", "sdpa": "is_causal", "with_kv_cache": "return_lse",
        "cascade": "return_lse", "explain": "return_lse", "rotary": "interleaved", "rotary_qk": "inplace interleaved",
        "append": "rotary_interleaved", "swiglu_mlp": "recompute",
    }),
    (TypeError, "must be a float, got str", "1", {"attention": "softcap", "sdpa": "dropout_p", "qk_norm_rope": "eps"}),
    (TypeError, "must be an int.*, got float", 2.0, {
        "attention": "num_splits", "shape": "seqlen_k num_heads_kv head_dim_v page_size", "rotary_qk": "offsets",
        "set_deterministic_workspace": "size", "dropout_mask": "seqlen_q dropout_seed",
    }),
    (TypeError, "must be a pair", 3, {"append": "window", "shape": "window block_size"}),
    (ValueError, "must be float32, as the result is, got float16", OUT.half(), {"cascade": "out", "rotary": "out"}),
    (ValueError, 'must be (False, True, )?"none", "top-left" or "bottom-right", got .left', "left", {
        "append": "causal", "shape": "causal", "attend": "causal", "backward": "causal",
    }),
    (ValueError, 'must be "bshd" or "bhsd", got .sbhd', "sbhd", {"attention": "layout", "shape": "layout"}),
    (ValueError, "must be .*, got -1", -1, {
        "attention": "deterministic_workspace softcap", "varlen": "max_seqlen_q", "set_deterministic_workspace": "size",
        "shape": "seqlen_k", "dropout_mask": "num_heads", "qk_norm_rope": "eps", "rms_norm": "eps",
    }),
    (ValueError, "must be contiguous in its last dimension", in_every_second_place, {
        "features": "v out lse", "forward": "value", "merge_states": "o_a", "paged": "page_table", "rms_norm": "x",
    }),
    (ValueError, "must be contiguous: pass", in_every_second_place, {
        "features": "sinks cache_batch_idx", "append_kv_": "cache_seqlens", "varlen": "cu_seqlens_q cu_seqlens_k",
    }),
    (ValueError, "must be float32.* got float64", LSE.double(), {
        "features": "lse alibi_slopes", "merge_states": "lse_a", "backward": "softmax_lse",
    }),
    (ValueError, "must be float16 or bfloat16 or float32", Tensor.int, {"rotary": "x", "rms_norm": "x", "a norm": "x"}),
    (ValueError, r"must have shape \(4,\).*, got \(2,\)", torch.ones(2), {"attention": "alibi_slopes sinks"}),
    (ValueError, r"must have shape \(2, 6, 4, 16\), got .*4\)", Q[..., 0], {"backward": "output", "append": "out"}),
    (ValueError, r"must have shape \(2, 4, 6\),.* got \(1, 4, 6\)", LSE[:1], {
        "features": "lse", "append": "lse", "merge_states": "lse_b", "backward": "softmax_lse dlse",
    }),
    (ValueError, "must have [234] dimensions", torch.tensor(1.0), {
        "attention": "q", "append": "k rotary_cos", "cascade": "q", "rotary": "x", "varlen": "k",
        "append_kv_": "page_table",
    }),
    (ValueError, "must be finite", math.nan, dict.fromkeys(("forward", "attend", "backward", "explain"), "scale")),
    (ValueError, "must be int32,? .*got int64", torch.tensor([0, 1]), {
        "attention": "seqused_k", "append_kv_": "cache_seqlens", "rotary": "positions", "packed append": "cu_seqlens_q",
        "paged": "page_table",
    }),
    (ValueError, r"must have shape \(2,\), got \(1,\)", ints(0), {
        "attention": "seqused_q leftpad_k prefix_lengths", "rotary_qk": "offsets", "append_kv_": "cache_seqlens",
    }),
    (ValueError, "must have (q|x|gate)'s dtype float32( or float32)?, got float16", Tensor.half, {
        "attention": "v", "explain": "k", "norm append": "k", "with_kv_cache": "k_cache", "qk_norm_rope": "q_weight",
        "rms_norm": "weight", "swiglu": "up", "swiglu_mlp": "w_down",
    }),
    (ValueError, "must have (query|k_cache)'s dtype float32", Tensor.half, {"backward": "dout", "norm append": "v"}),
]  # fmt: skip

#: What no kernel takes, of arguments of every function.
STRANGE = {
    "attention": "q k mask bias sinks", "with_kv_cache": "q k_cache", "append": "k cache_seqlens rotary_cos",
    "cascade": "k_shared v", "merge_states": "o_a lse_b", "rotary": "x cos positions", "explain": "q",
    "forward": "query", "attend": "value", "sdpa": "query attn_mask",
}  # fmt: skip
ALIKE_ON_CPU: Alike = [
    (UnsupportedError, "fwd is a CUDA kernel, and the tensors are on the CPU", "fwd", {
        "attention": "row", "features": "row", "with_kv_cache": "row", "append": "row", "forward": "row",
    }),
    (ValueError, "must hold numbers of 0 or more, got -1", ints(3, -1), {
        "attention": "seqused_k seqused_q leftpad_k prefix_lengths",
    }),
    (ValueError, "must not share memory with (o_a|q|x), which is read or written in the same call", Q, {
        "merge_states": "out", "append": "out", "rotary": "out", "cascade": "out", "rms_norm": "out",
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


def refused(table: Refusals) -> list[Call]:
    return [(name, row[0], row[1], row[2] if row[2:] else ValueError) for name, rows in table.items() for row in rows]


def alike(table: Alike) -> list[Call]:
    return [
        (name, {argument: x(BAD[name][1][argument]) if callable(x) else x}, f"^{argument} {what}", error)
        for error, what, x, functions in table
        for name, arguments in functions.items()
        for argument in arguments.split()
    ]


CALLS = [
    *(refused(REFUSED) + alike(ALIKE)),
    *[("attention", {word: None}, f"'{word}': {re.escape(told)}", TypeError) for word, told in FOREIGN.items()],
    ("attention", {"windows": None}, r"'windows': help\(cutlass_fmha.attention\)", TypeError),
    ("with_kv_cache", {"dropout": 0.1}, r"'dropout': help\(cutlass_fmha.with_kv_cache\)", TypeError),
    ("cascade", {"sm_scale": 1.0}, "'sm_scale': pass scale", TypeError),
]
CALLS_ON_CPU = refused(REFUSED_ON_CPU) + alike(ALIKE_ON_CPU)


def on_meta(x: Any) -> Any:
    if not is_plain(x):
        return x
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return empty.requires_grad_(x.requires_grad)


def is_plain(x: Any) -> bool:
    usual = isinstance(x, Tensor) and x.layout is torch.strided and x.device.type == "cpu"
    return usual and not (x.is_nested or x.is_quantized)


#: Of a cache, but for what only the CPU reads of tensors, or has no row for; and of attention what has no shape.
PLANNED = [
    call
    for call in CALLS + [each for each in CALLS_ON_CPU if each[3] in (TypeError, NotImplementedError)]
    if (BAD[call[0]][0] is fmha.with_kv_cache and call[3] is not UnsupportedError)
    or (BAD[call[0]][0] is attention and call[3] is NotImplementedError)
]
PLACES = {"cpu": CALLS + CALLS_ON_CPU, "meta": CALLS, "past the dispatcher": PLANNED}


@pytest.mark.parametrize(
    ("name", "arguments", "message", "error", "place"), [(*x, place) for place, calls in PLACES.items() for x in calls]
)
def test_a_bad_call_is_refused_in_a_sentence(
    name: str, arguments: dict[str, Any], message: str, error: type[Exception], place: str, monkeypatch
):
    """Nothing that was passed has changed when it comes."""

    def plain(values: Iterable[Any]) -> bool:
        return all(type(x) is Tensor and not x.requires_grad for x in values if isinstance(x, Tensor))

    if place == "past the dispatcher":
        monkeypatch.setattr(dispatcher, "can_skip_dispatcher", lambda *x: None not in x and plain(x))
        monkeypatch.setattr(dispatcher, "others_can_skip_dispatcher", plain)
    function, usual = BAD[name]
    given = {argument: value for argument, value in (usual | arguments).items() if value is not ...}
    before = [(x, x.clone()) for x in given.values() if is_plain(x)]
    with pytest.raises(error, match=message) as found:
        function(**(tree_map(on_meta, given) if place == "meta" else given))
    assert found.type is error and all(torch.equal(x, as_it_was) for x, as_it_was in before)
    assert len(str(found.value)) <= 600 and "\n" not in str(found.value)
