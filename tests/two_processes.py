"""A test in two processes that know each other."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

#: Seconds after which two processes that wait for each other have failed.
PATIENCE = 120


def meet(rank: int, meeting: str, backend: str = "gloo") -> None:
    limit = datetime.timedelta(seconds=PATIENCE // 2)
    torch.distributed.init_process_group(backend, f"file://{meeting}", limit, 2, rank)


def part() -> None:
    """What each does last: a process whose other has gone may end in an error of gloo's threads."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(one: Callable[[int, str], None], folder: Path) -> None:
    """``one(rank, meeting)`` of a module of tests, in each: it meets the other, and must not raise."""
    module = one.__module__.rpartition(".")[2]
    code = f"import sys, {module}; {module}.{one.__name__}(int(sys.argv[1]), sys.argv[2])"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.txt" for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-c", code, str(rank), str(folder / "meeting")]
            output = stack.enter_context(log.open("w"))
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            stack.enter_context(processes[-1])
            stack.callback(processes[-1].kill)
        statuses = [process.wait(PATIENCE) for process in processes]
    assert statuses == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
