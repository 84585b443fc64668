"""Calls of every function and op, and what they are made of: small tensors on the CPU, nothing wrong with any."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensors import ints

import cutlass_fmha as fmha
from cutlass_fmha import attention, scaled_dot_product_attention

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
    "explain": (fmha.explain, CALL),
    "shape": (fmha.explain, {"shape": (1, 8, 4, 64), "device": "l4"}),
    "backward": (
        OPS.attend_backward,
        {"dout": Q, **OP, "output": Q, "softmax_lse": LSE, "dlse": LSE, "return_lse": ...},
    ),
    "forward": (OPS.forward, OP),
    "attend": (OPS.attend, OP),
}
