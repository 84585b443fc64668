"""A Llama-like decoder block, prefill and decode: by cutlass_fmha.nn, by torch, and by torch.compile,
its attention by SDPA's choice and by its flash backend.

    python examples/decoder_block.py                    # --json FILE keeps it

On a GPU 4096 wide, H32/8, MLP 14336, in bf16: a prompt of 8,192 tokens, then steps at 32,768 keys, as CUDA
graphs. 1,000 steps are replayed, and torch's counters asked whether anything was allocated. Without a GPU a
tiny block, whose times say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import cutlass_fmha
from cutlass_fmha.bench import machine
from cutlass_fmha.demo.measure import times_in_turns
from cutlass_fmha.nn import Attention, KVCache, RMSNorm, SwiGLU, rotary_table


class Size(NamedTuple):
    width: int
    heads: int
    heads_kv: int
    hidden: int
    prompt: int
    keys: int
    batch: int
    steps: int


SIZES = {"cuda": Size(4096, 32, 8, 14336, 8192, 32768, 4, 1000), "cpu": Size(64, 4, 2, 160, 48, 64, 2, 8)}
EPS = 1e-5


class Block(torch.nn.Module):
    def __init__(self, size: Size, **like: Any) -> None:
        super().__init__()
        self.norm, self.mlp_norm = (RMSNorm(size.width, EPS, **like) for _ in range(2))
        self.attention = Attention(size.width, size.heads, size.heads_kv, **like)
        self.mlp = SwiGLU(size.width, size.hidden, **like)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        attended = self.attention(self.norm(x), table, cache)
        normed, total = self.mlp_norm(attended, residual=x)  # the sum and its norm in one launch
        return total + self.mlp(normed)


class TorchBlock(torch.nn.Module):
    """The same weights in torch's words: products fused as ours, SDPA over a cache that it may see whole."""

    def __init__(self, block: Block, size: Size, flash: bool = False) -> None:
        """flash: by SDPA's flash backend, which torch itself prefers on any GPU but sm_90 and sm_100."""
        super().__init__()
        self.of, self.size, self.flash = [block], size, flash  # not a child: its parameters are the block's

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
        """at: positions [seqlen] of x's tokens. Several are a prompt, and see each other alone; one sees all
        keys of the cache."""
        (block,), size = self.of, self.size
        head_dim = size.width // size.heads
        rows = functional.linear(
            functional.rms_norm(x, (size.width,), block.norm.weight, EPS), block.attention.qkv_weight
        ).unflatten(-1, (-1, head_dim))
        q, k, v = (y.transpose(1, 2) for y in rows.split([size.heads, size.heads_kv, size.heads_kv], -2))
        cos, sin = (y[at] for y in table)
        q, k = (self.turned(y, cos, sin) for y in (q, k))
        k_cache.index_copy_(2, at, k)
        v_cache.index_copy_(2, at, v)
        prompt = x.shape[1] > 1
        seen = (k, v) if prompt else (k_cache, v_cache)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash else contextlib.nullcontext():
            out = functional.scaled_dot_product_attention(q, *seen, is_causal=prompt, enable_gqa=True)
        x = x + functional.linear(out.transpose(1, 2).flatten(2), block.attention.o_proj.weight)
        normed = functional.rms_norm(x, (size.width,), block.mlp_norm.weight, EPS)
        gate, up = functional.linear(normed, block.mlp.gate_up_weight).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, block.mlp.down_proj.weight)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def worst(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is printed, and on what it ran")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, dtype = SIZES[device], torch.bfloat16 if device == "cuda" else torch.float32
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    torch.manual_seed(0)
    block = Block(size, **like)
    theirs = TorchBlock(block, size)
    head_dim = size.width // size.heads
    table = rotary_table(size.keys, head_dim, 500000.0, device=device)
    cache = KVCache(size.batch, size.keys, size.heads_kv, head_dim, **like)
    caches = [torch.zeros(size.batch, size.heads_kv, size.keys, head_dim, **like) for _ in range(2)]
    prompt = torch.randn(1, size.prompt, size.width, **like)
    token = torch.randn(size.batch, 1, size.width, **like)
    of_prompt = KVCache(1, size.prompt, size.heads_kv, head_dim, **like)
    places = torch.arange(size.prompt, device=device)
    last = torch.tensor([size.keys - 1], device=device)
    cache.k.normal_()
    cache.v.normal_()
    for mine, other in zip((cache.k, cache.v), caches, strict=True):
        other.copy_(mine.transpose(1, 2))
    room = 0  # the CPU takes nothing from a workspace
    if device == "cuda":
        like_q = torch.empty(size.batch, 1, size.heads, head_dim, **like)
        said: dict[str, Any] = {"causal": True, "seqused_k": cache.lengths}
        room = cutlass_fmha.memory_plan(like_q, cache.k, cache.v, **said).workspace
        room += sum(-(-x.nbytes // 512) * 512 for x in (like_q, cache.lengths))  # turned, before attention reads them
    workspace = cutlass_fmha.Workspace(room, device)

    def prefill() -> Tensor:
        of_prompt.lengths.zero_()
        return block(prompt, table, of_prompt)

    def step() -> Tensor:
        cache.lengths.fill_(size.keys - 1)  # the same step again: a model would let it grow
        with workspace:
            return block(token, table, cache)

    def of_torch(x: Tensor, at: Tensor) -> Callable[[Callable[..., Tensor]], Callable[[], Tensor]]:
        kept = caches if len(at) == 1 else [y[:1, :, : size.prompt].clone() for y in caches]
        return lambda call: lambda: call(x, table, *kept, at)

    kept: dict[str, Any] = {"machine": machine.describe(0) if device == "cuda" else {"gpu": None}}
    kept |= {"size": size._asdict(), "us": {}, "off_torch": {}}
    with torch.no_grad():
        for name, ours, bind in (
            (f"prefill of {size.prompt} tokens", prefill, of_torch(prompt, places)),
            (f"decode of {size.batch} sequences at {size.keys} keys", step, of_torch(token, last)),
        ):
            calls = {"cutlass_fmha": ours, "torch": bind(theirs)}
            if device == "cuda":
                for named, flash in (("torch.compile", False), ("torch.compile, flash", True)):
                    each = torch.compile(TorchBlock(block, size, flash), fullgraph=True, dynamic=False)
                    calls[named] = bind(each)
            off = worst(ours(), calls["torch"]())
            assert off < (0.05 if device == "cuda" else 1e-4), off
            times = times_in_turns(calls, device, 0.5 if device == "cuda" else 0.02)
            told = ", ".join(f"{each} {us:,.0f} us ({us / times['cutlass_fmha']:.2f}x)" for each, us in times.items())
            print(f"{name} on the {device}: {told}; {off:.0e} off torch")
            kept["us"][name], kept["off_torch"][name] = times, off
        kept["steps"] = allocations(step, size.steps, device)
        print(f"{size.steps} steps: {kept['steps']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


def allocations(step: Callable[[], Tensor], steps: int, device: str) -> str:
    """Of steps that are replayed, by torch's counters."""
    if device == "cpu":
        for _ in range(steps):
            step()
        return "a CPU has no graphs and no counters"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = torch.cuda.memory_stats()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    counters = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")
    more = {name: after.get(name, 0) - before.get(name, 0) for name in counters}
    assert not any(more.values()), more
    return "no allocation"


if __name__ == "__main__":
    main()
