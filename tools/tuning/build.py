"""Compiles candidates into a scratch extension, through the project's own CMake.

Each candidate has a file of its own, so that what nvcc refuses holds up nothing else, and one build directory
serves a whole search: what was compiled before stays as it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import resources
from building import BuildError, Tree, tail
from cubin import Kernel, read_kernels

from .space import Candidate, Limits

Wanted = Mapping[Candidate, tuple[str, ...]]
"""Candidates and the dtypes (float16, bfloat16) that each is compiled for."""
SHORT = {"float16": "f16", "bfloat16": "bf16"}  # the package's names, and the manifest's
_ROW_NAME = re.compile(r"fwd_sm\d+_(f16|bf16)_\w+_(t[0-9a-f]{10})")
_FAILED = re.compile(r"^FAILED: .*?generated/\w+?_(t[0-9a-f]{10})\w*\.cu\.o")


@dataclass
class Built:
    """An extension, why candidates are not in it, and what the compiler made of the rest."""

    extension: Path
    failed: dict[Candidate, str] = field(default_factory=dict)
    complaints: dict[Candidate, list[str]] = field(default_factory=dict)
    registers: dict[Candidate, int] = field(default_factory=dict)


def scratch(wanted: Wanted, arch: int) -> str:
    """A manifest whose rows' names, and files, end in their candidate's tag: see cmake/Instances.cmake."""
    text = "# Written by tools/tune.py for one build. The package's kernels are in src/rows.cmake.\n"
    for candidate, dtypes in sorted(wanted.items()):
        suffix = f"_{candidate.tag}"
        text += f'set(FMHA_NAME_SUFFIX "{suffix}")\nset(FMHA_GROUP_SUFFIX "{suffix}")\n'
        text += candidate.line(arch, ";".join(SHORT[dtype] for dtype in dtypes)) + "\n"
    return text


def judge_resources(
    kernels: Iterable[Kernel], wanted: Wanted, limits: Limits
) -> tuple[dict[Candidate, list[str]], dict[Candidate, int]]:
    """What tools/resources.py has against each candidate's kernels, and the registers of its largest one.

    Shared memory is the space's business, which may allow more than sm_89 has. A candidate without a kernel
    for one of its dtypes is complained about, too.
    """
    missing = {(c.tag, SHORT[dtype]): (c, dtype) for c, dtypes in wanted.items() for dtype in dtypes}
    found: dict[Candidate, list[str]] = {candidate: [] for candidate in wanted}
    registers: dict[Candidate, int] = {}
    for kernel in kernels:
        match = _ROW_NAME.fullmatch(kernel.name)
        if not match or (match[2], match[1]) not in missing:
            continue
        c, dtype = missing.pop((match[2], match[1]))
        config = {"family": "plain", "dtype": dtype, "mma": "m16n8k16", "smem_bytes": 0}
        found[c] += resources.complaints(kernel, SimpleNamespace(**vars(c), name=match[1], **config))
        registers[c] = max(registers.get(c, 0), kernel.registers)
        if kernel.shared > limits.shared_per_block:
            found[c].append(f"{kernel.shared} bytes of static shared memory")
    for c, dtype in missing.values():
        found[c].append(f"the extension has no {SHORT[dtype]} kernel of it")
    return found, registers


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


class Builder:
    """Builds extensions for one architecture in ``directory``, which it owns.

    variables: more of CMake's. timeout_s: what one build may take; what is not compiled by then fails.
    """

    def __init__(
        self, directory: Path, arch: int, limits: Limits, variables: Mapping[str, object],
        jobs: int | None = None,
    ) -> None:  # fmt: skip
        self.directory, self.arch, self.limits, self.timeout_s = directory, arch, limits, 1800.0
        self.manifest = directory / "manifest.cmake"
        own = {"CUTLASS_FMHA_MANIFEST": self.manifest, "CMAKE_CUDA_ARCHITECTURES": arch}
        self.tree = Tree(directory / "tree", {**own, **variables}, **({"jobs": jobs} if jobs else {}))

    def nvcc_version(self) -> str:
        """The version of the nvcc that builds. Configures an empty tree when there is none yet."""
        config = self.tree.directory / "generated" / "build_config.h"
        if not config.exists():
            self._configure({})
        match = re.search(r'NVCC_VERSION "([^"]*)"', config.read_text())
        return match[1] if match else ""

    def build(self, wanted: Wanted, incumbents: Wanted) -> Built:
        """One extension of all that compiles. Raises BuildError."""
        left, failed, begin = {**incumbents, **wanted}, {}, time.monotonic()
        while True:
            self._configure(left)
            status, output = self.tree.compile("_C", max(1.0, self.timeout_s - (time.monotonic() - begin)))
            if status == 0:
                break
            words = failures(output)
            if status is None:  # Ninja stops before it comes to a file only when it runs out of time
                late = f"not compiled within {self.timeout_s:.0f} s"
                words = {c.tag: late for c in left if not self._is_compiled(c)} | words
                begin = time.monotonic()  # for the rest, which is there, and the linker
            broken = {c: words[c.tag] for c in left if c.tag in words}
            if not broken:
                raise BuildError(f"the extension was not built:\n{tail(output)}")
            if row := next((c for c in broken if c in incumbents), None):
                raise BuildError(f"a row of src/rows.cmake does not compile ({row.key}): {broken[row]}")
            failed |= broken
            left = {c: dtypes for c, dtypes in left.items() if c not in broken}
        extension = self.tree.file("_C*.so")
        kept = {c: dtypes for c, dtypes in wanted.items() if c not in failed}
        return Built(extension, failed, *judge_resources(read_kernels(extension), kept, self.limits))

    def _configure(self, wanted: Wanted) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.manifest.write_text(scratch(wanted, self.arch))
        self.tree.configure()

    def _is_compiled(self, candidate: Candidate) -> bool:
        objects = self.tree.directory / "CMakeFiles" / f"fmha_sm{self.arch}.dir" / "generated"
        sources = (self.tree.directory / "generated").glob(f"*_{candidate.tag}*.cu")
        compiled = [objects / f"{source.name}.o" for source in sources]
        return bool(compiled) and all(o.exists() and o.stat().st_size > 0 for o in compiled)
