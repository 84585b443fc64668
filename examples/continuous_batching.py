"""Continuous batching over a paged cache: each step is one call, of parts of prompts and of single tokens.

    python examples/continuous_batching.py

Requests come and go, pages are handed on, and each request gets the tokens that it gets alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cutlass_fmha

HEADS, HEADS_KV, DIM, VOCABULARY = 4, 2, 64, 128
PAGE, PAGES, TOKENS = 16, 12, 24  # rows of a page, pages of the cache, tokens of a step at most


class Layer(torch.nn.Module):
    """One layer of attention between an embedding and its transpose, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HEADS * DIM)
        self.qkv = torch.nn.Linear(HEADS * DIM, (HEADS + 2 * HEADS_KV) * DIM, bias=False)
        angles = torch.outer(torch.arange(PAGE * PAGES), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def project(self, tokens: Tensor) -> list[Tensor]:
        """q, k, v: [tokens, heads, DIM] each."""
        rows = self.qkv(self.embedding(tokens)).unflatten(-1, (-1, DIM))
        return list(rows.split([HEADS, HEADS_KV, HEADS_KV], dim=-2))

    def next_tokens(self, attended: Tensor) -> Tensor:
        return (attended.flatten(-2) @ self.embedding.weight.T).argmax(-1)


class Request:
    def __init__(self, prompt: list[int], wanted: int) -> None:
        self.tokens, self.end = list(prompt), len(prompt) + wanted
        self.cached = 0  # tokens whose keys are in the cache
        self.pages: list[int] = []


class Engine:
    """Takes a request where there are pages for all of it, and runs what it has until nothing is left."""

    def __init__(self, layer: Layer, device: str, dtype: torch.dtype) -> None:
        self.layer = layer
        self.caches = [torch.zeros(PAGES, PAGE, HEADS_KV, DIM, device=device, dtype=dtype) for _ in "kv"]
        self.free = list(range(PAGES))
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def step(self) -> list[int]:
        """How many tokens of each request were computed."""
        while self.waiting and len(self.free) >= (count := -(-self.waiting[0].end // PAGE)):
            request = self.waiting.pop(0)
            request.pages, self.free = self.free[:count], self.free[count:]
            self.running.append(request)
        left, parts = TOKENS, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):  # single tokens first
            new = request.tokens[request.cached :][:left]
            left -= len(new)
            parts += [(request, new)] if new else []
        self._run(parts)
        for request in [r for r in self.running if len(r.tokens) == r.end]:
            self.running.remove(request)
            self.free += request.pages
        return [len(new) for _, new in parts]

    def _run(self, parts: list[tuple[Request, list[int]]]) -> None:
        device = self.caches[0].device
        lengths = [0, *(len(new) for _, new in parts)]
        starts = torch.tensor(lengths, device=device).cumsum(0).int()
        most = max(len(request.pages) for request, _ in parts)
        table = [request.pages + [0] * (most - len(request.pages)) for request, _ in parts]
        tokens = torch.tensor([token for _, new in parts for token in new], device=device)
        q, k, v = self.layer.project(tokens)
        attended = cutlass_fmha.with_kv_cache(
            q, *self.caches, k, v, causal=True, cu_seqlens_q=starts, max_seqlen_q=max(lengths),
            page_table=torch.tensor(table, dtype=torch.int32, device=device),
            cache_seqlens=torch.tensor([r.cached for r, _ in parts], dtype=torch.int32, device=device),
            rotary_cos=self.layer.cos, rotary_sin=self.layer.sin,
        )  # fmt: skip
        found = self.layer.next_tokens(attended[starts[1:].long() - 1]).tolist()
        for (request, new), token in zip(parts, found, strict=True):
            request.cached += len(new)
            if request.cached == len(request.tokens):  # its prompt, too, is all there
                request.tokens.append(token)


def alone(layer: Layer, request: Request, count: int) -> list[int]:
    """A prompt and its tokens by attention over the whole sequence each time."""
    tokens = torch.tensor(request.tokens[:count], device=layer.cos.device)
    while len(tokens) < request.end:
        q, k, v = (x[None] for x in layer.project(tokens))
        q, k = (cutlass_fmha.rotary(x, layer.cos, layer.sin, 0) for x in (q, k))
        attended = cutlass_fmha.attention(q, k, v, causal=True)[0, -1:]
        tokens = torch.cat((tokens, layer.next_tokens(attended)))
    return tokens.tolist()


@torch.no_grad()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = Layer().to(device, dtype)
    sizes = ((37, 9), (5, 12), (60, 4), (1, 20), (18, 3), (44, 8))  # tokens of a prompt, tokens to come
    requests = [Request(torch.randint(VOCABULARY, (n,)).tolist(), wanted) for n, wanted in sizes]
    engine, batches, coming = Engine(layer, device, dtype), [], list(requests)
    while coming or engine.waiting or engine.running:
        engine.waiting += [coming.pop(0)] if coming else []  # another one at each step
        batches.append(engine.step())
    same = [alone(layer, r, n) == r.tokens for r, (n, _) in zip(requests, sizes, strict=True)]
    print(f"{len(batches)} steps on the {device}, of up to {max(map(len, batches))} requests: {batches[:6]} ...")
    print(f"{sum(same)} of {len(same)} requests have the tokens that they have alone")
    assert len({*requests[3].tokens}) > 5 and len(engine.free) == PAGES and max(map(len, batches)) > 2
    assert all(same) or device == "cuda"  # float16 may break a tie otherwise


if __name__ == "__main__":
    main()
