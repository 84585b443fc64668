"""The node for ComfyUI, called as its functions are: the same numbers and shapes, or its own function."""

import copy
import importlib
import inspect
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import serving
import torch
from tensors import randn
from torch import Tensor

from cutlass_fmha import log
from cutlass_fmha.integrations import comfyui

HEADS, DIM = 4, 32
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "queries and keys": torch.arange(13) < torch.arange(9)[:, None] + 3,
    "of the batch": torch.arange(13).expand(2, 1, 13) < torch.tensor([13, 5])[:, None, None],
    "numbers of the heads": randn(2, HEADS, 9, 13),
}


@pytest.fixture(autouse=True)
def there() -> Iterator[Any]:
    comfyui.calls.clear()
    log.forget()
    with serving.stand_ins("comfy"):
        yield importlib.import_module("comfy.ldm.modules.attention")


@pytest.mark.parametrize("place", serving.PLACES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stay", [False, True])
@pytest.mark.parametrize("heads_kv", [HEADS, 2])
def test_shapes_masks_and_heads_are_as_there(there: Any, mask: str, split: bool, stay: bool, heads_kv: int, place: str):
    q, k, v = (randn(2, heads, seqlen, DIM) for heads, seqlen in ((HEADS, 9), (heads_kv, 13), (heads_kv, 13)))
    if not split:
        q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    q, k, v, here = serving.placed((q, k, v, MASKS[mask]), place)
    said = {"skip_reshape": split, "skip_output_reshape": stay, "enable_gqa": heads_kv != HEADS, "mask": here}
    override = {"transformer_options": {comfyui.OVERRIDE: comfyui.or_else}}
    for scale in ({}, {"scale": 0.3}):
        want = there.attention_pytorch(q, k, v, HEADS, **said, **scale, transformer_options={})
        found = there.attention_pytorch(q, k, v, HEADS, **said, **scale, **override)
        assert found.shape == want.shape and serving.is_close(found, want.double().cpu())
    assert comfyui.calls.counts == {"attention": 2} and not comfyui.calls.declined


def test_what_is_declined_is_comfyuis_with_a_line(caplog: pytest.LogCaptureFixture):
    given, theirs = (*(randn(2, seqlen, HEADS * DIM) for seqlen in (9, 13, 13)), HEADS), mock.Mock()
    for said in ({"is_causal": True}, {"mask": torch.zeros(9, 13, dtype=torch.float64)}) * 2:
        with caplog.at_level(logging.WARNING, "cutlass_fmha"):
            assert comfyui.or_else(theirs, *given, **said) is theirs.return_value
        assert theirs.call_args.args == given and theirs.call_args.kwargs == said
    unknown, refused = caplog.messages  # once each
    assert "ComfyUI says is_causal, which is unknown here" in unknown and "bias must" in refused
    assert not comfyui.calls.counts


def test_the_node_changes_a_clone_and_refuses_to_undo_another_node():
    def model(**options: Any) -> Any:
        made = SimpleNamespace(model_options={"transformer_options": options})
        made.clone = lambda: SimpleNamespace(model_options=copy.deepcopy(made.model_options))
        return made

    before = model(patches={})
    (node,) = comfyui.NODE_CLASS_MAPPINGS.values()
    assert node.INPUT_TYPES()["required"] == {"model": ("MODEL",)} and node.RETURN_TYPES == ("MODEL",)
    (after,) = getattr(node(), node.FUNCTION)(before)
    options = after.model_options["transformer_options"]
    assert options == {"patches": {}, "optimized_attention_override": comfyui.or_else}
    assert before.model_options == {"transformer_options": {"patches": {}}}
    node().patch(model(optimized_attention_override=comfyui.or_else))
    with pytest.raises(ValueError, match="another node changes this model's attention, too"):
        node().patch(model(optimized_attention_override=print))


def test_the_registry_gets_a_wrapped_function_that_falls_back_to_torchs(there: Any):
    comfyui.register(there)
    function = there.REGISTERED_ATTENTION_FUNCTIONS.pop("cutlass_fmha")
    given = [randn(2, 9, HEADS * DIM)] * 3
    want = there.attention_pytorch(*given, HEADS)
    torch.testing.assert_close(function(*given, HEADS), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(function(*given, HEADS, window=3), want)
    assert comfyui.calls.counts == {"attention": 1} and sum(comfyui.calls.declined.values()) == 1
    changed = {"transformer_options": {comfyui.OVERRIDE: lambda own, *args, **said: own.__name__}}
    assert function(*given, HEADS, **changed) == "attention_cutlass_fmha", "it is wrapped"
    both = (inspect.signature(f).parameters.values() for f in (comfyui.attention, there.attention_pytorch))
    own, other = ([(x.name, x.default, x.kind) for x in each] for each in both)
    assert own == other
