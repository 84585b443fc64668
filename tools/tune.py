"""Searches tiles: which lines of the manifest (src/templates.cmake) would be faster on a GPU.

    python tools/tune.py --preset dense --head-dim 64 --head-dim 128 --minutes 30
    python tools/tune.py --shape b4_h32_s4096_d64_bf16_causal --apart --strategy random
    python tools/tune.py --dry-run --arch 90 ...        candidates, without compiling anything
    python tools/tune.py --report [--all]               the leaderboard
    python tools/tune.py --accept                       the lines to take over into src/templates.cmake

Candidates are drawn from what can be compiled, built in batches through CMake, dropped when they spill or
fail parity, and timed beside the manifest's rows. The same command goes on where an interrupted one stopped;
the leaderboard says what has been tried. docs/tuning.md has the rules.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tools") not in sys.path:  # Python can be told to leave a script's directory out
    sys.path.insert(0, str(ROOT / "tools"))

from tuning import manifest, report, search, space  # noqa: E402
from tuning.build import Builder, BuildError, check_tools  # noqa: E402
from tuning.candidate import DTYPES, Candidate  # noqa: E402
from tuning.evaluate import EvaluationError, Evaluator  # noqa: E402
from tuning.leaderboard import Leaderboard, LeaderboardError, kernel_hash  # noqa: E402
from tuning.session import Plan, Session  # noqa: E402
from tuning.space import Limits, Space  # noqa: E402
from tuning.targets import Target, make_targets  # noqa: E402

ARCHITECTURES = (89, 90, 120)
BOTH = tuple(DTYPES)


class UsageError(ValueError):
    """The options can't be followed; the message is one sentence."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("what to tune for").add_argument
    many = partial(add, action="append", default=[])
    many("--preset", metavar="NAME", help="a group of the benchmark's cases, or a case (default: dense)")
    many("--shape", help="a problem, as b4_h32-8_s4096_d64_bf16_causal")
    many("--head-dim", type=int, metavar="D", help="only cases of this head dim")
    add("--apart", action="store_true", help="each case is a set of its own, not all of a head dim together")
    add("--arch", type=int, choices=ARCHITECTURES, help="whose rows to tune (default: the GPU's)")
    add("--mma-passes", type=int, default=1, metavar="N", help="repeat each mma (3 or 5): an emulated GPU")
    add("--device", type=int, default=0, metavar="N", help="the CUDA device that runs candidates")
    add = parser.add_argument_group("how to search").add_argument
    many = partial(add, action="append", default=[])
    add("--strategy", choices=search.STRATEGIES, default="evolve")
    add("--seed", type=int, default=0)
    many("--copy", choices=space.COPIES, help="only rows that copy so")
    add("--smem", type=int, default=99, metavar="KIB", help="shared memory of a block (default 99: all GPUs)")
    add("--minutes", type=float, metavar="M", help="time budget (default 30, or none with --candidates)")
    add("--candidates", type=int, metavar="N", help="stop after so many")
    add("--round", type=int, metavar="N", help="candidates per problem set that are built together")
    add("--jobs", type=int, metavar="N", help="parallel nvcc jobs (default: as many as cores)")
    many("--define", "-D", metavar="NAME=VALUE", help="a CMake variable of the builds")
    add = parser.add_argument_group("files, and what to do instead of searching").add_argument
    add("--work", type=Path, default=ROOT / "build" / "tune", metavar="DIR", help="default: build/tune")
    add(
        "--leaderboard",
        type=Path,
        metavar="FILE",
        help="default: <work>/leaderboard-sm<arch>[-passes<N>].json",
    )
    add("--dry-run", action="store_true", help="print the candidates of the first round as manifest lines")
    add("--report", action="store_true", help="print the leaderboard")
    add("--all", action="store_true", help="with --report: every candidate")
    add("--accept", action="store_true", help="print the accepted lines for the manifest")
    options = parser.parse_args(arguments)
    if options.mma_passes < 1 or options.mma_passes % 2 == 0:
        parser.error("--mma-passes must be odd: 1, 3 or 5")
    if min(options.round or 1, options.jobs or 1, options.candidates or 1) < 1:
        parser.error("--round, --jobs and --candidates must be at least 1")
    return options


# ---- from options to what the search works with ------------------------------------------------------------


def default_arch(device: int) -> tuple[str, int]:
    """(name, architecture of its rows) of the GPU. Raises UsageError when it can't run our kernels."""
    import torch

    if device >= torch.cuda.device_count() or not torch.cuda.is_available():
        raise UsageError(
            f"a search needs a GPU, and torch sees {torch.cuda.device_count()} of them, no number {device}: "
            "--dry-run, --report and --accept work without"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise UsageError(f"{torch.cuda.get_device_name(device)} is older than compute capability 8.9")
    own = 120 if major == 12 else 10 * major + minor
    return torch.cuda.get_device_name(device), own if own in ARCHITECTURES else 89


def leaderboard_path(options: argparse.Namespace, arch: int | None) -> Path:
    if options.leaderboard:
        return Path(options.leaderboard)
    passes = "" if options.mma_passes == 1 else f"-passes{options.mma_passes}"
    found = sorted(options.work.glob(f"leaderboard-*{passes}.json"))
    if arch is None and len(found) == 1:
        return Path(found[0])
    if arch is None:
        raise UsageError(
            f"say which leaderboard with --leaderboard or --arch: {options.work} has {len(found)}"
        )
    return Path(options.work) / f"leaderboard-sm{arch}{passes}.json"


def prepare(
    options: argparse.Namespace, arch: int
) -> tuple[list[Target], dict[str, Space], dict[str, list[Candidate]]]:
    """What is tuned for, the space of each target, and the manifest's rows to beat."""
    if options.smem > 99 and arch != 90:
        raise UsageError(
            f"a block has 99 KiB of shared memory on sm_{arch}: --smem {options.smem} is for sm_90"
        )
    targets = make_targets(options.preset, options.shape, options.head_dim, options.apart)
    copies = tuple(options.copy) or space.copies_of_the_kernels()
    limits, lines = Limits.with_shared(options.smem), manifest.read()
    spaces = {dim: Space(arch, dim, limits, copies) for dim in {target.head_dim for target in targets}}
    incumbents = {}
    for target in targets:
        rows = manifest.candidates_of(lines, arch, target.head_dim, target.dtypes)
        incumbents[target.name] = [row for row in rows if row.copy != "element"]
        if not incumbents[target.name]:
            raise UsageError(
                f"the manifest has no sm_{arch} row of head dim {target.head_dim} to compare with"
            )
    return targets, {target.name: spaces[target.head_dim] for target in targets}, incumbents


# ---- the commands ------------------------------------------------------------------------------------------


def dry_run(options: argparse.Namespace) -> None:
    arch = options.arch or default_arch(options.device)[1]
    targets, spaces, incumbents = prepare(options, arch)
    for target in targets:
        rows, known = incumbents[target.name], {row.key for row in incumbents[target.name]}
        parents = [search.Scored(row, search.prior(row, target)) for row in rows]
        seed = f"{options.seed} {target.name} 1"
        print(f"# {target.name}: {', '.join(case.name for case in target.cases)}")
        print(f"# {len(spaces[target.name].all)} candidates; {len(rows)} rows of the manifest to beat")
        for c in search.propose(
            spaces[target.name], known, parents, options.round or 8, options.strategy, seed
        ):
            line = manifest.Line((arch,), BOTH, c).text()
            print(f"{line}  # {space.shared_bytes(c)} B shared, {space.registers(c)}+ registers")


def tune(options: argparse.Namespace) -> None:
    gpu, own = default_arch(options.device)
    arch = options.arch or own
    targets, spaces, incumbents = prepare(options, arch)
    check_tools()
    work = Path(options.work).resolve() / f"sm{arch}-passes{options.mma_passes}"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another search is at work in {work}: give this one another --work") from None
        # Other code runs in place of the rows' own; sm_89's have PTX.
        stand_in = options.mma_passes != 1 or arch not in (own, 89)
        defines = list(options.define)
        if stand_in and arch == 120 and options.mma_passes == 1:
            defines.append(f"CUTLASS_FMHA_SM120_PROXY={own}")
        limits = Limits.with_shared(options.smem)
        common: dict[str, Any] = {"jobs": options.jobs, "limits": limits}
        builder = Builder(work, arch, mma_passes=options.mma_passes, defines=defines, **common)
        own_builder = Builder(work / "own", arch, defines=options.define, **common) if stand_in else None
        about = {"gpu": gpu, "arch": arch, "mma_passes": options.mma_passes, "shared_kib": options.smem}
        about |= {"kernel_hash": kernel_hash(), "nvcc": builder.nvcc_version()}
        board = Leaderboard.resume(leaderboard_path(options, arch), about)
        minutes = options.minutes or (None if options.candidates else 30.0)
        per_round = options.round or max(4, 2 * (os.cpu_count() or 1) // len(targets))
        limit_s = None if minutes is None else 60.0 * minutes
        plan = Plan(options.strategy, options.seed, per_round, limit_s, options.candidates)
        evaluator = Evaluator(work, arch, options.device, options.mma_passes, limits)
        say = partial(print, file=sys.stderr, flush=True)
        say(f"tune: {', '.join(target.name for target in targets)}: sm_{arch} rows on {gpu}; {board.path}")
        try:
            Session(board, targets, spaces, incumbents, builder, evaluator, plan, say, own_builder).run()
        finally:
            print(report.render(board))


def accept(board: Leaderboard) -> None:
    """Print the best accepted line of each target, and which rows it beat or takes the name of."""
    if board.about.get("kernel_hash") != (now := kernel_hash()):
        raise UsageError(
            f"{board.path} is about kernels {str(board.about.get('kernel_hash'))[:12]}, and src/ "
            f"outside the manifest has {now[:12]}: tune again"
        )
    arch, lines = int(board.about["arch"]), manifest.read()
    for target in board.targets:
        accepted = [entry for entry in board.best(target) if entry.fate == "accepted"]
        new = [entry for entry in accepted if all(entry.candidate != line.candidate for line in lines)]
        if not new:
            print(f"# {target}: no accepted line that the manifest does not have")
            continue
        entry = new[0]
        beaten = {min(us, key=lambda k: us[k]) for us in entry.sightings[-1].incumbents_us.values()}
        print(f"# {target}: {entry.reason}; fastest before: {', '.join(sorted(beaten))}")
        for row in manifest.replaced(lines, arch, entry.candidate):
            print(f"# has the name of, and so replaces, on sm_{arch}: {row.key}")
        print(manifest.Line((arch,), BOTH, entry.candidate).text())


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.report or options.accept:
            board = Leaderboard.load(leaderboard_path(options, options.arch))
            accept(board) if options.accept else print(report.render(board, options.all))
        else:
            (dry_run if options.dry_run else tune)(options)
    except KeyboardInterrupt:
        print("tune: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, BuildError, EvaluationError, LeaderboardError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
