"""The attention functions that transformers' layers call, by themselves: what a layer says, and what is refused."""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from spied import attention
from tensors import ints, randn

from cutlass_fmha import with_kv_cache
from cutlass_fmha.flash_attn import flash_attn_interface
from cutlass_fmha.integrations import hub
from cutlass_fmha.integrations import transformers as integration


def call(module: Any = None, forward: Any = integration.attention_forward, **options: Any) -> torch.Tensor:
    """attention_forward, or flash_forward, on [1, 2, 4, 32] tensors."""
    query, key, value = torch.randn(3, 1, 2, 4, 32, generator=torch.Generator().manual_seed(2))
    module = torch.nn.Module() if module is None else module
    return forward(module, query, key, value, options.pop("attention_mask", None), **options)[0]


flash = functools.partial(call, forward=integration.flash_forward)
CU, HALVES, PADDED = torch.tensor([0, 1, 4]), torch.tensor([0, 2, 4]), torch.tensor([[0, 1, 1, 1]])
BAND = torch.ones(1, 1, 4, 4).tril().bool()


@pytest.mark.parametrize(
    ("how", "options", "error", "message"),
    [
        (call, {"output_attentions": True}, NotImplementedError, "attention weights"),
        (call, {"head_mask": torch.ones(2)}, NotImplementedError, "head mask"),
        (call, {"cache": object()}, NotImplementedError, "continuous batching"),
        (call, {"sinks": torch.zeros(2)}, NotImplementedError, "sinks of each query"),
        (call, {"cu_seq_lens_q": torch.zeros(2)}, NotImplementedError, "use cutlass_fmha_flash"),
        (call, {"block_indices": torch.zeros(2)}, NotImplementedError, "block-sparse"),
        (call, {"indices": torch.zeros(2)}, NotImplementedError, "sparse attention"),
        (flash, {"position_bias": torch.zeros(1)}, NotImplementedError, "use cutlass_fmha"),
        (flash, {"indices": torch.zeros(1)}, NotImplementedError, "use cutlass_fmha"),
        (flash, {"cu_seq_lens_q": CU}, ValueError, "only taken with cu_seq_lens_k"),
        (call, {"cu_seq_lens_q": CU, "attention_mask": BAND}, ValueError, "only taken with cu_seq_lens_k"),
        (flash, {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "attention_mask": PADDED}, ValueError, "exclude each other"),
    ],
)
def test_what_would_have_to_be_dropped_raises(how: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        how(is_causal=False, **options)


@pytest.mark.parametrize(
    ("name", "module"), [("transformers", "transformers"), ("diffusers", "diffusers.models"), ("sglang", "sglang.srt")]
)
def test_without_it_the_error_says_what_to_install(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"this integration needs .* or newer .pip install {name}"):
        importlib.import_module(f"cutlass_fmha.integrations.{name}").register()


def test_layers_that_share_a_bias_share_its_copy() -> None:
    def of_heads(*heads: int) -> torch.Tensor:
        """In which heads are neighbours, as T5 makes it."""
        return randn(64, 65, *heads).permute(2, 0, 1)[None]

    kept = integration._Neighbours()
    bias, other = of_heads(4), of_heads(4)
    first = kept.of(bias)
    assert first.stride(-1) == 1 and torch.equal(first, bias) and kept.of(bias) is first
    assert kept.of(other) is not first and kept.of(bias) is not first  # the last one alone
    before = kept.of(bias)
    bias.mul_(2)
    assert torch.equal(kept.of(bias), bias) and not torch.equal(before, bias)
    learned = bias.clone().requires_grad_()
    with torch.no_grad():
        assert not kept.of(learned).requires_grad
    kept.of(learned).sum().backward()
    assert torch.equal(learned.grad, torch.ones_like(bias))
    with torch.inference_mode():
        assert kept.of(lasting := of_heads(4)) is not kept.of(lasting)
    last = weakref.ref(kept.of(bias))
    del bias
    assert last() is None
    for left in (of_heads(4).contiguous(), of_heads(4).expand(2, 4, 64, 65), of_heads(4)[:, :, :1]):
        assert kept.of(left) is left


def test_what_a_layer_says_without_a_mask_of_ours() -> None:
    """Modules of other models: causality of the module, scale, windows and 2-D masks that nobody prepared."""
    module = torch.nn.Module()
    causal, full = call(is_causal=True), call(is_causal=False)
    assert torch.equal(call(), causal) and not torch.equal(full, causal)
    module.is_causal = False
    assert torch.equal(call(module), full) and torch.equal(call(module, is_causal=True), causal)
    assert torch.equal(call(scaling=32**-0.5), causal) and not torch.equal(call(scaling=1.0), causal)
    for window in (2, 3):  # the second hides one key
        band = torch.ones(4, 4).tril().triu(1 - window).bool()[None, None]
        for mask in (PADDED, torch.tensor([[1, 1, 0, 0]]), torch.tensor([[1, 0, 0, 1]])):
            rows = mask[0].bool()
            wanted = call(attention_mask=band & rows)[:, rows]
            torch.testing.assert_close(flash(attention_mask=mask, sliding_window=window)[:, rows], wanted)
        additive = torch.zeros(1, 1, 4, 4).masked_fill(~band, float("-inf"))
        torch.testing.assert_close(call(attention_mask=additive), flash(sliding_window=window))
    short = flash(attention_mask=PADDED[:, :3], is_causal=False)  # of a cache with room behind it
    torch.testing.assert_close(short, call(attention_mask=torch.tensor([[[[False, True, True, False]]]])))
    bias = torch.arange(32.0).view(1, 2, 4, 4)
    assert torch.equal(call(attention_mask=additive, position_bias=bias), call(attention_mask=additive + bias))
    packed = flash(cu_seq_lens_q=HALVES, cu_seq_lens_k=HALVES)
    assert not torch.equal(packed, causal)
    for mask in (BAND, torch.zeros(BAND.shape).masked_fill(~BAND, float("-inf"))):
        torch.testing.assert_close(call(attention_mask=mask, cu_seq_lens_q=HALVES, cu_seq_lens_k=HALVES), packed)
    numbers, anew = torch.tensor([[1, 1, 2, 2]]), torch.tensor([[1, 2, 0, 1]])
    for says in ({"attention_mask": numbers}, {"position_ids": anew}, {"position_ids": anew + 4 * (numbers == 1)}):
        assert torch.equal(flash(**says), packed)
    for one in ([[3, 4, 5, 6]], [[0, 1, 5, 6]], [[0, 1, 1, 2]], [[[1, 2, 0, 1]]] * 3, [[0, 1, 2, 0, 1, 2]]):
        assert torch.equal(flash(position_ids=torch.tensor(one)), causal)  # a chunk, gaps, images' axes, of others
    assert torch.equal(flash(position_ids=anew, attention_mask=PADDED), flash(attention_mask=PADDED))
    assert not integration._read(numbers, 1, 4, True, None).arguments  # a step behind them
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        said = integration._read(numbers, 4, 4, True, None).arguments
    assert said["mask"].tolist() == [[[[1, 1, 0, 0]] * 2 + [[0, 0, 1, 1]] * 2]]


@pytest.mark.parametrize("masked", [True, False])
def test_what_a_layer_says_is_passed_on(masked: bool) -> None:
    packed = {"cu_seq_lens_q": HALVES, "cu_seq_lens_k": HALVES, "max_length_q": 2, "max_length_k": 2}
    options = {"attention_mask": BAND} if masked else packed
    names = {"mask"} if masked else {"causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    said: set[str] = set()
    with attention(said):
        flash(**options, dropout=0.5, softcap=2.0, s_aux=torch.ones(2), deterministic=True)
    assert said == {"dropout_p", "softcap", "sinks", "deterministic", *names}


# ---- continuous batching, on the CPU: by indices, and by the block tables that flash attention takes ----------

NEW, PROMPTS = 8, [list(range(3, 3 + length)) for length in (5, 16, 33)]
Tokens = list[list[int]]


@pytest.fixture
def batching() -> tuple[Any, Tokens, Callable[[], Tokens]]:
    """A model, what each prompt goes on with by eager attention, and the same by continuous batching."""
    transformers = pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")
    pytest.importorskip("transformers.generation.continuous_batching.initialization", reason="is of 5.24")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model, greedy = transformers.LlamaForCausalLM(config).eval(), {"do_sample": False, "eos_token_id": -1}
    model.generation_config = transformers.GenerationConfig(max_new_tokens=NEW, pad_token_id=0, **greedy)
    alone = [model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist() for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)

    def together() -> Tokens:
        """Prompts are cut in parts, and parts and single tokens are in one batch."""
        said = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=24, page_size=16)
        found = model.generate_batch(PROMPTS, model.generation_config, continuous_batching_config=said).values()
        assert not any(one.error for one in found)
        return [one.generated_tokens for one in sorted(found, key=lambda one: len(one.prompt_ids))]

    return model, alone, together


def test_cutlass_fmha_flash_reads_the_cache_by_indices(batching: Any) -> None:
    model, alone, together = batching
    integration.register()
    model.set_attn_implementation(f"{integration.NAME}_flash")
    with mock.patch.object(integration, "packed_attention", wraps=integration.packed_attention) as packed:
        assert together() == alone
    assert packed.call_count >= 2 * NEW


def test_the_kernel_of_the_hub_takes_block_tables(batching: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which transformers hands out on a GPU alone: the question is answered for it."""
    model, alone, together = batching
    kernels = pytest.importorskip("kernels")
    loader = importlib.import_module("transformers.integrations.hub_kernels")
    initialization = importlib.import_module("transformers.generation.continuous_batching.initialization")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    monkeypatch.setattr(loader, "is_kernels_available", lambda: True)
    monkeypatch.setattr(loader, "get_kernel", lambda name, **_: kernels.get_kernel(name, version=1))
    monkeypatch.setenv("LOCAL_KERNELS", "")
    model.set_attn_implementation(hub.use("kernels-community/flash-attn2"))
    with mock.patch.object(flash_attn_interface, "with_kv_cache", wraps=with_kv_cache) as cached:
        assert together() == alone
    steps = [call.kwargs["page_table"] for call in cached.call_args_list]
    assert steps and all(table.dtype == torch.int32 for table in steps)


def test_sinks_of_a_cache_are_passed_on() -> None:
    """transformers drops what a function has no parameter for."""
    q, k, v = (randn(2, 1, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2)))
    caches, given = [randn(3, 16, 2, 16, seed=n) for n in (3, 4)], {"cache_seqlens": ints(3, 9), "causal": True}
    sinks, table = randn(4, seed=5), ints(2, 0)[:, None]
    found = hub.flash_attn_with_kvcache(
        q, *(x.clone() for x in caches), k, v, block_table=table, softmax_scale=0.3, softcap=5.0, s_aux=sinks, **given
    )
    said = {"page_table": table, "scale": 0.3, "softcap": 5.0, **given}
    with_sinks, without = (with_kv_cache(q, *(x.clone() for x in caches), k, v, sinks=x, **said) for x in (sinks, None))
    assert torch.equal(found, with_sinks) and not torch.allclose(found, without, atol=1e-3)
