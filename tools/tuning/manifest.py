"""Reads src/templates.cmake and writes scratch manifests.

Only what a manifest consists of is understood: comments, ``set(NAME values...)`` and ``fmha_forward(...)`` on
one line each; ``fmha_scored(...)`` and ``fmha_wide(...)``, whose rows are not searched for, are passed
over. Anything else is an error, so that no line is lost by being overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .candidate import DTYPES, Candidate

MANIFEST = Path(__file__).resolve().parents[2] / "src" / "templates.cmake"
PASSED_OVER = ("fmha_scored", "fmha_wide")
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*(?:#.*)?$")
_WORD = re.compile(r'"[^"]*"|[^\s"()]+')


class ManifestError(ValueError):
    """A manifest holds something that this file does not understand."""


@dataclass(frozen=True)
class Line:
    """One line of a manifest: a kernel for each pair of architecture and dtype."""

    archs: tuple[int, ...]
    dtypes: tuple[str, ...]  # as the manifest has them: f16, bf16
    candidate: Candidate

    def text(self) -> str:
        archs, dtypes = ";".join(map(str, self.archs)), ";".join(self.dtypes)
        return f'fmha_forward("{archs}" "{dtypes}" {self.candidate.key})'


def identity(candidate: Candidate) -> str:
    """What two rows of one architecture and dtype must not share: the columns that are in a row's name."""
    c = candidate
    # ldg_16 is what kv_warps mean where nothing is said, and cp_async_16 what one is.
    copy = "" if c.copy in ("cp_async_16", "ldg_16") else f"_{c.copy}"
    launch = "_pdl" if c.dependent_launch else ""
    return f"d{c.head_dim}_m{c.tile_m}n{c.tile_n}w{c.warps}k{c.kv_warps}{copy}{launch}"


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
        return Line(archs, dtypes, Candidate.of_columns(words[2:]))
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


def replaced(lines: Iterable[Line], arch: int, candidate: Candidate) -> list[Candidate]:
    """The kernels of an architecture whose names a new line would repeat: it has to take their place."""
    found = [line.candidate for line in lines if arch in line.archs and line.candidate != candidate]
    return [c for c in dict.fromkeys(found) if identity(c) == identity(candidate)]


def scratch(lines: Iterable[tuple[Line, str]]) -> str:
    """A manifest of (line, suffix of its rows' names and of their file's): see cmake/Instances.cmake."""
    text = "# Written by tools/tune.py for one build. The package's kernels are in src/templates.cmake.\n"
    for line, suffix in lines:
        text += f'set(FMHA_NAME_SUFFIX "{suffix}")\nset(FMHA_GROUP_SUFFIX "{suffix}")\n{line.text()}\n'
    return text
