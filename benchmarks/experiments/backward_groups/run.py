"""Rows of the backward by groups of warps: errors against fp32 on small problems, rates beside torch's flash one.

PYTHONPATH=BUILD_OF_ROWS_CMAKE python run.py [--library NAME=FILE ...]; it takes 50 s on an H200.

A library has `bwd_run(q, k, v, o, dout, lse, dq, dk, dv, sums, lse2, delta, heads, seqlen, causal, what,
stream)` over [heads, seqlen, head_dim] tensors, and stands beside rows of the head dim its NAME begins with.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from typing import Any

import torch

from cutlass_fmha import _C
from cutlass_fmha.launch import gradients

SMALL = ((1, 2, 1, 197, 333), (2, 2, 2, 512, 512), (1, 4, 2, 61, 65), (1, 1, 1, 1000, 777), (1, 1, 1, 1, 640))
TIMED = ((64, 4, 32, 4096), (128, 2, 16, 8192), (96, 4, 16, 4096), (256, 4, 8, 4096))
Tensors = tuple[torch.Tensor, ...]


def seconds(call: Callable[[], Any], runs: int = 8, inner: int = 3) -> float:
    """The median time of a call, of graphs of `inner`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(), call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    graph.replay()
    for _ in range(runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(), graph.replay(), end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / inner / 1e3)
    return statistics.median(times)


def gradients_of(
    row: Any, tensors: Tensors, dout: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, causal: bool
) -> Tensors:
    mask, wanted = "bottom-right" if causal else "none", (True, True, True, False, False)
    scale = tensors[0].shape[-1] ** -0.5
    return gradients.launch(dout, tensors, o, lse, None, scale, mask, {}, wanted, row=row.name)[:3]


def error(row: Any, shape: tuple[int, ...], causal: bool) -> float:
    """The largest relative L2 error of the three gradients."""
    batch, heads, heads_kv, seqlen_q, seqlen_k = shape
    torch.manual_seed(seqlen_q + seqlen_k)
    q, dout = (torch.randn(batch, seqlen_q, heads, row.head_dim, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(batch, seqlen_k, heads_kv, row.head_dim, device="cuda").bfloat16() for _ in range(2))
    wide = [x.float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(heads // heads_kv, 1) for x in wide[1:])
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda")
    if causal:
        hidden = ~hidden.logical_not().tril(seqlen_k - seqlen_q)
    scores = (wide[0] @ keys.mT * row.head_dim**-0.5).masked_fill(hidden, -1e30)
    lse = torch.where(hidden.all(1), -torch.inf, scores.logsumexp(-1)).detach()
    out = scores.softmax(-1).masked_fill(hidden, 0) @ values
    wanted = torch.autograd.grad(out, wide, dout.float().transpose(1, 2))
    got = gradients_of(row, (q, k, v), dout, out.detach().transpose(1, 2).bfloat16(), lse, causal)
    return max(
        float((x.float().transpose(1, 2) - y).norm() / y.norm().clamp_min(1e-6))
        for x, y in zip(got, wanted, strict=True)
    )


def library_call(file: str, tensors: Tensors, lse: torch.Tensor, causal: bool) -> Callable[[], None]:
    library = ctypes.CDLL(file)
    given = [x.transpose(1, 2).contiguous() for x in tensors]
    made = [torch.empty_like(given[0]) for _ in range(3)]
    made += [
        torch.empty(given[0].numel(), device="cuda"),
        *(torch.empty(lse.numel(), device="cuda") for _ in range(2)),
    ]
    everything = [*given, lse.contiguous(), *made]
    batch, seqlen, heads, _ = tensors[0].shape

    def call() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        addresses = [ctypes.c_void_p(x.data_ptr()) for x in everything]
        assert library.bwd_run(*addresses, batch * heads, seqlen, int(causal), 7, stream) == 0

    return call


def compare(rows: list[Any], libraries: dict[str, str], case: tuple[int, int, int, int], causal: bool) -> None:
    head_dim, batch, heads, seqlen = case
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda").bfloat16() for _ in range(4))
    o, lse, *rest = torch.ops.aten._flash_attention_forward(q, k, v, None, None, seqlen, seqlen, 0.0, causal, False)

    def flash() -> None:
        torch.ops.aten._flash_attention_backward(
            dout, q, k, v, o, lse, None, None, seqlen, seqlen, 0.0, causal, rest[0], rest[1]
        )

    of_flash, tera = seconds(flash), 10 * batch * heads * seqlen**2 * head_dim / (1 + causal) / 1e12
    print(f"D{head_dim} S{seqlen} {'causal' if causal else 'full'}: flash {tera / of_flash:.0f} TFLOP/s")
    calls: dict[str, Callable[[], Any]] = {
        row.name: lambda row=row: gradients_of(row, (q, k, v), dout, o, lse, causal)
        for row in rows
        if row.head_dim == head_dim
    }
    for name, file in libraries.items():
        if name.startswith(str(head_dim)):
            calls[name] = library_call(file, (q, k, v, o, dout), lse, causal)
    for name, call in calls.items():
        took = seconds(call)
        print(f"  {name:62s} {tera / took:4.0f} {of_flash / took:.3f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", action="append", default=[], metavar="NAME=FILE")
    libraries = dict(text.split("=", 1) for text in parser.parse_args().library)
    rows = [row for row in _C.backward_rows() if "_groups_tma_" in row.name + "_" and not row.name.endswith("_ds")]
    for row in rows:
        worst = max(error(row, shape, causal) for shape in SMALL for causal in (False, True))
        print(f"{row.name:62s} {worst:.4f}{'' if worst < 0.012 else ' WRONG'}", flush=True)
    for case in TIMED:
        for causal in (False, True):
            compare(rows, libraries, case, causal)


if __name__ == "__main__":
    main()
