"""What became of the calls that came through torch: how many were ours, what went on to torch, and why."""

from __future__ import annotations

import threading
from collections import Counter

from cutlass_fmha import log
from cutlass_fmha.errors import UnsupportedError

#: What this package raises of a call that it does not take, before anything has run.
REFUSALS = (NotImplementedError, UnsupportedError, TypeError, ValueError)

#: Calls that were ours, by the name of torch's op.
counts: Counter[str] = Counter()
#: Calls that went on to torch, by the reason.
declined: Counter[str] = Counter()

_lock = threading.Lock()  # autograd's threads count, too


def count(name: str) -> None:
    with _lock:
        counts[name] += 1


def sentence(error: Exception) -> str:
    """The reason in a refusal: its first line, which says what was asked for."""
    return str(error).partition("\n")[0].removesuffix(":")


def decline(name: str, reason: str) -> None:
    """A call that goes on to torch: one line in the log for each reason."""
    with _lock:
        declined[reason] += 1
    log.warn_once((name, reason), "torch's own %s runs, and not cutlass_fmha: %s", name, reason)


def clear() -> None:
    with _lock:
        counts.clear()
        declined.clear()
