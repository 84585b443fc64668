"""The ops of queries and keys together: schemas, gradients in fp64, compiling, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensors import ints, randn

import cutlass_fmha

F64 = torch.float64
OPS = torch.ops.cutlass_fmha
COS, SIN = (f(torch.outer(torch.arange(20.0), 100.0 ** -(torch.arange(6) / 6))) for f in (torch.cos, torch.sin))
Q, K = randn(1, 3, 2, 16, dtype=F64), randn(1, 3, 1, 16, dtype=F64, seed=1)
WEIGHTS = (randn(16, dtype=F64, seed=2), randn(16, dtype=F64, seed=3))
SAID: tuple[dict[str, Any], ...] = (
    {"cos": COS, "sin": SIN, "offsets": ints(3)},
    {"inv_freq": torch.rand(8), "interleaved": True, "positions": ints(9, 0, 17).view(1, 3)},
)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("said", SAID, ids=("table", "inv_freq"))
def test_gradients(said: dict[str, Any]):
    qk = leaves(Q, K)
    assert torch.autograd.gradcheck(lambda q, k: cutlass_fmha.rotary_qk(q, k, **said), qk)
    assert torch.autograd.gradgradcheck(lambda q, k: cutlass_fmha.rotary_qk(q, k, **said), qk)
    given = leaves(Q, K, *WEIGHTS)
    call = lambda q, k, *w: cutlass_fmha.qk_norm_rope(q, k, None, *w, weight_offset=1.0, **said)  # noqa: E731
    assert torch.autograd.gradcheck(call, given)
    (dq,) = torch.autograd.grad(call(*given)[0].square().sum(), given[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="qk_norm_rope can be differentiated once"):
        dq.sum().backward()


@pytest.mark.parametrize("said", SAID, ids=("table", "inv_freq"))
def test_opcheck(said: dict[str, Any]):
    check = torch.library.opcheck
    check(OPS.rotary_qk.default, leaves(Q, K), said)
    check(OPS.rotary_qk_.default, (Q.clone(), K.clone()), said)
    check(OPS.qk_norm_rope.default, leaves(Q, K, *WEIGHTS), said)
    check(OPS.qk_norm_rope_backward.default, (Q, K, Q, K, *WEIGHTS), said)
    caches = torch.zeros(2, 1, 16, 1, 16, dtype=F64).unbind(0)
    check(OPS.qk_norm_rope_append_.default, (*caches, Q, K, K, ints(3), *WEIGHTS), said)


def test_compiling_in_one_graph_is_the_same():
    def call(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = cutlass_fmha.qk_norm_rope(q, k, None, *weights, **SAID[0])
        return cutlass_fmha.rotary_qk(q, k, inv_freq=SAID[1]["inv_freq"], offsets=2)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        given = leaves(Q, K, *WEIGHTS)
        found = function(*given)
        results.append((*found, *torch.autograd.grad(sum(x.square().sum() for x in found), given)))
    torch.testing.assert_close(*results)


def test_autocast_casts_what_is_new_to_the_cache():
    caches = torch.zeros(2, 1, 16, 1, 16, dtype=torch.bfloat16).unbind(0)
    q, k = Q.float(), K.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = cutlass_fmha.qk_norm_rope(
            q, k, k, cos=COS.half(), sin=SIN.half(), k_cache=caches[0], v_cache=caches[1], cache_seqlens=3
        )
    assert out.dtype == torch.bfloat16
