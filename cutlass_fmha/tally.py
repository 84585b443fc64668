"""What became of calls that come through another library: how many were ours, how many its own, and why."""

from __future__ import annotations

import threading
from collections import Counter

from cutlass_fmha import log
from cutlass_fmha.errors import UnsupportedError

#: What this package raises of a call that it does not take, before anything has run.
REFUSALS = (NotImplementedError, UnsupportedError, TypeError, ValueError)


def sentence(error: Exception) -> str:
    """The reason in a refusal: its first line, which says what was asked for."""
    return str(error).partition("\n")[0].removesuffix(":")


class Tally:
    """Of one library."""

    def __init__(self, library: str) -> None:
        self.library = library
        #: Calls that were ours, by the name of the library's function.
        self.counts: Counter[str] = Counter()
        #: Calls that went on to the library, by the reason.
        self.declined: Counter[str] = Counter()
        self._lock = threading.Lock()  # autograd's threads count, too

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def decline(self, name: str, reason: str) -> None:
        """A call that goes on: one line in the log for each reason."""
        with self._lock:
            self.declined[reason] += 1
        message = "%s's own %s runs, and not cutlass_fmha: %s"
        log.warn_once((self.library, name, reason), message, self.library, name, reason)

    def clear(self) -> None:
        with self._lock:
            self.counts.clear()
            self.declined.clear()
