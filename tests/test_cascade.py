"""Merging states and cascade attention: CPU tensors, the op as torch sees it, what is refused."""

import math
from typing import Any

import oracle_features
import pytest
import torch
from oracle_helpers import bits
from tensors import drawn, ints, laid, randn, starts
from test_parity_helpers import states
from torch import Tensor

import cutlass_fmha
from cutlass_fmha.cascade import cascade_attention, merge_states

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_nan_stays_in_its_row_and_what_is_far_below_counts_for_nothing():
    a, b = states((2, 5, 3, 16))
    far = a[0], a[1] + 3e38
    assert all(map(torch.equal, merge_states(*far, *b), far))
    a[1][0, 2, 3] = torch.nan
    b[0][1, 4, 0, 5] = torch.nan
    output, lse = merge_states(*a, *b)
    assert output.isnan().nonzero().tolist() == [[0, 3, 2, n] for n in range(16)] + [[1, 4, 0, 5]]
    assert lse.isnan().nonzero().tolist() == [[0, 2, 3]]


def cascade_inputs(own: int = 12, dim_v: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return drawn((3, 5, 4, 16), (20, 2, 16), (20, 2, dim_v), (3, own, 2, 16), (3, own, 2, dim_v), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_empty_part_passes_the_others_bits_on(dtype: torch.dtype):
    q, k_shared, v_shared, k, v = cascade_inputs(dtype=dtype)
    of_all = cutlass_fmha.attention(q.reshape(1, 15, 4, 16), k_shared[None], v_shared[None], return_lse=True)
    output, lse = cascade_attention(q, k_shared, v_shared, k[:, :0], v[:, :0], causal=True, return_lse=True)
    assert torch.equal(bits(output), bits(of_all[0].view(q.shape)))
    assert torch.equal(bits(lse), bits(of_all[1].view(4, 3, 5).transpose(0, 1)))
    output, lse = cascade_attention(q, k_shared[:0], v_shared[:0], k[:, :0], v[:, :0], return_lse=True)
    assert (output == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("where", "dim_v", "features"),
    [
        *[("batch", dim_v, {"scale": 0.3, "causal": causal}) for dim_v in (8, 16) for causal in (False, True)],
        *[(where, 16, {"softcap": 2.0, "sinks": 3 * randn(4), "causal": True}) for where in ("lengths", "packed")],
        *[(where, 16, {"causal": True}) for where in ("lengths", "packed", "pages")],
    ],
)
def test_cascade_is_attention_over_both_parts(where: str, dim_v: int, features: dict[str, Any]):
    q, *shared, k, v = cascade_inputs(32, dim_v)
    queries, keys, said = [5, 5, 5], [32, 32, 32] if where == "batch" else [32, 0, 7], dict(features)
    if where == "packed":
        queries, keys = [2, 0, 5], [4, 5, 7]
        said |= {"cu_seqlens_q": starts(*queries), "cu_seqlens_k": starts(*keys)}
        said |= {"max_seqlen_q": 5, "max_seqlen_k": 7}
    elif where != "batch":
        said["seqused_k"] = ints(*keys)
    of_q, of_k, of_v = ([x[b, :n] for b, n in enumerate(own)] for x, own in ((q, queries), (k, keys), (v, keys)))
    given = [torch.cat(x) for x in (of_q, of_k, of_v)] if where == "packed" else [q, k, v]
    if where == "pages":
        said["page_table"] = table = ints(3, 0, 5, 1, 4, 2).view(3, 2)
        for i, x in ((1, k), (2, v)):
            given[i] = torch.empty(6, 16, 2, 16).index_copy(0, table.flatten().long(), x.reshape(6, 16, 2, 16))
    output, lse = cascade_attention(given[0], *shared, *given[1:], return_lse=True, **said)
    assert torch.equal(cascade_attention(given[0], *shared, *given[1:], **said), output)
    outputs = output.split(queries) if where == "packed" else output
    lses = lse.split(queries, 1) if where == "packed" else lse
    for one, of_one, *own in zip(outputs, lses, of_q, of_k, of_v, strict=True):
        # Without own keys, the shared ones are before all queries.
        causal = "bottom-right" if features["causal"] and len(own[1]) else "none"
        both = (torch.cat(parts)[None] for parts in zip(shared, own[1:], strict=True))
        oracle_features.compare(one[None], of_one[None], own[0][None], *both, **features | {"causal": causal}).check()


@pytest.mark.parametrize("shape", [(2, 5, 3, 16), (7, 3, 40), (0, 5, 3, 16), (2, 0, 3, 16), (2, 5, 0, 16), (0, 3, 16)])
def test_opcheck_passes(shape: tuple[int, ...]):
    a, b = states(shape)
    output, lse = merge_states(*a, *b)
    assert output.shape == shape and lse.shape == a[1].shape
    strided = laid(a[0], "heads first"), a[1].mT.contiguous().mT
    for first in (a, strided):
        torch.library.opcheck(torch.ops.cutlass_fmha.merge_states.default, (*first, *b))
