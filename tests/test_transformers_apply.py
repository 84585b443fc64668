"""Norms, rotary and MLPs of transformers by this package: eager's numbers, and undone as if never."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any
from unittest import mock

import pytest
import torch

from cutlass_fmha.integrations import transformers as integration
from cutlass_fmha.integrations import transformers_apply

transformers = pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")
from test_transformers import GPU, GROUPED, HOST, TOLERANCE, Place, error, generate, padding, tokens, train  # noqa: E402

WINDOW = {"sliding_window": 4}
SLIDING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}
#: Class, config, and how many norms a layer has.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 2),
    "Mistral": ("MistralForCausalLM", WINDOW, 2),
    "Qwen2": ("Qwen2ForCausalLM", {}, 2),
    "Qwen3": ("Qwen3ForCausalLM", {}, 4),
    "Gemma": ("GemmaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, 2),
    "Gemma2": ("Gemma2ForCausalLM", {**SLIDING, "attn_logit_softcapping": 2.0}, 4),
    "Gemma3": ("Gemma3ForCausalLM", SLIDING, 6),
}
CLASSES = ("RMSNorm", "Attention", "MLP", "DecoderLayer")


@functools.cache
def _made(name: str) -> Any:
    torch.manual_seed(0)
    kind, config, _ = MODELS[name]
    cls = getattr(transformers, kind)
    made = cls(cls.config_class(**{**GROUPED, **config}, attn_implementation="eager")).eval()
    made.generation_config = transformers.GenerationConfig(pad_token_id=0)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if "norm" in key:
                weight.normal_(0.0 if name.startswith("Gemma") else 1.0, 0.3)
    return made


def model(name: str) -> Any:
    return copy.deepcopy(_made(name))


told_by = functools.partial(generate, cache="dynamic")


def step(network: Any, place: Place = HOST) -> torch.Tensor:
    """Logits of prompts of two lengths, and the gradients of all parameters."""
    positions = (padding("left").cumsum(-1) - 1).clamp(min=0).to(place[0])
    return train(network, place, side="left", position_ids=positions, use_cache=False)


@torch.no_grad()
def rest_of_a_prompt(network: Any, place: Place = HOST) -> torch.Tensor:
    ids = tokens(2, 9).to(place[0])
    cache = network(ids[:, :5], use_cache=True).past_key_values
    return network(ids[:, 5:], past_key_values=cache).logits.to(*HOST)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return error(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_did_and_undone_is_what_it_was(name: str):
    network = model(name)
    before = {key: x.data_ptr() for key, x in network.state_dict().items()}
    kinds = [type(module) for module in network.modules()]
    wanted, told = step(network), told_by(network)
    spied = {op: mock.Mock(wraps=getattr(transformers_apply, op)) for op in ("rms_norm", "rotary_qk", "qk_norm_rope")}
    norms = 2 * MODELS[name][2] + 1
    with integration.apply(network) as applied, mock.patch.multiple(transformers_apply, **spied):
        assert applied.swapped == {f"{name}{kind}": norms if kind == "RMSNorm" else 2 for kind in CLASSES}
        assert applied.left == {} and f"{norms} {name}RMSNorm" in str(applied)
        assert {key: x.data_ptr() for key, x in network.state_dict().items()} == before
        assert same(step(network), wanted)
        network.gradient_checkpointing_enable()
        assert same(step(network), wanted)
        assert same(told_by(network), told) and same(told_by(copy.deepcopy(network)), told)
        of_heads = name in ("Qwen3", "Gemma3")  # norms of each head's queries and keys
        assert spied["qk_norm_rope"].called == of_heads and spied["rotary_qk"].called != of_heads
        assert any(call.kwargs.get("residual") is not None for call in spied["rms_norm"].mock_calls)
        with pytest.raises(ValueError, match="before: undo"):
            integration.apply(network)
    assert [type(module) for module in network.modules()] == kinds
    network.gradient_checkpointing_disable()
    assert torch.equal(step(network), wanted) and "as it was" in str(applied)
    applied.undo()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_a_model_is_as_exact_as_it_was(name: str):
    """In half precision beside float32, or a rounding further: a step, and logits over a cache."""
    network = model(name).to(*GPU)
    for compute in (step, rest_of_a_prompt):
        wanted, own = compute(model(name)), compute(network, GPU)
        with integration.apply(network):
            found = compute(network, GPU)
        assert error(found, wanted) <= 2 * error(own, wanted) + torch.finfo(GPU[1]).eps


def test_parts_alone_and_what_is_left():
    network = model("Llama")
    with integration.apply(network, norm=False, rotary=False) as applied:
        assert applied.swapped == {"LlamaMLP": 2}
    network.model.layers[0].mlp.forward = network.model.layers[0].mlp.forward
    network.model.layers[1].mlp.config = copy.copy(network.config)
    network.model.layers[1].mlp.config.hidden_act = "relu"
    applied = integration.apply(network)
    assert "LlamaMLP" not in applied.swapped
    assert "another forward" in str(applied) and "its activation is relu" in str(applied)
    network.model.norm.__class__ = torch.nn.Identity
    with pytest.raises(RuntimeError, match="Identity is not what apply made of LlamaRMSNorm"):
        applied.undo()
    assert type(network.model.layers[0]) is not transformers.models.llama.modeling_llama.LlamaDecoderLayer


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_norms_that_are_hooked_patched_or_another_are_called(name: str):
    network = model(name)
    layers, seen = network.model.layers, mock.Mock(return_value=None)
    hooked = layers[0].post_attention_layernorm
    hooked.register_forward_hook(lambda module, given, out: out * 2)
    if name == "Qwen3":
        layers[0].self_attn.k_norm.register_forward_pre_hook(seen)
        layers[1].self_attn.q_norm = torch.nn.LayerNorm(16)
    patched = layers[1].post_attention_layernorm
    patched.forward = functools.partial(type(patched).forward, patched)  # as accelerate does
    wanted = step(network)
    seen.reset_mock()
    with integration.apply(network) as applied:
        assert same(step(network), wanted) and seen.called == (name == "Qwen3")
        assert "not model.layers.1.post_attention_layernorm: somebody put another forward" in str(applied)


def test_a_swapped_model_is_pickled():
    network = model("Llama")
    with integration.apply(network):
        again = pickle.loads(pickle.dumps(network))
    assert type(again.model.norm) is not type(network.model.norm) and same(step(again), step(network))
    with pytest.raises(ValueError, match="before: undo"):
        integration.apply(again)


def test_a_model_that_is_not_known_is_refused():
    config = transformers.BertConfig(**{**GROUPED, "num_hidden_layers": 1})
    with pytest.raises(ValueError, match="BertModel has no layer that apply knows.*Llama, Mistral, Qwen2"):
        integration.apply(transformers.BertModel(config))
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        integration.apply("llama")


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_autocast_and_weights_of_another_dtype(name: str):
    network = model(name)
    for dtype in (torch.bfloat16, torch.float32):
        network.to(dtype)
        network.model.norm.float()  # which some checkpoints keep so
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            wanted = network.model(input_ids=tokens(2, 9)).last_hidden_state
            with integration.apply(network):
                found = network.model(input_ids=tokens(2, 9)).last_hidden_state
        assert found.dtype == wanted.dtype
        assert (found - wanted).float().norm() <= 0.05 * wanted.float().norm()
