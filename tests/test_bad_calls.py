"""Calls that must be refused: by one of four kinds of exception, in a sentence that names what is at fault.

No other exception may leave the package, whatever is passed. bad_calls.py lists them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from bad_calls import CALLS, CALLS_ON_CPU
from calls import BAD, NESTED, K, Q, V
from torch import Tensor
from torch.utils._pytree import tree_map

import cutlass_fmha as fmha
from cutlass_fmha import UnsupportedError, attention, features
from cutlass_fmha.arguments.signature import FOREIGN
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


@pytest.mark.parametrize(
    ("name", "arguments", "message", "error", "place"),
    [*[(*call, "cpu") for call in CALLS + CALLS_ON_CPU], *[(*call, "meta") for call in CALLS]],
)
def test_a_bad_call_is_refused_in_a_sentence(
    name: str, arguments: dict[str, Any], message: str, error: type[Exception], place: str
):
    found = refusal(name, arguments, place)
    assert type(found) is error, repr(found)
    assert re.search(message, str(found)), str(found)
    assert len(str(found)) <= 600 and "\n" not in str(found)


#: Of a cache, but for what only the CPU reads of tensors, or has no row for.
STEPS = [
    call
    for call in CALLS + [each for each in CALLS_ON_CPU if each[3] in (TypeError, NotImplementedError)]
    if BAD[call[0]][0] is fmha.with_kv_cache and call[3] is not UnsupportedError
]


@pytest.mark.parametrize(("name", "arguments", "message", "error"), STEPS)
def test_a_step_that_could_be_planned_is_refused_alike(
    name: str, arguments: dict[str, Any], message: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    def plain(values: Iterable[Any]) -> bool:
        return all(type(x) is Tensor and not x.requires_grad for x in values if isinstance(x, Tensor))

    monkeypatch.setattr(dispatcher, "can_skip_dispatcher", lambda *x: None not in x and plain(x))
    monkeypatch.setattr(dispatcher, "others_can_skip_dispatcher", plain)
    found = refusal(name, arguments, "cpu")
    assert type(found) is error and re.search(message, str(found)), repr(found)


def test_there_are_many_of_them():
    calls = CALLS + CALLS_ON_CPU
    assert len(calls) >= 400 and {name for name, *_ in calls} == set(BAD)
    assert {error for *_, error in calls} == {TypeError, ValueError, NotImplementedError, UnsupportedError}


@pytest.mark.parametrize("more", [(True,), (None, 0.1, True)])
def test_arguments_by_position_are_refused(more: tuple[Any, ...]):
    with pytest.raises(TypeError, match=rf"takes q, k and v by position .* by name.* got {3 + len(more)} po"):
        attention(Q, K, V, *more)


@pytest.mark.parametrize("tensor", [NESTED, Q.to_sparse()], ids=["nested", "sparse"])
def test_what_has_no_shape_is_refused_past_the_dispatcher(tensor: Tensor, monkeypatch):
    monkeypatch.setattr(dispatcher, "can_skip_dispatcher", lambda *tensors: True)
    for said in ({}, {"softcap": 1.0}):
        with pytest.raises(NotImplementedError, match="q (is a nested|must be a dense) tensor"):
            attention(tensor, K, V, **said)


def test_signatures_list_the_features():
    listed = inspect.signature(attention).parameters
    said = set(features.CallArguments.__annotations__)
    assert set(listed) == {"q", "k", "v", "scale", "causal", "return_lse", "layout", "row"} | said
    assert [name for name, each in listed.items() if each.kind != each.KEYWORD_ONLY] == ["q", "k", "v"]
    assert listed["window"].annotation == "tuple[int | None, int | None] | None"
    for function in (fmha.with_kv_cache, fmha.cascade_attention):
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert not set(FOREIGN) & set(listed)
