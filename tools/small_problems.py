"""Problems so small that every kernel of a build can run them under compute-sanitizer, checked on the CPU.

What runs a kernel's problems stops after each of them. Inputs are made and results compared there, so that
next to no kernel but ours runs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutlass_fmha
from cutlass_fmha import _C
from cutlass_fmha.cascade import merge_states
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

Problems = Iterator[None]


def kernels() -> dict[str, Callable[[], Problems]]:
    """For every kernel of the architecture under test: what runs it and raises when a result is wrong."""
    arch = gpu.rows_arch()
    found: dict[str, Callable[[], Problems]] = {}
    for helper in _C.helpers():  # first: they take least
        if helper.arch == arch:
            found[helper.name] = partial(HELPERS[helper.family], getattr(torch, helper.dtype))
    for row in _C.rows():
        if row.arch == arch:
            small = wide(row) if row.family == "wide" else features(row) if row.takes_features else plain(row)
            error = SPLIT_ERROR if row.mma == "tf32x3" else 0.0
            found[row.name] = partial(_run, row.name, getattr(torch, row.dtype), small, error)
    for row in _C.backward_rows():
        if row.arch == arch:
            found[row.name] = partial(gradients, _writer(row) if row.family == "query_product" else row)
    return found


def plain(row: Any) -> list[Problem]:
    """More than one tile of queries and four of keys, both ragged: every buffer is used again, every mask is
    met, and with keys that grow the softmax must rescale."""
    few, many = row.tile_m + 9, 4 * row.tile_n * row.kv_warps + 5
    dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v}
    return [
        Problem(few, many, batch=1, num_heads_kv=1, fill="ramp", **dims),
        Problem(many, few, batch=1, num_heads_kv=1, fill="ramp", causal="bottom-right", **dims),
    ]


def features(row: Any) -> list[Problem]:
    """The first of plain rows, and two that have every feature between them."""
    few, many = row.tile_m + 9, 2 * row.tile_n * row.kv_warps + 5
    dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim_v}
    prefill = Problem(
        few, many, causal="bottom-right", window=(many // 2, -1), mask=("bhqk", "plain"), prefix=True,
        bias=("hqk", "same", "plain"), softcap=20.0, alibi="h", sinks="normal", dropout=0.2,
        packed_q=True, packed_k=True, used_k=True, seed=3, **dims,
    )  # fmt: skip
    decode = Problem(
        2, 2 * many, num_heads=8, causal="bottom-right", page_size=16, used_k=True, leftpad=True,
        num_splits=3, seed=4, **dims,
    )  # fmt: skip
    first = replace(plain(row)[0], used_k=True)
    if row.family == "score_mod":  # for nothing else
        first, decode = replace(first, softcap=20.0), replace(decode, alibi="h")
    if row.family == "masked":
        mask = ("bhqk", "plain")
        first, decode = replace(first, mask=mask), replace(decode, mask=mask)
    return [fit(problem, row) for problem in (first, prefill, decode)]


def wide(row: Any) -> list[Problem]:
    # Above 256, where they are all that there is.
    dim = min(row.head_dim, 264)
    dims = {"head_dim": dim, "head_dim_v": dim}
    few, many = row.tile_m + 9, 2 * row.tile_n + 5
    bias, mask = ("bhqk", "same", "plain"), ("bqk", "plain")
    return [
        Problem(few, many, num_heads_kv=1, causal="bottom-right", used_k=True, **dims),
        Problem(few, many, causal="top-left", bias=bias, mask=mask, used_k=True, seed=2, **dims),
        Problem(few, many, packed_q=True, packed_k=True, causal="bottom-right", seed=3, **dims),
    ]


def _run(row: str | None, dtype: torch.dtype, small: list[Problem], product_error: float = 0.0) -> Problems:
    for problem in small:
        call = problem.call(dtype, "cpu")
        there = {name: _there(value) for name, value in call.features.items()}
        out, lse = cutlass_fmha.attention(
            *(_there(x) for x in (call.q, call.k, call.v)),
            scale=call.scale, causal=call.causal, return_lse=True, row=row, **there,
        )  # fmt: skip
        errors = compare(call, out.cpu(), lse.cpu(), product_error).check()
        print(f"  {problem}: {errors.worst:.3f} of the tolerance", flush=True)
        yield


def _there(value: Any) -> Any:
    return value.to(gpu.device()) if isinstance(value, Tensor) else value


def gradients(row: Any) -> Problems:
    """More than one tile of keys and of queries, ragged; all that becomes of scores, dQ in turns."""
    scored = {"softcap": 9.0, "alibi": "h", "dropout": 0.3, "mask": ("qk", "plain"), "sinks": "normal"}
    for n_q, n_k in ((300, 700), (700, 300)):
        dims = {"head_dim": row.head_dim, "head_dim_v": row.head_dim}
        problem = Problem(n_q, n_k, "bottom-right", batch=1, num_heads_kv=1, seed=n_q, **dims)
        lists = {"bias": ("hqk", "same", "plain"), "blocks": (64, 64)}
        more = [problem, replace(problem, **lists)] if row.scored and row.family == "backward" else []
        for one in (problem, *(replace(each, **scored) for each in more[:1]), *more[1:]):
            launch = BackwardLaunch.of(row, one, "cpu")
            launch.deterministic = writes_scores(row) or one is not problem
            launch.run(gpu.device())
            launch.errors().check()
            assert launch.intact(), f"{row.name}: {one}: wrote beside its gradients"
            yield


def _writer(product: Any) -> Any:
    """The row that writes dS for one that makes dQ of it."""
    same = ("arch", "dtype", "head_dim")
    rows = (row for row in _C.backward_rows() if writes_scores(row))
    return next(row for row in rows if all(getattr(row, x) == getattr(product, x) for x in same))


def _gradients_of(dtype: torch.dtype) -> Problems:
    """What stands before and after the backward's rows that know most."""
    rows = (row for row in _C.backward_rows() if row.arch == gpu.rows_arch() and row.scored)
    yield from gradients(next(row for row in rows if getattr(torch, row.dtype) == dtype))


def combine(dtype: torch.dtype) -> Problems:
    for dim in (64, 50):
        problem = Problem(3, 300, num_heads=4, num_splits=3, head_dim=dim, head_dim_v=dim, used_k=True)
        yield from _run(None, dtype, [problem])


def merge_tail(dtype: torch.dtype) -> Problems:
    """By rows that divide the keys of their last tiles."""
    rows = [row for row in gpu.rows() if row.family == "plain" and row.copy == "tma" and gpu.torch_dtype(row) == dtype]
    for row in rows[:1]:
        problem = Problem(row.tile_m + 9, 4 * row.tile_n + 5, batch=1, num_heads=2, num_heads_kv=1)
        launch = Launch.of(row, problem, gpu.device())
        launch.run(tail=Tail(3, 3, 2, 2))
        out, *inputs = (x.cpu() for x in (launch.out.view, launch.q, launch.k, launch.v))
        lse = launch.lse.view.cpu() if launch.lse else None
        errors = oracle_features.compare(out, lse, *inputs, causal=problem.causal).check()
        print(f"  {problem}, its last tiles divided: {errors.worst:.3f} of the tolerance", flush=True)
        yield


def merge(dtype: torch.dtype) -> Problems:
    for dim in (64, 50):
        states = [(_randn(2, 5, 3, dim, dtype=dtype, seed=n), _randn(2, 3, 5, seed=n + 2)) for n in (0, 1)]
        yield _agree(merge_states, *itertools.chain(*states))


def turns(dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(40), 100.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(dtype: torch.dtype) -> Problems:
    for (head_dim, dim), interleaved in itertools.product(((64, 64), (50, 22)), (False, True)):
        x, offsets = _randn(3, 5, 4, head_dim, dtype=dtype), torch.tensor([0, 31, 7], dtype=torch.int32)
        yield _agree(rotary, x, *turns(dtype, dim), offsets, interleaved=interleaved)


def append(dtype: torch.dtype) -> Problems:
    """By the kernel of its own, and by the one that norms as well."""

    def both(q: Tensor, k: Tensor, v: Tensor, used: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, rows: Any):
        caches = [k.new_zeros(9, 16, *k.shape[-2:]) for _ in range(4)]
        said = {"query": q, "rotary_cos": cos, "rotary_sin": sin, "page_table": pages, "cu_seqlens_q": rows}
        found = torch.ops.cutlass_fmha.append_kv_(*caches[:2], k, v, used, **said)
        said = {"k_cache": caches[2], "v_cache": caches[3], "cos": cos, "sin": sin, "cu_seqlens": rows}
        turned = qk_norm_rope(q, k, v, **said, cache_seqlens=used, page_table=pages)
        return (*caches, *found, *turned)

    for (head_dim, dim), packed in itertools.product(((64, 64), (50, 22)), (False, True)):
        key, value = (_randn(3, 5, 2, head_dim, dtype=dtype, seed=seed) for seed in (4, 5))
        query = _randn(3, 5, 4, head_dim, dtype=dtype, seed=6)
        if packed:
            key, value, query = (x.flatten(0, 1) for x in (key, value, query))
        lengths = torch.tensor([0, 6, 19], dtype=torch.int32)
        table = torch.randperm(9, generator=torch.Generator().manual_seed(3)).to(torch.int32).view(3, 3)
        begins = torch.tensor([0, 9, 9, 15], dtype=torch.int32) if packed else None
        yield _agree(both, query, key, value, lengths, *turns(dtype, dim), table, begins)


def norm(dtype: torch.dtype) -> Problems:
    for dim in (64, 50, 16384 + 8):
        given = _randn(9, dim, dtype=dtype), _randn(dim, dtype=dtype), _randn(9, dim, dtype=dtype, seed=1)
        yield _agree(_differentiated(lambda x, weight, residual: rms_norm(x, weight, residual=residual)), *given)


def units(dtype: torch.dtype) -> Problems:
    for dim, unit in itertools.product((64, 50), (silu_and_mul, gelu_and_mul)):
        yield _agree(_differentiated(unit), _randn(9, 2 * dim, dtype=dtype))


def rope(dtype: torch.dtype) -> Problems:
    yield from append(dtype)
    yield from norm_and_turn(dtype)


def norm_and_turn(dtype: torch.dtype) -> Problems:
    """With its gradients."""
    for head_dim, dim in ((64, 64), (50, 22)):
        q, k = (_randn(3, 5, heads, head_dim, dtype=dtype, seed=heads) for heads in (4, 2))
        weights = [_randn(head_dim, dtype=dtype, seed=seed) for seed in (7, 8)]
        cos, sin = turns(dtype, dim)
        _agree(rotary_qk, q, k, cos, sin)
        normed = _differentiated(lambda q, k, *weights, **said: qk_norm_rope(q, k, None, *weights, **said))
        yield _agree(normed, q, k, *weights, cos=cos, sin=sin)


HELPERS: dict[str, Callable[[torch.dtype], Problems]] = {
    "combine": combine, "merge_tail": merge_tail, "merge": merge, "append": append, "rotary": rotate,
    "rope": rope, **dict.fromkeys(("rope_backward", "rope_weights"), norm_and_turn),
    **dict.fromkeys(("backward_before", "backward_after", "backward_lists"), _gradients_of),
    **dict.fromkeys(("rms_norm", "rms_norm_backward", "rms_norm_weights"), norm),
    **dict.fromkeys(("gated", "gated_backward"), units),
}  # fmt: skip


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _differentiated(call: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """What returns the results of ``call`` and the gradients of what it is given by position."""

    def run(*given: Tensor, **said: Any) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in given]
        found = call(*inputs, **said)
        found = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(found, inputs, [torch.ones_like(x) for x in found])
        return (*(x.detach() for x in found), *gradients)

    return run


def _agree(call: Callable[..., Any], *given: Any, **said: Any) -> None:
    """Results of a kernel and of the CPU backend are the same, up to a rounding."""
    results = []
    for where in (_there, lambda x: x):
        found = call(*map(where, given), **{name: where(x) for name, x in said.items()})
        results.append(found if isinstance(found, tuple) else (found,))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.cpu(), other)
