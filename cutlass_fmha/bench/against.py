"""Another build of the package beside this one: each in a process of its own, taking turns on the same cases.

A process loads this build's benchmark under a name of its own, and the package that it is told. A build from
before a case's feature refuses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from . import machine, runner
from .cases import Case, select_cases
from .contenders import OTHER, OURS
from .lineup import line_up
from .timing import ROUNDS, Timing, replays

LOAD = (
    "import importlib.util as util, sys; spec = util.spec_from_file_location('timed_bench', sys.argv[1]); "
    "sys.modules['timed_bench'] = util.module_from_spec(spec); "
    "spec.loader.exec_module(sys.modules['timed_bench']); "
    "from timed_bench import against; against.work(*sys.argv[2:])"
)


def measure(
    cases: list[Case], directory: Path, row: str | None = None, quick: bool = False, device: int = 0
) -> dict[str, object]:
    """A report as runner.measure's, whose only peer is the package in ``directory``.

    ``row`` is forced in this build alone. Raises CannotMeasure, too, where the directory holds no package.
    """
    if not (directory / "cutlass_fmha" / "__init__.py").is_file():
        raise runner.CannotMeasure(f"{directory} holds no package cutlass_fmha")
    runner.require_gpu(device)
    with (
        Process(OURS, "", row, device) as ours,
        Process(OTHER, str(directory.resolve()), None, device) as other,
    ):
        own = str(Path(runner.__file__).parents[1])
        if ours.build["directory"] != own:
            raise runner.CannotMeasure(
                f"a new process imports {ours.build['directory']} and this one is {own}: put it first in PYTHONPATH"
            )

        def in_turns(case: Case, budget_s: float) -> dict[str, object]:
            return measure_case(case, ours, other, budget_s)

        result = runner.measure(cases, [OTHER], row, quick, device, in_turns)
        described: Any = result["machine"]
        described["other"] = {name: other.build[name] for name in ("package", "build")}
        return result


def measure_case(case: Case, ours: Process, other: Process, budget_s: float) -> dict[str, object]:
    """One case's entry, as runner.measure_case has it."""
    prepared = {process: process.ask(prepare=case.name) for process in (ours, other)}
    timed = {process: answer for process, answer in prepared.items() if "graph_us" in answer}
    for _ in range(ROUNDS):
        for process, answer in timed.items():
            process.ask(round=replays(answer["graph_us"], budget_s) // ROUNDS)
    results = {}
    for process, answer in prepared.items():
        results[process.name] = answer["result"]
        if process in timed:
            results[process.name] |= runner.rates(Timing(**process.ask(done=True)), case.flop, case.moved_bytes)
    return {**case.as_dict(), "input_sets": prepared[ours]["sets"], "results": results}


class Process:
    """A process that times cases with a package: the one in ``directory``, or what it imports by itself."""

    def __init__(self, name: str, directory: str, row: str | None, device: int) -> None:
        bench = Path(__file__).parent / "__init__.py"
        command = [sys.executable, "-c", LOAD, str(bench), name, directory, row or "", str(device)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.build = self._answer()

    def ask(self, **request: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise runner.CannotMeasure(f"the process of build {self.name!r} ended with status {status}: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.communicate()  # closes its input, at whose end it ends


# ---- in the process ----------------------------------------------------------------------------------------


class Only:
    """Finds the package in one directory, whatever else is installed."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = name.split(".")[0] == "cutlass_fmha"
        return PathFinder.find_spec(name, path or [self.directory]) if ours else None


def work(name: str, directory: str, row: str, device: str) -> None:
    """Answers requests, a line of JSON each, until there are no more."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        if directory:
            sys.meta_path.insert(0, Only(directory))
        requests = (json.loads(line) for line in sys.stdin)
        for answer in serve(requests, name, row or None, int(device)):
            print(json.dumps(answer), file=answers, flush=True)


def serve(requests: Iterable[dict[str, Any]], name: str, row: str | None, device: int) -> Iterator[dict[str, Any]]:
    """First what the package is. Then, of each case: that it is prepared, rounds of replays, its times."""
    import cutlass_fmha

    directory = str(Path(cutlass_fmha.__file__).parent)
    yield {"directory": directory, "package": machine.package_version(), "build": machine.build()}
    timer = None
    for request in requests:
        with torch.cuda.device(device), torch.inference_mode():
            if "prepare" in request:
                [case] = select_cases([request["prepare"]])
                inputs, feature, check = runner.problem(case, device)
                contender = line_up(case, inputs, [], row, feature)[OURS]
                result, timer = runner.prepare(name, contender, inputs.sets, check)
                answer = {"result": result, "sets": inputs.sets}
                if timer is not None:
                    answer["graph_us"] = timer.graph_us
                    if name == OURS:
                        result["row"] = row or runner.selected_row(case, inputs, feature)
            elif timer is None:
                raise ValueError(f"no case is prepared for {request}")
            elif "round" in request:
                timer.run_round(request["round"])
                answer = {}
            else:
                answer, timer = asdict(timer.result()), None
                torch.cuda.empty_cache()
        yield answer
