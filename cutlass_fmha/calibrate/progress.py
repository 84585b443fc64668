"""A progress bar on stderr: one line that moves on a terminal, a line per tenth elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 32


class Progress:
    """Counts steps of a job and tells how far it is and how long it may still take."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = total
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.begin = time.monotonic()
        self.done = 0
        self._tenth = 0

    def step(self, note: str = "") -> None:
        """One more step is done; ``note`` says what comes with it."""
        self.done += 1
        if self.live:
            filled = WIDTH * self.done // max(1, self.total)
            bar = "#" * filled + "-" * (WIDTH - filled)
            line = f"{self.label} [{bar}] {self.done}/{self.total}, {self._left()} left  {note}"
            end = "\n" if self.done == self.total else ""
            print(f"\r{line[:109]:<109}", end=end, file=self.stream, flush=True)
        elif 10 * self.done // max(1, self.total) > self._tenth:
            self._tenth = 10 * self.done // self.total
            print(f"{self.label}: {self.done}/{self.total}, {self._left()} left", file=self.stream, flush=True)

    def _left(self) -> str:
        elapsed = time.monotonic() - self.begin
        return f"{elapsed / self.done * (self.total - self.done):.0f} s"
