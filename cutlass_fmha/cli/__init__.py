"""``cutlass-fmha`` and ``python -m cutlass_fmha``: what this installation is, would run, and how fast."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NamedTuple

import cutlass_fmha


class Command(NamedTuple):
    """A module with ``main(argv) -> int``, imported when the command is asked for, and what it does."""

    module: str
    help: str


#: All there are. Each takes ``--help`` and ``--json`` (``output.add_json``).
COMMANDS = {
    "info": Command("cutlass_fmha.cli.info", "versions, GPUs, kernels, and what would run here"),
    "explain": Command("cutlass_fmha.cli.explain", "which kernel runs a problem, and why"),
    "bench": Command("cutlass_fmha.bench", "time the kernels against torch's and other packages'"),
    "calibrate": Command("cutlass_fmha.calibrate.command", "measure what the rows cost on this GPU"),
    "memory": Command("cutlass_fmha.memory.command", "what attention allocates on a GPU, before the call"),
    "parity": Command("cutlass_fmha.cli.parity", "hold this installation's results against fp64"),
    "demo": Command("cutlass_fmha.demo", "search real text with a model that runs on this attention"),
}
#: What answers even where the package can't be imported.
ALWAYS = ("info",)
EXIT_STATUS = (
    "exit status: 0 it is so; 1 it is not, or can't be found out (nothing runs the problem, a result is "
    "wrong, there is no GPU to measure on, the installation is broken); 2 a wrong argument"
)


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status (``EXIT_STATUS``)."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    name = parser.parse_args(argv[:1]).command  # what follows is the command's
    if (error := cutlass_fmha.import_error) is not None and name not in ALWAYS:
        from cutlass_fmha.cli.output import one_line

        why = f"cutlass_fmha can't be imported here: {one_line(error)} (`cutlass-fmha info` says more)"
        if not {"-h", "--help"}.isdisjoint(argv[1:]):  # the options are in modules that need the package
            prog, usage = f"cutlass-fmha {name}", "%(prog)s [options]"
            argparse.ArgumentParser(prog, usage, COMMANDS[name].help, epilog=why).print_help()
            return 0
        print(f"{name}: {why}", file=sys.stderr)
        return 1
    try:
        status: int = importlib.import_module(COMMANDS[name].module).main(argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file that can't be written
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha",
        description=(cutlass_fmha.__doc__ or "").partition("\n")[0],
        epilog=EXIT_STATUS,
    )
    parser.add_argument("--version", action="version", version=f"cutlass_fmha {cutlass_fmha.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    return parser
