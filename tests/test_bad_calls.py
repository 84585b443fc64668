"""The calls of bad_calls.py are refused: by one of four kinds of exception, whatever is passed, in a sentence."""

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from bad_calls import BAD, CALLS, CALLS_ON_CPU
from torch import Tensor
from torch.utils._pytree import tree_map

import cutlass_fmha as fmha
from cutlass_fmha import UnsupportedError, attention
from cutlass_fmha.ops import dispatcher


def refusal(name: str, arguments: dict[str, Any], place: str) -> Exception:
    """Nothing that was passed has changed when it comes."""
    function, usual = BAD[name]
    given = {argument: value for argument, value in (usual | arguments).items() if value is not ...}
    plain = {argument: x for argument, x in given.items() if is_plain(x)}
    if place == "meta":
        given = tree_map(on_meta, given)
    before = {argument: x.clone() for argument, x in plain.items()}
    try:
        function(**given)
    except Exception as error:
        assert all(torch.equal(plain[argument], x) for argument, x in before.items())
        return error
    raise AssertionError("it was not refused")


def on_meta(x: Any) -> Any:
    if not is_plain(x):
        return x
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return empty.requires_grad_(x.requires_grad)


def is_plain(x: Any) -> bool:
    usual = isinstance(x, Tensor) and x.layout is torch.strided and x.device.type == "cpu"
    return usual and not (x.is_nested or x.is_quantized)


#: Of a cache, but for what only the CPU reads of tensors, or has no row for; and of attention what has no shape.
PLANNED = [
    call
    for call in CALLS + [each for each in CALLS_ON_CPU if each[3] in (TypeError, NotImplementedError)]
    if (BAD[call[0]][0] is fmha.with_kv_cache and call[3] is not UnsupportedError)
    or (BAD[call[0]][0] is attention and call[3] is NotImplementedError)
]
PLACES = {"cpu": CALLS + CALLS_ON_CPU, "meta": CALLS, "past the dispatcher": PLANNED}


@pytest.mark.parametrize(
    ("name", "arguments", "message", "error", "place"), [(*x, place) for place, calls in PLACES.items() for x in calls]
)
def test_a_bad_call_is_refused_in_a_sentence(
    name: str, arguments: dict[str, Any], message: str, error: type[Exception], place: str, monkeypatch
):
    def plain(values: Iterable[Any]) -> bool:
        return all(type(x) is Tensor and not x.requires_grad for x in values if isinstance(x, Tensor))

    if place == "past the dispatcher":
        monkeypatch.setattr(dispatcher, "can_skip_dispatcher", lambda *x: None not in x and plain(x))
        monkeypatch.setattr(dispatcher, "others_can_skip_dispatcher", plain)
    found = refusal(name, arguments, place)
    assert type(found) is error, repr(found)
    assert re.search(message, str(found)), str(found)
    assert len(str(found)) <= 600 and "\n" not in str(found)
