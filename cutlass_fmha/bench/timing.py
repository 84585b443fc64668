"""How a call is timed: statistics, CUDA-graph replays over rotating inputs, and host time per eager call."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Call = Callable[[int], object]
"""A call on input set number i; what it returns is dropped."""

WARMUP_CALLS = 3
GRAPH_US = 1000.0
"""A graph is filled up to this long, so that the two events around it (about a microsecond) cost 0.1 %."""
MAX_CALLS_PER_GRAPH = 128
ROUNDS = 5
"""Implementations take turns this often, so that a clock that drifts meets all of them."""


@dataclass(frozen=True)
class Timing:
    """Time of one call in microseconds, over ``samples`` graph replays of ``calls_per_sample`` calls each."""

    p50_us: float
    p90_us: float
    min_us: float
    samples: int
    calls_per_sample: int


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which ``fraction`` of the values lie, with linear interpolation between neighbours."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(fraction))


def summarise(samples_us: Sequence[float], calls_per_sample: int) -> Timing:
    """Timing of a list of per-call times in microseconds."""
    return Timing(
        p50_us=percentile(samples_us, 0.5),
        p90_us=percentile(samples_us, 0.9),
        min_us=min(samples_us),
        samples=len(samples_us),
        calls_per_sample=calls_per_sample,
    )


def input_sets(input_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs to rotate through, so that a call finds none of its input in the L2 cache.

    The sets together are one and a half times the L2 cache, or one set when it alone exceeds that.
    """
    return max(1, min(MAX_CALLS_PER_GRAPH, math.ceil(1.5 * l2_bytes / max(1, input_bytes))))


def calls_per_graph(call_us: float, sets: int) -> int:
    """Calls in one graph: about ``GRAPH_US`` of work, and every input set the same number of times."""
    wanted = math.ceil(GRAPH_US / max(call_us, 0.1))
    turns = max(1, min(wanted, MAX_CALLS_PER_GRAPH) // sets)
    return turns * sets


def replays(graph_us: float, budget_s: float) -> int:
    """Replays of a graph within a time budget: 15 to 400, a multiple of the number of rounds."""
    wanted = int(budget_s * 1e6 / max(graph_us, 1.0))
    per_round = max(3, min(400 // ROUNDS, wanted // ROUNDS))
    return per_round * ROUNDS


class GraphTimer:
    """A CUDA graph of calls over rotating inputs and the times of its replays.

    Capturing takes the host out of the figure: it is what the GPU needs per call, kernel launches included.
    prepare: called once for each set before all else, on the stream of the calls.
    """

    def __init__(self, call: Call, sets: int, prepare: Call | None = None) -> None:
        self.samples_us: list[float] = []
        # A graph keeps neither the tensors that it reads nor the modules that torch.compile loaded.
        self.keeps_alive = call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if prepare is not None:
                for number in range(sets):
                    prepare(number)
            for number in range(WARMUP_CALLS):
                call(number % sets)
            # With the host's part: this only decides how many calls a graph gets.
            self.estimate_us = sum(elapsed_us([partial(call, number % sets) for number in range(3)])) / 3
        torch.cuda.current_stream().wait_stream(stream)
        self.calls = calls_per_graph(self.estimate_us, sets)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for number in range(self.calls):
                call(number % sets)
        self.graph.replay()
        torch.cuda.synchronize()
        self.graph_us = elapsed_us([self.graph.replay] * 2)[-1]

    def run_round(self, count: int) -> None:
        """Keep the times of ``count`` replays. One more goes first, unrecorded: it meets an idle GPU."""
        times = elapsed_us([self.graph.replay] * (count + 1))[1:]
        self.samples_us += [elapsed / self.calls for elapsed in times]

    def result(self) -> Timing:
        return summarise(self.samples_us, self.calls)


def elapsed_us(calls: Sequence[Callable[[], object]]) -> list[float]:
    """GPU microseconds of each call, back to back on the current stream.

    Where a call takes longer than the host needs to make it, the host runs ahead, and no gap is measured.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    events[-1].synchronize()
    return [float(first.elapsed_time(second)) * 1e3 for first, second in itertools.pairwise(events)]


def time_interleaved(timers: dict[str, GraphTimer], budget_s: float) -> dict[str, Timing]:
    """Times of several captured implementations of one problem, measured in turns.

    budget_s: seconds of GPU time for each.
    """
    counts = {name: replays(timer.graph_us, budget_s) // ROUNDS for name, timer in timers.items()}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            timer.run_round(counts[name])
    return {name: timer.result() for name, timer in timers.items()}


def time_host(calls: dict[str, Callable[[], object]], count: int = 200, rounds: int = 31) -> dict[str, float]:
    """Host microseconds per eager call: medians over ``rounds`` of ``count`` calls without a synchronisation.

    The calls take turns, so that a host that slows down meets all of them. The problem must be so small that
    the GPU keeps up, and ``count`` below the depth of the launch queue (1024): otherwise the host waits for
    the GPU and the figure is the GPU's. No garbage is collected, as in Python's ``timeit``: what that takes is
    a matter of everything that a process has imported.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(-1, rounds):  # the first round warms up
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                if number >= 0:
                    samples[name].append((time.perf_counter() - begin) * 1e6 / count)
        torch.cuda.synchronize()
    finally:
        if collects:
            gc.enable()
    return {name: percentile(values, 0.5) for name, values in samples.items()}
