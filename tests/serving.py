"""Batches of a serving engine over a paged cache, and what attention of each request alone is."""

import contextlib
import copy
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import oracle_features
import pytest
import torch
from tensors import randn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

HEADS, HEADS_KV, DIM, PAGE = 4, 2, 32, 16

#: Keys and values in the cache of each request, and new tokens: a prompt, a part of one, single tokens, two
#: drafts, the first token of all; and single tokens alone.
MIXED = ((0, 37), (48, 21), (100, 1), (15, 1), (31, 3), (0, 1))
DECODE = ((100, 1), (15, 1), (16, 1), (64, 1))

#: Modules that stand in for those of vLLM 0.33, SGLang 0.5.23 and ComfyUI 0.38.1, with their names and parameters.
ENGINES = Path(__file__).parent / "engines"

#: Where a test runs: in float32, and in half precision by the kernels.
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def stand_ins(name: str, or_installed: bool = False) -> Iterator[None]:
    """Within it, ``import name`` finds the modules of tests/engines, and afterwards not; or the package."""
    if or_installed and importlib.util.find_spec(name) is not None:
        yield
        return
    with mock.patch.object(sys, "path", [str(ENGINES), *sys.path]):
        try:
            yield
        finally:
            for module in [x for x in sys.modules if x.split(".")[0] == name or x.endswith(f"{name}_backend")]:
                del sys.modules[module]
                parent, _, child = module.rpartition(".")
                if parent in sys.modules:  # which would go on offering it
                    vars(sys.modules[parent]).pop(child, None)


class Requests:
    """Queries, keys and values of a batch, each request's whole, and pages for them in no order."""

    def __init__(self, lengths: tuple[tuple[int, int], ...]) -> None:
        self.old, self.new = ([pair[i] for pair in lengths] for i in (0, 1))
        self.used = [sum(pair) for pair in lengths]
        self.q, self.k, self.v = (
            [randn(rows, heads, DIM, dtype=torch.float16, seed=10 * at + i).float() for i, rows in enumerate(each)]
            for at, (each, heads) in enumerate(((self.new, HEADS), (self.used, HEADS_KV), (self.used, HEADS_KV)))
        )
        pages = [-(-used // PAGE) for used in self.used]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).int() + 1
        #: Rows beyond a request's own pages are of no page at all.
        self.table = torch.full((len(lengths), max(pages) + 2), -7, dtype=torch.int32)
        for row, own in zip(self.table, order.split(pages), strict=True):
            row[: len(own)] = own
        self.pages = 1 + sum(pages)
        self.starts = torch.tensor([0, *self.new]).cumsum(0).int()

    def slots(self, number: int, begin: int, end: int) -> Tensor:
        """Where in the cache a request's rows lie, in rows of it."""
        at = torch.arange(begin, end)
        return self.table[number, at // PAGE].long() * PAGE + at % PAGE

    def inputs(self, spare: int = 0) -> tuple[Tensor, ...]:
        """q, k and v of the new tokens, packed, and of ``spare`` tokens that are nobody's."""
        new = ([x[old:] for x, old in zip(each, self.old, strict=True)] for each in (self.k, self.v))
        return tuple(torch.cat((*own, randn(spare, *own[0].shape[1:]))) for own in (self.q, *new))

    def expected(self, causal: str = "bottom-right", keys: list[int] | None = None, **said: Any) -> Tensor:
        """[total tokens, num_heads, head_dim] in fp64. keys: so many of each request are seen, for all."""
        of_each = zip(self.q, self.k, self.v, keys or self.used, strict=True)
        given = ((q[None], k[None, :used], v[None, :used]) for q, k, v, used in of_each)
        return torch.cat([oracle_features.attention(*each, causal=causal, **said)[0][0] for each in given])


def plugin(group: str) -> Callable[[], object]:
    """What an engine calls of an installed cutlass_fmha."""
    text = (ENGINES.parents[1] / "pyproject.toml").read_text()
    (target,) = re.findall(rf'\[project.entry-points."{group}"\]\ncutlass_fmha = "(.*)"', text)
    return pkgutil.resolve_name(target)


def placed(x: Any, place: str, floats: torch.dtype | None = torch.float16) -> Any:
    """On a GPU a copy of it, whose tensors are there, but for those that are named for the host."""
    if place == "cpu":
        return x
    if isinstance(x, Tensor):
        return x.to(place, floats if x.is_floating_point() else None)
    if isinstance(x, tuple | list):
        return type(x)(placed(each, place, floats) for each in x)
    if isinstance(x, dict):
        return {name: value if name.endswith("_cpu") else placed(value, place, floats) for name, value in x.items()}
    if hasattr(x, "__dict__") and not isinstance(x, type | int | Callable):
        found = copy.copy(x)
        found.__dict__.update(placed(vars(x), place, floats))
        return found
    return x


def hollow(mode: FakeTensorMode, *places: object) -> None:
    """Tensors that are attributes of these hold nothing from now on: a look at a length raises."""
    for where in places:
        for name, x in vars(where).items():
            if isinstance(x, Tensor):
                setattr(where, name, mode.from_tensor(x))


def recorded(call: Callable[[], Tensor], place: str) -> Callable[[], Tensor]:
    """The call once more, whenever; on a GPU by a graph of CUDA, which reads the memory of now."""
    call()
    if place == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = call()

    return lambda: (graph.replay(), found)[1]


def is_close(found: Tensor, expected: Tensor) -> bool:
    limits = {"rtol": 1e-4, "atol": 1e-5} if found.dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    return torch.allclose(found.double().cpu(), expected, **limits)


def check_parameters(ours: type, *theirs: type) -> None:
    """What an engine calls is a method of one of theirs, and ours has its parameters, in its order."""
    for name, own in inspect.getmembers(ours, inspect.isroutine):
        others = [getattr(each, name) for each in theirs if name in vars(each)]
        if name in vars(ours) and (others or not name.startswith("_")):
            assert others, f"no engine calls {name}"
            assert list(inspect.signature(own).parameters) == list(inspect.signature(others[0]).parameters), name
