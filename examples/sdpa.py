"""A model written for torch, with cutlass_fmha behind its attention: forward, backward, and the proof.

    python examples/sdpa.py

On a GPU its kernels run; without one, the ops' CPU backend.
"""

from __future__ import annotations

import torch
from torch import nn

import cutlass_fmha


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).to(device)
    tokens = torch.randn(2, 100, 256, device=device)
    padding = torch.arange(100, device=device) >= torch.tensor([[100], [60]], device=device)

    def step() -> torch.Tensor:
        """The gradient of the first projection, half precision as in training."""
        model.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(tokens, src_key_padding_mask=padding)
        out[~padding].float().square().mean().backward()
        gradient = model.layers[0].self_attn.in_proj_weight.grad
        assert gradient is not None
        return gradient.clone()

    theirs = step()
    with cutlass_fmha.sdpa(device):
        ours = step()
    print(f"on the {device}: {dict(cutlass_fmha.sdpa.counts)}, declined: {dict(cutlass_fmha.sdpa.declined)}")
    distance = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"gradient beside torch's own attention: {distance:.1e} away, relative")
    assert distance < 0.05


if __name__ == "__main__":
    main()
