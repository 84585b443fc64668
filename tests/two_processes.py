"""A test in two processes that know each other."""

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import torch

#: Seconds after which two processes that wait for each other have failed.
PATIENCE = 120


def meet(rank: int, meeting: str, backend: str = "gloo") -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=PATIENCE // 2)
    torch.distributed.init_process_group(backend, f"file://{meeting}", limit, 2, rank)


def each(rank: int, one: Callable[[int, str], None], meeting: str) -> None:
    one(rank, meeting)
    torch.distributed.barrier()  # a process whose other has gone may end in an error of gloo's threads
    torch.distributed.destroy_process_group()
    # Those threads live on. One that drops a tensor while the interpreter ends aborts the process (pytorch #190489).
    os._exit(0)


def run(one: Callable[[int, str], None], folder: Path) -> None:
    """``one(rank, meeting)`` of a module of tests, in each: it meets the other, and must not raise."""
    both = torch.multiprocessing.spawn(each, (one, str(folder / "meeting")), 2, join=False, daemon=True)
    assert any(both.join(PATIENCE) for _ in range(2)), "one waits for the other"
