"""diffusers' models and its dispatcher through the package's attention, beside its native backend."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tensors import moved, randn

from cutlass_fmha import log
from cutlass_fmha.demo.measure import CountCalls
from cutlass_fmha.integrations import diffusers as integration

diffusers = pytest.importorskip("diffusers", minversion="0.42", reason="needs Python 3.11 or newer")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    assert integration.register() == integration.register() == integration.NAME
    assert [x.value for x in dispatch.AttentionBackendName].count(integration.NAME) == 1
    yield
    # A model's choice is that of all models.
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)


def call(
    backend: str, heads_kv: int = 4, place: Any = (), wide: bool = False, queries: int = 7, **said: Any
) -> torch.Tensor:
    sizes = ((queries, 4), (7, heads_kv), (7, heads_kv))
    operands = (randn(2, *size, 32, seed=n).to(*place) for n, size in enumerate(sizes))
    return dispatch.dispatch_attention_fn(*(x.double() if wide else x for x in operands), **said, backend=backend)


PADDING = torch.arange(7) < torch.tensor([[7], [4]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, fewer queries": {"is_causal": True, "queries": 4},
    "scale": {"scale": 0.5},
    "padding": {"attn_mask": PADDING},
    "padding to add": {"attn_mask": torch.zeros(2, 7).masked_fill(~PADDING, float("-inf"))},
    "mask": {"attn_mask": randn(2, 1, 7, 7) > -0.5},
    "bias": {"attn_mask": randn(4, 7, 7)},
    "grouped": {"heads_kv": 2, "enable_gqa": True},
}
PLACES = [("cpu", torch.float32), pytest.param(("cuda", torch.float16), marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("said", CALLS.values(), ids=CALLS)
def test_a_call_of_the_dispatcher_is_as_exact_as_its_native_backend(said: dict[str, Any], place: Any) -> None:
    """Beside fp64; what was said matters."""
    given = moved(said, *place)
    with CountCalls() as counter:
        found = call(integration.NAME, place=place, **given)
    assert counter.calls == 1
    wanted = call("native", place=place, wide=True, **moved(given, place[0], torch.float64))
    errors = [(x.double() - wanted).abs().max() for x in (found, call("native", place=place, **given))]
    assert errors[0] <= 2 * errors[1] + (8 if place[1] == torch.float32 else 1) * torch.finfo(place[1]).eps
    if "heads_kv" not in said and said:
        without = call("native", place=place, queries=said.get("queries", 7))
        assert (found - without).abs().max() > 1e-2


def test_what_the_native_backend_lacks() -> None:
    band = torch.ones(7, 7, dtype=torch.bool).tril(1).triu(-2)
    found, lse = call(integration.NAME, attention_kwargs={"window_size": (2, 1), "return_lse": True})
    torch.testing.assert_close(found, call("native", attn_mask=band), rtol=1e-5, atol=1e-5)
    assert lse.shape == (2, 4, 7)
    rows = [x.mT.contiguous().mT for x in (randn(2, 7, 4, 32, seed=n) for n in range(3))]  # not contiguous
    torch.testing.assert_close(integration.attention_forward(*rows), call("native"), rtol=1e-5, atol=1e-5)
    dropped = []
    for _ in range(2):
        torch.manual_seed(0)
        dropped.append(call(integration.NAME, dropout_p=0.5))
    assert torch.equal(*dropped) and not torch.equal(dropped[0], call(integration.NAME))
    with pytest.raises(NotImplementedError, match="context parallelism"):
        call(integration.NAME, parallel_config=object())
    with pytest.raises(ValueError, match="enable_gqa"):
        call(integration.NAME, heads_kv=2)


#: Config, inputs, and how many layers have attention. Qwen's text has padding, whose mask is joined with the image's.
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "FluxTransformer2DModel": (
        {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": randn(2, 16, 4), "encoder_hidden_states": randn(2, 5, 32), "img_ids": torch.zeros(16, 3),
         "pooled_projections": randn(2, 32), "timestep": torch.tensor([0.5, 0.5]), "txt_ids": torch.zeros(5, 3)}, 2),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16,
         "freq_dim": 16, "ffn_dim": 32, "num_layers": 1, "cross_attn_norm": True, "rope_max_seq_len": 32},
        {"hidden_states": randn(1, 4, 1, 8, 8), "encoder_hidden_states": randn(1, 6, 16),
         "timestep": torch.tensor([5])}, 2),
    "QwenImageTransformer2DModel": (
        {"in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)},
        {"hidden_states": randn(2, 16, 16), "encoder_hidden_states": randn(2, 5, 16), "img_shapes": [(1, 4, 4)] * 2,
         "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
         "timestep": torch.tensor([0.5, 0.5])}, 1),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_as_exact_as_by_its_native_backend(name: str, place: Any) -> None:
    torch.manual_seed(0)
    (config, said, layers), found = SMALL[name], {}
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-0.3, 0.3)
        wanted = model.double()(**moved(said, "cpu", torch.float64))[0]
        model.to(*place)
        said = moved(said, *place)
        for backend in ("native", integration.NAME):
            model.set_attention_backend(backend)
            with CountCalls() as counter:
                found[backend] = (model(**said)[0].double().cpu() - wanted).abs().max()
        with mock.patch.object(integration, "attention", lambda q, *_, **__: 0 * q):
            without = model(**said)[0].double().cpu()
    assert counter.calls == layers and (without - wanted).abs().max() > 1e-2  # it depends on the attention
    # A training step, too.
    model(**said)[0].square().mean().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    rounding = (8 if place[1] == torch.float32 else 1) * torch.finfo(place[1]).eps * wanted.abs().max()
    assert found[integration.NAME] <= 2 * found["native"] + rounding


#: Small models, and which of their processors never ask the dispatcher.
ASKING: dict[str, tuple[dict[str, Any], str]] = {
    "AutoencoderKL": ({"block_out_channels": (8,), "norm_num_groups": 4}, "AttnProcessor2_0"),
    # for the active backend, without a place for one
    "CosmosTransformer3DModel": ({
        "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "in_channels": 4, "out_channels": 4,
        "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 8, 8)}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_a_choice_that_processors_will_not_hear_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    log.forget()
    said, deaf = ASKING[name]
    model = getattr(diffusers, name)(**said)
    told = [f"{name}: {deaf} won't ask"] if deaf else []
    for backend, expected in (("native", []), (integration.NAME, told), (integration.NAME, told)):
        model.set_attention_backend(backend)
        found = [record.getMessage() for record in caplog.records if record.name == "cutlass_fmha"]
        assert [message.partition(" diff")[0] for message in found] == expected
    # A processor with a place for a backend is not told of, however it asks.
    for own, asks in (({"_attention_backend": None}, True), ({}, False)):
        assert integration._asks(type("Own", (), {**own, "__call__": lambda self: None})) is asks
