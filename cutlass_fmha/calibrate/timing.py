"""Times of rows on this machine's GPU, taken on the same inputs and in turns.

A figure is the median over replays of a CUDA graph of calls, as in the benchmark: calls rotate through sets
of inputs that together exceed the L2 cache. Calls go to ``_C.run`` directly, into one output, so that a
figure costs a few milliseconds: a calibration needs a thousand of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from cutlass_fmha import _C
from cutlass_fmha.bench.timing import elapsed_us
from cutlass_fmha.calibrate.problems import input_bytes
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.problem import Problem
from cutlass_fmha.launch import params

if TYPE_CHECKING:
    from cutlass_fmha.dispatch.table import Row

GRAPH_US = 400.0
"""A graph is filled up to this long: the events around it add less than 1 %."""
MAX_CALLS = 128
"""Calls in a graph at most, and sets of inputs."""
LONG_US = 1000.0
"""A call this long needs no graph: the host is far ahead of it."""
MIN_ROUNDS, MAX_ROUNDS = 3, 9
HOT_US, HOT_BUDGET_US, HOT_ROUNDS = 150.0, 30_000.0, 75
"""Calls that take this long seldom come alone. A GPU that is busy with them is at its power limit, where the order of
rows is another than in a burst: an H200's 128 x 48 tiles of head dim 128 lose 3 % on its 256 x 64. Their rounds
keep it busy for so long for each row, and the second half counts."""
HOST_US = 60.0
"""Below this, a first call's time is mostly the host's and says nothing of the row."""
GUARD_ELEMENTS = 8
"""Rounds places in a pool to 16 bytes."""
MIN_ELEMENTS = 4096
"""Of a pool and of the output: room for a problem of one query and one key."""


@dataclass(frozen=True)
class RowTime:
    """A row's time on a problem. ``skipped``: it was so slow at first sight that only that sight was kept."""

    us: float
    min_us: float
    rounds: int
    skipped: bool = False


def input_sets(problem: Problem, l2_bytes: int) -> int:
    """Sets of inputs that together are one and a half times the L2 cache, at most ``MAX_CALLS``."""
    return max(1, min(MAX_CALLS, -(-3 * l2_bytes // (2 * max(1, input_bytes(problem))))))


def calls_in_graph(call_us: float, sets: int) -> int:
    """About ``GRAPH_US`` of calls, each set of inputs equally often."""
    wanted = min(MAX_CALLS, int(GRAPH_US / max(call_us, 0.5)) + 1)
    return max(1, wanted // sets) * sets


class Pool:
    """Normally distributed numbers on the GPU that inputs of every problem are cut from."""

    def __init__(self, dtype: str, elements: int, device: torch.device) -> None:
        self.values = torch.empty(elements, dtype=getattr(torch, dtype), device=device).normal_()

    def addresses(self, problem: Problem, sets: int) -> list[tuple[int, int, int]]:
        """Q, K and V of each set, contiguous as [batch, seqlen, num_heads, head_dim], one after another."""
        q, k, v, _ = _elements(problem)
        size = self.values.element_size()
        found = []
        for first in range(0, sets * (q + k + v), q + k + v):
            begin = self.values.data_ptr() + first * size
            found.append((begin, begin + q * size, begin + (q + k) * size))
        return found


def _elements(problem: Problem) -> tuple[int, int, int, int]:
    """Elements of Q, K, V and O, rounded up to 16 bytes."""
    queries = problem.batch * problem.seqlen_q * problem.num_heads
    keys = problem.batch * problem.seqlen_k * problem.num_heads_kv

    def whole(elements: int) -> int:
        return -(-elements // GUARD_ELEMENTS) * GUARD_ELEMENTS

    dim, dim_v = problem.head_dim, problem.value_dim
    return whole(queries * dim), whole(keys * dim), whole(keys * dim_v), whole(queries * dim_v)


Launch = Callable[[int], None]
"""Launches a row on input set number i of the problem, on the timer's stream."""


class RowTimer:
    """Times rows of this build on CUDA device ``index``, for problems that are known beforehand."""

    def __init__(self, index: int, problems: Iterable[Problem]) -> None:
        self.index = index
        self.device = _device(index)
        self.l2_bytes = int(torch.cuda.get_device_properties(index).L2_cache_size)
        elements: dict[str, int] = {}
        outputs = MIN_ELEMENTS
        for problem in problems:
            q, k, v, o = _elements(problem)
            needed = (q + k + v) * input_sets(problem, self.l2_bytes)
            elements[problem.dtype] = max(elements.get(problem.dtype, MIN_ELEMENTS), needed)
            outputs = max(outputs, o)
        self.pools = {dtype: Pool(dtype, count, self.device) for dtype, count in elements.items()}
        self.output = torch.empty(outputs, dtype=torch.float16, device=self.device)
        self.stream = torch.cuda.Stream(self.device)
        self._warm: set[int] = set()
        torch.cuda.synchronize(self.device)

    def time(
        self, problem: Problem, rows: Sequence[Row], give_up: float = 3.0, budget_us: float = 6000.0
    ) -> dict[str, RowTime]:
        """The time of each row, by name. The likely fastest should come first.

        A row whose first call takes more than ``give_up`` times what the best one's took is skipped.
        ``budget_us``: GPU time for the replays of one row; 3 to 9 of them are made, more of long calls.
        """
        sets = input_sets(problem, self.l2_bytes)
        with self._active():
            launches = {row.name: self._launch(row, problem, sets) for row in rows}
            for row in rows:
                self._warm_up(row)
            found: dict[str, RowTime] = {}
            estimates: dict[str, float] = {}
            for name, launch in launches.items():
                slow = max(HOST_US, give_up * min(estimates.values(), default=math.inf))
                first_us = self._first_call(launch)
                if first_us > slow:  # or the host was
                    first_us = min(first_us, self._first_call(launch))
                if first_us > slow:
                    found[name] = RowTime(first_us, first_us, 1, skipped=True)
                else:
                    estimates[name] = first_us
            replays = {name: self._replay(launches[name], us, sets) for name, us in estimates.items()}
            return found | self._rounds(replays, budget_us)

    @contextmanager
    def _active(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def _launch(self, row: Row, problem: Problem, sets: int) -> Launch:
        prepared, room = params.contiguous_params(row, problem, devices.of_index(self.index))
        parts = torch.empty(room, dtype=torch.float32, device=self.device)
        output, stream, scale = self.output.data_ptr(), self.stream.cuda_stream, problem.head_dim**-0.5
        addresses = self.pools[problem.dtype].addresses(problem, sets)
        calls = [prepared.of_call(*operands, output, 0, scale, parts.data_ptr()) for operands in addresses]

        def launch(number: int, keep: torch.Tensor = parts) -> None:
            _C.run(row.index, calls[number], self.index, stream)

        return launch

    def _warm_up(self, row: Row) -> None:
        """A row's first launch loads its code, which must be neither timed nor captured."""
        if row.index in self._warm:
            return
        self._launch(row, Problem(1, 1, 1, 1, 1, row.head_dim, row.dtype, head_dim_v=row.head_dim_v), 1)(0)
        self.stream.synchronize()
        self._warm.add(row.index)

    def _first_call(self, launch: Launch) -> float:
        return elapsed_us([lambda: launch(0)])[0]

    def _replay(self, launch: Launch, first_us: float, sets: int) -> tuple[Callable[[], None], int]:
        """What one round runs, and how many calls that is."""
        if first_us >= LONG_US:
            numbers = itertools.cycle(range(sets))
            return lambda: launch(next(numbers)), 1
        calls = calls_in_graph(first_us, sets)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would collect garbage and empty the allocator's cache first: 100 ms per figure.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(calls):
                launch(number % sets)
        finally:
            graph.capture_end()
        return graph.replay, calls

    def _rounds(self, replays: dict[str, tuple[Callable[[], None], int]], budget_us: float) -> dict[str, RowTime]:
        """Every row once per round. The first round tells how many more fit, and is not kept."""
        if not replays:
            return {}
        first = {name: us[0] for name, us in self._round(replays, 1).items()}
        hot = min(us / replays[name][1] for name, us in first.items()) >= HOT_US
        budget_us, most = (max(budget_us, HOT_BUDGET_US), HOT_ROUNDS) if hot else (budget_us, MAX_ROUNDS)
        rounds = max(MIN_ROUNDS, min(most, int(budget_us / max(1.0, *first.values()))))
        samples = self._round(replays, rounds, idle=True)
        found = {}
        for name, (_, calls) in replays.items():
            us = [sample / calls for sample in samples[name][rounds // 2 if hot else 0 :]]
            found[name] = RowTime(median(us), min(us), len(us))
        return found

    def _round(
        self, replays: dict[str, tuple[Callable[[], None], int]], count: int, idle: bool = False
    ) -> dict[str, list[float]]:
        """Microseconds of ``count`` replays of each row, queued back to back; one more first if ``idle``."""
        if idle:  # it meets an idle GPU, and gives the host time to get ahead
            next(iter(replays.values()))[0]()
        us = elapsed_us([replay for replay, _ in replays.values()] * count)
        return {name: us[number :: len(replays)] for number, name in enumerate(replays)}


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)
