"""Builds the extension for each number of mma passes, through the project's own CMake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from building import BuildError, find_program, pybind11_directory

ROOT = Path(__file__).resolve().parents[2]
SPILLS = "spills.json"

#: Rows that compute long problems in bf16: neither the unaligned ones nor those whose warps share the keys.
ROWS = "_bf16_d[0-9]+_m[0-9]+n[0-9]+w[0-9]+(_[^e].*)?$"
#: What ptxas says of a kernel with CUTLASS_FMHA_PTXAS_VERBOSE.
_SPILLS = re.compile(
    r"Compiling entry function '(\w+)'(?:(?!Compiling entry).)*?(\d+) bytes spill stores", re.DOTALL
)


@dataclass(frozen=True)
class Build:
    """An emulation build: how often each mma pass runs, the extension and the library it is held against."""

    passes: int
    extension: Path
    reference: Path

    def spills(self) -> dict[str, int]:
        """Kernels that the repeated passes, or anything else, made spill, and how many bytes."""
        file = self.extension.parent / SPILLS
        found: dict[str, int] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return {name: count for name, count in found.items() if count}


@dataclass(frozen=True)
class Options:
    """What is built. ``rows``: a regular expression of CMake's. ``defines``: NAME=VALUE for its cache."""

    directory: Path
    rows: str = ROWS
    architectures: Sequence[int] = (89, 90, 120)
    manifest: Path | None = None
    defines: Sequence[str] = ()
    jobs: int = 1

    def configure(self, passes: int, jobs: int) -> list[str]:
        """The command that configures the build with ``passes`` passes in its directory."""
        cache = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CUDA_ARCHITECTURES": ";".join(map(str, self.architectures)),
            "CUTLASS_FMHA_EMULATION": "ON",
            "CUTLASS_FMHA_MMA_PASSES": str(passes),
            "CUTLASS_FMHA_ROWS": self.rows,
            "CUTLASS_FMHA_ROWS_PER_FILE": "1",  # a file per kernel keeps all cores busy to the end
            "CUTLASS_FMHA_MANIFEST": str(self.manifest.resolve()) if self.manifest else "",
            "CUTLASS_FMHA_JOBS": str(jobs),
            "CUTLASS_FMHA_PTXAS_VERBOSE": "ON",
            "Python_EXECUTABLE": sys.executable,
        }
        if pybind11 := pybind11_directory():
            cache["pybind11_DIR"] = pybind11
        given = [f"-D{name}={value}" for name, value in cache.items()]
        ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
        return [
            *(find_program("cmake"), "-S", str(ROOT), "-B", str(self.directory_of(passes)), *ninja),
            *given,
            *(f"-D{define}" for define in self.defines),
        ]

    def directory_of(self, passes: int) -> Path:
        return self.directory / f"x{passes}"


def build_all(passes: Iterable[int], options: Options) -> list[Build]:
    """Builds for every number of passes at once, sharing ``options.jobs`` among them. Raises BuildError."""
    wanted = list(passes)
    jobs = max(1, -(-options.jobs // len(wanted)))
    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(lambda n: build(n, options, jobs), wanted))


def build(passes: int, options: Options, jobs: int) -> Build:
    """Configures and builds; what the programs print goes to build.log in the directory."""
    directory = options.directory_of(passes)
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "build.log"
    commands = [
        options.configure(passes, jobs),
        [find_program("cmake"), "--build", str(directory), "-j", str(jobs)],
    ]
    with log.open("w", encoding="utf-8") as file:
        for command in commands:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
            if subprocess.run(command, stdout=file, stderr=file, env=environment, check=False).returncode:
                raise BuildError(f"the build with {passes} mma passes failed, {log} ends with:\n{tail(log)}")
    keep_spills(log, directory / SPILLS)
    return find(passes, directory)


def keep_spills(log: Path, file: Path) -> None:
    """Updates what is known of each kernel's spills with what this build compiled."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = log.read_text(encoding="utf-8", errors="replace")
    known.update({name: int(count) for name, count in _SPILLS.findall(text)})
    file.write_text(json.dumps(known, indent=1), encoding="utf-8")


def find(passes: int, directory: Path) -> Build:
    """The files of a finished build. Raises BuildError when they are not there."""
    extensions = sorted(directory.glob("_C.*.so"))
    reference = directory / "tools" / "emulation" / "libemulation_reference.so"
    if not extensions or not reference.is_file():
        raise BuildError(f"{directory} holds no emulation build: run without --no-build")
    return Build(passes, extensions[0], reference)


def tail(log: Path, lines: int = 25) -> str:
    """The errors of a log, or its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in text if "error" in line.lower() or "cutlass_fmha:" in line]
    return "\n".join((errors or text)[-lines:])
