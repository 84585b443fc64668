"""transformers' models through the package's attention: eager's numbers, and nothing dropped that matters."""

import copy
import functools
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from spied import attention

import cutlass_fmha
from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.flash_attn import flash_attn_interface
from cutlass_fmha.integrations import hub, transformers_apply
from cutlass_fmha.integrations import transformers as integration

transformers = pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")

MASKS, FLASH = integration.NAME, f"{integration.NAME}_flash"
TOLERANCE, MATTERS = 1e-4, 1e-3  # of the largest number of eager's; forwards are within 3e-5
STEPS = 3
HOST = (torch.device("cpu"), torch.float32)
GPU = (torch.device("cuda"), torch.float16)
Place = tuple[torch.device, torch.dtype]

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {**GROUPED, "sliding_window": 4}
SLIDING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {**SLIDING, "query_pre_attn_scalar": 16}
LLAMA = {**GROUPED, "attention_bias": True, "mlp_bias": True}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 63}
DEEPSEEK = {
    **COMMON, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
MODERN = {**COMMON, **SPECIAL, "local_attention": 4, "layer_types": SLIDING["layer_types"]}
WHISPER = {
    **SPECIAL, "vocab_size": 64, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_source_positions": 8, "max_target_positions": 32, "init_std": 0.2,
}  # fmt: skip
T5 = {**SPECIAL, "vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}

#: Class, config, and what its result is known to depend on.
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA, {"causal"}),
    "Mistral": ("MistralForCausalLM", WINDOW, {"causal", "window"}),
    "Qwen3": ("Qwen3ForCausalLM", GROUPED, {"causal"}),
    "Gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0}, {"causal", "window", "softcap"}),
    "Gemma3": ("Gemma3ForCausalLM", GEMMA, {"causal", "window"}),
    "GptOss": (
        "GptOssForCausalLM", {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1},
        {"causal", "window", "sinks"},
    ),
    "DeepseekV3": ("DeepseekV3ForCausalLM", DEEPSEEK, {"causal"}),
    "Bert": ("BertModel", {**COMMON, "hidden_dropout_prob": 0.0}, set()),
    "ModernBert": ("ModernBertModel", MODERN, {"window"}),
    "ViT": ("ViTModel", {**COMMON, "image_size": 12, "patch_size": 4, "hidden_dropout_prob": 0.0}, set()),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER, {"causal"}),
    "T5": ("T5ForConditionalGeneration", T5, {"bias"}),
    # Of these norms, rotary embedding and MLPs alone are looked at.
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, set()),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "hidden_act": "gelu_pytorch_tanh"}, set()),
}  # fmt: skip
PROBS = "attention_probs_dropout_prob"
DROPOUT_NAMES = {"Bert": PROBS, "ViT": PROBS, "T5": "dropout_rate"}  # of others attention_dropout
ENCODERS, TWO_SIDED = ("Bert", "ModernBert", "ViT"), ("Whisper", "T5")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    assert integration.register() == integration.register() == MASKS  # twice is once
    with mock.patch.object(integration, "_MANY_QUERIES", 2):  # models have a few here
        yield


def model(name: Any, dropout: float = 0.0, place: Place = HOST) -> Any:
    """One for all who name it, however they do; or it is one."""
    return _model(name, dropout, place) if isinstance(name, str) else name


@functools.lru_cache
def _model(name: str, dropout: float, place: Place) -> Any:
    if place != HOST:
        return copy.deepcopy(_model(name, dropout, HOST)).to(*place)
    torch.manual_seed(0)
    cls, said, *_ = MODELS[name]
    kind, of_dropout = getattr(transformers, cls), {DROPOUT_NAMES.get(name, "attention_dropout"): dropout}
    made = kind(kind.config_class(**said, **of_dropout)).eval()
    made.generation_config = transformers.GenerationConfig(pad_token_id=0, decoder_start_token_id=1)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if "relative_attention_bias" in key or "sinks" in key:
                weight.normal_()
    return made


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 63, shape, generator=torch.Generator().manual_seed(seed))


#: Of a batch of two, which tokens are there.
PADDING = {side: torch.tensor([[int(each) for each in row] for row in rows]) for side, rows in {
    "prefill": ("111111111", "111111111"), "left padding": ("111111111", "000111111"),
    "right padding": ("111111111", "111111000"), "padding on both sides": ("111111100", "001111000"),
    "padding in between": ("111111111", "110011111"),
}.items()}  # fmt: skip


def inputs(name: Any, side: str, place: Place = HOST) -> tuple[dict[str, Any], torch.Tensor]:
    """What the model is called with, and which rows of its result count."""
    ids, mask, drawn = tokens(2, 9), PADDING[side], torch.Generator().manual_seed(3)
    said, rows = {"input_ids": ids, "attention_mask": mask}, mask
    if name == "ViT":
        said, rows = {"pixel_values": torch.randn(2, 3, 12, 12, generator=drawn)}, mask[:, :1]
    elif name == "Whisper":
        said = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        said["input_features"] = torch.randn(2, 8, 16, generator=drawn)
    elif name == "T5":
        said, rows = said | {"decoder_input_ids": tokens(2, 7, seed=2)}, torch.ones(2, 7)
    return {key: x.to(place[0], place[1] if x.is_floating_point() else None) for key, x in said.items()}, rows


def forward(name: str, place: Place = HOST, *, side: str) -> torch.Tensor:
    said, rows = inputs(name, side, place)
    with torch.no_grad():
        result = model(name, place=place)(**said)[0]
    return result[:, : rows.shape[1]][rows.bool()].to(*HOST)


def generate(name: Any, place: Place = HOST, *, cache: str) -> torch.Tensor:
    """Logits of each step after a prompt that is padded on the left (of T5's encoder; Whisper's is not)."""
    said, _ = inputs(name, "left padding", place)
    if name in TWO_SIDED:
        said = {key: value for key, value in said.items() if not key.startswith("decoder")}
    with torch.no_grad():
        found = transformers.GenerationMixin.generate(
            model(name, place=place), **said, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
            return_dict_in_generate=True, output_logits=True, disable_compile=True,
            cache_implementation=None if cache == "dynamic" else cache,
        )  # fmt: skip
    return torch.stack(found.logits).to(*HOST)


def train(name: Any, place: Place = HOST, *, side: str, **more: Any) -> torch.Tensor:
    """All gradients of a training step. With dropout, the attention's own alone."""
    network = model(name, 0.3 if side == "dropout" else 0.0, place).train()
    said, rows = inputs(name, side if side in PADDING else "prefill", place)
    network.zero_grad()
    result = network(**said, **more)[0]
    result = result[:, : rows.shape[1]][rows.bool()].to(*HOST)
    # An odd function: one that a layer norm at the end makes constant would have no gradient.
    torch.tanh(result).pow(3).sum().backward()
    network.eval()
    gradients = [(torch.zeros_like(x) if x.grad is None else x.grad).to(*HOST) for x in network.parameters()]
    # Each by its own size, but for those that are 0 but for rounding, as that of a bias of keys.
    largest = max(x.abs().max() for x in gradients)
    gradients = [(x / (x.abs().max() + 0.01 * largest)).flatten() for x in gradients]
    return torch.cat([result.detach().flatten() / result.abs().max(), *gradients])


MODES: dict[str, Any] = {
    **{side: functools.partial(forward, side=side) for side in PADDING},
    "generate": functools.partial(generate, cache="dynamic"),
    "generate, static cache": functools.partial(generate, cache="static"),
    "training": functools.partial(train, side="left padding"),
    "training, dropout": functools.partial(train, side="dropout"),
}


@contextmanager
def same_dropout() -> Iterator[None]:
    """Eager's attention drops what ours does: of each call that which a seed of its own says."""
    seeds = iter(range(1000)), iter(range(1000))

    def seed(query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.tensor([next(seeds[1])], device=query.device)

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> torch.Tensor:
        if x.dim() != 4 or not training or p == 0.0:
            return x
        return x * cutlass_fmha.dropout_mask(next(seeds[0]), *x.shape, p, device=x.device) / (1 - p)

    with (
        mock.patch("torch.nn.functional.dropout", dropout),
        mock.patch("cutlass_fmha.arguments.op_arguments._seed", seed),
    ):
        yield


@functools.lru_cache
def eager(name: str, mode: str, place: Place = HOST) -> torch.Tensor:
    use("eager", name, place)
    with same_dropout():
        return MODES[mode](name, place)


def use(implementation: str, name: str, place: Place = HOST) -> None:
    for dropout in (0.0, 0.3):
        model(name, dropout, place).set_attn_implementation(implementation)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


CASES = [
    pytest.param(name, mode, implementation, id=f"{name}-{mode}-{implementation}")
    for name in [*MODELS][:-2]
    for mode in MODES
    for implementation in (MASKS, FLASH)
    if not (name in ENCODERS and "generate" in mode)
    and not (name == "ViT" and "padding" in mode)
    and (name, implementation) != ("T5", FLASH)  # test_a_model_that_would_not_use_it_is_refused
]


def ours(name: str, mode: str, implementation: str, place: Place = HOST, **spying: Any) -> Any:
    """The result, and what was said to attention(), whose op each layer called."""
    use(implementation, name, place)
    if name == "T5" and model(name, place=place).encoder.config._attn_implementation != implementation:
        pytest.skip("set_attn_implementation of this transformers (5.17) does not reach T5's halves")
    said: set[str] = set()
    with same_dropout(), attention(said, **spying) as calls, CountCalls() as counter:
        found = MODES[mode](name, place)
    passes = STEPS if "generate" in mode else 1
    layers = 2 * (1 + 2 * passes) if name in TWO_SIDED else 2 * passes
    assert counter.calls == calls[0] == layers
    return found, said


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mode", "implementation"), CASES)
def test_a_model_on_a_gpu_is_as_exact_as_eagerly(name: str, mode: str, implementation: str) -> None:
    """Beside float32: in half precision as far off as eager attention is, or a rounding further."""
    wanted = eager(name, mode)
    found, _ = ours(name, mode, implementation, GPU)
    assert error(found, wanted) <= 2 * error(eager(name, mode, GPU), wanted) + torch.finfo(GPU[1]).eps


def needed(name: str, mode: str, implementation: str, **spying: Any) -> set[str]:
    """What is said to attention(), where the result is eager's, and another without any one of these."""
    wanted = eager(name, mode)
    found, said = ours(name, mode, implementation, **spying)
    assert error(found, wanted) <= TOLERANCE
    for argument in MODELS[name][2] if spying else said:  # lengths say nothing one without the other there
        with same_dropout(), attention(set(), drop=argument, **spying):
            changed = error(MODES[mode](name), wanted)
        assert not changed <= MATTERS, f"{argument} could be dropped"
    return said


@pytest.mark.parametrize(("name", "mode", "implementation"), CASES)
def test_a_model_computes_what_it_does_eagerly(name: str, mode: str, implementation: str) -> None:
    said, known = needed(name, mode, implementation), MODELS[name][2]
    if implementation == FLASH:
        assert known <= said | ({"causal", "window"} if "generate" in mode else set())
        assert "mask" not in said or "in between" in mode  # lengths, wherever they can say it
    else:
        assert known - {"causal", "window"} <= said


# ---- what the matrix above does not say --------------------------------------------------------------------


@contextmanager
def copies(network: Any) -> Iterator[None]:
    """Layers get copies of tensors, as accelerate's hooks for several devices make them."""

    def copied(_: Any, operands: tuple[Any, ...], named: dict[str, Any]) -> Any:
        named = {name: x.clone() if torch.is_tensor(x) else x for name, x in named.items()}
        return tuple(x.clone() if torch.is_tensor(x) else x for x in operands), named

    lists = (x for x in network.modules() if isinstance(x, torch.nn.ModuleList))
    hooks = [layer.register_forward_pre_hook(copied, with_kwargs=True) for layers in lists for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


PACKED = torch.tensor([[*range(6), *range(5)]])


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("layers", [nullcontext, copies])
@pytest.mark.parametrize("said", ["nothing", "cache", "static", "starts"])
@pytest.mark.parametrize("implementation", [MASKS, FLASH])
def test_packed_sequences_do_not_see_each_other(name: str, implementation: str, said: str, layers: Any) -> None:
    if (name, said, implementation) == ("Llama", "starts", MASKS):
        return  # there is no mask that they could join: test_what_would_have_to_be_dropped_raises
    network, ids = model(name), tokens(1, 11)
    options: dict[str, Any] = {"position_ids": PACKED.clone(), "use_cache": said != "nothing"}
    if said == "static":
        options["past_key_values"] = transformers.StaticCache(network.config, max_cache_len=16)
    if said == "starts":  # as DataCollatorWithFlattening gives them; masks know nothing of them
        starts, longest = torch.tensor([0, 6, 11]), torch.tensor(6)
        options |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
    network.set_attn_implementation("eager")
    with torch.no_grad(), layers(network):
        wanted = torch.cat([network(part).logits for part in ids.split([6, 5], dim=1)], dim=1)
        network.set_attn_implementation(implementation)
        with attention(seen := set()):
            found = network(ids, **options).logits
    # With a cache, masks know nothing of positions, sdpa's neither.
    assert (error(found, wanted) <= TOLERANCE) == (implementation == FLASH or said in ("nothing", "starts"))
    assert ("cu_seqlens_q" in seen) == (implementation == FLASH)


def test_positions_are_looked_at_once_in_a_forward() -> None:
    network, ids = model("Llama"), tokens(1, 11)
    network.set_attn_implementation(FLASH)
    for inference in (False, True):
        with torch.inference_mode(inference), torch.no_grad():
            wanted, positions = network(ids).logits, PACKED.clone()
            with mock.patch.object(integration, "packing", wraps=integration.packing) as look:
                assert error(network(ids, position_ids=positions).logits, wanted) > MATTERS and look.call_count == 1
            positions.copy_(torch.arange(11))
            assert error(network(ids, position_ids=positions).logits, wanted) <= TOLERANCE
    positions, one, other = PACKED.clone(), torch.nn.Module(), torch.nn.Module()
    assert integration._restarts(positions, 11, one)
    positions.copy_(torch.arange(11))
    assert not integration._restarts(positions, 11, other)


def test_a_static_cache_that_has_rolled_keeps_its_padding():
    told, padded = [], {"input_ids": tokens(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    padded["attention_mask"][0, :10] = 0
    said = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    network = copy.deepcopy(model("Mistral"))
    for implementation in ("eager", MASKS, FLASH):
        network.set_attn_implementation(implementation)
        told.append(network.generate(**padded, **said).tolist())
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("implementation", [MASKS, FLASH])
@pytest.mark.parametrize(("rows", "before", "static"), [(1, 5, False), (2, 0, False), (2, 5, False), (2, 5, True)])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_chunk_sees_the_one_before(name: str, rows: int, before: int, static: bool, implementation: str) -> None:
    """Positions that begin anew in it, or in many rows, pack nothing."""
    network, found = model(name), []
    for each in ("eager", implementation):
        network.set_attn_implementation(each)
        kept = transformers.StaticCache(network.config, max_cache_len=16) if static else None
        with torch.no_grad():
            if before:
                kept = network(tokens(rows, before), past_key_values=kept, use_cache=True).past_key_values
            found.append(network(tokens(rows, 11), position_ids=PACKED, past_key_values=kept).logits)
    assert error(*found) <= TOLERANCE


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="it compiles no model of transformers 5.20")
@pytest.mark.parametrize("implementation", [MASKS, FLASH])
def test_a_graph_without_breaks_gives_the_same(implementation: str) -> None:
    """Packed sequences too, whose mask is dense there, and FA2's words for them may be said beside it."""
    network, ids, mask = model("Mistral"), tokens(2, 9), PADDING["left padding"]
    network.set_attn_implementation(implementation)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    starts, positions = torch.tensor([0, 5, 9]).int(), torch.tensor([[*range(5), *range(4)]])
    said = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad():
        for arguments in ({}, {"attention_mask": mask}):
            found, wanted = (of(ids, **arguments, use_cache=False).logits[mask.bool()] for of in (compiled, network))
            assert error(found, wanted) <= TOLERANCE
        wanted = torch.cat([network(part, use_cache=False).logits for part in ids[:1].split([5, 4], dim=1)], 1)
        for more in (said, {}):
            found = compiled(ids[:1], position_ids=positions, use_cache=False, **more).logits
            assert error(found, wanted) <= TOLERANCE


def test_a_model_that_would_not_use_it_is_refused() -> None:
    for name in (MASKS, FLASH):
        bloom = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, attn_implementation=name)
        with pytest.raises(ValueError, match="computes its attention itself"):
            transformers.BloomModel(bloom)
    with pytest.raises(ValueError, match="use cutlass_fmha"):
        transformers.T5Model(transformers.T5Config(**T5, attn_implementation=FLASH))


def load_by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, kernels = (pytest.importorskip(name) for name in ("transformers.integrations.hub_kernels", "kernels"))
    monkeypatch.setattr(loader, "is_kernels_available", lambda: True)
    monkeypatch.setattr(loader, "get_kernel", lambda name, **_: kernels.get_kernel(name, version=1))


@pytest.mark.parametrize("side", ["prefill", "left padding"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_a_model_runs_by_the_kernel_of_the_hub(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that a model insists on, too. Nothing is fetched."""
    repository = "kernels-community/vllm-flash-attn3" if name == "GptOss" else hub.NAME
    if not pytest.importorskip("transformers.integrations.hub_kernels").is_kernels_available():
        load_by_kernels_alone(monkeypatch)  # not of a version that transformers takes
    monkeypatch.setenv("LOCAL_KERNELS", f"a/b=/nowhere:{repository}=/elsewhere")
    assert hub.use(repository) == repository and os.environ["LOCAL_KERNELS"].startswith(f"a/b=/nowhere:{repository}=")
    assert MODELS[name][2] <= needed(name, side, repository, caller=flash_attn_interface)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("by_the_hub", [False, True])
def test_continuous_batching_goes_on_as_each_prompt_alone(
    by_the_hub: bool, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By indices, or block tables, which transformers has on a GPU alone: the question is answered for it. Prompts are
    cut in parts, and parts and single tokens are in one batch."""
    batching = pytest.importorskip("transformers.generation.continuous_batching.initialization", reason="is of 5.24")
    network, prompts = fresh("Llama"), [list(range(3, 3 + length)) for length in (5, 16, 33)]
    said = transformers.GenerationConfig(max_new_tokens=8, pad_token_id=0, do_sample=False, eos_token_id=-1)
    alone = [network.generate(torch.tensor([x]), generation_config=said)[0, len(x) :].tolist() for x in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    if applied:
        integration.apply(network)
    if by_the_hub:
        monkeypatch.setattr(batching, "ensure_decode_fast_path_is_available", lambda *_: None)
        load_by_kernels_alone(monkeypatch)
        monkeypatch.setenv("LOCAL_KERNELS", "")
    network.set_attn_implementation(hub.use("kernels-community/flash-attn2") if by_the_hub else FLASH)
    of_batch = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=24, page_size=16)
    where, name = (flash_attn_interface, "with_kv_cache") if by_the_hub else (integration, "packed_attention")
    with mock.patch.object(where, name, wraps=getattr(where, name)) as heard:
        found = network.generate_batch(prompts, said, continuous_batching_config=of_batch).values()
    assert not any(one.error for one in found)
    assert [one.generated_tokens for one in sorted(found, key=lambda one: len(one.prompt_ids))] == alone
    assert heard.call_count >= (1 if by_the_hub else 16)
    assert not by_the_hub or {each.kwargs["page_table"].dtype for each in heard.mock_calls} == {torch.int32}


# ---- norms, rotary and MLPs by this package: eager's numbers, and undone as if never ---------------------------

#: How many norms a layer has.
SWAPPED = {"Llama": 2, "Mistral": 2, "Qwen2": 2, "Qwen3": 4, "Gemma": 2, "Gemma2": 4, "Gemma3": 6}


def fresh(name: str, seed: int = 0) -> Any:
    made, drawn = copy.deepcopy(model(name)), torch.Generator().manual_seed(seed)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if "norm" in key:
                weight.normal_(0.0 if name.startswith("Gemma") else 1.0, 0.3, generator=drawn)
    return made


def step(network: Any, place: Place = HOST) -> torch.Tensor:
    """Logits of prompts of two lengths, and the gradients of all parameters."""
    positions = (PADDING["left padding"].cumsum(-1) - 1).clamp(min=0).to(place[0])
    return train(network, place, side="left padding", position_ids=positions, use_cache=False)


@torch.no_grad()
def rest_of_a_prompt(network: Any, place: Place = HOST) -> torch.Tensor:
    ids = tokens(2, 9).to(place[0])
    cache = network(ids[:, :5], use_cache=True).past_key_values
    return network(ids[:, 5:], past_key_values=cache).logits.to(*HOST)


@pytest.mark.parametrize("name", SWAPPED)
def test_a_model_computes_what_it_did_and_undone_is_what_it_was(name: str):
    network = fresh(name)
    before = {key: x.data_ptr() for key, x in network.state_dict().items()}
    kinds = [type(module) for module in network.modules()]
    wanted, told = step(network), MODES["generate"](network)
    spied = {op: mock.Mock(wraps=getattr(transformers_apply, op)) for op in ("rms_norm", "rotary_qk", "qk_norm_rope")}
    norms = 2 * SWAPPED[name] + 1
    with integration.apply(network) as applied, mock.patch.multiple(transformers_apply, **spied):
        assert applied.swapped == {f"{name}RMSNorm": norms} | {
            f"{name}{kind}": 2 for kind in ("Attention", "MLP", "DecoderLayer")
        }
        assert applied.left == {} and f"{norms} {name}RMSNorm" in str(applied)
        assert {key: x.data_ptr() for key, x in network.state_dict().items()} == before
        assert error(step(network), wanted) <= TOLERANCE
        again = pickle.loads(pickle.dumps(network))
        network.gradient_checkpointing_enable()
        assert error(step(network), wanted) <= TOLERANCE
        assert (
            error(MODES["generate"](network), told) <= TOLERANCE and error(MODES["generate"](again), told) <= TOLERANCE
        )
        of_heads = name in ("Qwen3", "Gemma3")  # norms of each head's queries and keys
        assert spied["qk_norm_rope"].called == of_heads and spied["rotary_qk"].called != of_heads
        assert any(call.kwargs.get("residual") is not None for call in spied["rms_norm"].mock_calls)
        for each in (network, again):
            with pytest.raises(ValueError, match="before: undo"):
                integration.apply(each)
    assert [type(module) for module in network.modules()] == kinds
    network.gradient_checkpointing_disable()
    assert torch.equal(step(network), wanted) and "as it was" in str(applied)
    applied.undo()


@pytest.mark.parametrize("name", SWAPPED)
@pytest.mark.parametrize(
    "place",
    [
        (torch.device("cpu"), torch.float16),
        pytest.param(GPU, marks=[pytest.mark.gpu, pytest.mark.filterwarnings("default")]),
    ],
    ids=["cpu", "cuda"],
)
def test_in_half_precision_a_model_is_as_exact_as_it_was(name: str, place: Place):
    """A step, and logits over a cache, beside float32's. Of several models: one that is as small has its gradients from
    few numbers, and was 0.4 to 1.8 times as far off as eager's by the luck of its roundings, 0.8 to 1.0 on average."""
    ratios = []
    for seed in range(8):
        network = fresh(name, seed).to(*place)
        for compute in (step, rest_of_a_prompt):
            wanted, own = compute(fresh(name, seed)), compute(network, place)
            with integration.apply(network):
                ratios.append((compute(network, place) - wanted).norm() / (own - wanted).norm())
    assert torch.stack(ratios).log().mean().exp() <= 1.2


def test_parts_alone_and_what_is_left():
    network = fresh("Llama")
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


def test_norms_that_are_hooked_patched_or_another_are_called():
    network, seen = fresh("Qwen3"), mock.Mock(return_value=None)
    layers = network.model.layers
    layers[0].post_attention_layernorm.register_forward_hook(lambda module, given, out: out * 2)
    layers[0].self_attn.k_norm.register_forward_pre_hook(seen)
    layers[1].self_attn.q_norm = torch.nn.LayerNorm(16)
    patched = layers[1].post_attention_layernorm
    patched.forward = functools.partial(type(patched).forward, patched)  # as accelerate does
    wanted = step(network)
    seen.reset_mock()
    with integration.apply(network) as applied:
        assert error(step(network), wanted) <= TOLERANCE and seen.called
        assert "not model.layers.1.post_attention_layernorm: somebody put another forward" in str(applied)


def test_a_model_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="Linear has no layer that apply knows.*Llama, Mistral, Qwen2"):
        integration.apply(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got str"):
        integration.apply("llama")


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_autocast_and_weights_of_another_dtype(name: str):
    network = fresh(name)
    for dtype in (torch.bfloat16, torch.float32):
        network.to(dtype)
        network.model.norm.float()  # which some checkpoints keep so
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            wanted = network.model(input_ids=tokens(2, 9)).last_hidden_state
            with integration.apply(network):
                found = network.model(input_ids=tokens(2, 9)).last_hidden_state
        assert found.dtype == wanted.dtype
        assert (found - wanted).float().norm() <= 0.05 * wanted.float().norm()
