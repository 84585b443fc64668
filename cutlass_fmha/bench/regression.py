"""Two recorded results beside each other: has anything of ours become slower than noise explains?"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from .contenders import OURS
from .report import InvalidReport, Result, geometric_mean

BAND = 5.0
"""Percent by which a case's p50 may differ between two runs of one build, as clocks and temperature do; the
mean of all cases, half of it. In turns, on an H200, 41 cases of two builds differed by 1.6 at most."""


def compare(before: Result, now: Result, band: float = BAND, names: Collection[str] | None = None) -> dict[str, Any]:
    """What became of each case's time; ``slower`` names those beyond the band, and what no longer runs.

    names: the cases that are asked for; None: all that ran before, of which none may be missing now.

    Raises InvalidReport for results of two GPUs, or without a case in common.
    """
    gpus = [result["machine"]["gpu"] for result in (before, now)]
    if gpus[0] != gpus[1]:
        raise InvalidReport(f"results of {gpus[0]} and of {gpus[1]} say nothing about each other")
    old, new = ({case["name"]: case for case in result["cases"]} for result in (before, now))
    asked = [name for name in old if names is None or name in names]
    lost = [name for name in asked if name not in new and old[name]["results"][OURS]["status"] == "ok"]
    cases, slower = [], []
    for name in (name for name in asked if name in new):
        was, is_now = (case["results"][OURS] for case in (old[name], new[name]))
        if was["status"] != "ok":
            continue
        if is_now["status"] != "ok":
            slower.append(f"{name} no longer runs: {is_now['reason']}")
            continue
        before_us, now_us = float(was["p50_us"]), float(is_now["p50_us"])  # NaN is kept as a string
        ratio = now_us / before_us
        cases.append({"case": name, "before_us": before_us, "now_us": now_us, "ratio": ratio})
        if not ratio <= 1 + band / 100:
            slower.append(f"{name} takes {ratio:.3f} of its time")
    if not cases and not slower:
        raise InvalidReport("the two results have no case in common that ran")
    slower += [f"{name} is missing" for name in lost]
    mean = geometric_mean([case["ratio"] for case in cases]) if cases else None
    if mean is not None and len(cases) > 1 and not mean <= 1 + band / 200:  # of one case, its own band counts
        slower.append(f"all cases take {mean:.3f} of their time on average")
    commits = {"before": before["machine"].get("commit"), "now": now["machine"].get("commit")}
    return {"gpu": gpus[0], "band": band, "commits": commits, "cases": cases, "mean": mean, "slower": slower}


def parts(found: dict[str, Any]) -> list[Any]:
    """The comparison for people."""
    from cutlass_fmha.cli.output import Table

    rows = [
        [case["case"], f"{case['before_us']:.1f}", f"{case['now_us']:.1f}", f"{case['ratio']:.3f}"]
        for case in found["cases"]
    ]
    mean = "" if found["mean"] is None else f", {found['mean']:.3f} on average"
    verdict = "; ".join(found["slower"]) or "nothing is slower"
    return [
        f"microseconds on {found['gpu']}, commit {found['commits']['before']} and {found['commits']['now']}",
        "",
        Table(["case", "before", "now", "ratio"], rows),
        "",
        f"{len(rows)} cases{mean}; beyond noise, {found['band']:g} % ({found['band'] / 2:g} % of the mean): {verdict}",
    ]
