"""A script written for flash_attn, FlashAttention-2: packed prompts, then a cache, by this package's kernels.

    python examples/flash_attn_generation.py

On a GPU its kernels run; without one, the ops' CPU backend. Two lines are not of such a script, nor is what
checks it: the same tokens by torch, each from all before it.
"""

from __future__ import annotations

import torch

import cutlass_fmha.flash_attn
from cutlass_fmha.demo.measure import CountCalls

cutlass_fmha.flash_attn.install()

from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from flash_attn.bert_padding import pad_input, unpad_input  # noqa: E402
from flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402

HEADS, DIM, VOCABULARY = 4, 64, 100


@torch.no_grad()
def main() -> None:
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    embed = torch.randn(VOCABULARY, HEADS * DIM, device=device, dtype=dtype)
    project = torch.randn(HEADS * DIM, 3 * HEADS * DIM, device=device, dtype=dtype) / (HEADS * DIM) ** 0.5
    angles = torch.outer(torch.arange(128.0), 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    prompts = torch.randint(VOCABULARY, (2, 9), device=device)
    lengths = torch.tensor([9, 5], dtype=torch.int32, device=device)
    cache = torch.zeros(2, 2, 128, HEADS, DIM, device=device, dtype=dtype)

    def qkv_of(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (embed[tokens] @ project).unflatten(-1, (3, HEADS, DIM)).unbind(-3)

    def generate(lengths: torch.Tensor) -> list[list[int]]:
        mask = torch.arange(9, device=device) < lengths[:, None]
        tokens, indices, starts, longest, *_ = unpad_input(prompts[..., None], mask)
        q, k, v = qkv_of(tokens.squeeze(-1))
        q, k = (apply_rotary_emb(x, cos, sin, cu_seqlens=starts, max_seqlen=longest) for x in (q, k))
        out = pad_input(flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True), indices, 2, 9)
        for place, rows in zip(cache, (k, v), strict=True):
            place[:, :9] = pad_input(rows, indices, 2, 9)
        last = out[torch.arange(2, device=device), lengths.long() - 1]
        generated = []
        for _ in range(8):
            new = (last.flatten(-2) @ embed.t()).argmax(-1, keepdim=True)
            generated.append(new)
            said = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False, "causal": True}
            q, k, v = qkv_of(new)
            last = flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, **said)
            last, lengths = last[:, 0], lengths + 1
        return torch.cat(generated, 1).tolist()

    def by_torch(prompt: torch.Tensor) -> list[int]:
        tokens = prompt
        for _ in range(8):
            q, k, v = qkv_of(tokens)
            c, s = (table[: len(tokens), None] for table in (cos, sin))
            q, k = (torch.cat((a * c - b * s, a * s + b * c), -1) for a, b in (x.chunk(2, -1) for x in (q, k)))
            weights = (torch.einsum("hd,khd->hk", q[-1], k) / DIM**0.5).softmax(-1)
            last = torch.einsum("hk,khd->hd", weights, v)
            tokens = torch.cat((tokens, (last.flatten() @ embed.t()).argmax()[None]))
        return tokens[len(prompt) :].tolist()

    with CountCalls() as counter:
        generated = generate(lengths)
    expected = [by_torch(row[:length]) for row, length in zip(prompts, lengths, strict=True)]
    print(f"on the {device}, {counter.calls} calls of cutlass_fmha's ops, two sequences: {generated}")
    assert counter.calls == 1 + 8
    assert generated == expected or device == "cuda"  # float16 may break a tie otherwise


if __name__ == "__main__":
    main()
