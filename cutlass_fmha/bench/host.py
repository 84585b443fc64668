"""Host time: what a call costs the interpreter, repeated and with a length that it never saw before."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from . import peers as packages
from .cases import Case
from .contenders import TITLES, Inputs
from .surfaces import measure_surfaces
from .timing import percentile, time_host

Call = Callable[[], object]

STEPS = 1000
"""Lengths of a loop: as many that its p99 is that of ten calls. Of torch, which takes up to 40 ms a call, a tenth."""
DEPTH = 50
"""Calls between two synchronisations, which are not timed: a full launch queue would make the host wait."""
DOCUMENTS = 16


def measure_host(peers: Iterable[str] = ()) -> dict[str, dict[str, float]]:
    """Microseconds on the host, by section: of a repeated call by contender, of a loop its p50 and p99."""
    return {**repeated(peers), **new_lengths(), **measure_surfaces()}  # JAX's calls last: after them others take longer


def of_packages(peers: Iterable[str], *tensors: torch.Tensor) -> dict[str, Call]:
    """Calls of those that run it, [batch, seqlen, num_heads, head_dim]; the cases tell why others don't."""
    _, seqlen, heads, head_dim = tensors[0].shape
    case = Case("latency", 1, heads, heads, seqlen, seqlen, head_dim, "bfloat16")
    found: dict[str, Call] = {}
    for name, call in packages.line_up(case, Inputs(*(x[None] for x in tensors)), peers, None).items():
        with contextlib.suppress(Exception):
            call(*tensors)
            found[TITLES[name]] = partial(call, *tensors)
    return found


def repeated(peers: Iterable[str] = ()) -> dict[str, dict[str, float]]:
    """An eager call with the same shapes again and again, in turns with torch's and those of ``peers``."""
    import cutlass_fmha

    found = {}
    for seqlen, head_dim in ((128, 64), (2048, 128)):
        q, k, v = (_tensor(1, 1, seqlen, head_dim) for _ in range(3))
        rows = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        calls: dict[str, Call] = {
            "attention": partial(cutlass_fmha.attention, *rows),
            "scaled_dot_product_attention": partial(cutlass_fmha.scaled_dot_product_attention, q, k, v),
            "the op forward": partial(torch.ops.cutlass_fmha.forward, *rows, head_dim**-0.5, "none", False, None),
            "torch SDPA": partial(torch.nn.functional.scaled_dot_product_attention, q, k, v),
            **of_packages(peers, *rows),
        }
        section = f"repeated, S{seqlen} D{head_dim}"
        found[section] = {name: round(us, 2) for name, us in time_host(calls).items()}
        ours = {name: calls[name] for name in ("scaled_dot_product_attention", "torch SDPA")}
        with cutlass_fmha.sdpa():  # where the second is the first, too
            times = time_host(ours)
        found[f"{section}, under cutlass_fmha.sdpa"] = {name: round(us, 2) for name, us in times.items()}
    found["repeated, a key appended to a cache"] = {name: round(us, 2) for name, us in time_host(_appends()).items()}
    return found


def _appends() -> dict[str, Call]:
    """A decode step: keys and queries are rotated, keys appended, then attended to."""
    import cutlass_fmha

    q, k, v = _tensor(2, 1, 32, 128), _tensor(2, 1, 8, 128), _tensor(2, 1, 8, 128)
    k_cache, v_cache = (_tensor(2, 4096, 8, 128) for _ in range(2))
    lengths = torch.tensor([1000, 2000], dtype=torch.int32, device="cuda")
    table: dict[str, Any] = {"rotary_cos": _tensor(4096, 64), "rotary_sin": _tensor(4096, 64)}
    append = torch.ops.cutlass_fmha.append_kv_
    return {
        "with_kv_cache": partial(
            cutlass_fmha.with_kv_cache, q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, **table
        ),
        "the op append_kv_": partial(append, k_cache, v_cache, k, v, lengths, query=q, **table),
    }


def new_lengths() -> dict[str, dict[str, float]]:
    """Loops in which each call has a length that none had before."""
    import cutlass_fmha

    loops: dict[str, Callable[[int], Iterator[Call]]] = {
        "prefill, ours": partial(_prefill, lambda *x: cutlass_fmha.attention(*x, causal=True)),
        "prefill, torch SDPA": partial(_prefill, _torch_causal),
        "packed documents, ours": _packed,
        "growing decode, ours": _growing,
    }
    found = {}
    for name, loop in loops.items():
        times = time_each(loop(STEPS // 10 if "torch" in name else STEPS))
        section = {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}
        found[f"a new length at each call: {name}"] = {key: round(us, 1) for key, us in section.items()}
    return found


def time_each(calls: Iterator[Call]) -> list[float]:
    """Host microseconds of each call; making the calls is not timed, and waiting for the GPU neither."""
    times = []
    for number, call in enumerate(calls):
        if number % DEPTH == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return times


def _tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cuda").to(torch.bfloat16)


def _torch_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _prefill(attend: Callable[..., object], steps: int) -> Iterator[Call]:
    first = 700
    q, k, v = (_tensor(1, first + steps, 8, 128) for _ in range(3))
    for seqlen in range(first, first + steps):
        yield partial(attend, *(x[:, :seqlen] for x in (q, k, v)))


def _packed(steps: int) -> Iterator[Call]:
    import cutlass_fmha

    draw = random.Random(1)
    q, k, v = (_tensor(DOCUMENTS * 400, 8, 128) for _ in range(3))
    for _ in range(steps):
        ends = [0]
        for _ in range(DOCUMENTS):
            ends.append(ends[-1] + draw.randint(20, 400))
        longest = max(b - a for a, b in pairwise(ends))
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
        yield partial(
            cutlass_fmha.attention,
            *(x[: ends[-1]] for x in (q, k, v)),
            causal=True,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )


def _growing(steps: int) -> Iterator[Call]:
    import cutlass_fmha

    first = 1000
    q = _tensor(1, 1, 32, 128)
    k, v = (_tensor(1, first + steps, 8, 128) for _ in range(2))
    for seqlen in range(first, first + steps):
        yield partial(cutlass_fmha.attention, q, k[:, :seqlen], v[:, :seqlen])
