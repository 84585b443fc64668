"""transformers' own continuous batching, on the CPU: by indices, and by the block tables that flash attention takes."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import torch
from tensors import randn

from cutlass_fmha import with_kv_cache
from cutlass_fmha.flash_attn import flash_attn_interface
from cutlass_fmha.integrations import hub
from cutlass_fmha.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization", reason="is of 5.24")

NEW, NONE = 8, -1
PROMPTS = [list(range(3, 3 + length)) for length in (5, 16, 33)]


@pytest.fixture
def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model, greedy = transformers.LlamaForCausalLM(config).eval(), {"do_sample": False, "eos_token_id": NONE}
    model.generation_config = transformers.GenerationConfig(max_new_tokens=NEW, pad_token_id=0, **greedy)
    return model


def alone(model: transformers.LlamaForCausalLM) -> list[list[int]]:
    """What each prompt goes on with, by eager attention."""
    found = [model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    return found


def together(model: transformers.LlamaForCausalLM) -> list[list[int]]:
    """The same by continuous batching: prompts are cut in parts, and parts and single tokens are in one batch."""
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=24, page_size=16)
    found = model.generate_batch(PROMPTS, model.generation_config, continuous_batching_config=batching)
    assert not any(one.error for one in found.values())
    return [one.generated_tokens for one in sorted(found.values(), key=lambda one: len(one.prompt_ids))]


def test_cutlass_fmha_flash_reads_the_cache_by_indices(llama: transformers.LlamaForCausalLM) -> None:
    wanted = alone(llama)
    integration.register()
    llama.set_attn_implementation(f"{integration.NAME}_flash")
    with mock.patch.object(integration, "packed_attention", wraps=integration.packed_attention) as packed:
        assert together(llama) == wanted
    assert packed.call_count >= 2 * NEW


def test_the_kernel_of_the_hub_takes_block_tables(
    llama: transformers.LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which transformers hands out on a GPU alone: the question is answered for it."""
    kernels = pytest.importorskip("kernels")
    loader = importlib.import_module("transformers.integrations.hub_kernels")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    monkeypatch.setattr(loader, "is_kernels_available", lambda: True)
    monkeypatch.setattr(loader, "get_kernel", lambda name, **_: kernels.get_kernel(name, version=1))
    monkeypatch.setenv("LOCAL_KERNELS", "")
    wanted = alone(llama)
    llama.set_attn_implementation(hub.use("kernels-community/flash-attn2"))
    with mock.patch.object(flash_attn_interface, "with_kv_cache", wraps=with_kv_cache) as cached:
        assert together(llama) == wanted
    steps = [call.kwargs["page_table"] for call in cached.call_args_list]
    assert steps and all(table.dtype == torch.int32 for table in steps)


def test_sinks_of_a_cache_are_passed_on() -> None:
    """transformers drops what a function has no parameter for."""
    q, k, v = (randn(2, 1, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2)))
    caches = [randn(3, 16, 2, 16, seed=n) for n in (3, 4)]
    sinks, lengths, table = randn(4, seed=5), *(torch.tensor(x, dtype=torch.int32) for x in ([3, 9], [[2], [0]]))
    given = {"cache_seqlens": lengths, "causal": True}
    found = hub.flash_attn_with_kvcache(
        q, *(x.clone() for x in caches), k, v, block_table=table, softmax_scale=0.3, softcap=5.0, s_aux=sinks, **given
    )
    said = {"page_table": table, "scale": 0.3, "softcap": 5.0, **given}
    assert torch.equal(found, with_kv_cache(q, *(x.clone() for x in caches), k, v, sinks=sinks, **said))
    assert not torch.allclose(found, with_kv_cache(q, *(x.clone() for x in caches), k, v, **said), atol=1e-3)
