"""The acceptance rule: what a timing run says about a candidate, and when it has said it often enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

GAIN = 1.03  # a candidate must be this much faster than the incumbents, as a geometric mean
WORST = 0.99  # and on no case slower than this
SIGHTINGS = 2  # in so many timing runs, each a process and a build of its own


@dataclass(frozen=True)
class Judgement:
    """One timing run: speed relative to the best incumbent of each case, and whether that is a gain."""

    geomean: float
    worst: float

    @property
    def is_gain(self) -> bool:
        return self.geomean >= GAIN and self.worst >= WORST

    def sentence(self) -> str:
        if self.is_gain:
            return f"{self.geomean:.3f}x, worst case {self.worst:.3f}x"
        if self.geomean < GAIN:
            return f"{self.geomean:.3f}x the incumbent's speed, and {GAIN:.2f}x is asked for"
        return f"{self.geomean:.3f}x, but {self.worst:.3f}x on one case"


def judge(candidate_us: Mapping[str, float], incumbents_us: Mapping[str, Mapping[str, float]]) -> Judgement:
    """Compare a candidate with the fastest incumbent of each case.

    candidate_us: case -> microseconds; incumbents_us: case -> incumbent -> microseconds, of the same timing
    run. Raises ValueError when a case is missing on either side, or a time is not a positive number.
    """
    if not candidate_us or candidate_us.keys() != incumbents_us.keys():
        raise ValueError(f"times of {sorted(candidate_us)} can't be compared with {sorted(incumbents_us)}")
    gains = []
    for case, us in candidate_us.items():
        if not incumbents_us[case]:
            raise ValueError(f"there is no incumbent of {case} to compare with")
        best = min(incumbents_us[case].values())
        if not all(0.0 < time < math.inf for time in (us, best)):
            raise ValueError(f"a time of {case} is no positive number: {us}, {best}")
        gains.append(best / us)
    return Judgement(math.exp(sum(map(math.log, gains)) / len(gains)), min(gains))
