"""The picture of an emulation: shares of the slowed tensor ceiling per GPU, ours beside FA2's tile."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emulation import report

OURS, THEIRS = "#76b900", "#3b4252"
BAR = 0.4


def draw(result: report.Result, path: Path) -> None:
    """One panel per target; the file's suffix decides the format."""
    targets = report.covered(result)
    columns = 2 if len(targets) > 1 else 1
    rows = -(-len(targets) // columns)
    with matplotlib.rc_context(
        {"svg.hashsalt": "cutlass_fmha", "font.family": "DejaVu Sans", "font.size": 9}
    ):
        figure = Figure(figsize=(6.2 * columns, 3.1 * rows + 0.9), dpi=160, layout="constrained")
        gpu = result["machine"]["gpu"]
        figure.suptitle(
            f"A model: tensor pipe slowed on {gpu}, share of what its mma alone reaches",
            fontsize=12, fontweight="bold",
        )  # fmt: skip
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, target in zip(axes, targets, strict=False):
            draw_target(axis, result, target)
        for axis in axes[len(targets) :]:
            axis.set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_target(axis: Axes, result: report.Result, target: report.Target) -> None:
    """Bars of the best row and of FA2's tile for each problem that the target has rows for."""
    found = [
        (dim, causal, ranked[0], report.standard(result, target.passes, dim, causal))
        for dim, causal in report.problems(result)
        if (ranked := report.ranking(result, target, dim, causal))
    ]
    ours = [100 * best.share for *_, best, _ in found]
    theirs = [100 * other.share if other else 0.0 for *_, other in found]
    for offset, shares, colour, label in (
        (-BAR / 2, ours, OURS, "our best row"),
        (BAR / 2, theirs, THEIRS, "FlashAttention-2's tile, built the same way"),
    ):
        places = [number + offset for number in range(len(found))]
        axis.bar(places, shares, width=BAR * 0.92, color=colour, label=label)
        for place, share in zip(places, shares, strict=True):
            if share:
                axis.text(place, share + 1, f"{share:.0f}", ha="center", fontsize=6.5, color="#333")
    names = [f"D{dim}\n{report.MASKS[causal]}" for dim, causal, *_ in found]
    axis.set_xticks(range(len(found)), names, fontsize=7)
    axis.set_ylim(0, 105)
    axis.set_ylabel("% of the slowed ceiling", fontsize=8, color="#555")
    axis.set_title(
        f"{target.gpus}: sm_{target.arch} rows, {target.passes} passes",
        loc="left", fontsize=10, fontweight="bold",
    )  # fmt: skip
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
