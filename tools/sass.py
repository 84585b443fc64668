"""What each row's main loop issues per key block, and what a model makes of it on each architecture.

    python tools/sass.py                         the installed build: counts, bounds, predicted shares
    python tools/sass.py FILE --rows d128        another extension, object file, fatbin or cubin; some rows
    python tools/sass.py --markdown out.md --json out.json
    python tools/sass.py --opcodes --rows NAME   every opcode of the loop, to see what a change added
    python tools/sass.py --calibration           what the model was fitted to, and how far it is from that
    python tools/sass.py --write-counts          tests/data/sass_counts.json, which the test gates

Counts are of one warp and one block of keys in the steady state (mainloop.py), without the rows whose warps
share the keys; shares of the tensor ceiling are a model (roofline.py), not a measurement. Beside what it
predicts for an H200, with each mma pass run 1, 3 or 5 times, stands what was measured there, by the
benchmark and tools/emulate.py (benchmarks/results/*.json). Needs cuobjdump and nvdisasm, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cubin import Kernel, read_kernels
from loop_counts import COUNTS, build_counts, plain, write_counts
from mainloop import Loop, LoopNotFoundError, main_loop
from measured import Measurement, best_measurements
from roofline import GPUS, H200, Gpu, Prediction, Work, interference, predict, resident_warps, variant_errors

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PASSES = (1, 3, 5)  # how often each mma runs in the builds that make an H200 resemble the others
BYTES_PER_ELEMENT = 2
#: A program that prints build_info() and the table of kernels of the extension that its argument names.
PRINT_ROWS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
names = [name for name in vars(module.Template) if not name.startswith("_")]
rows = [{name: getattr(row, name) for name in names if hasattr(row, name)} for row in module.templates()]
print(json.dumps([module.build_info(), rows]))
"""


@dataclass(frozen=True)
class RowLoop:
    """A row of the table of kernels together with its machine code. ``row`` is a ``_C.Template``."""

    row: Any
    kernel: Kernel
    loop: Loop

    @property
    def work(self) -> Work:
        return Work.of(self.loop.counts)

    @property
    def per_mma(self) -> float:
        """Other instructions per mma, NOPs aside."""
        return self.work.others / self.work.mma

    def predictions(self) -> list[Prediction]:
        """On an H200, one per repetition of the mma, as tools/emulate.py measures them; then one per GPU that
        the kernel is for. Those GPUs' limits decide how many blocks an SM holds."""
        gpus = gpus_of(self.kernel.arch)
        warps = self.resident_warps(gpus[0] if gpus else H200)
        slowed = [predict(self.work, H200, warps, passes) for passes in PASSES]
        return slowed + [predict(self.work, gpu, self.resident_warps(gpu)) for gpu in gpus]

    def resident_warps(self, gpu: Gpu) -> float:
        row = self.row
        return resident_warps(
            gpu, self.kernel.registers, row.smem_bytes, row.warps, row.min_blocks, row.ping_pong
        )


def gpus_of(arch: int) -> list[Gpu]:
    """GPUs of an architecture, the H200 aside, on which everything is predicted."""
    return [gpu for gpu in GPUS if gpu.arch == arch and gpu is not H200]


def rows_of(file: Path | None) -> tuple[Path, list[Any]]:
    """The file to read and its table of kernels: ``_C.templates()``, or the like of it.

    The installed extension's table serves for a file that this Python can't import. Raises ValueError for an
    extension whose table can't be had, and for one that repeats its mma.
    """
    if file is None or not any(file.name.endswith(suffix) for suffix in EXTENSION_SUFFIXES):
        from cutlass_fmha import _C

        refuse_repeated_mma(_C.build_info(), file or Path(str(_C.__file__)))
        return file or Path(str(_C.__file__)), list(_C.templates())
    # In a process of its own: one process holds one _C.
    command = [sys.executable, "-c", PRINT_ROWS, str(file.resolve())]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ValueError(f"{file} can't be imported: {answer.stderr.strip().splitlines()[-1]}")
    build, rows = json.loads(answer.stdout)
    refuse_repeated_mma(build, file)
    return file, [SimpleNamespace(**row) for row in rows]


def refuse_repeated_mma(build: dict[str, Any], file: Path) -> None:
    """Raises ValueError for an emulation build, of whose loops the mma are not all useful."""
    passes = build.get("mma_passes", 1)
    if passes != 1:
        raise ValueError(
            f"{file} runs each mma pass {passes} times (an emulation build): take one that doesn't"
        )


def is_modelled(row: Any) -> bool:
    """Whether the model is for a row's main loop.

    Not where the warps of a block share the keys: such a loop loads straight into registers, runs a few times
    if at all (the first step stands before it), and is bound by latency, of which the model knows nothing.
    Nor in a general row: most of its loop is branches that a problem takes or doesn't.
    """
    return bool(row.family == "plain")


def read_rows(file: Path, rows: Iterable[Any]) -> list[RowLoop]:
    """The main loop of every kernel in ``file`` that is a modelled one of ``rows``, in the order of the rows.

    Raises LoopNotFoundError for a kernel without one.
    """
    return loops_of(read_kernels(file), rows)


def loops_of(kernels: Iterable[Kernel], rows: Iterable[Any]) -> list[RowLoop]:
    by_name = {row.name: row for row in rows if is_modelled(row)}
    found = [
        RowLoop(by_name[kernel.name], kernel, main_loop(kernel, copied_bytes(by_name[kernel.name])))
        for kernel in kernels
        if kernel.name in by_name
    ]
    order = list(by_name)
    return sorted(found, key=lambda loop: order.index(loop.row.name))


def copied_bytes(row: Any) -> float:
    """What a warp brings per iteration: its share of a tile of K and one of V."""
    return float(2 * row.tile_n * row.head_dim * BYTES_PER_ELEMENT / row.warps)


# ---- tables ------------------------------------------------------------------------------------------------

SHOWN = ("mma", "mufu", "fp32", "convert", "imad", "alu", "ldsm", "copy", "barrier", "uniform", "nop")


def headings(arch: int) -> list[str]:
    shares = [f"H200 x{n}" for n in PASSES] + [gpu.name for gpu in gpus_of(arch)]
    errors = [f"model x{n}" for n in PASSES]
    return ["row", "regs", "code", *SHOWN, "rest", "others/mma", "bound", *shares, *errors]


def cells(loop: RowLoop, measured: dict[tuple[str, int], Measurement]) -> list[str]:
    counts = loop.loop.counts
    rest = sum(counts.values()) - sum(counts[name] for name in SHOWN)
    predictions = loop.predictions()
    line = [loop.row.name, str(loop.kernel.registers), str(len(loop.kernel.code))]
    line += [f"{plain(counts[name])}" for name in SHOWN]
    own = predictions[len(PASSES)] if len(predictions) > len(PASSES) else predictions[0]
    line += [f"{plain(rest)}", f"{loop.per_mma:.2f}", own.bound]
    line += [share_text(p, measured.get((loop.row.name, p.passes))) for p in predictions]
    found = errors([loop], measured)
    return [*line, *(f"{found[n][0].error:+.0%}" if n in found else "-" for n in PASSES)]


@dataclass(frozen=True)
class Error:
    """How far the model is from a measurement, as a share of it."""

    row: str
    error: float
    found: Measurement


def errors(loops: list[RowLoop], measured: dict[tuple[str, int], Measurement]) -> dict[int, list[Error]]:
    """By number of passes, where there is a measurement."""
    all_errors: dict[int, list[Error]] = {}
    for loop in loops:
        for p in loop.predictions():
            found = measured.get((loop.row.name, p.passes)) if p.gpu is H200 else None
            if found:
                error = Error(loop.row.name, p.tflops / found.tflops - 1, found)
                all_errors.setdefault(p.passes, []).append(error)
    return all_errors


def share_text(prediction: Prediction, found: Measurement | None) -> str:
    """``87 %`` or ``84 to 97 %``, with the measured share behind it in brackets where there is one."""
    low, high = (f"{100 * share:.0f}" for share in (prediction.low, prediction.high))
    text = f"{low} %" if low == high else f"{low} to {high} %"
    if prediction.gpu is not H200 or found is None:
        return text
    return f"{text} ({100 * found.tflops * prediction.passes / H200.tflops:.0f})"


def text_table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: list[str]) -> str:
        return "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        )

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    rule = "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])


def report(
    loops: list[RowLoop],
    measured: dict[tuple[str, int], Measurement],
    table: Callable[[list[str], list[list[str]]], str],
    title: str,
) -> str:
    """The tables of all architectures, the notes below."""
    parts = []
    for arch in sorted({loop.kernel.arch for loop in loops}):
        of_arch = [loop for loop in loops if loop.kernel.arch == arch]
        parts += [title.format(arch), table(headings(arch), [cells(loop, measured) for loop in of_arch])]
    return "\n\n".join([*parts, "\n".join(notes(loops, measured))]) + "\n"


def notes(loops: list[RowLoop], measured: dict[tuple[str, int], Measurement]) -> list[str]:
    """What the tables mean, and how wrong the model is known to be."""
    fitted = [abs(model / real - 1) for *_, real, model in variant_errors()]
    clks = ", ".join(f"{gpu.name} {gpu.mma_clk:.1f}" for gpu in GPUS)
    lines = [
        "Instructions that a warp issues per block of keys in the steady state.",
        "Left out: rows whose warps share the keys (k and a number in the name); latency bounds those.",
        "A MODEL: shares are of the tensor ceiling of mma.sync, on the H200 as it is and slowed by "
        "running each mma 3 or 5 times (x3, x5), there with as many blocks per SM as the row's own GPUs "
        "hold. A range goes from the H200's loss to other instructions, clock for clock, to what is left "
        "of it where a slower mma hides all it can. Brackets: measured. 'model x3 +5%': it predicts 5 % "
        "more than was measured.",
        f"Clocks per mma m16n8k16 and sub-core, at boost: {clks}.",
        f"The model is within {sum(fitted) / len(fitted):.1%} of what it was calibrated to on average, "
        f"{max(fitted):.0%} at worst (--calibration).",
    ]
    by_passes = errors(loops, measured)
    if not by_passes:
        return [*lines, "No result of an H200 under benchmarks/results/: nothing to hold the model against."]
    files = ", ".join(sorted({e.found.file for found in by_passes.values() for e in found}))
    return [
        *lines,
        f"The model against {files}:",
        *map(error_text, *zip(*sorted(by_passes.items()), strict=True)),
    ]


def error_text(passes: int, found: list[Error]) -> str:
    worst = max(found, key=lambda e: abs(e.error))
    median = statistics.median(abs(e.error) for e in found)
    return (
        f"x{passes}: off by {median:.1%} in the median of {len(found)} rows, "
        f"by {worst.error:+.1%} at worst ({worst.row})."
    )


def as_json(loops: list[RowLoop], measured: dict[tuple[str, int], Measurement]) -> dict[str, Any]:
    def prediction(loop: RowLoop, p: Prediction) -> dict[str, Any]:
        found = measured.get((loop.row.name, p.passes)) if p.gpu is H200 else None
        return {
            "gpu": p.gpu.name,
            "passes": p.passes,
            "bound": p.bound,
            "clocks": {name: round(clk, 1) for name, clk in p.clocks.items()},
            "share": [round(p.low, 4), round(p.high, 4)],
            "tflops": round(p.tflops, 1),
            "measured_tflops": found and found.tflops,
            "measured_case": found and found.case,
            "error": found and round(p.tflops / found.tflops - 1, 4),
        }

    return {
        "rows": [
            {
                "row": loop.row.name,
                "arch": loop.kernel.arch,
                "registers": loop.kernel.registers,
                "instructions": len(loop.kernel.code),
                "loop_addresses": list(loop.loop.addresses),
                "loop": {name: plain(count) for name, count in loop.loop.counts.items()},
                "others_per_mma": round(loop.per_mma, 3),
                "predictions": [prediction(loop, p) for p in loop.predictions()],
            }
            for loop in loops
        ]
    }


def calibration() -> str:
    """The model's constants, and its error on each variant."""
    fit = interference()
    rows = [
        [name, str(passes), f"{real:.1%}", f"{model:.1%}", f"{model / real - 1:+.1%}"]
        for name, passes, real, model in variant_errors()
    ]
    points = ", ".join(f"{x:g}: {y:.2f}" for x, y in fit.curve)
    return (
        f"Others per mma: clocks lost per mma on an H200: {points}.\nAn FP32 instruction counts 1, MUFU "
        f"{fit.mufu:.2f}, ldmatrix.x4 {fit.ldsm:.2f}. Wait per iteration: {fit.wait:.0f} clocks.\n\n"
        + text_table(["variant", "passes", "measured", "model", "model is"], rows)
    )


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="extension, object file, fatbin or cubin (default: the installed one)",
    )
    parser.add_argument("--rows", default="", metavar="REGEX", help="only rows whose name it is found in")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of benchmark results (JSON)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--opcodes", action="store_true", help="list the loop's opcodes per row")
    parser.add_argument(
        "--calibration", action="store_true", help="print what the model was fitted to, and stop"
    )
    parser.add_argument("--write-counts", action="store_true", help=f"write {COUNTS.relative_to(ROOT)}")
    return parser.parse_args(arguments)


def write_text(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.calibration:
        print(calibration())
        return 0
    try:
        file, rows = rows_of(options.file)
        loops = read_rows(file, [row for row in rows if re.search(options.rows, row.name)])
        if not loops:
            print(f"no row with a modelled loop in {file} whose name holds {options.rows!r}", file=sys.stderr)
            return 1
        if options.write_counts:
            if options.rows:
                raise ValueError("--write-counts writes all rows: leave --rows out")
            write_counts(build_counts(loops, file))
            print(f"wrote {COUNTS.relative_to(ROOT)}: {len(loops)} rows")
            return 0
    except (LoopNotFoundError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    measured = best_measurements(options.results)
    print(report(loops, measured, text_table, "sm_{}"), end="")
    if options.opcodes:
        for loop in loops:
            listed = ", ".join(f"{name} {n}" for name, n in loop.loop.opcodes.most_common())
            print(f"\n{loop.row.name}: {listed}")
    if options.markdown:
        write_text(report(loops, measured, markdown_table, "## sm_{}"), options.markdown)
    if options.json:
        write_text(json.dumps(as_json(loops, measured), indent=1) + "\n", options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
