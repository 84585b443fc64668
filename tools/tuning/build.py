"""Compiles candidates into a scratch extension, through the project's own CMake.

Each candidate has a file of its own, so that what nvcc refuses holds up nothing else, and one build directory
serves a whole search: what was compiled before stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import resources
from building import BuildError, Tree, tail
from cubin import Kernel, read_kernels

from .space import Candidate

Wanted = Mapping[Candidate, tuple[str, ...]]
"""Candidates and the dtypes (float16, bfloat16) that each is compiled for."""
SHORT = {"float16": "f16", "bfloat16": "bf16"}  # the package's names, and the manifest's
_ROW_NAME = re.compile(r"fwd_sm\d+_(f16|bf16)_\w+_(t[0-9a-f]{10})")
_FAILED = re.compile(r"^FAILED: .*?generated/\w+?_(t[0-9a-f]{10})\w*\.cu\.o")


@dataclass
class Built:
    """An extension; (fate, reason) of what must not run; registers of the largest kernel of what may."""

    extension: Path
    dropped: dict[Candidate, tuple[str, str]] = field(default_factory=dict)
    registers: dict[Candidate, int] = field(default_factory=dict)


def scratch(wanted: Wanted, arch: int) -> str:
    """A manifest whose rows' names, and files, end in their candidate's tag: see cmake/Instances.cmake."""
    text = ""
    for candidate, dtypes in sorted(wanted.items()):
        text += "".join(f'set(FMHA_{what}_SUFFIX "_{candidate.tag}")\n' for what in ("NAME", "GROUP"))
        text += candidate.line(arch, ";".join(SHORT[dtype] for dtype in dtypes)) + "\n"
    return text


def judge_resources(kernels: Iterable[Kernel], wanted: Wanted, built: Built) -> None:
    """Adds what tools/resources.py has against each candidate's kernels, and their registers.

    Shared memory is the space's business, which may allow more than sm_89 has. A candidate without a kernel
    for one of its dtypes is dropped, too.
    """
    named = {match.groups(): kernel for kernel in kernels if (match := _ROW_NAME.fullmatch(kernel.name))}
    for c, dtypes in wanted.items():
        words = []
        for dtype in dtypes:
            if kernel := named.get((SHORT[dtype], c.tag)):
                config = {"family": "plain", "name": SHORT[dtype], "dtype": dtype, "mma": "m16n8k16", "smem_bytes": 0}
                words += resources.complaints(kernel, SimpleNamespace(**vars(c), **config))
                built.registers[c] = max(built.registers.get(c, 0), kernel.registers)
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
        """One extension of all that compiles. Raises BuildError."""
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
