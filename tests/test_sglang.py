"""SGLang's backend, called as SGLang 0.5.23 calls it, beside each request's attention alone in fp64."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import serving
import torch
from serving import DECODE, DIM, HEADS, HEADS_KV, MIXED, PAGE, PLACES, Requests, placed
from tensors import randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_fmha.integrations import sglang as integration

#: What a layer says, what its call says, and what ``attention`` calls that.
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {}),
    "window": ({"sliding_window_size": 8}, {}, {"window": (8, None)}),
    "softcap": ({"logit_cap": 2.0}, {}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": randn(HEADS)}, {"sinks": randn(HEADS)}),
    "scale": ({"scaling": 0.5}, {}, {"scale": 0.5}),
}
CONTEXT = 10 * PAGE + 4  # SGLang's table has some columns more than a context
WINDOW = {"layer_id": 1, "sliding_window_size": 8}

MODULES = {
    "base": "layers.attention.base_attn_backend", "registry": "layers.attention.attention_registry",
    "radix": "layers.radix_attention", "memory": "mem_cache.memory_pool", "swa": "mem_cache.swa_memory_pool",
    "batch": "model_executor.forward_batch_info", "choices": "arg_groups.choices", "context": "runtime_context",
}  # fmt: skip


@pytest.fixture(scope="module")
def there() -> Iterator[SimpleNamespace]:
    with serving.stand_ins("sglang"):
        theirs = {name: importlib.import_module(f"sglang.srt.{module}") for name, module in MODULES.items()}
        from cutlass_fmha.integrations import sglang_backend as ours

        yield SimpleNamespace(ours=ours, **theirs)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))


def runner(
    pool: Any = None, cross: bool = False, head_dim: int = 64, images: bool = False, **changed: Any
) -> SimpleNamespace:
    given = {
        "kv_cache_dtype": torch.bfloat16, "use_mla_backend": False, "page_size": PAGE, "gpu_id": 0,
        "spec_algorithm": SimpleNamespace(is_speculative=lambda: False), "token_to_kv_pool": pool,
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "req_to_token_pool": SimpleNamespace(size=8, req_to_token=torch.full((9, CONTEXT), 5, dtype=torch.int32)),
        "model_config": SimpleNamespace(
            is_encoder_decoder=cross, dtype=torch.bfloat16, head_dim=head_dim, is_multimodal=images,
            hf_config=SimpleNamespace(architectures=["Gemma3ForConditionalGeneration"])),
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changed})


class Serving:
    """A runner's pool with what is cached of some requests, the backend, and their batch."""

    def __init__(self, there: Any, lengths: Any, order: str = "rows", place: str = "cpu") -> None:
        self.there, self.place = there, place
        self.requests = r = Requests(lengths)
        shape, pool = (r.pages * PAGE, HEADS_KV, DIM), there.memory.MHATokenToKVPool()
        pool.k, pool.v = randn(*shape, seed=1), randn(*shape, seed=2)
        self.slots = [r.slots(i, 0, used) for i, used in enumerate(r.used)]
        copies: list[tuple[Any, Any]] = [(pool, lambda slots: slots)]
        if order == "window pool":  # rows of layer 1 lie elsewhere, the oldest nowhere
            plain, pool = pool, there.swa.SWAKVPool()
            pool.full_kv_pool, pool.swa_kv_pool, pool.swa_layer_nums = plain, there.memory.MHATokenToKVPool(), 1
            pool.swa_kv_pool.k, pool.swa_kv_pool.v = randn(*shape), randn(*shape, seed=3)
            pages = torch.cat((torch.zeros(1).long(), torch.randperm(r.pages - 1) + 1))
            pool.full_to_swa_index_mapping = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
            for own, old in zip(self.slots, r.old, strict=True):
                pool.full_to_swa_index_mapping[own[: max(0, old - 8) // PAGE * PAGE]] = -1
            copies.append((pool.swa_kv_pool, pool.translate_loc_from_full_to_swa))
        of_model = runner(pool)
        self.places = torch.randperm(8)[: len(lengths)] + 1
        for i, own in enumerate(self.slots):
            of_model.req_to_token_pool.req_to_token[self.places[i], : len(own)] = own.int()
            for copy, where in copies:
                at = where(own[: r.old[i]])
                copy.k[at[at >= 0]], copy.v[at[at >= 0]] = (x[i][: len(at)][at >= 0] for x in (r.k, r.v))
        self.backend = there.ours.Backend(placed(of_model, place))
        pool = self.backend.pool
        self.plain = pool.full_kv_pool if order == "window pool" else pool
        if order == "heads first":  # as pages of [heads, page_size, head_dim]
            self.view = [x.view(-1, PAGE, HEADS_KV, DIM).transpose(1, 2) for x in (pool.k, pool.v)]
            pool.get_kv_buffer = lambda layer_id: tuple(self.view)

    def batch(self, mode: str, padded: int = 0) -> Any:
        r = self.requests
        new = [own[old:] for own, old in zip(self.slots, r.old, strict=True)]
        nobody = torch.zeros(padded, dtype=torch.int64)
        batch = self.there.batch.ForwardBatch(
            forward_mode=self.there.batch.ForwardMode[mode], batch_size=len(r.used) + padded, input_ids=torch.zeros(0),
            req_pool_indices=torch.cat((self.places, nobody)),
            seq_lens=torch.cat((torch.tensor(r.used), nobody + 1)), seq_lens_sum=sum(r.used),
            out_cache_loc=torch.cat((*new, nobody)), extend_seq_lens=torch.tensor(r.new),
            extend_prefix_lens_cpu=r.old, extend_seq_lens_cpu=r.new,
        )  # fmt: skip
        return placed(batch, self.place)

    def prepared(self, mode: str) -> Any:
        """A batch that the backend has seen."""
        batch = self.batch(mode)
        self.backend.init_forward_metadata(batch)
        return batch

    def inputs(self, padded: int = 0) -> list[Tensor]:
        """q [tokens, heads * head_dim], k and v [tokens, heads, head_dim] of the new rows."""
        q, k, v = self.requests.inputs(padded)
        return placed([q.flatten(1), k, v], self.place)

    def layer(self, **said: Any) -> Any:
        given = {"scaling": DIM**-0.5, "layer_id": 0, **said}
        return self.there.radix.RadixAttention(HEADS, DIM, num_kv_heads=HEADS_KV, **given)

    def run(self, batch: Any, layer: Any, padded: int = 0, inputs: Any = None, **kwargs: Any) -> Tensor:
        inputs = inputs or self.inputs(padded)
        found: Tensor = self.backend.forward(*inputs, layer, batch, **placed(kwargs, self.place, None))
        assert found.shape == (sum(self.requests.new) + padded, HEADS * DIM)
        return found.view(-1, HEADS, DIM)[: sum(self.requests.new)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("lengths", "mode"), [(MIXED, "MIXED"), (MIXED, "EXTEND"), (DECODE, "DECODE")])
@pytest.mark.parametrize("order", ["rows", "heads first", "window pool"])
@pytest.mark.parametrize("what", SAID)
def test_a_batch_is_each_request_alone(there: Any, what: str, order: str, lengths: Any, mode: str, place: str):
    layer, kwargs, ours = SAID[what]
    there.ours.calls.clear()
    s = Serving(there, lengths, order, place)
    batch, expected, pool = s.prepared(mode), s.requests.expected(**ours), s.plain
    layers = [s.layer(**layer), s.layer()]
    if order == "window pool" and what == "window":
        layers[0].layer_id, pool = 1, s.backend.pool.swa_kv_pool
    assert serving.is_close(s.run(batch, layers[0], **kwargs), expected) and there.ours.calls.counts == {"decoder": 1}
    assert serving.is_close(s.run(batch, layers[1]), s.requests.expected())
    assert not ours or not serving.is_close(s.requests.expected(), expected), f"{what} changes nothing here"
    for own, k, v in zip(s.slots, s.requests.k, s.requests.v, strict=True):
        assert all(torch.equal(x[own].float().cpu(), y) for x, y in ((s.plain.k, k), (s.plain.v, v)))
    batch._attn_output = torch.empty_like(s.inputs()[0])  # as in graphs of prompts
    for name in "kv" if order != "heads first" else "":  # a pool may get other tensors
        old = getattr(pool, name)
        setattr(pool, name, old.clone())
        old.fill_(torch.nan)
        again = s.run(batch, layers[0], save_kv_cache=False, **kwargs)  # layers that share a cache
        assert serving.is_close(again, expected) and again.data_ptr() == batch._attn_output.data_ptr()


def test_a_batch_may_be_padded_beyond_the_pool(there: Any):
    s = Serving(there, DECODE)
    batch = s.batch("DECODE", 9)
    s.backend.init_forward_metadata(batch)
    assert serving.is_close(s.run(batch, s.layer(), 9), s.requests.expected())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ["rows", "window pool"])
def test_a_replayed_graph_reads_the_lengths_and_pages_of_now(there: Any, order: str, place: str):
    """Captured for six sequences of nothing; what the graph recorded of the preparation runs again."""
    s, padded = Serving(there, DECODE, order, place), 2
    windows = order == "window pool"
    layer, said = s.layer(**WINDOW if windows else {}), {"window": (8, None)} if windows else {}
    s.backend.init_cuda_graph_state(8, 8)
    inputs, now, static = s.inputs(padded), s.batch("DECODE", padded), s.batch("DECODE", padded)
    static.seq_lens.fill_(s.backend.get_cuda_graph_seq_len_fill_value())
    for x in (static.req_pool_indices, static.out_cache_loc):
        x.zero_()
    s.backend.init_forward_metadata_out_graph(static, in_capture=True)

    def decode() -> Tensor:
        s.backend.init_forward_metadata_in_graph(static)
        return s.run(static, layer, padded, inputs)

    def addresses() -> list[int]:
        return [x.data_ptr() for x in vars(s.backend.forward_metadata).values() if isinstance(x, Tensor)]

    again = serving.recorded(decode, place)
    captured, lie = s.backend.forward_metadata, addresses()
    for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
        getattr(static, name).copy_(getattr(now, name))
    s.backend.init_forward_metadata_out_graph(static)
    found = again()
    assert s.backend.forward_metadata is captured and addresses() == lie
    assert serving.is_close(found, s.requests.expected(**said))


@pytest.mark.parametrize("kind", ["ENCODER_ONLY", "DECODER_BIDIRECTIONAL"])
def test_prompts_that_see_both_sides(there: Any, kind: str):
    s = Serving(there, tuple((0, new) for _, new in MIXED))
    batch, attn_type = s.prepared("EXTEND"), there.radix.AttentionType[kind]
    for window, said in ((-1, {}), (8, {"window": (8, 8)})):
        found = s.run(batch, s.layer(attn_type=attn_type, sliding_window_size=window))
        assert serving.is_close(found, s.requests.expected("none", **said))


def test_nothing_asks_what_a_tensor_holds(there: Any):
    """Fake tensors hold nothing: one look at a length would raise, and in a graph of CUDA it would, too."""
    s = Serving(there, DECODE, "window pool")
    s.backend.init_cuda_graph_state(4, 4)
    batch, inputs, layer = s.batch("DECODE"), s.inputs(), s.layer(**WINDOW)
    s.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    with FakeTensorMode() as mode:
        pool, metadata = s.backend.pool, s.backend.forward_metadata
        serving.hollow(mode, batch, s.backend, metadata, pool, pool.swa_kv_pool)
        s.backend.init_forward_metadata_in_graph(batch)
        q, k, v = map(mode.from_tensor, inputs)
        found = s.backend.forward(q, k, v, layer, batch, save_kv_cache=False, sinks=None, q_rope=None)
        assert found.shape == inputs[0].shape


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"use_mla_backend": True}, "has no cache of latents"),
        ({"page_size": 1}, "needs pages of a multiple of 16 rows, got --page-size 1"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "needs a cache in the model's dtype, float16 or bfloat16"),
        ({"kv_cache_dtype": torch.float16}, "got float16 of a model in bfloat16"),
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "has no speculative decoding"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "has no unified pool"),
        ({"attn_dcp_size": 2}, "has no context parallelism"),
        ({"cross": True}, "has no cross attention"),
        ({"images": True}, "has no images whose tokens see each other"),
        ({"head_dim": 520}, "use head dims of at most 512"),
    ],
)
def test_a_model_is_refused_with_the_reason(
    there: Any, changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
):
    assert integration.create(runner()).needs_cpu_seq_lens is False
    monkeypatch.setattr(there.context.get_parallel(), "attn_dcp_size", changed.get("attn_dcp_size", 1))
    with pytest.raises(NotImplementedError, match=reason):
        integration.create(runner(**changed))


@pytest.mark.parametrize(
    ("layer", "kwargs", "said"),
    [
        ({"is_cross_attention": True}, {}, "is_cross_attention"),
        ({"use_irope": True}, {}, "use_irope"),
        ({"xai_temperature_len": 1024}, {}, "xai_temperature_len"),
        ({"logit_cap": 1.0, "logit_capping_method": "other"}, {}, "logit_capping_method"),
        ({}, {"q_rope": torch.zeros(1), "return_lse": False}, "q_rope"),
        ({}, {"return_lse": True, "k_rope": None}, "return_lse"),
    ],
)
def test_what_a_layer_or_a_batch_says_more_is_refused(there: Any, layer: Any, kwargs: Any, said: str):
    s = Serving(there, DECODE)
    batch, saying = s.prepared("DECODE"), s.layer()
    vars(saying).update(layer)
    with pytest.raises(NotImplementedError, match=f"does not know what {said} says in SGLang"):
        s.run(batch, saying, **kwargs)
    for begin in (s.backend.init_forward_metadata, s.backend.init_forward_metadata_out_graph):
        with pytest.raises(NotImplementedError, match="of TARGET_VERIFY in SGLang"):
            begin(s.batch("TARGET_VERIFY"))


def test_the_plugin_adds_a_name_and_obeys_sglang(there: Any, monkeypatch: pytest.MonkeyPatch):
    serving.check_parameters(there.ours.Backend, there.base.AttentionBackend)
    assert integration.register() == serving.plugin("sglang.srt.plugins")() == "cutlass_fmha"
    for names in ("ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES"):
        assert getattr(there.choices, names).count("cutlass_fmha") == 1
    made = there.registry.ATTENTION_BACKENDS["cutlass_fmha"](runner())
    assert isinstance(made, there.base.AttentionBackend)
    monkeypatch.setattr(there.context.get_exec().deterministic, "enable_deterministic_inference", True)
    s, asked = Serving(there, DECODE), []
    monkeypatch.setattr(there.ours, "attend_known", lambda q, *said: asked.append(said[-2]) or q)
    s.run(s.prepared("DECODE"), s.layer())
    assert asked[0]["batch_invariant"] is True
