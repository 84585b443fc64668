"""Searches tiles: which lines of the manifest (src/rows.cmake) would be faster on a GPU (docs/tuning.md).

python tools/tune.py --preset dense --head-dim 64 --head-dim 128 --minutes 30
"""

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from building import ROOT, BuildError
from cubin import ToolMissingError, find_tool
from source_hash import source_hash
from tuning import search
from tuning.search import SMALLEST_SHARED_KIB, Candidate, Target

from cutlass_fmha import _C
from cutlass_fmha.bench.cases import select_cases
from cutlass_fmha.cli import output
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.dispatch import table as tables


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for; as ``cases`` the benchmark's that are left to tune for, as ``error`` what refuses it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    many = partial(add, action="append", default=[])
    many("--preset", metavar="NAME", help="a group of the benchmark's cases, or a case (default: dense)")
    many("--head-dim", type=int, metavar="D", help="only cases of this head dim")
    add("--arch", type=int, choices=devices.ARCHITECTURES, help="whose rows to tune (default: the GPU's)")
    add("--mma-passes", type=int, default=1, metavar="N", help="repeat each mma (3 or 5): an emulated GPU")
    add("--seed", type=int, default=0)
    add("--smem", type=int, default=SMALLEST_SHARED_KIB, metavar="KIB", help="of a block (default 99: all GPUs)")
    add("--minutes", type=float, default=30.0, metavar="M", help="draw no more after so long (default 30)")
    add("--work", type=Path, default=ROOT / "build" / "tune", metavar="DIR", help="default: build/tune")
    add("--leaderboard", type=Path, metavar="FILE", help="default: one of --work for --arch")
    add("--dry-run", action="store_true", help="print the candidates of the first round as manifest lines")
    add("--report", action="store_true", help="print the leaderboard, and what it accepted as manifest lines")
    output.add_json(parser)
    options = parser.parse_args(arguments)
    try:
        cases = select_cases(options.preset or ["dense"])
    except ValueError as error:
        parser.error(str(error))
    options.cases = [c for c in cases if not c.feature and (not options.head_dim or c.head_dim in options.head_dim)]
    if not options.cases:
        parser.error("no case is left to tune for: see --preset and --head-dim")
    options.error = parser.error
    return options


def gpu_at_hand() -> tuple[str, int]:
    """(name, architecture of its rows). Raises ValueError where there is none."""
    if not torch.cuda.device_count():
        without = "--dry-run works with --arch, --report with --leaderboard"
        raise ValueError(f"a search needs a GPU, and torch sees none: {without}")
    device = devices.of_index(0)
    own = devices.own_arch(device)
    return device.name, own if own in devices.ARCHITECTURES else 89


def make_targets(options: argparse.Namespace, arch: int) -> list[Target]:
    """Sets of the benchmark's cases by head dim and group. Raises ValueError when there is no row to beat."""
    targets = []
    for head_dim, group in dict.fromkeys((case.head_dim, case.group) for case in options.cases):
        own = tuple(case for case in options.cases if (case.head_dim, case.group) == (head_dim, group))
        plain = [
            row for row in _C.rows() if (row.arch, row.head_dim) == (arch, head_dim) and row.family in tables.PLAIN
        ]
        dtypes = {case.dtype for case in own}
        rows = (row for row in plain if row.dtype in dtypes and row.copy != "element")
        incumbents = tuple(dict.fromkeys(map(Candidate.of, rows)))
        if not incumbents:
            raise ValueError(f"this build has no sm_{arch} row of head dim {head_dim} to compare with")
        targets.append(Target(f"d{head_dim}-{group}", own, arch, options.smem, incumbents))
    return targets


def dry_run(options: argparse.Namespace, arch: int) -> None:
    found: dict[str, list[str]] = {}
    for target in make_targets(options, arch):
        parents = [(1.0, row) for row in target.incumbents]
        drawn = search.propose(target.allows, parents, 8, f"{options.seed} {target.name}")
        cases = ", ".join(case.name for case in target.cases)
        head = f"# {target.name}: {cases}; {len(parents)} rows of the manifest to beat"
        lines = (
            f"{c.line(arch)}  # {search.shared_bytes(c)} B shared, {search.registers(c)}+ registers" for c in drawn
        )
        found[target.name] = [head, *lines]
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
    board = search.Leaderboard.resume(path, about, {t.name: [case.name for case in t.cases] for t in targets})
    per_round, say = max(4, 2 * (os.cpu_count() or 1)), partial(print, file=sys.stderr, flush=True)
    gates = search.Builder(work, arch, variables), search.judge_in_a_process(work)
    try:
        search.Search(board, targets, *gates, options.seed, per_round, 60.0 * options.minutes, say).run()
    finally:
        output.emit(board.content(), board.render(), options.json)


def main(arguments: Sequence[str] | None = None, name: str = "tune") -> int:
    options = parse(arguments)
    try:
        without = options.arch if options.dry_run else options.report and (options.arch or options.leaderboard)
        gpu, own = ("", 0) if without else gpu_at_hand()
        arch = options.arch or own
        path = options.leaderboard or options.work / f"leaderboard-sm{arch}-passes{options.mma_passes}.json"
        if options.smem > SMALLEST_SHARED_KIB and arch != 90:
            options.error(f"a block has 99 KiB of shared memory on sm_{arch}: --smem {options.smem} is for sm_90")
        if options.report:
            board = search.Leaderboard.load(path)
            output.emit(board.content(), board.render(), options.json)
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
