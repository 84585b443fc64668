"""The attention functions that transformers' layers call, by themselves: what a layer says, and what is refused."""

import functools
import importlib
import sys
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from spied import attention
from tensors import randn

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


@pytest.mark.parametrize("said", [{}, {"cu_seq_lens_q": HALVES, "cu_seq_lens_k": HALVES}], ids=["plain", "packed"])
def test_attention_of_channels_has_rows_that_are_not_contiguous(said: dict[str, Any]) -> None:
    rows = [x.mT.contiguous().mT for x in torch.randn(3, 1, 2, 4, 32)]
    given = rows, map(torch.Tensor.contiguous, rows)
    found, wanted = (integration.flash_forward(torch.nn.Module(), *x, None, **said)[0] for x in given)
    assert torch.equal(found, wanted)


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
    in_rows = {"cu_seq_lens_q": HALVES, "cu_seq_lens_k": HALVES, "max_length_q": 2, "max_length_k": 2}
    names = {"causal", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    for options, expected in (({"attention_mask": BAND}, {"mask"}), (in_rows, names)):
        with attention(passed := set()):
            flash(**options, dropout=0.5, softcap=2.0, s_aux=torch.ones(2), deterministic=True)
        assert passed == {"dropout_p", "softcap", "sinks", "deterministic", *expected}


def test_patterns_that_lengths_and_windows_can_not_say_stay_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = pytest.importorskip("transformers.masking_utils", reason="requirements/demo.txt is not installed")
    from cutlass_fmha.integrations import transformers_masks

    def both(function: Any, before: int = 0, keys: int = 6) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Ours and SDPA's."""
        made = transformers_masks.flash_mask(2, 6, keys, before, mask_function=function)
        return made, masks.sdpa_mask(2, 6, keys, before, mask_function=function, allow_is_causal_skip=False)

    causal = masks.causal_mask_function
    left, around = masks.sliding_window_causal_mask_function, masks.sliding_window_bidirectional_mask_function
    for nothing in (causal, masks.bidirectional_mask_function, left(6)):  # the last one hides nothing
        assert both(nothing)[0] is None
    for window in (left(3), left(5), around(3), around(4)):  # the second of each hides one key of a query
        assert both(window)[0].shape == (2, 6)
    thirds = torch.arange(8).expand(2, 8) // 3
    packed, own = (masks.and_masks(masks.packed_sequence_mask_function(x), causal) for x in (thirds, thirds[:, :6]))
    assert torch.equal(both(own)[0], thirds[:, :6] + 1)
    blocks = masks.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, 1, 1]] * 2))
    for other, *behind in (
        (masks.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int)),),
        (masks.or_masks(causal, blocks),),
        (masks.and_masks(masks.sliding_window_overlay(3), masks.bidirectional_mask_function),),
        (lambda batch, head, q, kv: kv <= q,),
        (around(3), 2, 8),  # of queries that stand behind the first keys
        (packed, 2, 8),
    ):
        assert torch.equal(*both(other, *behind))
    monkeypatch.setattr(transformers_masks, "is_tracing", lambda _: True)
    assert both(causal)[0] is both(causal, 2, 8)[0] is None and torch.equal(*both(causal, 0, 8))
