"""What tools/tune.py does: which candidates can be compiled and could be worth it; rounds of draw, build, gates and
timing; the leaderboard, which is whole at any moment, so that a search which is killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import resources
from building import BuildError, Tree, run, tail
from cubin import Kernel, read_kernels

from cutlass_fmha.bench.cases import Case
from cutlass_fmha.cli import output

# A rule of the space is a static_assert of src/forward/*.cuh, a limit of the hardware, or a bound on what registers
# hold: they only keep compile time from being spent on what cannot pass the machine code's checks.
KIB = 1024
TMA_BOX_ROWS = 256
FIRST_TMA = FIRST_OVERLAP = 90  # from this architecture on: TMA, and launches of few-query rows that overlap
# Values that are drawn from, in the order in which a mutation walks.
DOMAINS: dict[str, tuple[Any, ...]] = {
    "tile_m": (16, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512),
    "tile_n": (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
    "warps": (2, 4, 6, 8, 12, 16), "kv_warps": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4), "min_blocks": (1, 2, 3, 4, 6, 8),
    "q_in_registers": (False, True), "ping_pong": (False, True),
}  # fmt: skip
#: What sm_89 and sm_120 have, which every row keeps to, but for a block's shared memory.
SMALLEST_SHARED_KIB, REGISTERS_PER_SM, THREADS_PER_BLOCK = 99, 64 * KIB, 1024
RESERVED_SHARED = KIB  # what CUDA takes of the SM's for each block
#: Registers of a thread besides O, S, P and Q: addresses, row sums and references, an operand of K or V.
OTHER_REGISTERS = 16
MAX_REGISTERS = 255
#: Shared memory beside tiles: TilePosition, where each lane reads, WarpConstants; the barrier that Q reports to, and
#: Work; two mbarriers, which a stage of K and one of V have each.
POSITION_BYTES, LANE_BYTES, WARP_BYTES, TMA_WORK_BYTES, PIPELINE_BYTES = 12, 32 * 8, 8, 8 + 28, 2 * 8


@dataclass(frozen=True, order=True)
class Candidate:
    """A kernel but for architecture and dtype: the manifest's columns, which src/config.h describes."""

    head_dim: int
    tile_m: int
    tile_n: int
    warps: int
    kv_warps: int
    stages: int
    min_blocks: int
    q_in_registers: bool
    ping_pong: bool
    copy: str

    @classmethod
    def of(cls, row: Any) -> Candidate:
        return cls(**{field.name: getattr(row, field.name) for field in fields(cls)})

    @property
    def rows_per_warp(self) -> int:
        return self.tile_m * self.kv_warps // self.warps

    @property
    def key(self) -> str:
        """The columns as a line of the manifest has them: ``64 256 64 8 1 2 1 true true cp_async_16``."""
        return " ".join(str(value).lower() for value in astuple(self))

    @property
    def tag(self) -> str:
        """A short name that is good in a symbol, for builds that hold many candidates."""
        return "t" + hashlib.sha256(self.key.encode()).hexdigest()[:10]

    def overlaps(self, arch: int) -> bool:
        """Whether its launches do: the manifest's last column, dependent_launch."""
        return self.kv_warps > 1 and arch >= FIRST_OVERLAP

    def line(self, arch: int, dtypes: str = "f16;bf16") -> str:
        return f'fmha_forward("{arch}" "{dtypes}" {self.key}{" true" if self.overlaps(arch) else ""})'


def shared_bytes(c: Candidate) -> int:
    """Dynamic shared memory of a block: SharedLayout, TmaLayout, KeyPartLayout or FewQueryTmaLayout."""
    q, tile = 2 * c.tile_m * c.head_dim, 2 * c.tile_n * c.head_dim
    if c.kv_warps > 1 and c.copy == "tma":
        outputs = 4 * c.kv_warps * c.tile_m * (c.head_dim + 8)
        tiles = q + 2 * c.kv_warps * c.stages * tile
        maxima_and_sums = 8 * c.kv_warps * c.tile_m
        return max(outputs, tiles) + maxima_and_sums + 2 * c.kv_warps * c.stages * PIPELINE_BYTES + 8
    if c.kv_warps > 1:
        return c.kv_warps * c.tile_m * (4 * c.head_dim + 8)
    rest = TMA_WORK_BYTES if c.copy == "tma" else POSITION_BYTES
    held = q + 2 * c.stages * (tile + PIPELINE_BYTES) + rest + 4 * c.tile_m
    return held if c.copy == "tma" else (held + 7) // 8 * 8 + LANE_BYTES + c.warps * WARP_BYTES


def registers(c: Candidate) -> int:
    """Registers that a thread holds at the worst moment of the main loop at least, OTHER_REGISTERS apart."""
    rows, dim = c.rows_per_warp, c.head_dim
    output, scores = rows * dim // 32, rows * c.tile_n // 32
    probabilities = scores // 2
    q = rows * dim // 64 if c.q_in_registers else rows // 16 * 4
    if c.kv_warps == 1:
        return output + scores + probabilities + (q if c.q_in_registers else 0)
    if c.copy == "tma":
        return output + q + scores + probabilities
    kv = c.tile_n * dim // 64  # a tile of K, and one of V: the operands are loaded whole
    if c.stages > 1:
        return output + q + scores + probabilities + 2 * kv
    return output + q + max(kv + scores, scores + probabilities, probabilities + kv)


def fits(c: Candidate, arch: int, shared_kib: int = SMALLEST_SHARED_KIB) -> bool:
    """Whether the kernels can be made of it and its blocks are within limits; ``shared_kib``: of a block."""
    tma, threads = c.copy == "tma", 32 * c.warps
    if c.head_dim % 32 or c.tile_n % 16 or c.warps % c.kv_warps or c.tile_m % (16 * (c.warps // c.kv_warps)):
        return False
    if c.kv_warps == 1:
        # One half of the warps brings K and the other V. TileLoader's: a pass of the threads must keep their
        # swizzle pattern; of 8 or 4 chunks of 16 bytes in a row of a panel.
        chunks = 8 if c.head_dim % 64 == 0 else 4
        passes = ((c.tile_m, threads // chunks), (c.tile_n, threads // 2 // chunks))
        whole = all(step >= 8 and step % 8 == 0 and tile % step == 0 for tile, step in passes)
        can_copy = max(c.tile_m, c.tile_n) <= TMA_BOX_ROWS if tma else c.copy != "ldg_16" and whole
        if c.warps % 2 or not can_copy or (c.ping_pong and c.warps not in (2, 4, 8)):  # turns of pairs
            return False
        if c.ping_pong and tma and c.head_dim >= 96 and c.tile_n < 32:  # which are passed on before the last two n16
            return False
    else:
        ahead = c.stages <= 2 or tma  # loads into registers are at most one block ahead
        if c.copy not in ("ldg_16", "tma") or c.rows_per_warp > 32 or c.ping_pong or not ahead:
            return False
    shared = shared_bytes(c)
    most = REGISTERS_PER_SM // (threads * c.min_blocks) // 8 * 8  # they are given out in eights
    return (
        (arch >= FIRST_TMA or not tma)
        and threads <= THREADS_PER_BLOCK
        and shared <= shared_kib * KIB
        and c.min_blocks * (shared + RESERVED_SHARED) <= (shared_kib + 1) * KIB
        and registers(c) + OTHER_REGISTERS <= min(MAX_REGISTERS, most)
    )


PARENTS = 8  # the best so many
TRIES = 500  # for each that is asked for: a child that can't be compiled, or is known, is thrown away

Scored = tuple[float, Candidate]  # one that ran, behind its speed relative to the incumbents (1.05: 5 % faster)


def propose(allowed: Callable[[Candidate], bool], best: Sequence[Scored], count: int, seed: str) -> list[Candidate]:
    """``count`` candidates that are ``allowed``, or what is found of them: mutations of the best, alike for a seed."""
    rng = random.Random(seed)
    parents = [candidate for _, candidate in sorted(best, reverse=True)[:PARENTS]]
    chosen: list[Candidate] = []
    for _ in range(TRIES * count):
        child = mutate(parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))], rng)
        if child not in chosen and allowed(child):
            chosen.append(child)
            parents.append(child)  # a step further, behind what has been timed
        if len(chosen) == count:
            break
    return chosen


def mutate(candidate: Candidate, rng: random.Random) -> Candidate:
    """One to three columns changed, or all: a flag turned, a number moved one step, or anywhere."""
    for name in rng.sample(list(DOMAINS), rng.choice((1, 1, 2, 3, len(DOMAINS)))):
        domain, at = DOMAINS[name], DOMAINS[name].index(getattr(candidate, name))
        others = [*domain[:at], *domain[at + 1 :]]
        near = [*domain[max(0, at - 1) : at], *domain[at + 1 : at + 2]]
        candidate = replace(candidate, **{name: rng.choice(near if rng.random() < 0.75 else others)})
    # Loads into registers go with warps that share the keys, cp.async with those that don't, TMA with both.
    by_thread = "ldg_16" if candidate.kv_warps > 1 else "cp_async_16"
    if candidate.copy not in (by_thread, "tma") or rng.random() < 0.2:
        candidate = replace(candidate, copy=rng.choice((by_thread, "tma")))
    return candidate


GAIN = 1.03  # a candidate must be this much faster than the incumbents, as a geometric mean
WORST = 0.99  # and on no case slower than this
SIGHTINGS = 2  # in so many timing runs, each in a process of its own
KIND = "cutlass_fmha tuning leaderboard 7"
ROWS = 12  # candidates of a target that are listed: the fastest
HEAD = ("fate", "candidate", "gain", "worst case", "seen", "times (us): candidate/incumbent")
JUDGE = Path(__file__).with_name("judge.py")
HANG_S = 900.0  # what takes a candidate's process longer will never end
LOOKS, CONFIRMING_LOOKS = 1, 5  # at the times of a case's rows: at first, and for acceptance
Wanted = Mapping[Candidate, tuple[str, ...]]  # candidates and the dtypes (float16, bfloat16) that each is compiled for
SHORT = {"float16": "f16", "bfloat16": "bf16"}  # the package's names, and the manifest's
_ROW_NAME = re.compile(r"fwd_sm\d+_(f16|bf16)_\w+_(t[0-9a-f]{10})")
_FAILED = re.compile(r"^FAILED: .*?generated/\w+?_(t[0-9a-f]{10})\w*\.cu\.o")


@dataclass
class Built:
    """An extension; (fate, reason) of what must not run."""

    extension: Path
    dropped: dict[Candidate, tuple[str, str]] = field(default_factory=dict)


def scratch(wanted: Wanted, arch: int) -> str:
    """A manifest whose rows' names, and files, end in their candidate's tag: see cmake/Instances.cmake."""
    text = ""
    for candidate, dtypes in sorted(wanted.items()):
        text += "".join(f'set(FMHA_{what}_SUFFIX "_{candidate.tag}")\n' for what in ("NAME", "GROUP"))
        text += candidate.line(arch, ";".join(SHORT[dtype] for dtype in dtypes)) + "\n"
    return text


def judge_resources(kernels: Iterable[Kernel], wanted: Wanted, built: Built) -> None:
    """Adds what tools/resources.py has against each candidate's kernels; nothing of shared memory, of which the space
    may allow more than sm_89 has. One without a kernel of a dtype is dropped, too."""
    named = {match.groups(): kernel for kernel in kernels if (match := _ROW_NAME.fullmatch(kernel.name))}
    for c, dtypes in wanted.items():
        words = []
        for dtype in dtypes:
            if kernel := named.get((SHORT[dtype], c.tag)):
                config = {"family": "plain", "name": SHORT[dtype], "dtype": dtype, "mma": "m16n8k16", "smem_bytes": 0}
                words += resources.complaints(kernel, SimpleNamespace(**vars(c), **config))
            else:
                words.append(f"the extension has no {SHORT[dtype]} kernel of it")
        if words:
            built.dropped[c] = ("resources", "; ".join(words))


def failures(output: str) -> dict[str, str]:
    """Ninja's output -> tag of each candidate that did not compile, and its first error."""
    found: dict[str, str] = {}
    for part in re.split(r"^(?=FAILED: |\[\d+/\d+\]|ninja: )", output, flags=re.MULTILINE):
        if match := _FAILED.match(part):
            lines = [x.strip() for x in part.splitlines()[1:] if x.strip() and "-gencode" not in x]
            errors = [line for line in lines if re.search(r"\berror\b|\bfatal\b", line)]
            first = (errors or lines[-1:] or ["nvcc failed without a word"])[0]
            found.setdefault(match[1], re.sub(r"(?:/[\w.+-]+)+/", "", first)[:300])
    return found


@dataclass
class Builder:
    """Builds extensions for one architecture in ``directory``, which it owns. variables: more of CMake's."""

    directory: Path
    arch: int
    variables: Mapping[str, object]
    jobs: int = Tree.jobs

    def build(self, wanted: Wanted, incumbents: Wanted) -> Built:
        manifest = self.directory / "manifest.cmake"
        own = {"CUTLASS_FMHA_MANIFEST": manifest, "CMAKE_CUDA_ARCHITECTURES": self.arch}
        tree = Tree(self.directory / "tree", {**own, **self.variables}, self.jobs)
        self.directory.mkdir(parents=True, exist_ok=True)
        broken: dict[Candidate, str] = {}
        while True:
            left = {c: dtypes for c, dtypes in {**incumbents, **wanted}.items() if c not in broken}
            manifest.write_text(scratch(left, self.arch))
            tree.configure()
            status, output = tree.compile("_C")
            if status == 0:
                break
            words = failures(output)
            new = {c: words[c.tag] for c in left if c.tag in words}
            if not new:
                raise BuildError(f"the extension was not built:\n{tail(output)}")
            if row := next((c for c in new if c in incumbents), None):
                raise BuildError(f"a row of src/rows.cmake does not compile ({row.key}): {new[row]}")
            broken |= new
        built = Built(tree.file("_C*.so"), {c: ("compile", words) for c, words in broken.items()})
        judge_resources(read_kernels(built.extension), {c: x for c, x in wanted.items() if c not in broken}, built)
        return built


@dataclass
class Sighting:
    """One timing run of a candidate: microseconds per case, its own, and the incumbents' by their keys. ValueError when
    a case is missing on either side, or a time is not a positive number."""

    us: dict[str, float]
    incumbents_us: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        us, others = self.us, self.incumbents_us
        times = [*us.values(), *(x for rows in others.values() for x in rows.values())]
        whole = us and us.keys() == others.keys() and all(others.values())
        if not whole or not all(0.0 < x < math.inf for x in times):
            raise ValueError(f"times {us} can't be compared with {others}")
        speeds = [min(others[case].values()) / time for case, time in us.items()]
        self.geomean, self.worst = statistics.geometric_mean(speeds), min(speeds)

    @property
    def is_gain(self) -> bool:
        return self.geomean >= GAIN and self.worst >= WORST


@dataclass
class Entry:
    """A candidate of one target; ``fate``: the gate that it didn't pass (docs/tuning.md), "accepted", or "promising",
    a gain seen once, which is not final."""

    target: str
    candidate: Candidate
    fate: str = ""
    reason: str = ""
    sightings: list[Sighting] = field(default_factory=list)

    @property
    def least(self) -> Sighting:
        return min(self.sightings, key=lambda sighting: sighting.geomean)

    def see(self, sighting: Sighting) -> None:
        """Decide by one more timing run: a gain is believed once it was seen ``SIGHTINGS`` times in a row."""
        self.sightings.append(sighting)
        if not sighting.is_gain:
            self.fate = "slower" if len(self.sightings) == 1 else "unconfirmed"
        else:
            self.fate = "accepted" if len(self.sightings) >= SIGHTINGS else "promising"
        self.reason = f"{sighting.geomean:.3f}x the incumbent's speed ({GAIN:.2f}x is asked for), "
        self.reason += f"worst case {sighting.worst:.3f}x ({WORST:.2f}x)"

    def row(self) -> tuple[str, ...]:
        seen = self.least
        times = [f"{us:.1f}/{min(seen.incumbents_us[case].values()):.1f}" for case, us in seen.us.items()]
        figures = f"{seen.geomean:.3f}x", f"{seen.worst:.3f}x", str(len(self.sightings))
        return self.fate, self.candidate.key, *figures, " ".join(times)


@dataclass
class Leaderboard:
    """``about``: what it holds for; ``targets``: the names of each one's cases."""

    path: Path
    about: dict[str, Any]
    targets: dict[str, list[str]] = field(default_factory=dict)
    rounds: int = 0
    entries: list[Entry] = field(default_factory=list)

    def of(self, target: str, *fates: str) -> list[Entry]:
        return [e for e in self.entries if e.target == target and (not fates or e.fate in fates)]

    def fates(self) -> str:
        return ", ".join(f"{number} {fate}" for fate, number in Counter(e.fate for e in self.entries).most_common())

    def best(self, target: str, *fates: str) -> list[Entry]:
        """A target's entries that ran: accepted ones first, then the fastest."""
        ran = [entry for entry in self.of(target, *fates) if entry.sightings]
        return sorted(ran, key=lambda entry: (entry.fate != "accepted", -entry.least.geomean, entry.candidate))

    def content(self) -> dict[str, Any]:
        return {"kind": KIND, **asdict(self), "path": None}

    def save(self) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        output.write_text(output.to_json(self.content()), new)
        os.replace(new, self.path)

    @classmethod
    def load(cls, path: Path) -> Leaderboard:
        """Raises ValueError, with one sentence, unless the file is a leaderboard of this version."""
        try:
            content = json.loads(path.read_text())
            if content.pop("kind") != KIND:
                raise ValueError("of another kind or version")
            for raw in (entries := content.pop("entries")):
                raw["candidate"] = Candidate(**raw["candidate"])
                raw["sightings"] = [Sighting(**sighting) for sighting in raw["sightings"]]
            return cls(**{**content, "path": path, "entries": [Entry(**raw) for raw in entries]})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} can't be read as a leaderboard of this version: {error}") from error

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any], targets: dict[str, list[str]]) -> Leaderboard:
        """The one at ``path`` to go on with, or a new one. ValueError: it is about something else."""
        board = cls.load(path) if path.exists() else cls(path, about)
        known = {**targets, **board.about, **board.targets}
        for name, value in {**about, **targets}.items():
            if (other := known.get(name)) != value:
                asked = f"this search about {value}: give another --leaderboard"
                raise ValueError(f"{path} is about {name} {other}, {asked}")
        board.targets |= targets
        return board

    def render(self) -> list[str | output.Table]:
        parts: list[str | output.Table] = [
            ", ".join(f"{name} {str(value)[:20]}" for name, value in self.about.items()),
            f"{len(self.entries)} candidates in {self.rounds} rounds: {self.fates()}",
        ]
        for target, cases in self.targets.items():
            rows = [entry.row() for entry in self.best(target)]
            head = f"\n{target}: {', '.join(cases)}; {len(rows[:ROWS])} of {len(rows)} that ran"
            parts += [head, output.Table(HEAD, rows[:ROWS], left=2)]
            parts += [best.candidate.line(int(self.about["arch"])) for best in self.best(target, "accepted")[:1]]
        return parts


@dataclass(frozen=True)
class Target:
    """Cases of one head dim whose times count together, the rows to beat, and what a block may share."""

    name: str
    cases: tuple[Case, ...]
    arch: int
    shared_kib: int
    incumbents: tuple[Candidate, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({case.dtype for case in self.cases}))

    def allows(self, candidate: Candidate) -> bool:
        return candidate not in self.incumbents and fits(candidate, self.arch, self.shared_kib)


Judge = Callable[[Path, Target, Candidate, tuple[str, ...], int], "Sighting | tuple[str, str]"]
"""Of an extension a target's candidate, in these dtypes, at so many looks -> a timing run, or (fate, reason)."""


def judge_in_a_process(
    directory: Path, command: Sequence[str] = (sys.executable, str(JUDGE)), hang_s: float = HANG_S
) -> Judge:
    """Judges each candidate in a process of its own, so that one which dies or hangs takes no other along. BuildError
    when it fails by no fault of a candidate. ``directory``: for what it is told, tells and logs."""

    def judge(extension: Path, target: Target, candidate: Candidate, dtypes: tuple[str, ...], looks: int):
        keys = {row.tag: row.key for row in target.incumbents}
        job = {"extension": str(extension), "tag": candidate.tag, "dtypes": dtypes, "looks": looks}
        job |= {"incumbents": list(keys), "cases": [asdict(case) for case in target.cases]}
        files = directory / "job.json", directory / "result.json"
        output.write_text(json.dumps(job), files[0])
        files[1].unlink(missing_ok=True)
        status, told = run([*command, *map(str, files)], directory / "judge.log", hang_s)
        if status is None:
            return "crash", f"no answer within {hang_s:.0f} s"
        if status < 0:
            return "crash", f"ended by signal {-status} ({signal.Signals(-status).name})"
        if status or not files[1].exists():
            last = ["it said nothing", *filter(None, map(str.strip, told.splitlines()))][-1]
            raise BuildError(f"the judge failed: {last} (its log: {directory / 'judge.log'})")
        found = json.loads(files[1].read_text())
        if (us := found.pop("us", None)) is None:
            return next(iter(found.items()))
        own = {case: times.pop(candidate.tag) for case, times in us.items()}
        return Sighting(own, {case: {keys[tag]: t for tag, t in times.items()} for case, times in us.items()})

    return judge


@dataclass
class Search:
    """per_round: candidates drawn per target and round. limit_s: seconds after which none is drawn any more; what
    gained once is confirmed all the same."""

    board: Leaderboard
    targets: Sequence[Target]
    builder: Builder
    judge: Judge
    seed: int = 0
    per_round: int = 8
    limit_s: float = math.inf
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.monotonic

    def run(self) -> None:
        begin, going = self.clock(), True
        while going:
            self.board.rounds += 1
            going = False
            for target in self.targets:
                confirm = self.board.of(target.name, "promising")
                late = self.clock() - begin >= self.limit_s
                drawn = [] if late else self.draw(target)
                if confirm or drawn:
                    self.say(f"round {self.board.rounds}, {target.name}: {len(drawn)} | {self.board.fates()}")
                    self.round(target, confirm, drawn)
                    going = True

    def draw(self, target: Target) -> list[Entry]:
        """Children of what ran, and of the manifest's rows by the latest times that there are of them."""
        entries = self.board.of(target.name)
        ran = [entry for entry in entries if entry.sightings]
        latest = ran[-1].sightings[-1].incumbents_us.values() if ran else ()
        parents: list[Scored] = [(entry.least.geomean, entry.candidate) for entry in ran]
        for row in target.incumbents:
            standing = [min(times.values()) / times[row.key] for times in latest]
            parents.append((statistics.geometric_mean(standing or [1.0]), row))
        known = {entry.candidate for entry in entries}
        seed = f"{self.seed} {target.name} {self.board.rounds}"
        drawn = propose(lambda c: c not in known and target.allows(c), parents, self.per_round, seed)
        return [Entry(target.name, candidate) for candidate in drawn]

    def round(self, target: Target, confirm: Sequence[Entry], drawn: Sequence[Entry]) -> None:
        wanted = {entry.candidate: target.dtypes for entry in drawn}
        wanted |= {entry.candidate: tuple(sorted(SHORT)) for entry in confirm}
        built = self.builder.build(wanted, dict.fromkeys(target.incumbents, target.dtypes))
        for entry in (*confirm, *drawn):
            c, looks = entry.candidate, CONFIRMING_LOOKS if entry.fate else LOOKS
            result = built.dropped.get(c) or self.judge(built.extension, target, c, wanted[c], looks)
            if not entry.fate:
                self.board.entries.append(entry)
            if isinstance(result, Sighting):
                entry.see(result)
            else:
                entry.fate, entry.reason = result
            self.board.save()
            if entry.fate in ("promising", "accepted"):
                self.say(f"{entry.fate}: {target.name} {c.key}: {entry.reason}")
