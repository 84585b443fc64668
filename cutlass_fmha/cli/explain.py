"""``cutlass-fmha explain``: which kernel runs a problem, and why."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from cutlass_fmha.bench.runner import CannotMeasure, require_gpu
from cutlass_fmha.cli import output
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch.explain import Explanation, explain
from cutlass_fmha.dispatch.problem import FEATURES


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha explain", description="Print which kernel runs a problem, and why."
    )
    parser.add_argument(
        "--shape",
        required=True,
        type=output.sizes,
        metavar="B,S,H,D",
        help="batch, seqlen_q, num_heads, head_dim",
    )
    parser.add_argument("--seqlen-k", type=int, metavar="S", help="number of keys (default: seqlen_q)")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="heads of key and value (default: num_heads)")
    parser.add_argument("--dtype", default="bfloat16", help="float16, bfloat16 or float32 (default: %(default)s)")
    parser.add_argument(
        "--causal",
        nargs="?",
        const="bottom-right",
        default="none",
        choices=("none", "top-left", "bottom-right"),
        help="causal mask; bottom-right when nothing else is said",
    )
    parser.add_argument(
        "--alignment",
        type=int,
        default=16,
        metavar="BYTES",
        help="of pointers and strides (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="cuda:0, cpu, sm_89, sm_89:<SM count>, " + ", ".join(devices.PRESETS) + " (default: cuda:0, or cpu)",
    )
    parser.add_argument("--head-dim-v", type=int, metavar="D", help="of value and output, if another one")
    parser.add_argument(
        "--features",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAMES",
        help="what comes with the problem, separated by commas: " + ", ".join(FEATURES),
    )
    parser.add_argument("--row", metavar="ROW", help="force this row")
    parser.add_argument("--backward", action="store_true", help="which kernel computes the gradients")
    parser.add_argument(
        "--all",
        action="store_true",
        help="list rows for other architectures, dtypes and head dims one by one",
    )
    parser.add_argument("--measure", action="store_true", help="also time every eligible row on this machine's GPU")
    output.add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Explains a problem. Returns 1 when nothing runs or measures it, exits with 2 for a wrong argument."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.measure:
            require_gpu(0)
        found = explain(
            shape=arguments.shape,
            seqlen_k=arguments.seqlen_k,
            num_heads_kv=arguments.kv_heads,
            dtype=arguments.dtype,
            causal=arguments.causal,
            alignment=arguments.alignment,
            device=arguments.device,
            row=arguments.row,
            measure=arguments.measure,
            all_rows=arguments.all,
            head_dim_v=arguments.head_dim_v,
            features=arguments.features,
            backward=arguments.backward,
        )
    except CannotMeasure as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    except (TypeError, ValueError, RuntimeError) as error:  # no row; an old driver
        parser.error(str(error))
    runs = found.winner is not None or (found.device is None and arguments.row is None)
    output.emit(content(found, runs), output.told(found), arguments.json)
    return 0 if runs else 1


def content(found: Explanation, runs: bool) -> dict[str, Any]:
    """For programs; times in microseconds. Without ``--all`` the rows that were in question alone."""
    return {
        "problem": asdict(found.problem),
        "device": None if found.device is None else asdict(found.device),
        "runs": runs,
        "winner": found.winner,
        "note": found.note,
        "costs": found.costs,
        "lost": found.lost,
        "rows": [
            {
                "name": verdict.row.name,
                "eligible": verdict.eligible,
                "contender": verdict.contender,
                "reasons": verdict.reasons,
                "predicted_us": verdict.predicted_us,
                "measured_us": verdict.measured_us,
            }
            for verdict in found.rows
            if found.all_rows or verdict.irrelevance is None
        ],
    }
