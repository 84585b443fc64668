"""Searches tiles: which lines of the manifest (src/rows.cmake) would be faster on a GPU.

    python tools/tune.py --preset dense --head-dim 64 --head-dim 128 --minutes 30
    python tools/tune.py --dry-run --arch 90 ...        candidates, without compiling anything
    python tools/tune.py --report                       the leaderboard
    python tools/tune.py --accept                       the lines to take over into src/rows.cmake

Candidates are drawn from what can be compiled, built in batches through CMake, dropped when they spill or
fail parity, and timed beside the manifest's rows. The same command goes on where an interrupted one stopped;
the leaderboard says what has been tried. docs/tuning.md has the rules.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from building import ROOT, BuildError
from cubin import ToolMissingError, find_tool
from source_hash import source_hash
from tuning.build import Builder
from tuning.search import Leaderboard, Search, Target, judge_in_a_process
from tuning.space import SMALLEST_SHARED_KIB, Candidate, propose, registers, shared_bytes

from cutlass_fmha import _C
from cutlass_fmha.bench.cases import select_cases
from cutlass_fmha.cli import output
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument_group("what to tune for").add_argument
    many = partial(add, action="append", default=[])
    many("--preset", metavar="NAME", help="a group of the benchmark's cases, or a case (default: dense)")
    many("--head-dim", type=int, metavar="D", help="only cases of this head dim")
    add("--arch", type=int, choices=devices.ARCHITECTURES, help="whose rows to tune (default: the GPU's)")
    add("--mma-passes", type=int, default=1, metavar="N", help="repeat each mma (3 or 5): an emulated GPU")
    add = parser.add_argument_group("how to search").add_argument
    add("--seed", type=int, default=0)
    add("--smem", type=int, default=SMALLEST_SHARED_KIB, metavar="KIB", help="of a block (default 99: all GPUs)")
    add("--minutes", type=float, default=30.0, metavar="M", help="draw no more after so long (default 30)")
    add = parser.add_argument_group("files, and what to do instead of searching").add_argument
    add("--work", type=Path, default=ROOT / "build" / "tune", metavar="DIR", help="default: build/tune")
    add("--leaderboard", type=Path, metavar="FILE", help="default: one of --work for --arch")
    add("--dry-run", action="store_true", help="print the candidates of the first round as manifest lines")
    add("--report", action="store_true", help="print the leaderboard")
    add("--accept", action="store_true", help="print the accepted lines for the manifest")
    output.add_json(parser)
    return parser


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for; as ``cases`` the benchmark's that are left to tune for."""
    options = parser.parse_args(arguments)
    try:
        cases = select_cases(options.preset or ["dense"])
    except ValueError as error:
        parser.error(str(error))
    options.cases = [c for c in cases if not c.feature and (not options.head_dim or c.head_dim in options.head_dim)]
    if not options.cases:
        parser.error("no case is left to tune for: see --preset and --head-dim")
    return options


def gpu_at_hand() -> tuple[str, int]:
    """(name, architecture of its rows). Raises ValueError where there is none."""
    import torch

    if not torch.cuda.device_count():
        raise ValueError(
            "a search needs a GPU, and torch sees none: "
            "--dry-run works with --arch, --report and --accept with --leaderboard"
        )
    device = devices.of_index(0)
    own = devices.own_arch(device)
    return device.name, own if own in devices.ARCHITECTURES else 89


def plain_rows(arch: int) -> list[_C.Row]:
    return [row for row in _C.rows() if row.arch == arch and row.family in tables.PLAIN]


def make_targets(options: argparse.Namespace, arch: int) -> list[Target]:
    """Sets of the benchmark's cases by head dim and group, with the rows of this build to beat.

    Raises ValueError when there is no row to beat.
    """
    targets = []
    for head_dim, group in dict.fromkeys((case.head_dim, case.group) for case in options.cases):
        own = tuple(case for case in options.cases if (case.head_dim, case.group) == (head_dim, group))
        rows = [row for row in plain_rows(arch) if row.head_dim == head_dim and row.copy != "element"]
        dtypes = {case.dtype for case in own}
        incumbents = tuple(dict.fromkeys(Candidate.of(row) for row in rows if row.dtype in dtypes))
        if not incumbents:
            raise ValueError(f"this build has no sm_{arch} row of head dim {head_dim} to compare with")
        targets.append(Target(f"d{head_dim}-{group}", own, arch, options.smem, incumbents))
    return targets


def dry_run(options: argparse.Namespace, arch: int) -> None:
    found: dict[str, list[str]] = {}
    for target in make_targets(options, arch):
        parents = [(1.0, row) for row in target.incumbents]
        drawn = propose(target.allows, parents, 8, f"{options.seed} {target.name}")
        cases = ", ".join(case.name for case in target.cases)
        lines = [f"{c.line(arch)}  # {shared_bytes(c)} B shared, {registers(c)}+ registers" for c in drawn]
        found[target.name] = [
            f"# {target.name}: {cases}; {len(target.incumbents)} rows of the manifest to beat",
            *lines,
        ]
    output.emit(found, itertools.chain(*found.values()), options.json)


def tune(options: argparse.Namespace, gpu: str, own: int, arch: int, path: Path) -> None:
    targets = make_targets(options, arch)
    info = _C.build_info()
    if info["source_hash"] != source_hash():
        raise ValueError("the installed build, whose rows are to be beaten, is of other sources: make build")
    for program in ("cuobjdump", "nvdisasm"):
        find_tool(program)
    work = Path(options.work).resolve() / f"sm{arch}-passes{options.mma_passes}"
    variables: dict[str, object] = {}
    if options.mma_passes != 1:
        variables = {"CUTLASS_FMHA_EMULATION": "ON", "CUTLASS_FMHA_MMA_PASSES": options.mma_passes}
    elif arch == 120 != own:
        variables = {"CUTLASS_FMHA_SM120_PROXY": own}
    about = {"gpu": gpu, "arch": arch, "mma_passes": options.mma_passes, "shared_kib": options.smem}
    about |= {"source_hash": source_hash(), "nvcc": info["nvcc_version"]}
    board = Leaderboard.resume(path, about, {t.name: [case.name for case in t.cases] for t in targets})
    search = Search(
        board,
        targets,
        Builder(work, arch, variables),
        judge_in_a_process(work),
        seed=options.seed,
        per_round=max(4, 2 * (os.cpu_count() or 1)),
        limit_s=60.0 * options.minutes,
        say=partial(print, file=sys.stderr, flush=True),
    )
    try:
        search.run()
    finally:
        output.emit(board.content(), board.render(), options.json)


def accept(board: Leaderboard, json: str | None) -> None:
    """Tell the best accepted line of each target, and which rows it beat or takes the name of."""
    if board.about["source_hash"] != (now := source_hash()):
        then = str(board.about["source_hash"])[:12]
        raise ValueError(f"{board.path} is about sources {then}, and src/ has {now[:12]}: tune again")
    arch = int(board.about["arch"])
    rows = {Candidate.of(row) for row in plain_rows(arch)}
    found = {target: [f"# {target}: no accepted line"] for target in board.targets}
    for target, lines in found.items():
        for best in board.best(target, "accepted")[:1]:
            beaten = sorted({min(us, key=lambda k: us[k]) for us in best.sightings[-1].incumbents_us.values()})
            lines[:] = [f"# {target}: {best.reason}; fastest before: {', '.join(beaten)}"]
            same_name = (row.key for row in sorted(rows) if row.name_columns == best.candidate.name_columns)
            lines += [f"# has the name of, and so replaces, on sm_{arch}: {key}" for key in same_name]
            lines.append(best.candidate.line(arch))
    output.emit(found, itertools.chain(*found.values()), json)


def main(arguments: Sequence[str] | None = None, name: str = "tune") -> int:
    """``name``: whose errors they are."""
    parser = build_parser()
    options = parse_arguments(parser, arguments)
    reads = options.report or options.accept
    try:
        without = (reads and options.leaderboard) or ((reads or options.dry_run) and options.arch)
        gpu, own = ("", 0) if without else gpu_at_hand()
        arch = options.arch or own
        path = options.leaderboard or options.work / f"leaderboard-sm{arch}-passes{options.mma_passes}.json"
        if options.smem > SMALLEST_SHARED_KIB and arch != 90:
            parser.error(f"a block has 99 KiB of shared memory on sm_{arch}: --smem {options.smem} is for sm_90")
        if options.report:
            board = Leaderboard.load(path)
            output.emit(board.content(), board.render(), options.json)
        elif options.accept:
            accept(Leaderboard.load(path), options.json)
        elif options.dry_run:
            dry_run(options, arch)
        else:
            tune(options, gpu, own, arch, path)
    except KeyboardInterrupt:
        print(f"{name}: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, BuildError, ToolMissingError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends, too
    raise SystemExit(main())
