"""Renders a benchmark's result: JSON, a text table, Markdown, a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contenders import CAUSAL, COPY, OURS, OWN, PAGES, PLAIN, TITLES

if TYPE_CHECKING:
    from cutlass_fmha.cli.output import Table

SCHEMA = 3
"""Version of the JSON's layout; a reader refuses others."""

MIB = 1 << 20
PICTURES = (".png", ".svg")

Result = dict[str, Any]
"""schema, machine, method, row, quick, peers, host_us (section -> contender or percentile -> us), of newer
results loop (``memory.loop``), wall_s and cases: per case its description,
``input_sets`` and ``results``: contender -> status ("ok" or "unsupported"), then reason, or p50_us, p90_us,
min_us, samples, calls_per_sample, tflops, tbytes_per_s, where the result was checked max_abs_error,
mean_abs_error, tolerance and error_ratio, of newer results peak_bytes, and, for ours, row and
planned_bytes."""


class InvalidReport(ValueError):
    """A file that is no benchmark result."""


class CannotDraw(ValueError):
    """No picture: of another kind, or without matplotlib, which is an optional dependency."""


def write_json(result: Result, path: Path) -> None:
    from cutlass_fmha.cli import output  # not above: another build's benchmark is this one (``against``)

    output.write_text(output.to_json(result), path)


def read_json(path: Path) -> Result:
    """A recorded result. Raises InvalidReport when the file isn't one, OSError when it can't be read."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidReport(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise InvalidReport(f"{path} is no benchmark result of schema {SCHEMA}")
    missing = {"machine", "method", "peers", "cases"} - result.keys()
    if missing:
        raise InvalidReport(f"{path} lacks {', '.join(sorted(missing))}")
    return result


def joined(parts: Sequence[Result]) -> Result:
    """Runs of some cases each as one: their lists together, the rest of the first run that has it.

    Raises InvalidReport for runs of two GPUs or builds, whose figures say nothing about each other.
    """
    first, *others = parts
    of_first, *rest = ([part["machine"].get(name) for name in ("gpu", "commit", "build")] for part in parts)
    if any(each != of_first for each in rest):
        raise InvalidReport(f"results of two GPUs or builds are no single one: {[of_first, *rest]}")
    found = dict(first)
    for part in others:
        for name, value in part.items():
            if isinstance(value, list):
                found[name] = found[name] + [entry for entry in value if entry not in found[name]]
            else:
                found[name] = found.get(name) or value
    return found


def wrong_results(result: Result) -> list[str]:
    """One line for each of our results that differs from fp64 by more than its tolerance."""
    lines = []
    for case in result["cases"]:
        own = [(name, case["results"][name]) for name in OWN if name in case["results"]]
        lines += [
            f"{case['label']}, {TITLES[name]}: error {entry['max_abs_error']}, tolerance {entry['tolerance']}"
            for name, entry in own
            if entry["status"] == "ok" and not float(entry["error_ratio"]) <= 1.0
        ]
    return lines


def speedup(case: Result, peer: str) -> float | None:
    """Time of the peer over ours: above 1 we are faster. None when either can't run the case.

    Beside our own plain row, which computes another problem: our rate over its rate.
    """
    ours, other = case["results"][OURS], case["results"].get(peer, {"status": "absent"})
    if ours["status"] != "ok" or other["status"] != "ok":
        return None
    if peer == PLAIN:
        return float(ours["tflops"]) / float(other["tflops"])
    return float(other["p50_us"]) / float(ours["p50_us"])


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def rate(case: Result, entry: Result) -> str:
    """What bounds the case: TFLOP/s, or for decode TB/s and the share that they are of a copy's, if known."""
    if case["group"] != "decode":
        return f"{entry['tflops']:.0f}"
    copied = case["results"].get(COPY, {})
    share = f", {entry['tbytes_per_s'] / copied['tbytes_per_s']:.0%}" if "tbytes_per_s" in copied else ""
    return f"{entry['tbytes_per_s']:.2f}{'' if entry is copied else share}"


def microseconds(value: float) -> str:
    """Three to five significant digits."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


@dataclass(frozen=True)
class Section:
    """Groups of cases that share a table, and the contenders that any of them has, ours first."""

    title: str
    unit: str
    cases: list[Result]
    contenders: list[str]

    @property
    def headings(self) -> list[str]:
        ratios = [f"of {TITLES[PLAIN]}" if name == PLAIN else f"to {TITLES[name]}" for name in self.compared]
        others = [TITLES[name] for name in self.contenders[1:]]
        return ["case", *ratios, "ours p50", "p90", self.unit, *others, "error"]

    @property
    def compared(self) -> list[str]:
        """Those whose ratio to ours says something."""
        return [name for name in self.contenders[1:] if name != COPY]

    @property
    def rows(self) -> list[list[str]]:
        return [self._row(case) for case in self.cases]

    def _row(self, case: Result) -> list[str]:
        ours = case["results"][OURS]
        ratios = [speedup(case, name) for name in self.compared]
        row = [case["label"], *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]
        if ours["status"] == "ok":
            row += [microseconds(ours["p50_us"]), microseconds(ours["p90_us"]), rate(case, ours)]
        else:
            row += ["unsupported", "-", "-"]
        row += [_time(case, name) for name in self.contenders[1:]]
        row.append(f"{float(ours['error_ratio']):.2f}" if ours["status"] == "ok" else "-")
        return row

    @property
    def means(self) -> list[str]:
        """The geometric mean and the worst of each group's ratios, a sentence for each group that has any."""
        sentences = []
        for group in dict.fromkeys(case["group"] for case in self.cases):
            cases = [case for case in self.cases if case["group"] == group]
            found = []
            for name in self.compared:
                ratios = [ratio for case in cases if (ratio := speedup(case, name)) is not None]
                if ratios and name != CAUSAL:
                    mean = geometric_mean(ratios)
                    worst = max(ratios) if name in PAGES else min(ratios)
                    among = "" if len(ratios) == len(cases) else f", {len(ratios)} of {len(cases)} cases"
                    found.append(f"{TITLES[name]} {mean:.2f}x (worst {worst:.2f}x{among})")
            if found:
                sentences.append(f"{group}, geometric mean: {'; '.join(found)}.")
        return sentences


def _time(case: Result, name: str) -> str:
    """A contender's p50 and rate."""
    entry = case["results"].get(name)
    if entry is None:
        return "-"
    return f"{microseconds(entry['p50_us'])} ({rate(case, entry)})" if entry["status"] == "ok" else "unsupported"


SECTIONS = {
    "Throughput and latency": ("latency", "dense"),
    "Decode, one query": ("decode",),
    "fp32 and head dims above 256": ("wide",),
    "Features": ("features",),
    "Packed sequences": ("packed",),
    "One feature beside the plain row: rate per visible pair": ("ranges", "scores"),
    "Masks and biases at head dims 32, 96 and 256": ("masks",),
    "Head dims between the rows'": ("dims",),
    "Packed queries over caches": ("paged",),
    "Backward": ("backward",),
    "Backward with one feature": ("score_gradients",),
}


def sections(result: Result) -> list[Section]:
    """The tables, shared by the text and the Markdown form."""
    found = []
    for title, groups in SECTIONS.items():
        cases = [case for case in result["cases"] if case["group"] in groups]
        present = {name for case in cases for name in case["results"]}
        if cases:
            unit = "TB/s" if groups == ("decode",) else "TFLOP/s"
            found.append(Section(title, unit, cases, [name for name in TITLES if name in present]))
    return found


def tables(result: Result) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, headings and rows of each table: the sections', and what calls allocate, where known."""
    found = [(section.title, section.headings, section.rows) for section in sections(result)]
    cases = [case for case in result["cases"] if "planned_bytes" in case["results"][OURS]]
    present = {name for case in cases for name, entry in case["results"].items() if "peak_bytes" in entry}
    names = [name for name in TITLES if name in present]
    rows = []
    for case in cases:
        entries = (case["results"].get(name, {}) for name in names)
        sizes = [case["results"][OURS]["planned_bytes"], *(entry.get("peak_bytes") for entry in entries)]
        rows.append([case["label"], *("-" if size is None else f"{size / MIB:,.2f}" for size in sizes)])
    headings = ["MiB that a call allocates", "ours planned", *(TITLES[name] for name in names)]
    return [*found, ("Memory", headings, rows)] if rows else found


def text(result: Result) -> str:
    """The tables, aligned for a terminal, with the machine above and the refusals below."""
    return "\n".join(map(str, parts(result)))


def parts(result: Result) -> list[str | Table]:
    """What ``text`` is made of."""
    from cutlass_fmha.cli.output import Table

    lines: list[str | Table] = []
    for title, headings, rows in tables(result):
        lines += [title, "", Table(headings, rows), ""]
    return [heading(result), "", *lines, *footnotes(result)]


def markdown(result: Result) -> str:
    """The same as a Markdown document."""
    lines = [f"# {heading(result)}", ""]
    for title, headings, rows in tables(result):
        lines += [f"## {title}", "", *table(headings, rows), ""]
    lines += [*(f"- {note}" for note in footnotes(result)), "", result["method"], ""]
    return "\n".join(lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown; all columns but the first are numbers."""
    lines = [
        "| " + " | ".join(headings) + " |",
        "|" + "|".join(["---", *["---:"] * (len(headings) - 1)]) + "|",
    ]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def heading(result: Result) -> str:
    machine = result["machine"]
    return f"cutlass_fmha {machine['package']} on {machine['gpu']} (sm_{machine['capability'].replace('.', '')})"


def footnotes(result: Result) -> list[str]:
    """What the table can't hold: versions, host time, rows, the reason of every refusal."""
    machine = result["machine"]
    notes = [
        f"torch {machine['torch']}, CUDA {machine['cuda']}, cuDNN {machine['cudnn']}, "
        f"driver {machine['driver']}, SM clock {clock_seen(result)}, "
        f"commit {machine['commit'] or 'unknown'}, {machine['date']}.",
        "Times are microseconds per call, a peer's p50 with its TFLOP/s in brackets (for decode, which "
        "memory bounds, TB/s and the share of a copy's). 'to X' 1.20x: X takes 1.20 times as long as ours. "
        "'of X': our rate over the rate of X, which computes another problem. An error above 1 is wrong.",
        *(sentence for section in sections(result) for sentence in section.means),
    ]
    for section, times in (result.get("host_us") or {}).items():
        shown = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
        notes.append(f"Host time per eager call in microseconds, {section}: {shown}.")
    if packages := machine.get("packages"):
        shown = ", ".join(f"{TITLES[name]} {version or 'unknown'}" for name, version in packages.items())
        notes.append(f"Versions: {shown}.")
    for name, x in (result.get("loop") or {}).items():
        notes.append(
            f"{x['calls']:,} calls of drawn lengths, by {name}: {x['us']:.1f} us each, "
            f"{x['reserved_mib']:.1f} MiB more reserved, {x['never_used']:.0%} of it never in use, "
            f"{x['allocations']:,} allocations."
        )
    if other := machine.get("other"):
        sources = f"sources {other['build'].get('source_hash', 'unknown')}"
        notes.append(f"Other build: cutlass_fmha {other['package']}, {sources}, in a process of its own.")
    if machine.get("forced_arch"):
        notes.append(f"Forced: the sm_{machine['forced_arch']} rows (CUTLASS_FMHA_FORCE_ARCH).")
    for arch, compiled_for in ((machine.get("build") or {}).get("proxy") or {}).items():
        notes.append(f"A proxy build: the sm_{arch} rows are compiled for sm_{compiled_for}.")
    if result.get("quick"):
        notes.append("A quick run: a quarter of the usual repetitions.")
    if result.get("row"):
        notes.append(f"Row forced: {result['row']}.")
    notes += [f"Row {row}: {', '.join(labels)}." for row, labels in rows_used(result).items()]
    notes += inexact(result)
    for case in result["cases"]:
        for name, entry in case["results"].items():
            if entry["status"] != "ok":
                notes.append(f"{case['label']}, {TITLES[name]}: unsupported: {entry['reason']}")
    return notes


def clock_seen(result: Result) -> str:
    """The SM's clock as it was read after each group of cases, or, in older results, after the run."""
    read = result.get("clocks") or [result["machine"].get("clocks_after") or {}]
    seen = sorted({clock for x in read if (clock := x.get("sm_clock_mhz")) is not None})
    return " to ".join(f"{clock:.0f}" for clock in (seen[:1] + seen[1:][-1:])) + " MHz" if seen else "not readable"


def inexact(result: Result) -> list[str]:
    """Whose errors are beyond the tolerance, ours aside (``wrong_results``): who quantises, or is wrong."""
    worst: dict[str, float] = {}
    for case in result["cases"]:
        for name, entry in case["results"].items():
            ratio = float(entry.get("error_ratio", 0.0))
            ratio = math.inf if math.isnan(ratio) else ratio  # the worst there is
            if name not in OWN and ratio > max(1.0, worst.get(name, 0.0)):
                worst[name] = ratio
    return [f"{TITLES[name]}: not exact, errors up to {x:.1f} of the tolerance." for name, x in worst.items()]


def rows_used(result: Result) -> dict[str, list[str]]:
    """Which of our rows ran which cases."""
    used: dict[str, list[str]] = {}
    for case in result["cases"]:
        row = case["results"][OURS].get("row")
        if row:
            used.setdefault(row, []).append(case["label"])
    return used


def require_picture(path: Path) -> None:
    """Raises CannotDraw, with one sentence, when the picture can't be drawn."""
    import importlib.util

    if path.suffix not in PICTURES:
        raise CannotDraw(f"--plot writes {' or '.join(PICTURES)}, and not {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotDraw("--plot needs matplotlib, which is not installed: pip install matplotlib.")


def plot(result: Result, path: Path) -> None:
    """Write the picture. Raises as ``require_picture``."""
    require_picture(path)
    from .picture import draw

    path.parent.mkdir(parents=True, exist_ok=True)
    draw(result, path)
