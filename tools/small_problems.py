"""Problems so small that every kernel of a build can run them under compute-sanitizer. Inputs are made and results
compared on the CPU, so that next to no kernel but ours runs. What runs a kernel's problems stops after each of them."""

import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.cascade import merge_states
from cutlass_fmha.dispatch import blocks
from cutlass_fmha.dispatch.blocks import Tail
from cutlass_fmha.dispatch.gradients import writes_scores
from cutlass_fmha.gates import gelu_and_mul, silu_and_mul
from cutlass_fmha.norm import rms_norm
from cutlass_fmha.qk_norm_rope import qk_norm_rope
from cutlass_fmha.rotary import rotary, rotary_qk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gpu
import oracle_features
from backward_launch import BackwardLaunch
from launches import SPLIT_ERROR, Launch, compare, fit
from problems import Problem
from tensors import ints, moved, randn
from test_parity_helpers import table

Problems = Iterator[None]


def kernels() -> dict[str, Callable[[], Problems]]:
    """For every kernel of the architecture under test: what runs it and raises when a result is wrong."""
    helpers, rows, backward = (
        [x for x in every if x.arch == gpu.rows_arch()] for every in (_C.helpers(), _C.rows(), _C.backward_rows())
    )
    of = operator.attrgetter("dtype", "head_dim")
    writers = {of(x): x for x in reversed(backward) if writes_scores(x)}  # of dS, of which others make dQ
    return {  # helpers first: they take least
        **{x.name: partial(HELPERS[x.family], gpu.torch_dtype(x)) for x in helpers},
        **{x.name: partial(_run_row, x) for x in rows},
        **{x.name: partial(gradients, writers[of(x)] if x.family == "query_product" else x) for x in backward},
    }


def plain(row: Any) -> list[Problem]:
    """More than one tile of queries and four of keys, both ragged; with keys that grow the softmax must rescale."""
    few, many = row.tile_m + 9, 4 * row.tile_n * row.kv_warps + 5
    same = {"batch": 1, "num_heads_kv": 1, "fill": "ramp", "head_dim": row.head_dim, "head_dim_v": row.head_dim_v}
    return [Problem(few, many, **same), Problem(many, few, "bottom-right", **same)]


def features(row: Any) -> list[Problem]:
    """The first of plain rows, and two that have every feature between them."""
    few, many = row.tile_m + 9, 2 * row.tile_n * row.kv_warps + 5
    dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v}
    mask = {"mask": ("bhqk", "plain")}
    prefill = Problem(
        few, many, "bottom-right", window=(many // 2, -1), prefix=True, bias=("hqk", "same", "plain"), softcap=20.0,
        alibi="h", sinks="normal", dropout=0.2, packed_q=True, packed_k=True, used_k=True, seed=3, **mask, **dims,
    )  # fmt: skip
    keys = {"page_size": 16, "used_k": True, "leftpad": True, "num_splits": 3}
    decode = Problem(2, 2 * many, "bottom-right", num_heads=8, seed=4, **keys, **dims)
    # What rows of a family are for, and nothing else; a mask that is packed, where it has odd rows.
    shared = {"mask": ("qk", "plain")}
    own = {"score_mod": ({"softcap": 20.0}, {"alibi": "h"}), "masked": ({**shared, "num_heads": 4}, shared)}
    first, last = own.get(row.family, ({}, {}))
    small = (replace(plain(row)[0], used_k=True, **first), prefill, replace(decode, **last))
    return [fit(problem, row) for problem in small]


def wide(row: Any) -> list[Problem]:
    # Above 256, where they are all that there is.
    dims = dict.fromkeys(("head_dim", "head_dim_v"), min(row.head_dim, 264))
    few, many = row.tile_m + 9, 2 * row.tile_n + 5
    bias, mask = ("bhqk", "same", "plain"), ("bqk", "plain")
    return [
        Problem(few, many, num_heads_kv=1, causal="bottom-right", used_k=True, **dims),
        Problem(few, many, causal="top-left", bias=bias, mask=mask, used_k=True, seed=2, **dims),
        Problem(few, many, packed_q=True, packed_k=True, causal="bottom-right", seed=3, **dims),
    ]


def _run_row(row: Any) -> Problems:
    small = wide(row) if row.family == "wide" else features(row) if row.takes_features else plain(row)
    return _run(row.name, gpu.torch_dtype(row), small, SPLIT_ERROR if row.mma == "tf32x3" else 0.0)


def _run(row: str | None, dtype: torch.dtype, small: list[Problem], product_error: float = 0.0) -> Problems:
    for problem in small:
        call = problem.call(dtype, "cpu")
        there = moved(call, gpu.device())
        said = {"scale": call.scale, "causal": call.causal, "return_lse": True, "row": row, **there.features}
        out, lse = cutlass_fmha.attention(*there[:3], **said)
        errors = compare(call, out.cpu(), lse.cpu(), product_error).check()
        print(f"  {problem}: {errors.worst:.3f} of the tolerance", flush=True)
        yield


def gradients(row: Any) -> Problems:
    """More than one tile of keys and of queries, ragged; documents between rows that are nobody's; all that becomes of
    scores, dQ in turns."""
    packed = {"batch": 3, "packed_q": True, "packed_k": True, "used_k": True}
    scored = {"softcap": 9.0, "alibi": "h", "dropout": 0.3, "mask": ("qk", "plain"), "sinks": "normal"}
    more = (scored, {"bias": ("hqk", "same", "plain"), "blocks": (64, 64)})
    for n_q, n_k in ((300, 700), (700, 300)):
        dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim}
        problem = Problem(n_q, n_k, "bottom-right", batch=1, num_heads_kv=1, seed=n_q, **dims)
        others = (packed, *(more if row.scored and row.family == "backward" else ()))
        for one in (problem, *(replace(problem, **said) for said in others)):
            launch = BackwardLaunch.of(row, one, "cpu")
            launch.deterministic = writes_scores(row) or (one is not problem and row.scored)
            launch.run(gpu.device())
            launch.errors().check()
            assert launch.intact(), f"{row.name}: {one}: wrote beside its gradients"
            yield


def _gradients_of(dtype: torch.dtype) -> Problems:
    """What stands before and after the backward's rows that know most."""
    of_arch = (row for row in _C.backward_rows() if row.arch == gpu.rows_arch())
    rows = (row for row in of_arch if row.family != "query_product" and row.scored)
    return gradients(next(row for row in rows if gpu.torch_dtype(row) == dtype))


def combine(dtype: torch.dtype) -> Problems:
    split = {"num_heads": 4, "num_splits": 3, "used_k": True}
    return _run(None, dtype, [Problem(3, 300, head_dim=dim, head_dim_v=dim, **split) for dim in (64, 50)])


def merge_tail(dtype: torch.dtype) -> Problems:
    """By rows that divide the keys of their last tiles."""
    rows = (row for row in gpu.rows() if row.family == "plain" and row.copy == "tma" and gpu.torch_dtype(row) == dtype)
    for row in itertools.islice(rows, 1):
        problem = Problem(row.tile_m + 9, 4 * row.tile_n + 5, batch=1, num_heads=2, num_heads_kv=1)
        launch = Launch.of(row, problem, gpu.device())
        launch.run(tail=Tail(3, 3, 2, 2))
        out, lse, *inputs = (x.cpu() for x in (launch.out.view, launch.lse.view, *launch.call[:3]))
        oracle_features.compare(out, lse, *inputs, causal=problem.causal).check()
        yield


def pack_mask(dtype: torch.dtype) -> Problems:
    """By a row that reads its bits: of a mask of odd rows, and of one that is read four keys at once."""
    rows = (row for row in gpu.scored_rows() if row.family == "masked" and row.reads_mask_bits)
    for row in itertools.islice((row for row in rows if gpu.torch_dtype(row) == dtype), 1):
        dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v, "num_heads": 4}
        small = [Problem(seqlen, seqlen, mask=("qk", "plain"), **dims) for seqlen in (133, 256)]
        with mock.patch.object(blocks, "PACKED_SCORES", 0):
            yield from _run(row.name, dtype, small)


def merge(dtype: torch.dtype) -> Problems:
    for dim in (64, 50):
        states = [(randn(2, 5, 3, dim, dtype=dtype, seed=n), randn(2, 3, 5, seed=n + 2)) for n in (0, 1)]
        yield _agree(merge_states, *itertools.chain(*states))


def rotate(dtype: torch.dtype) -> Problems:
    for (head_dim, dim), interleaved in itertools.product(((64, 64), (50, 22)), (False, True)):
        x = randn(3, 5, 4, head_dim, dtype=dtype)
        yield _agree(rotary, x, *table(40, dim, dtype), ints(0, 31, 7), interleaved=interleaved)


def append(dtype: torch.dtype) -> Problems:
    """By the kernel of its own, and by the one that norms as well."""

    def both(q: Tensor, k: Tensor, v: Tensor, used: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, rows: Any):
        caches = [k.new_zeros(9, 16, *k.shape[-2:]) for _ in range(4)]
        said = {"query": q, "rotary_cos": cos, "rotary_sin": sin, "page_table": pages, "cu_seqlens_q": rows}
        found = torch.ops.cutlass_fmha.append_kv_(*caches[:2], k, v, used, **said)
        said = {"k_cache": caches[2], "v_cache": caches[3], "cos": cos, "sin": sin, "cu_seqlens": rows}
        turned = qk_norm_rope(q, k, v, **said, cache_seqlens=used, page_table=pages)
        return (*caches, *found, *turned)

    for (head_dim, dim), begins in itertools.product(((64, 64), (50, 22)), (None, ints(0, 9, 9, 15))):
        rows = (3, 5) if begins is None else (15,)
        given = [randn(*rows, heads, head_dim, dtype=dtype, seed=seed) for seed, heads in enumerate((4, 2, 2))]
        pages = ints(6, 2, 0, 8, 3, 1, 7, 4, 5).view(3, 3)
        yield _agree(both, *given, ints(0, 6, 19), *table(40, dim, dtype), pages, begins)


def norm(dtype: torch.dtype) -> Problems:
    for dim in (64, 50, 16384 + 8):
        given = randn(9, dim, dtype=dtype), randn(dim, dtype=dtype), randn(9, dim, dtype=dtype, seed=1)
        yield _agree(_differentiated(lambda x, weight, residual: rms_norm(x, weight, residual=residual)), *given)


def units(dtype: torch.dtype) -> Problems:
    for dim, unit in itertools.product((64, 50), (silu_and_mul, gelu_and_mul)):
        yield _agree(_differentiated(unit), randn(9, 2 * dim, dtype=dtype))


def norm_and_turn(dtype: torch.dtype) -> Problems:
    normed = _differentiated(lambda q, k, *weights, **said: qk_norm_rope(q, k, None, *weights, **said))
    for head_dim, dim in ((64, 64), (50, 22)):
        q, k = (randn(3, 5, heads, head_dim, dtype=dtype) for heads in (4, 2))
        cos, sin = table(40, dim, dtype)
        _agree(rotary_qk, q, k, cos, sin)
        yield _agree(normed, q, k, *(randn(head_dim, dtype=dtype, seed=n) for n in (7, 8)), cos=cos, sin=sin)


HELPERS: dict[str, Callable[[torch.dtype], Problems]] = {
    "combine": combine, "merge_tail": merge_tail, "pack_mask": pack_mask, "merge": merge, "append": append,
    "rotary": rotate,
    "rope": lambda dtype: itertools.chain(append(dtype), norm_and_turn(dtype)),
    **dict.fromkeys(("rope_backward", "rope_weights"), norm_and_turn),
    **dict.fromkeys(("backward_before", "backward_after", "backward_lists"), _gradients_of),
    **dict.fromkeys(("rms_norm", "rms_norm_backward", "rms_norm_weights"), norm),
    **dict.fromkeys(("gated", "gated_backward"), units),
}  # fmt: skip


def _differentiated(call: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def run(*given: Tensor, **said: Any) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in given]
        found = call(*inputs, **said)
        found = found if isinstance(found, tuple) else (found,)
        dx = torch.autograd.grad(found, inputs, [torch.ones_like(x) for x in found])
        return (*(x.detach() for x in found), *dx)

    return run


def _agree(call: Callable[..., Any], *given: Any, **said: Any) -> None:
    """Results of a kernel and of the CPU backend are the same, up to a rounding."""
    args, more = moved((given, said), gpu.device())
    torch.testing.assert_close(moved(call(*args, **more), "cpu"), call(*given, **said))
