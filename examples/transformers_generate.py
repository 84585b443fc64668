"""A transformers model, with random weights, that generates from prompts of two lengths by cutlass_fmha.

    pip install transformers
    python examples/transformers_generate.py

Padding, on the left, is passed on as lengths. On a GPU the kernels run; without one, the ops' CPU backend.
"""

from __future__ import annotations

import torch
from transformers import MistralConfig, MistralForCausalLM

from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import transformers as integration


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    integration.register()
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=32, attn_implementation="cutlass_fmha_flash",
    )  # fmt: skip
    model = MistralForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    prompts = torch.randint(1, 256, (2, 48), device=device)
    mask = torch.ones_like(prompts)
    mask[1, :30] = 0

    def generate() -> torch.Tensor:
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompts, attention_mask=mask, **options)[:, 48:]

    with CountCalls() as counter:
        ours = generate()
    model.set_attn_implementation("eager")
    same = (ours == generate()).float().mean().item()
    print(f"on the {device}: {counter.calls} calls of cutlass_fmha's ops, {same:.0%} of the tokens are eager's")
    assert counter.calls == 2 * 8
    assert same == 1.0 or device == "cuda"  # bfloat16 may break a tie otherwise


if __name__ == "__main__":
    main()
