"""``cutlass-fmha parity``: a first look whether this installation computes the right thing on this machine.

A problem of every kind against dense fp64 attention, with the benchmark's cases and its check; on a GPU by
every row that can run it. The whole gate, with an oracle that shares nothing with the package, is the
repository's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cutlass_fmha
from cutlass_fmha.bench import gradients
from cutlass_fmha.bench.cases import FEATURES, Case
from cutlass_fmha.bench.contenders import Error, ErrorCheck, Inputs, make_inputs, ours
from cutlass_fmha.bench.features import Feature
from cutlass_fmha.bench.gradients import GradientCheck
from cutlass_fmha.bench.lineup import with_feature
from cutlass_fmha.bench.runner import CannotMeasure, require_gpu
from cutlass_fmha.cli import output
from cutlass_fmha.dispatch.explain import explain

DTYPES = ("bfloat16", "float16", "float32")
LONG = 1300
"""Beyond a window; no multiple of a tile."""


def cases() -> Iterator[Case]:
    """Few heads and odd lengths: every dtype, every feature, packed sequences, caches, gradients."""
    for dtype in DTYPES:
        for head_dim in (64, 128):
            yield Case("parity", 2, 4, 2, 257, 257, head_dim, dtype)
            yield Case("parity", 1, 4, 4, 61, 333, head_dim, dtype, causal=True)
        yield Case("parity", 2, 8, 2, 1, 515, 128, dtype)
        yield Case("parity", 1, 2, 2, 130, 130, 320, dtype, causal=True)
        yield Case("backward", 1, 4, 2, 257, 257, 64, dtype, causal=True)
    for feature in FEATURES:
        length = LONG if feature != "prefix" else 2100
        batch = 2 if feature == "leftpad" else 1
        square = feature not in ("bias", "mask", "head_bias")
        yield Case("parity", batch, 2, 2, length, length, 64, "bfloat16", causal=square, feature=feature)
    yield Case("parity", 3, 4, 2, 200, 200, 64, "bfloat16", causal=True, lengths=(7, 200, 131))
    yield Case("parity", 2, 4, 2, 33, 400, 64, "bfloat16", causal=True, lengths=(33, 20), used=(400, 257))
    yield Case("backward", 3, 4, 2, 200, 200, 64, "bfloat16", causal=True, lengths=(7, 200, 131))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha parity",
        description="Hold results of this installation against dense fp64 attention: a problem of every "
        "kind, on a GPU by every row that can run it. `make parity` in a checkout is the whole gate.",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="cpu or cuda:N; default: cuda:0 where torch and the build have it"
    )
    parser.add_argument("--case", metavar="TEXT", default="", help="only cases whose name has this in it")
    output.add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the cases. Returns 1 for a wrong result, or with a sentence where there is nothing to run on."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    chosen = [case for case in cases() if arguments.case in case.name]
    if not chosen:
        parser.error(f"--case {arguments.case}: no case has that in its name")
    try:
        device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda":
            require_gpu(device.index or 0)
        elif device.type != "cpu":
            parser.error(f"--device must be cpu or cuda:N, got {arguments.device}")
    except CannotMeasure as error:
        print(f"parity: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # torch's, of a device that it doesn't know
        parser.error(f"--device {arguments.device}: {str(error).splitlines()[0]}")
    results = [result for case in chosen for result in results_of(case, device)]
    wrong = [result for result in results if result["wrong"]]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU backend"
    content = {"version": cutlass_fmha.__version__, "device": where, "passed": not wrong, "results": results}
    cells = [
        [r["case"], r["row"] or "-", f"{r['error']:.3f}" if r["error"] is not None else r["refused"]] for r in results
    ]
    verdict = f"{len(wrong)} wrong" if wrong else "none wrong"
    parts: list[str | output.Table] = [
        f"cutlass_fmha {cutlass_fmha.__version__} on {where}: error over what the dtype allows, 1 at most",
        "",
        output.Table(["case", "row", "error"], cells, left=2),
        "",
        f"{len(results)} results of {len(chosen)} problems, {verdict}",
    ]
    output.emit(content, parts, arguments.json)
    for result in wrong:
        print(f"parity: wrong result: {result['case']}, {result['row'] or where}", file=sys.stderr)
    return 1 if wrong else 0


def results_of(case: Case, device: torch.device) -> Iterator[dict[str, Any]]:
    """One result for each row that can run the case, or one of the CPU backend."""
    inputs = make_inputs(case, 1, device)
    feature = Feature(case, device) if case.featured and not case.backward else None
    check: Callable[[Any], Error] = GradientCheck(case, inputs) if case.backward else ErrorCheck(case, inputs, feature)
    rows, refused = rows_for(case, inputs, feature)
    if refused:
        yield {"case": case.name, "row": None, "error": None, "wrong": False, "refused": refused}
    for row in rows:
        error = check(call(case, inputs, feature, row))
        yield {
            "case": case.name,
            "row": row,
            "error": error.ratio,
            "wrong": not error.within,
            "refused": None,
        }


def rows_for(case: Case, inputs: Inputs, feature: Feature | None) -> tuple[list[str | None], str | None]:
    """The rows that can run a case, None for the CPU backend; and why there are none."""
    if case.backward:
        said = gradients.arguments_of(case, inputs.query.device)
        found = explain(*inputs[0], backward=True, causal=case.causal, **said)
        rows = [found.winner] if found.winner is not None else []
    else:
        found = explain(*inputs[0], **(feature.arguments if feature else {"causal": case.causal}))
        rows = [verdict.row.name for verdict in found.rows if verdict.eligible]
    if found.device is None:
        return [None], None
    return list(rows), None if rows else found.note


def call(case: Case, inputs: Inputs, feature: Feature | None, row: str | None) -> Any:
    if case.backward:
        return gradients.ours(case, inputs, row)(0)
    attention = ours(case, row) if feature is None else with_feature(feature, row)
    return attention(*inputs[0])
