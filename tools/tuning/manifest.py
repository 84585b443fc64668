"""Reads src/templates.cmake, writes scratch manifests, and patches accepted lines into the real one.

Only what a manifest consists of is understood: comments, ``set(NAME values...)`` and ``fmha_forward(...)`` on
one line each; ``fmha_general(...)`` and ``fmha_fallback(...)``, whose rows are not searched for, are passed
over. Anything else is an error, so that no line is lost by being overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .candidate import DTYPES, Candidate

MANIFEST = Path(__file__).resolve().parents[2] / "src" / "templates.cmake"
PASSED_OVER = ("fmha_general", "fmha_fallback")
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*(?:#.*)?$")
_WORD = re.compile(r'"[^"]*"|[^\s"()]+')


class ManifestError(ValueError):
    """A manifest holds something that this file does not understand, or would after a patch."""


@dataclass(frozen=True)
class Line:
    """One line of a manifest: a kernel for each pair of architecture and dtype. ``number`` counts from 0."""

    archs: tuple[int, ...]
    dtypes: tuple[str, ...]  # as the manifest has them: f16, bf16
    candidate: Candidate
    number: int = -1

    def identities(self) -> set[tuple[int, str, str]]:
        """(architecture, dtype, what a name has of the columns) of each row: two equal ones are an error."""
        return {(arch, dtype, identity(self.candidate)) for arch in self.archs for dtype in self.dtypes}

    def text(self) -> str:
        """The line without alignment, as in a scratch manifest."""
        return f"fmha_forward({' '.join(_words(self.archs, self.dtypes, self.candidate))})"


def identity(candidate: Candidate) -> str:
    """What two rows of one architecture and dtype must not share: the columns that are in a row's name."""
    c = candidate
    # ldg_16 is what kv_warps mean where nothing is said, and cp_async_16 what one is.
    copy = "" if c.copy in ("cp_async_16", "ldg_16") else f"_{c.copy}"
    launch = "_pdl" if c.dependent_launch else ""
    return f"d{c.head_dim}_m{c.tile_m}n{c.tile_n}w{c.warps}k{c.kv_warps}{copy}{launch}"


def _words(archs: Sequence[int], dtypes: Sequence[str], candidate: Candidate) -> list[str]:
    return [f'"{";".join(map(str, archs))}"', f'"{";".join(dtypes)}"', *candidate.columns]


def parse(text: str) -> list[Line]:
    """The lines of a manifest, in order. Raises ManifestError for one that it can't read."""
    variables: dict[str, str] = {}
    lines = []
    for number, raw in enumerate(text.splitlines()):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        match = _CALL.match(raw)
        if not match or match[1] not in ("set", "fmha_forward", *PASSED_OVER):
            raise ManifestError(f"line {number + 1} is neither a comment, set(...) nor fmha_forward(...)")
        words = [_expand(word, variables, number) for word in _WORD.findall(match[2])]
        if match[1] == "set":
            variables[words[0]] = ";".join(words[1:])
        elif match[1] == "fmha_forward":
            lines.append(_line(words, number))
    return lines


def _expand(word: str, variables: dict[str, str], number: int) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise ManifestError(f"line {number + 1} uses ${{{match[1]}}}, which is not set above it")
        return variables[match[1]]

    return re.sub(r"\$\{(\w+)\}", value, word.strip('"'))


def _line(words: list[str], number: int) -> Line:
    try:
        archs = tuple(int(arch) for arch in words[0].split(";"))
        dtypes = tuple(words[1].split(";"))
        if unknown := set(dtypes) - set(DTYPES):
            raise ValueError(f"there is no dtype {min(unknown)!r}")
        return Line(archs, dtypes, Candidate.of_columns(words[2:]), number)
    except (ValueError, IndexError) as error:
        raise ManifestError(f"line {number + 1}: {error}") from error


def read(path: Path = MANIFEST) -> list[Line]:
    try:
        return parse(path.read_text())
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}") from error


def candidates_of(lines: Iterable[Line], arch: int, head_dim: int, dtypes: Iterable[str]) -> list[Candidate]:
    """The kernels that lines make for an architecture and head dim in all ``dtypes`` (float16, bfloat16)."""
    wanted = set(dtypes)
    found = [
        line.candidate
        for line in lines
        if arch in line.archs
        and line.candidate.head_dim == head_dim
        and wanted <= {DTYPES[dtype] for dtype in line.dtypes}
    ]
    return list(dict.fromkeys(found))


# ---- patching ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """A new line for one architecture, and rows of that architecture that make place for it."""

    arch: int
    dtypes: tuple[str, ...]
    candidate: Candidate
    instead_of: tuple[Candidate, ...] = ()


def patch(text: str, patches: Sequence[Patch]) -> str:
    """The manifest with the patches in it. Comments and all lines that no patch touches stay as they are.

    A row whose name the new line would repeat gives way to it, for the patch's architecture and dtypes only:
    its line keeps the other architectures. New lines stand after the last one of their head dim and kind.
    """
    for one in patches:
        text = _insert(_make_place(text, one), one)
    lines = parse(text)
    seen: set[tuple[int, str, str]] = set()
    for line in lines:
        if repeated := seen & line.identities():
            arch, dtype, name = min(repeated)
            raise ManifestError(f"line {line.number + 1} would make a second row sm_{arch} {dtype} {name}")
        seen |= line.identities()
    for one in patches:
        if one.candidate not in candidates_of(
            lines, one.arch, one.candidate.head_dim, [DTYPES[dtype] for dtype in one.dtypes]
        ):
            raise ManifestError(f"the accepted line was lost again by a later one: {one.candidate.key}")
    return text


def _make_place(text: str, one: Patch) -> str:
    """Takes the patch's architecture out of the lines it replaces."""
    new = Line((one.arch,), one.dtypes, one.candidate)
    raw = text.splitlines(keepends=True)
    for line in reversed(parse(text)):
        taken = line.identities() & new.identities()
        if line.candidate in one.instead_of:
            taken |= {(one.arch, dtype, identity(line.candidate)) for dtype in one.dtypes}
        if one.arch not in line.archs or not taken:
            continue
        if left := set(line.dtypes) - {dtype for _, dtype, _ in taken}:
            raise ManifestError(f"line {line.number + 1} makes {min(left)} rows too, which have no successor")
        others = tuple(arch for arch in line.archs if arch != one.arch)
        raw[line.number] = _with_archs(raw[line.number], others) if others else ""
    return "".join(raw)


def _with_archs(raw: str, archs: Sequence[int]) -> str:
    """A manifest line with other architectures, the columns after them where they were if there is room."""
    match = re.search(r'\(\s*("[^"]*"|\S+)(\s+)', raw)
    assert match is not None
    word = f'"{";".join(map(str, archs))}"'
    width = len(match[1]) + len(match[2])
    gap = " " * max(1, width - len(word))
    return raw[: match.start(1)] + word + gap + raw[match.end(2) :]


def _insert(text: str, one: Patch) -> str:
    lines = parse(text)
    if not lines:
        raise ManifestError("the manifest holds no line to put a new one beside")
    split = one.candidate.kv_warps > 1
    # Lines of the same head dim and kind; else of the kind; else any.
    like = [line for line in lines if (line.candidate.kv_warps > 1) == split] or lines
    same = [line for line in like if line.candidate.head_dim == one.candidate.head_dim]
    before = [line for line in like if line.candidate.head_dim < one.candidate.head_dim]
    after = (same or before or like)[-1]
    raw = text.splitlines(keepends=True)
    new = align(_words((one.arch,), one.dtypes, one.candidate), raw[after.number].rstrip("\n"))
    if not raw[after.number].endswith("\n"):
        raw[after.number] += "\n"
    raw.insert(after.number + 1, new + "\n")
    return "".join(raw)


def align(words: Sequence[str], reference: str) -> str:
    """``fmha_forward(words)`` in the columns of another line: numbers end where its do, words begin there."""
    begin = reference.index("(") + 1
    places = [(match.start() + begin, match.end() + begin) for match in _WORD.finditer(reference[begin:])]
    text = reference[:begin]
    for word, (left, right) in zip(words, places, strict=False):
        column = right - len(word) if word.isdigit() else left
        gap = column - len(text)
        text += " " * (gap if text.endswith("(") and gap >= 0 else max(1, gap)) + word
    return text + ")"


# ---- scratch manifests -------------------------------------------------------------------------------------


def scratch(lines: Iterable[tuple[Line, str, str]]) -> str:
    """A manifest of (line, suffix of its rows' names, of their file's name): see cmake/Instances.cmake."""
    text = "# Written by tools/tune.py for one build. The package's kernels are in src/templates.cmake.\n"
    for line, name, group in lines:
        text += f'set(FMHA_NAME_SUFFIX "{name}")\nset(FMHA_GROUP_SUFFIX "{group}")\n{line.text()}\n'
    return text
