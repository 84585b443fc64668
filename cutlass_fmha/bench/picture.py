"""The picture of a benchmark's result: horizontal bars per case, ours against torch's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .contenders import CAUSAL, COPY, OURS, TITLES

# Ours in strong colours, the fair comparison (FA2, also mma.sync) dark, the others light.
COLOURS = {
    OURS: "#76b900",
    "paged": "#b5d96b",
    "flash": "#3b4252",
    "cudnn": "#8f9bb3",
    "efficient": "#ccd3df",
    CAUSAL: "#6b7489",
    COPY: "#e8d9b0",
}
OF_OTHERS = "#e6d5e0"
BAR_HEIGHT = 0.84
INCHES_PER_CASE = 0.52


@dataclass(frozen=True)
class Panel:
    """One group of cases with the figure that it is judged by."""

    group: str
    column: int
    value: str
    axis: str
    title: str


PANELS = (
    Panel("dense", 0, "tflops", "TFLOP/s, longer is better", "Throughput"),
    Panel("features", 0, "tflops", "TFLOP/s, longer is better", "Features"),
    Panel("latency", 1, "p50_us", "microseconds per call, shorter is better", "Latency"),
    Panel("decode", 1, "tbytes_per_s", "TB/s, longer is better", "Decode, one query"),
    Panel("wide", 1, "tflops", "TFLOP/s, longer is better", "fp32 and head dims above 256"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw one panel per group of cases that the result holds.

    The file's suffix decides the format.
    """
    groups = {panel: [case for case in result["cases"] if case["group"] == panel.group] for panel in PANELS}
    columns = [[panel for panel in PANELS if panel.column == column and groups[panel]] for column in (0, 1)]
    columns = [column for column in columns if column]
    heights = [[INCHES_PER_CASE * len(groups[panel]) + 0.8 for panel in column] for column in columns]
    # A fixed hash salt and no date make the same result give the same SVG.
    with matplotlib.rc_context({"svg.hashsalt": "cutlass_fmha", "font.family": "DejaVu Sans", "font.size": 9}):
        figure = Figure(figsize=(6.2 * len(columns), max(map(sum, heights)) + 0.7), dpi=160, layout="constrained")
        figure.suptitle(title_of(result), fontsize=12, fontweight="bold")
        # A subfigure per column: each lays its labels out for itself.
        halves = figure.subfigures(1, len(columns), squeeze=False)[0]
        bars: dict[str, Any] = {}
        for place, column in enumerate(columns):
            axes = halves[place].subplots(len(column), 1, squeeze=False, height_ratios=heights[place])[:, 0]
            for axis, panel in zip(axes, column, strict=True):
                bars |= draw_panel(axis, groups[panel], panel.value)
                axis.set_xlabel(panel.axis, fontsize=8, color="#555")
                axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
        names = [name for name in TITLES if name in bars]
        figure.legend(
            [bars[name] for name in names], [TITLES[name] for name in names],
            loc="outside lower center", ncols=len(names), frameon=False, fontsize=9,
        )  # fmt: skip
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def title_of(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"Attention forward on {machine['gpu']}, torch {machine['torch']}"


def draw_panel(axis: Axes, cases: list[dict[str, Any]], value: str) -> dict[str, Any]:
    """Bars of every contender for every case that it is in, the value at each bar's end; a refusal is written
    out. Returns the bars by contender."""
    names = [[name for name in TITLES if name in case["results"]] for case in cases]
    height = BAR_HEIGHT / max(map(len, names))
    largest = max((bar_length(entry, value) for case in cases for entry in case["results"].values()), default=0)
    largest = largest or 1.0
    drawn = {}
    for number, (case, present) in enumerate(zip(cases, names, strict=True)):
        for place, name in enumerate(present):
            entry = case["results"][name]
            position, length = number + (place - (len(present) - 1) / 2) * height, bar_length(entry, value)
            drawn[name] = axis.barh(position, length, height=height * 0.9, color=COLOURS.get(name, OF_OTHERS))
            supported = entry["status"] == "ok"
            note = (f"{length:.0f}" if length >= 100 else f"{length:.1f}") if supported else "unsupported"
            weight = "bold" if name == OURS and supported else "normal"
            axis.text(
                length + 0.006 * largest, position, note, va="center", fontsize=6.5, fontweight=weight,
                color="#333" if supported else "#999",
            )  # fmt: skip
    axis.set_yticks(range(len(cases)), [case["label"] for case in cases], fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlim(0, largest * 1.08)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    return drawn


def bar_length(entry: dict[str, Any], value: str) -> float:
    """The value of a contender, 0 when it has none."""
    return float(entry[value]) if entry["status"] == "ok" else 0.0
