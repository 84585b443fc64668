"""``python -m cutlass_fmha.bench.beside``: norms, gated units and rotary beside torch's and others'.

The share is the time of a copy that moves as many bytes as the call must, in the same run, over the call's. A
backward is timed alone, in a graph as the forward is. Append: against three launches of ours, to contiguous and
to paged caches. On a CPU times are those of the wall, and say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import cutlass_fmha
from cutlass_fmha.demo.measure import wall_times

from . import kept
from .report import table
from .runner import first_sentence
from .timing import Call, GraphTimer, input_sets, time_interleaved

Tensors = tuple[Tensor, ...]
Function = Callable[..., Any]

SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24, 26, 28))
"""Bytes of the first tensor."""
OURS, TORCH, COMPILED, COPY = "cutlass_fmha", "torch", "torch.compile", "copy"
APPEND, APART, TURNING = "append", "norm; rotary; append", "norm of q; of k; append that turns"
EPS, DIM, HEAD_DIM, HEADS, HEADS_KV = 1e-6, 4096, 128, 32, 8


class Op(NamedTuple):
    #: Tensors of so many elements; those of floats have gradients.
    make: Callable[[int, torch.device, torch.dtype], Tensors]
    ours: Function
    torch: Function
    #: Bytes of rows that must move: forward, backward (None: it has none). Tables of angles count, too.
    moved: Callable[[int], tuple[int, int | None]]
    #: Of others: module and what makes the function of it.
    peers: dict[str, tuple[str, Callable[[Any], Function]]]


def _rows(count: int) -> Callable[[int, torch.device, torch.dtype], Tensors]:
    """``count`` tensors [rows, dim], and a weight [dim] for one that norms."""

    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Tensors:
        dim = min(DIM, elements)
        return tuple(torch.randn(elements // dim, dim, device=device, dtype=dtype) for _ in range(count))

    return make


def _normed(count: int) -> Callable[[int, torch.device, torch.dtype], Tensors]:
    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Tensors:
        found = _rows(count)(elements, device, dtype)
        return *found, torch.randn(found[0].shape[1], device=device, dtype=dtype)

    return make


def _heads(weights: bool) -> Callable[[int, torch.device, torch.dtype], Tensors]:
    """q and k of one sequence, [1, seqlen, heads, head_dim], weights, cos and sin."""

    def make(elements: int, device: torch.device, dtype: torch.dtype) -> Tensors:
        seqlen = max(1, elements // (HEADS * HEAD_DIM))
        q, k = (torch.randn(1, seqlen, n, HEAD_DIM, device=device, dtype=dtype) for n in (HEADS, HEADS_KV))
        of_heads = [torch.randn(HEAD_DIM, device=device, dtype=dtype) for _ in range(2 * weights)]
        angles = torch.arange(seqlen * HEAD_DIM // 2, device=device, dtype=torch.float32).view(seqlen, -1)
        return q, k, *of_heads, angles.cos(), angles.sin()

    return make


def _torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def _torch_sum_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
    total = x + residual
    return _torch_norm(total, weight), total


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    c, s = cos[None, :, None], sin[None, :, None]
    return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)


def _torch_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _torch_norm_rotary(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    return _torch_rotary(_torch_norm(q, wq), _torch_norm(k, wk), cos, sin)


def _of_rotary(forward: int, backward: int) -> Callable[[int], tuple[int, int | None]]:
    more = (HEADS + HEADS_KV) / HEADS
    return lambda n: (int(forward * n * more), int(backward * n * more))


OPS = {
    "rms_norm": Op(
        _normed(1), lambda x, w: cutlass_fmha.rms_norm(x, w, eps=EPS), _torch_norm, lambda n: (2 * n, 3 * n),
        {
            "flashinfer": ("flashinfer.norm", lambda m: lambda x, w: m.rmsnorm(x, w, EPS)),
            "liger": ("liger_kernel.ops.rms_norm", lambda m: lambda x, w: m.LigerRMSNormFunction.apply(
                x, w, EPS, 0.0, "llama", False)),
            "quack": ("quack", lambda m: lambda x, w: m.rmsnorm(x, w, eps=EPS)),
        },
    ),
    "rms_norm, residual": Op(
        _normed(2), lambda x, r, w: cutlass_fmha.rms_norm(x, w, residual=r, eps=EPS), _torch_sum_norm,
        lambda n: (4 * n, 4 * n),
        {"quack": ("quack", lambda m: lambda x, r, w: m.rmsnorm(x, w, residual=r, eps=EPS))},
    ),
    "swiglu": Op(
        _rows(2), cutlass_fmha.swiglu, lambda gate, up: functional.silu(gate) * up, lambda n: (3 * n, 5 * n),
        {
            "liger": ("liger_kernel.ops.swiglu", lambda m: m.LigerSiLUMulFunction.apply),
        },
    ),
    "silu_and_mul": Op(
        _rows(1), cutlass_fmha.silu_and_mul,
        lambda x: functional.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
        lambda n: (3 * n // 2, 5 * n // 2),
        {"flashinfer": ("flashinfer.activation", lambda m: m.silu_and_mul)},
    ),
    "geglu, tanh": Op(
        _rows(2), partial(cutlass_fmha.geglu, approximate="tanh"),
        lambda gate, up: functional.gelu(gate, approximate="tanh") * up, lambda n: (3 * n, 5 * n),
        {"liger": ("liger_kernel.ops.geglu", lambda m: m.LigerGELUMulFunction.apply)},
    ),
    "rotary_qk": Op(_heads(False), cutlass_fmha.rotary_qk, _torch_rotary, _of_rotary(2, 2), {}),
    "qk_norm_rope": Op(
        _heads(True),
        lambda q, k, *w, **_: cutlass_fmha.qk_norm_rope(q, k, None, *w[:2], cos=w[2], sin=w[3], eps=EPS),
        _torch_norm_rotary, _of_rotary(2, 3), {},
    ),
}  # fmt: skip


class Backward:
    """A function's gradients, each time of what its forward kept once."""

    def __init__(self, function: Function, inputs: list[Tensors], tables: int) -> None:
        self.function, self.inputs, self.tables = function, inputs, tables
        self.kept: dict[int, tuple[Tensors, list[Tensor]]] = {}

    def prepare(self, number: int) -> None:
        """On the stream that the calls then go to: gradients are computed where the forward was. Of leaves of its own:
        one that another stream has met is waited for."""
        last = len(self.inputs[number]) - self.tables
        tensors = tuple(x.detach().requires_grad_(n < last) for n, x in enumerate(self.inputs[number]))
        self.kept[number] = _results(self.function(*tensors)), list(tensors[:last])

    def __call__(self, number: int) -> object:
        results, wanted = self.kept[number]
        return torch.autograd.grad(results, wanted, [x.detach() for x in results], retain_graph=True)


def functions(op: Op) -> tuple[dict[str, Function], dict[str, str]]:
    """By name, ours first, and why a peer that is here has none."""
    found: dict[str, Function] = {OURS: op.ours, TORCH: op.torch}
    if torch.cuda.is_available():
        torch._functorch.config.donated_buffer = False  # what a forward kept serves each time
        torch.compiler.reset()  # a kernel for each size, and torch makes no more than eight of a function
        found[COMPILED] = torch.compile(op.torch, fullgraph=True, dynamic=False)
    refused = {}
    for name, peer in op.peers.items():
        function = _peer(*peer)
        if isinstance(function, str):
            refused[name] = function
        elif function is not None:
            found[name] = function
    return found, refused


def _peer(module: str, build: Callable[[Any], Function]) -> Function | str | None:
    """None where it is not installed, and a reason where it is broken."""
    try:
        return build(importlib.import_module(module))
    except ModuleNotFoundError:
        return None
    except Exception as error:  # what a package raises is up to it
        return first_sentence(error)


def times(calls: dict[str, Call], sets: int, cuda: bool, budget_s: float) -> tuple[dict[str, float], dict[str, str]]:
    """Microseconds of a call, by contender in turns, and why there are none."""
    prepares = {name: call.prepare for name, call in calls.items() if isinstance(call, Backward)}
    if not cuda:
        for prepare in prepares.values():
            prepare(0)
        return wall_times({name: partial(call, 0) for name, call in calls.items()}, "cpu", budget_s), {}
    made = {name: _timer(name, call, sets, prepares.get(name)) for name, call in calls.items()}
    timers = {name: timer for name, timer in made.items() if isinstance(timer, GraphTimer)}
    found = {name: timing.p50_us for name, timing in time_interleaved(timers, budget_s).items()}
    return found, {name: why for name, why in made.items() if isinstance(why, str)}


def _timer(name: str, call: Call, sets: int, prepare: Call | None) -> GraphTimer | str:
    try:
        return GraphTimer(call, sets, prepare)
    except Exception as error:
        if name == OURS:
            raise
        torch.cuda.synchronize()  # raises where the device is broken
        return first_sentence(error)


def _copy(moved: int, sets: int, device: torch.device) -> Call:
    source, target = (torch.zeros(sets, max(1, moved // 2), dtype=torch.uint8, device=device) for _ in range(2))
    return lambda number: target[number].copy_(source[number])


def _results(found: Any) -> Tensors:
    return found if isinstance(found, tuple) else (found,)


def error(op: Op, function: Function, tensors: Tensors) -> float:
    """Worst difference from the same in fp64, over the largest number."""
    wanted = _results(op.torch(*(x.double() for x in tensors)))
    return max(
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(_results(function(*tensors)), wanted, strict=False)
    )


def measure(name: str, size: int, device: torch.device, budget_s: float) -> dict[str, Any]:
    """One op at one size: microseconds, forward and backward, and what others take of ours."""
    op, cuda = OPS[name], device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    of_each = sum(x.nbytes for x in op.make(size // dtype.itemsize, torch.device("meta"), dtype))
    sets = input_sets(of_each, l2)
    inputs = [op.make(size // dtype.itemsize, device, dtype) for _ in range(sets)]
    tables = 2 if op.make.__qualname__.startswith("_heads") else 0  # cos and sin
    of_tables = sum(x.nbytes for x in inputs[0][len(inputs[0]) - tables :])
    forward_bytes, backward_bytes = op.moved(max(inputs[0][0].nbytes, 1))
    moved = (forward_bytes + of_tables, backward_bytes and backward_bytes + of_tables)
    found, refused = functions(op)
    case: dict[str, Any] = {"op": name, "bytes": inputs[0][0].nbytes, "moved": moved, "refused": refused}
    case["error"] = error(op, op.ours, inputs[0])

    def forward(function: Function, number: int) -> object:
        with torch.no_grad():
            return function(*inputs[number])

    calls: dict[str, Call] = {n: partial(forward, f) for n, f in found.items()}
    calls[COPY] = _copy(moved[0], sets, device)
    case["forward_us"], why = times(calls, sets, cuda, budget_s)
    refused |= {f"{n}, forward": reason for n, reason in why.items()}
    if moved[1] is not None:
        wanted = [n for n in found if n in case["forward_us"] and n != "flashinfer"]
        calls = {n: Backward(found[n], inputs, tables) for n in wanted}
        calls[COPY] = _copy(moved[1], sets, device)
        case["backward_us"], why = times(calls, sets, cuda, budget_s)
        refused |= {f"{n}, backward": reason for n, reason in why.items()}
    return case


def append(batch: int, page_size: int, device: torch.device, budget_s: float) -> dict[str, Any]:
    """A decode step's norms, rotary and append, at 2048 of 4096 keys: one launch, and three of ours in two ways.

    page_size: of a paged cache; 0: it is contiguous.
    """
    cuda = device.type == "cuda"
    dtype, keys = (torch.bfloat16, 4096) if cuda else (torch.float32, 64)
    q, k, v = (
        torch.randn(batch, 1, heads, HEAD_DIM, device=device, dtype=dtype) for heads in (HEADS, HEADS_KV, HEADS_KV)
    )
    wq, wk = torch.randn(2, HEAD_DIM, device=device, dtype=dtype)
    cos, sin = torch.randn(2, keys, HEAD_DIM // 2, device=device)
    rows = page_size or keys
    shape = (batch * keys // rows, rows, HEADS_KV, HEAD_DIM)
    entries = torch.randperm(shape[0], device=device) if page_size else torch.arange(batch, device=device)
    pages = entries.view(batch, -1).int() if page_size else None
    caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
    lengths = torch.full((batch,), keys // 2, dtype=torch.int32, device=device)
    norm: dict[str, Any] = {"q_weight": wq, "k_weight": wk, "eps": EPS}
    append_kv = torch.ops.cutlass_fmha.append_kv_

    def ours(_: int) -> Any:
        to: dict[str, Any] = {"k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": lengths, "page_table": pages}
        return cutlass_fmha.qk_norm_rope(q, k, v, **norm, cos=cos, sin=sin, **to)

    def apart(_: int) -> Any:
        turned, new = cutlass_fmha.rotary_qk(*cutlass_fmha.qk_norm_rope(q, k, None, **norm), cos, sin, offsets=lengths)
        append_kv(*caches, new, v, lengths, page_table=pages)
        return (turned,)

    def turning(_: int) -> Any:
        normed, new = cutlass_fmha.rms_norm(q, wq, eps=EPS), cutlass_fmha.rms_norm(k, wk, eps=EPS)
        angles = {"query": normed, "rotary_cos": cos, "rotary_sin": sin}
        return append_kv(*caches, new, v, lengths, page_table=pages, **angles)

    def results(call: Callable[[int], Any]) -> list[Tensor]:
        """Queries, and what it wrote."""
        for cache in caches:
            cache.zero_()
        at = entries.view(batch, -1)[:, keys // 2 // rows], keys // 2 % rows
        return [call(0)[0].double(), *(cache[at].double() for cache in caches)]

    calls: dict[str, Callable[[int], Any]] = {OURS: ours, APART: apart, TURNING: turning}
    with torch.no_grad():
        mine, *others = (results(call) for call in calls.values())
        pairs = (pair for other in others for pair in zip(mine, other, strict=True))
        off = max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
        found = times(calls, 1, cuda, budget_s)[0]
    case = {"op": APPEND, "batch": batch, "page_size": page_size, "bytes": q.nbytes, "error": off}
    return {**case, "us": found, "ratio": found[APART] / found[OURS]}


# ---- the table ---------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    lines = [f"Ops beside attention on {result['machine']['gpu'] or 'a CPU'}: us, the share of a copy's rate, and"]
    lines += ["how many times as long others take.", ""]
    others = [n for n in dict.fromkeys(n for c in result["results"] for n in c["forward_us"]) if n not in (OURS, COPY)]
    rows = []
    for case in result["results"]:
        for which in ("forward", "backward"):
            us = case.get(f"{which}_us", {})
            if OURS not in us:
                continue
            cells = (f"{us[n] / us[OURS]:.2f}x" if n in us and us[OURS] > 0 else "-" for n in others)
            share = f"{us[COPY] / us[OURS]:.0%}" if us[OURS] > 0 else "-"
            rows.append([f"{case['op']}, {which}", f"{case['bytes']:,}", f"{us[OURS]:.2f}", share, *cells])
    if rows:
        lines += [*table(["op", "bytes", "us", "of copy", *others], rows), ""]
    steps = [
        [f"{x['ratio']:.2f}x", f"{x['batch']}", f"{x['page_size'] or '-'}", *(f"{us:.2f}" for us in x["us"].values())]
        for x in result["append"]
    ]
    ways = (f"{name}, us" for name in ("norm, rotary, append in one", APART, TURNING))
    if steps:
        lines += table(["three of ours to one", "batch", "pages of", *ways], steps)
    reasons = {f"{c['op']}, {n}: {why}": None for c in result["results"] for n, why in c["refused"].items()}
    return "\n".join([*lines, *([""] if reasons else []), *reasons]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Returns 1 where a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m cutlass_fmha.bench.beside", description=__doc__)
    parser.add_argument("--ops", nargs="+", choices=[*OPS, APPEND], default=[*OPS, APPEND], metavar="NAME")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes; default: 4 KiB to 256 MiB, on a CPU to 64 KiB")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of each contender and case")
    kept.add_options(parser)
    arguments = parser.parse_args(argv)

    def found(device: torch.device) -> Iterator[dict[str, Any]]:
        sizes = arguments.sizes or (SIZES if device.type == "cuda" else SIZES[:3])
        result: dict[str, Any] = {"results": [], "append": []}
        for name in arguments.ops:
            for size in sizes if name != APPEND else ():
                result["results"].append(measure(name, size, device, arguments.budget))
                print(result["results"][-1], file=sys.stderr, flush=True)
                yield result
        batches = (1, 8, 64, 256) if device.type == "cuda" else (1, 2)
        for batch, page_size in itertools.product(batches if APPEND in arguments.ops else (), (0, 16)):
            result["append"].append(append(batch, page_size, device, arguments.budget))
            yield result

    result = kept.run(arguments, found, text)
    tolerance = 2e-2 if result["machine"]["gpu"] else 1e-5
    wrong = [c for c in (*result["results"], *result["append"]) if not c["error"] <= tolerance]
    for case in wrong:
        print(f"beside: {case['op']} is {case['error']:.1e} off at {case['bytes']} bytes", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
