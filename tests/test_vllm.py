"""vLLM's backend, called as vLLM 0.33, or the one that is installed, calls it, beside attention alone in fp64."""

import logging
import math
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import serving
import torch
from serving import DECODE, DIM, HEADS, HEADS_KV, MIXED, PAGE, PLACES, Requests, placed
from tensors import ints, laid, randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_fmha import log
from cutlass_fmha.integrations import vllm as integration

SLOPES = [2.0 ** -(i + 1) for i in range(HEADS)]
#: What vLLM says to a layer, and what ``attention`` calls that.
SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "window": ({"sliding_window": 9}, {"window": (8, None)}),
    "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "sinks": ({"sinks": randn(HEADS)}, {"sinks": randn(HEADS)}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": torch.tensor(SLOPES)}),
    "scale": ({"scale": 0.5}, {"scale": 0.5}),
}


@pytest.fixture(scope="module")
def there() -> Iterator[SimpleNamespace]:
    with serving.stand_ins("vllm", or_installed=True):
        from vllm.v1.attention import backend
        from vllm.v1.attention.backends import flash_attn, registry

        from cutlass_fmha.integrations import vllm_backend as ours

        # vLLM's own kernel needs a GPU.
        there = runpy.run_path(str(serving.ENGINES / "vllm" / "_custom_ops.py"))
        ours.reshape_and_cache_flash = there["reshape_and_cache_flash"]
        yield SimpleNamespace(base=backend, registry=registry, flash=flash_attn, ours=ours)


def step(
    there: Any, lengths: tuple[tuple[int, int], ...], order: str = "NHD", place: str = "cpu", **changed: Any
) -> SimpleNamespace:
    """A batch as vLLM's runner has it, padded to more tokens and requests, as in its graphs."""
    r, spare = Requests(lengths), 3
    # [blocks, heads, block_size, 2 * head_size]
    cache = laid(randn(r.pages, HEADS_KV, PAGE, 2 * DIM), "heads first" if order == "NHD" else "plain")
    for i, old in enumerate(r.old):
        slot = r.slots(i, 0, old)
        cache[slot // PAGE, :, slot % PAGE] = torch.cat((r.k[i][:old], r.v[i][:old]), -1)
    new = [r.slots(i, *part) for i, part in enumerate(zip(r.old, r.used, strict=True))]
    tokens = int(r.starts[-1])
    common = there.base.CommonAttentionMetadata(
        query_start_loc=torch.cat((r.starts, ints(tokens, tokens))), query_start_loc_cpu=r.starts,
        seq_lens=ints(*r.used, 0, 0), num_reqs=len(lengths) + 2, num_actual_tokens=tokens,
        max_query_len=max(r.new), max_seq_len=max(r.used),
        block_table_tensor=torch.cat((r.table, torch.full_like(r.table[:2], -7))),
        slot_mapping=torch.cat((*new, torch.full((spare,), -1))), **changed,
    )  # fmt: skip
    query, key, value, cache, common = placed((*r.inputs(spare), cache, common), place)
    return SimpleNamespace(requests=r, query=query, key=key, value=value, cache=cache, common=common)


def call(there: Any, s: SimpleNamespace, metadata: Any = None, **said: Any) -> Callable[[], Tensor]:
    """A layer's: first the cache, then what computes attention, into memory that is there."""
    said = {"scale": DIM**-0.5, "sliding_window": None, "kv_cache_dtype": "auto", "alibi_slopes": None, **said}
    with s.query.device:  # as vLLM makes its models
        kind = there.ours.Backend.get_impl_cls()
        impl = kind(HEADS, DIM, num_kv_heads=HEADS_KV, **placed(said, s.query.device.type))
    impl.process_weights_after_loading(torch.float32)
    if metadata is None:
        metadata = there.ours.Backend.get_builder_cls()(None, ["layer"], None, s.query.device).build(0, s.common)
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    impl.do_kv_cache_update(layer, s.key, s.value, s.cache, metadata.slot_mapping)
    output = torch.full_like(s.query, math.inf)

    def forward() -> Tensor:
        assert impl.forward(layer, s.query, s.key, s.value, s.cache, metadata, output=output) is output
        return output[: metadata.num_actual_tokens]

    return forward


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("what", SAID)
def test_a_batch_is_each_request_alone(there: Any, what: str, order: str, lengths: Any, place: str):
    theirs, ours = SAID[what]
    there.ours.calls.clear()
    s = step(there, lengths, order, place)
    if what == "window":  # vLLM gives up blocks that it has left behind, and block 0 stands for them
        for row, old in zip(s.common.block_table_tensor, s.requests.old, strict=False):
            row[: max(0, old - 8) // PAGE] = 0
    expected = s.requests.expected(**ours)
    assert serving.is_close(call(there, s, **theirs)(), expected) and there.ours.calls.counts == {"decoder": 1}
    if ours:
        assert not serving.is_close(call(there, s)(), expected), f"{what} changes nothing here"
    for i, used in enumerate(s.requests.used):  # new rows went where the cache has room for them
        slot = s.requests.slots(i, 0, used)
        rows = torch.cat((s.requests.k[i], s.requests.v[i]), -1)
        assert torch.equal(s.cache[slot // PAGE, :, slot % PAGE].float().cpu(), rows)


def test_pages_are_made_once_for_a_cache_and_do_not_outlive_it(there: Any):
    impl = there.ours.Impl(HEADS, DIM, 1.0, HEADS_KV)
    for cache in (randn(3, HEADS_KV, PAGE, 2 * DIM), randn(3, PAGE, HEADS_KV, 2 * DIM).transpose(1, 2)):
        pages = impl._pages(cache)
        assert torch.equal(torch.cat(pages, -1), cache.transpose(1, 2)) and impl._pages(cache)[0] is pages[0]
    alive = weakref.ref(pages[0])
    del cache, pages
    assert alive() is None


@pytest.mark.parametrize("place", PLACES)
def test_encoders_see_both_sides(there: Any, place: str):
    """Without a cache: packed queries, keys and values, whatever the metadata says of causality."""
    s = step(there, tuple((0, new) for _, new in MIXED), place=place)
    before = s.cache.clone()
    for kind in ("encoder", "encoder_only"):
        for window, said in ((None, {}), (9, {"window": (8, 8)})):
            found = call(there, s, attn_type=kind, sliding_window=window)()
            assert serving.is_close(found, s.requests.expected("none", **said)) and torch.equal(s.cache, before)


def test_a_decoder_sees_all_that_the_encoder_left(there: Any):
    """Cross attention, and decoders that aren't causal; their windows have two sides."""
    s = step(there, MIXED, causal=False)
    assert serving.is_close(call(there, s, attn_type="encoder_decoder")(), s.requests.expected("none"))
    assert serving.is_close(call(there, s, sliding_window=9)(), s.requests.expected("none", window=(8, 8)))
    keys = [min(20, used) for used in s.requests.used]
    s.common.seq_lens[: len(keys)] = ints(*keys)
    s.common.max_seq_len = 20
    assert serving.is_close(call(there, s, attn_type="encoder_decoder")(), s.requests.expected("none", keys=keys))


@pytest.mark.parametrize("place", PLACES)
def test_lengths_that_grow_in_place_are_seen(there: Any, place: str):
    """As a replayed graph has it: the metadata of its capture, whose tensors hold the lengths of now."""
    s = step(there, DECODE, place=place)
    builder = there.ours.Backend.get_builder_cls()(None, [], None, torch.device("cpu"))
    metadata = builder.build(0, s.common)
    again = serving.recorded(call(there, s, metadata), place)
    whole, used = again().clone(), s.requests.used.copy()
    assert serving.is_close(whole, s.requests.expected())
    metadata.seq_lens[: len(used)] -= 5
    assert serving.is_close(shorter := again(), s.requests.expected("none", keys=[n - 5 for n in used]))
    assert not serving.is_close(shorter, whole.double().cpu())
    metadata.of_another_builder = True  # chunked attention hangs a function there
    other = builder.update_block_table(metadata, metadata.block_table.flip(0), metadata.slot_mapping)
    assert torch.equal(other.block_table[0], metadata.block_table[-1]) and other.seq_lens is metadata.seq_lens
    assert other.of_another_builder and other.block_table is not metadata.block_table
    assert there.ours.Builder._cudagraph_support is there.base.AttentionCGSupport.UNIFORM_BATCH


def test_sinks_that_are_loaded_again_are_read_where_they_were(there: Any):
    sinks = torch.zeros(HEADS, dtype=torch.bfloat16)
    impl = there.ours.Impl(HEADS, DIM, 0.1, HEADS_KV, sinks=sinks)
    impl.process_weights_after_loading(sinks.dtype)
    kept = impl._said["sinks"]
    sinks.fill_(3.0)
    impl.process_weights_after_loading(sinks.dtype)
    assert impl._said["sinks"] is kept and (kept == 3.0).all()


def test_nothing_asks_what_a_tensor_holds(there: Any):
    """Fake tensors hold nothing: one look at a length would raise, and in a graph of CUDA it would, too."""
    s = step(there, MIXED)
    impl = there.ours.Impl(HEADS, DIM, 0.1, HEADS_KV, None, 9, "auto", 3.0, sinks=randn(HEADS))
    metadata = there.ours.Builder(None, [], None, torch.device("cpu")).build(0, s.common)
    with FakeTensorMode() as mode:
        serving.hollow(mode, metadata)
        impl._said = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in impl._said.items()}
        q, k, v, cache = map(mode.from_tensor, (s.query, s.key, s.value, s.cache))
        output = torch.empty_like(q)
        assert impl.forward(None, q, k, v, cache, metadata, output) is output


def test_batch_invariance_and_the_run_that_measures_memory(there: Any, monkeypatch: pytest.MonkeyPatch):
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    monkeypatch.setattr(there.ours, "attention", asked := mock.Mock())
    call(there, step(there, ((3, 0),)))()
    assert asked.call_args.kwargs["batch_invariant"] is True
    output, impl = randn(2, HEADS, DIM), there.ours.Impl(HEADS, DIM, 1.0)
    assert impl.forward(None, output, output, output, torch.empty(0), None, output) is output
    assert (output == 0).all() and impl.num_kv_heads == HEADS
    with pytest.raises(NotImplementedError, match="does not quantize its output"):
        impl.forward(None, output, output, output, output, None, output, output_scale=output)


PLAIN: dict[str, Any] = {
    "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False,
    "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": SimpleNamespace(major=8, minor=9), "attn_type": "decoder",
}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, None),
        ({"device_capability": SimpleNamespace(major=12, minor=0), "block_size": 48, "head_size": 64}, None),
        ({"attn_type": "encoder_decoder", "has_sliding_window": True, "use_non_causal": True}, None),
        ({"has_sink": True, "use_batch_invariant": True, "kv_cache_dtype": "bfloat16"}, None),
        ({"device_capability": SimpleNamespace(major=7, minor=5)}, "capability 8.0 or newer is needed"),
        ({"head_size": 520}, "use head dims of at most 512"),
        ({"head_size": 260}, "the whole cache at each call: head dims must be multiples of 8, got 260"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"block_size": 8}, "pages of a multiple of 16 keys, got 8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "cutlass_fmha has no fp8_e4m3 cache of keys and values"),
        ({"kv_cache_dtype": "float16"}, "needs queries in the cache's dtype float16, got bfloat16"),
        ({"use_mla": True}, "cutlass_fmha has no cache of latents: MLA is computed by another backend"),
    ],
)
def test_a_model_is_taken_or_refused_with_the_reason(there: Any, asked: dict[str, Any], reason: str | None):
    reasons = there.ours.Backend.validate_configuration(**{**PLAIN, **asked})
    assert reasons == [] if reason is None else reason in reasons[-1], reasons


def test_what_only_a_batch_tells_is_refused_there_and_sinks_are_asked_for(there: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(there.ours, "why_not", lambda *given: str(given[4]))  # no kernel of this build minds them
    assert there.ours.Backend.validate_configuration(**{**PLAIN, "has_sink": True}) == ["cutlass_fmha: ('sinks',)"]
    for changed, said, reason in (
        ({"causal": torch.ones(8, dtype=torch.int32)}, {}, "causality that differs within a batch"),
        ({"mm_req_doc_ranges": {0: [(1, 5)]}}, {}, "tokens of images that see each other"),
        ({}, {"kv_cache_dtype": "fp8"}, "no fp8 cache"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            call(there, step(there, DECODE, **changed), **said)()


def test_the_plugin_registers_and_leaves_anothers_alone(
    there: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    ours, base, custom = there.ours, there.base, there.registry.AttentionBackendEnum.CUSTOM
    for own, *theirs in (
        (ours.Impl, there.flash.FlashAttentionImpl, *base.AttentionImpl.__mro__),
        (ours.Builder, base.AttentionMetadataBuilder), (ours.Backend, base.AttentionBackend),
    ):  # fmt: skip
        serving.check_parameters(own, *theirs)
    log.forget()
    integration.register()
    integration.register()  # in each of vLLM's processes, perhaps twice
    assert custom.get_path() == integration.BACKEND and custom.get_class() is there.ours.Backend
    assert there.ours.Backend.get_name() == custom.name
    with caplog.at_level(logging.WARNING, "cutlass_fmha"):
        there.registry.register_backend(custom, "another.Backend")
        integration.register()
        assert custom.get_path() == "another.Backend" and "VLLM_PLUGINS says which" in caplog.text
        monkeypatch.setitem(sys.modules, "vllm", None)
        serving.plugin("vllm.general_plugins")()  # it must not stop another vLLM
    assert "backend CUSTOM is not cutlass_fmha: this integration needs vLLM 0.33 or newer" in caplog.text
