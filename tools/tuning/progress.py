"""A progress bar on stderr: counts per fate, what is going on, and how long it will take."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

WIDTH = 20
PLAIN_EVERY_S = 10.0  # where there is no terminal, a line at most this often


def clock(seconds: float) -> str:
    """Minutes and seconds: 3:05."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02}"


def estimate(
    elapsed_s: float, limit_s: float | None, done: int, limit: int | None
) -> tuple[float, float | None]:
    """(share that is done, seconds left) by the limit that ends the search first; None while unknown."""
    shares, lefts = [0.0], []
    if limit_s is not None:
        shares.append(min(1.0, elapsed_s / limit_s))
        lefts.append(max(0.0, limit_s - elapsed_s))
    if limit is not None and limit > 0:
        shares.append(min(1.0, done / limit))
        if done:
            lefts.append(max(0.0, elapsed_s / done * (limit - done)))
    return max(shares), min(lefts, default=None)


class Progress:
    """One line that is written over on a terminal, a line now and then elsewhere."""

    def __init__(
        self,
        limit_s: float | None,
        limit: int | None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream or sys.stderr
        self.limit_s, self.limit = limit_s, limit
        self.now = clock
        self.begin = clock()
        self._terminal = self.stream.isatty()
        self._printed = -PLAIN_EVERY_S
        self._phase = ""

    def show(self, counts: Mapping[str, int], done: int, phase: str) -> None:
        """counts: candidates per fate; done: those of this run with a fate; phase: what is going on now."""
        elapsed = self.now() - self.begin
        share, left = estimate(elapsed, self.limit_s, done, self.limit)
        bar = "#" * round(share * WIDTH)
        fates = ", ".join(f"{count} {fate}" for fate, count in counts.items()) or "no candidate yet"
        eta = "" if left is None else f", {clock(left)} left"
        text = f"tune [{bar:-<{WIDTH}}] {clock(elapsed)}{eta} | {fates} | {phase}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r{text[:width]:<{width}}")
        elif elapsed - self._printed < PLAIN_EVERY_S and phase == self._phase:
            return
        else:
            self.stream.write(text + "\n")
        self._printed, self._phase = elapsed, phase
        self.stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._terminal:
            self.stream.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
        self.stream.write(text + "\n")
        self.stream.flush()
