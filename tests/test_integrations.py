"""transformers models through the package's attention: the same numbers, and nothing silently dropped."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    integration.register()


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=64,
        **options,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def llama() -> Any:
    """A causal decoder with grouped-query attention: 4 heads of query, 2 of key and value."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(1))


def both(model: Any, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a call with eager attention and with ours."""
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        eager = call(model)
        model.set_attn_implementation(integration.NAME)
        with CountCalls() as counter:
            ours = call(model)
    assert counter.calls >= model.config.num_hidden_layers
    return eager, ours


def test_an_encoder_gives_what_eager_attention_gives() -> None:
    eager, ours = both(bert(), lambda model: model(tokens(3, 17)).last_hidden_state)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_a_mask_that_masks_nothing_is_accepted() -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    eager, ours = both(bert(), lambda model: model(tokens(2, 9), attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [bert, llama])
def test_padding_is_masked(make: Any) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    eager, ours = both(make(), lambda model: model(tokens(2, 9), attention_mask=mask)[0][mask.bool()])
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    whole, _ = both(make(), lambda model: model(tokens(2, 9))[0][mask.bool()])
    assert (whole - eager).abs().max() > 1e-3 or make is llama  # a decoder's padding is behind what counts


def test_a_mask_of_four_dimensions_is_passed_on() -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    model = bert()
    model.set_attn_implementation(integration.NAME)
    with torch.inference_mode():
        first = model(tokens(1, 5), attention_mask=mask).last_hidden_state
        alone = model(tokens(1, 5)[:, :2], attention_mask=mask[..., :2, :2]).last_hidden_state
    torch.testing.assert_close(first[:, :2], alone, rtol=1e-5, atol=1e-5)


def test_a_causal_decoder_with_grouped_heads_gives_what_eager_attention_gives() -> None:
    eager, ours = both(llama(), lambda model: model(tokens(2, 13)).logits)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_decoding_with_a_cache_gives_the_same_tokens() -> None:
    def generate(model: Any) -> torch.Tensor:
        prompt = tokens(2, 7)
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, pad_token_id=0
        )

    eager, ours = both(llama(), generate)
    assert torch.equal(ours, eager)
    assert ours.shape == (2, 13)


def test_a_second_chunk_of_a_prompt_sees_the_first() -> None:
    def chunks(model: Any) -> torch.Tensor:
        cache = model(tokens(1, 8), use_cache=True).past_key_values
        return model(tokens(1, 4), past_key_values=cache).logits

    eager, ours = both(llama(), chunks)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def call(module: Any = None, **options: Any) -> torch.Tensor:
    """attention_forward on [1, 2, 4, 32] tensors."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = torch.randn(3, 1, 2, 4, 32, generator=generator)
    module = torch.nn.Module() if module is None else module
    return integration.attention_forward(
        module, query, key, value, options.pop("attention_mask", None), **options
    )[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "call model.eval"),
        ({"output_attentions": True}, "never forms the attention weights"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"softcap": 30.0}, "soft cap"),
        ({"s_aux": torch.zeros(2)}, "sinks"),
        ({"head_mask": torch.ones(2)}, "head mask"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "packed"),
    ],
)
def test_what_the_kernels_lack_raises(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call(is_causal=False, **options)


def test_causality_comes_from_the_call_and_else_from_the_module() -> None:
    full, causal = call(is_causal=False), call(is_causal=True)
    assert not torch.equal(full, causal)
    module = torch.nn.Module()
    assert torch.equal(
        call(module), causal
    )  # as SDPA's integration has it: a module that doesn't say is a decoder's
    module.is_causal = False
    assert torch.equal(call(module), full)
    assert torch.equal(call(module, is_causal=True), causal)


def test_the_scale_is_the_models() -> None:
    assert torch.equal(call(scaling=32**-0.5), call())
    assert not torch.equal(call(scaling=1.0), call())


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        integration.register()
