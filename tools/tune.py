"""Searches tiles: which lines of the manifest (src/templates.cmake) would be faster on a GPU.

    python tools/tune.py --preset dense --head-dim 64 --head-dim 128 --minutes 30
    python tools/tune.py --shape b4_h32_s4096_d64_bf16_causal --apart --strategy random
    python tools/tune.py --dry-run --arch 90 ...        candidates, without compiling anything
    python tools/tune.py --report [--all]               the leaderboard
    python tools/tune.py --accept [--write]             what would change in src/templates.cmake; change it

Candidates are drawn from what can be compiled, built in batches through CMake, dropped when they spill or
fail parity, and timed beside the manifest's rows. The same command goes on where an interrupted one stopped;
the leaderboard says what has been tried. docs/tuning.md has the rules.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import os
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT / "tools") not in sys.path:  # Python can be told to leave a script's directory out
    sys.path.insert(0, str(ROOT / "tools"))

from tuning import manifest, report, search, space  # noqa: E402
from tuning.build import Builder, BuildError, check_tools  # noqa: E402
from tuning.candidate import Candidate  # noqa: E402
from tuning.evaluate import EvaluationError, Evaluator  # noqa: E402
from tuning.leaderboard import Leaderboard, LeaderboardError, kernel_hash  # noqa: E402
from tuning.progress import Progress  # noqa: E402
from tuning.session import Plan, Session  # noqa: E402
from tuning.space import Limits, Space  # noqa: E402
from tuning.targets import Target, make_targets  # noqa: E402

ARCHITECTURES = (89, 90, 120)
WORK = ROOT / "build" / "tune"


class UsageError(ValueError):
    """The options can't be followed; the message is one sentence."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_search_options(parser)
    add_file_options(parser)
    options = parser.parse_args(arguments)
    if options.mma_passes < 1 or options.mma_passes % 2 == 0:
        parser.error("--mma-passes must be odd: 1, 3 or 5")
    if (options.write or options.replace) and not options.accept:
        parser.error("--write and --replace go with --accept")
    if min(options.per_file, options.round or 1, options.jobs or 1, options.candidates or 1) < 1:
        parser.error("--per-file, --round, --jobs and --candidates must be at least 1")
    return options


def add_search_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to tune for")
    what.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="a group of the benchmark's cases, or a case (default: dense)",
    )
    what.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="SHAPE",
        help="a problem, as b4_h32-8_s4096_d64_bf16_causal",
    )
    what.add_argument(
        "--head-dim", action="append", default=[], type=int, metavar="D", help="only cases of this head dim"
    )
    what.add_argument(
        "--apart", action="store_true", help="each case is a set of its own, not all of a head dim together"
    )
    what.add_argument(
        "--arch", type=int, choices=ARCHITECTURES, help="whose rows to tune (default: the GPU's)"
    )
    what.add_argument(
        "--mma-passes",
        type=int,
        default=1,
        metavar="N",
        help="repeat each mma (3 or 5): an emulated GPU with a slower tensor pipe",
    )
    what.add_argument(
        "--device", type=int, default=0, metavar="N", help="the CUDA device that runs candidates"
    )
    how = parser.add_argument_group("how to search")
    how.add_argument("--strategy", choices=search.STRATEGIES, default="evolve")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument(
        "--copy", action="append", default=[], choices=space.COPIES, help="only rows that copy so"
    )
    how.add_argument(
        "--smem", type=int, default=99, metavar="KIB", help="shared memory of a block at most (99: all GPUs)"
    )
    how.add_argument(
        "--minutes", type=float, metavar="M", help="time budget (default 30, or none with --candidates)"
    )
    how.add_argument("--candidates", type=int, metavar="N", help="stop after so many")
    how.add_argument(
        "--round", type=int, metavar="N", help="candidates per problem set that are built together"
    )
    how.add_argument("--per-file", type=int, default=2, metavar="N", help="kernels per .cu file (default 2)")
    how.add_argument(
        "--jobs", type=int, metavar="N", help="parallel nvcc jobs (default: what cores and memory allow)"
    )
    how.add_argument(
        "--define",
        "-D",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a CMake variable of the builds",
    )


def add_file_options(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    files.add_argument(
        "--work", type=Path, default=WORK, metavar="DIR", help="scratch builds (default build/tune)"
    )
    files.add_argument(
        "--leaderboard",
        type=Path,
        metavar="FILE",
        help="default: <work>/leaderboard-sm<arch>[-passes<N>].json",
    )
    files.add_argument(
        "--manifest", type=Path, default=manifest.MANIFEST, metavar="FILE", help=argparse.SUPPRESS
    )
    other = parser.add_argument_group("instead of searching").add_mutually_exclusive_group()
    other.add_argument(
        "--dry-run", action="store_true", help="print the candidates of the first round as manifest lines"
    )
    other.add_argument("--report", action="store_true", help="print the leaderboard")
    other.add_argument(
        "--accept", action="store_true", help="print what the accepted lines change in the manifest"
    )
    parser.add_argument("--all", action="store_true", help="with --report: every candidate")
    parser.add_argument("--write", action="store_true", help="with --accept: change the manifest")
    parser.add_argument(
        "--replace", action="store_true", help="with --accept: take out the rows that were beaten"
    )


# ---- from options to what the search works with ------------------------------------------------------------


def default_arch(device: int) -> tuple[str, int]:
    """(name, architecture of its rows) of the GPU. Raises UsageError when it can't run our kernels."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "a search needs a GPU, and torch finds none: --dry-run, --report and --accept work without"
        )
    if device >= torch.cuda.device_count():
        raise UsageError(f"there is no CUDA device {device}: torch sees {torch.cuda.device_count()}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise UsageError(f"{torch.cuda.get_device_name(device)} is older than compute capability 8.9")
    own = 120 if major == 12 else 10 * major + minor
    return torch.cuda.get_device_name(device), own if own in ARCHITECTURES else 89


def is_stand_in(arch: int, own: int, mma_passes: int) -> bool:
    """Whether other code runs in place of the rows' own. sm_89 rows don't need that: they have PTX."""
    return mma_passes != 1 or (arch != own and arch != 89)


def leaderboard_path(options: argparse.Namespace, arch: int | None) -> Path:
    if options.leaderboard:
        return Path(options.leaderboard)
    if arch is None:
        found = sorted(options.work.glob("leaderboard-*.json"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise UsageError(
                f"say which leaderboard with --leaderboard or --arch; {options.work} holds {names}"
            )
        return Path(found[0])
    passes = "" if options.mma_passes == 1 else f"-passes{options.mma_passes}"
    return Path(options.work) / f"leaderboard-sm{arch}{passes}.json"


def make_spaces(options: argparse.Namespace, targets: Sequence[Target], arch: int) -> dict[str, Space]:
    if options.smem > 99 and arch != 90:
        raise UsageError(
            f"a block has 99 KiB of shared memory on sm_{arch}: --smem {options.smem} is for sm_90"
        )
    copies = tuple(options.copy) or space.copies_of_the_kernels()
    limits = Limits.with_shared(options.smem)
    spaces: dict[int, Space] = {}
    for target in targets:
        spaces.setdefault(target.head_dim, Space(arch, target.head_dim, limits, copies))
    return {target.name: spaces[target.head_dim] for target in targets}


def find_incumbents(
    options: argparse.Namespace, targets: Sequence[Target], arch: int
) -> dict[str, list[Candidate]]:
    """The manifest's rows that could serve each target: those for aligned tensors."""
    lines = manifest.read(options.manifest)
    found = {}
    for target in targets:
        rows = manifest.candidates_of(lines, arch, target.head_dim, target.dtypes)
        found[target.name] = [row for row in rows if row.copy != "element"]
        if not found[target.name]:
            raise UsageError(
                f"the manifest has no sm_{arch} row of head dim {target.head_dim} to compare with"
            )
    return found


def describe(options: argparse.Namespace, gpu: str, arch: int, nvcc: str) -> dict[str, Any]:
    import torch

    return {
        "gpu": gpu,
        "arch": arch,
        "mma_passes": options.mma_passes,
        "shared_kib": options.smem,
        "kernel_hash": kernel_hash(),
        "nvcc": nvcc,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


# ---- the commands ------------------------------------------------------------------------------------------


def dry_run(options: argparse.Namespace) -> None:
    arch = options.arch or default_arch(options.device)[1]
    targets = make_targets(options.preset, options.shape, options.head_dim, options.apart)
    spaces, incumbents = make_spaces(options, targets, arch), find_incumbents(options, targets, arch)
    for target in targets:
        rows = incumbents[target.name]
        parents = [
            search.Scored(row, search.prior(row, target)) for row in rows if row in spaces[target.name]
        ]
        known = {row.key for row in rows}
        drawn = search.propose(
            spaces[target.name],
            known,
            parents,
            options.round or 8,
            options.strategy,
            f"{options.seed} {target.name} 1",
        )
        print(f"# {target.name}: {', '.join(case.name for case in target.cases)}")
        print(f"# {len(spaces[target.name].all)} candidates; {len(rows)} rows of the manifest to beat")
        for c in drawn:
            line = manifest.Line((arch,), ("f16", "bf16"), c).text()
            print(f"{line}  # {space.shared_bytes(c)} B shared, {space.registers(c)}+ registers")


def tune(options: argparse.Namespace) -> None:
    targets = make_targets(options.preset, options.shape, options.head_dim, options.apart)
    gpu, own = default_arch(options.device)
    arch = options.arch or own
    spaces, incumbents = make_spaces(options, targets, arch), find_incumbents(options, targets, arch)
    check_tools()
    work = Path(options.work).resolve() / f"sm{arch}-passes{options.mma_passes}"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another search is at work in {work}: give this one another --work") from None
        stand_in = is_stand_in(arch, own, options.mma_passes)
        defines = list(options.define)
        if stand_in and arch == 120 and options.mma_passes == 1:
            defines.append(f"CUTLASS_FMHA_SM120_PROXY={own}")
        common = {
            "per_file": options.per_file,
            "jobs": options.jobs,
            "limits": Limits.with_shared(options.smem),
        }
        builder = Builder(work, arch, mma_passes=options.mma_passes, defines=defines, **common)
        own_builder = Builder(work / "own", arch, defines=options.define, **common) if stand_in else None
        about = describe(options, gpu, arch, builder.nvcc_version())
        board = Leaderboard.resume(leaderboard_path(options, arch), about)
        minutes = options.minutes or (None if options.candidates else 30.0)
        limit_s = None if minutes is None else 60.0 * minutes
        per_round = options.round or max(4, (os.cpu_count() or 1) * options.per_file // len(targets))
        progress = Progress(limit_s, options.candidates)
        progress.say(
            f"tune: {', '.join(target.name for target in targets)}: sm_{arch} rows on {gpu}; {board.path}"
        )
        plan = Plan(options.strategy, options.seed, per_round, limit_s, options.candidates)
        evaluator = Evaluator(work, arch, options.device, options.mma_passes, limits=common["limits"])
        session = Session(board, targets, spaces, incumbents, builder, evaluator, plan, progress, own_builder)
        try:
            session.run()
        finally:
            progress.say("")
            print(report.render(board))
            print(report.NOTE)


def accept(options: argparse.Namespace, board: Leaderboard) -> int:
    """Print what the best accepted line of each target changes in the manifest, and write it if asked."""
    if board.about.get("kernel_hash") != (now := kernel_hash()):
        raise UsageError(
            f"{board.path} is about kernels {str(board.about.get('kernel_hash'))[:12]}, and src/ "
            f"outside the manifest has {now[:12]}: tune again"
        )
    arch = int(board.about["arch"])
    text = options.manifest.read_text()
    lines = manifest.parse(text)
    patches: dict[Candidate, manifest.Patch] = {}
    for target in board.targets:
        best = board.best(target)[:1]
        for entry in best:
            c = entry.candidate
            if c in manifest.candidates_of(lines, arch, c.head_dim, ["float16", "bfloat16"]):
                continue
            beaten: tuple[Candidate, ...] = ()
            if options.replace:
                times = entry.sightings[-1].incumbents_us.values()
                beaten = tuple(dict.fromkeys(Candidate.of_key(min(us, key=lambda k: us[k])) for us in times))
            known = patches.get(c)
            patches[c] = manifest.Patch(
                arch, ("f16", "bf16"), c, (known.instead_of if known else ()) + beaten
            )
    if not patches:
        print("no accepted line that the manifest does not have")
        return 0
    patched = manifest.patch(text, list(patches.values()))
    name = options.manifest.name
    sys.stdout.writelines(difflib.unified_diff(text.splitlines(True), patched.splitlines(True), name, name))
    if options.write:
        new = options.manifest.with_name(f".{name}.new")
        new.write_text(patched)
        os.replace(new, options.manifest)
        print(f"{len(patches)} lines written to {name}: run make test and make parity before committing it")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.report or options.accept:
            board = Leaderboard.load(leaderboard_path(options, options.arch))
            if options.accept:
                return accept(options, board)
            print(report.render(board, options.all))
            print(report.NOTE)
        elif options.dry_run:
            dry_run(options)
        else:
            tune(options)
    except KeyboardInterrupt:
        print("tune: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, BuildError, EvaluationError, LeaderboardError, search.Exhausted) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
