"""A model's calls of our attention, looked at."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import cutlass_fmha
from cutlass_fmha.call import packed_attention
from cutlass_fmha.integrations import transformers as integration


@contextmanager
def attention(seen: set[str], drop: str = "", caller: Any = integration) -> Iterator[list[int]]:
    """The model's attention is ours; of each call one argument is dropped. Gives the number of calls."""
    calls = [0]

    def spied(of: Any, *operands: torch.Tensor, **arguments: Any) -> Any:
        calls[0] += 1
        if drop == "causal":
            arguments["causal"] = False
        else:
            arguments.pop(drop, None)
        given = {name for name, x in arguments.items() if torch.is_tensor(x) or x not in (None, False, 0.0)}
        seen.update(given - {"scale", "layout"})
        return of(*operands, **arguments)

    with (
        mock.patch.object(caller, "attention", functools.partial(spied, cutlass_fmha.attention)),
        mock.patch.object(caller, "packed_attention", functools.partial(spied, packed_attention), create=True),
    ):
        yield calls
