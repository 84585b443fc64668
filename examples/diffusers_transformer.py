"""A video transformer of diffusers, with random weights, whose attention is cutlass_fmha's.

    pip install diffusers
    python examples/diffusers_transformer.py

On a GPU its kernels run; without one, the ops' CPU backend.
"""

from __future__ import annotations

import torch
from diffusers import WanTransformer3DModel

from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import diffusers as integration


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=64, freq_dim=64,
        ffn_dim=256, num_layers=2,
    ).to(device, dtype)  # fmt: skip
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.1, 0.1)
    latents = torch.randn(1, 4, 3, 16, 16, device=device, dtype=dtype)  # 192 tokens
    text = torch.randn(1, 20, 64, device=device, dtype=dtype)

    def denoise() -> torch.Tensor:
        with torch.no_grad():
            return model(latents, timestep=torch.tensor([5], device=device), encoder_hidden_states=text)[0]

    theirs = denoise()
    model.set_attention_backend(integration.register())
    with CountCalls() as counter:
        ours = denoise()
    distance = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"on the {device}: {counter.calls} calls of cutlass_fmha's ops, {distance:.1e} away from native")
    assert counter.calls == 4  # two layers, each with one attention to the video and one to the text
    assert distance < 0.05


if __name__ == "__main__":
    main()
