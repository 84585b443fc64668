"""Builds the extension with the simulator in place of the CUDA runtime, through the project's own CMake."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from building import BuildError, find_program, pybind11_directory

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "build" / "simulator"


@dataclass(frozen=True)
class Options:
    """What is built. ``rows``: a regular expression of CMake's that a row's name has to match somewhere."""

    rows: str
    directory: Path = DIRECTORY
    architectures: Sequence[int] = (89, 90, 120)
    manifest: Path | None = None
    jobs: int = len(os.sched_getaffinity(0))

    def configure(self) -> list[str]:
        """The command that configures the build."""
        cache = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CUDA_ARCHITECTURES": ";".join(map(str, self.architectures)),
            "CUTLASS_FMHA_SIMULATOR": "ON",
            "CUTLASS_FMHA_ROWS": self.rows,
            "CUTLASS_FMHA_MANIFEST": str(self.manifest.resolve()) if self.manifest else "",
            "CUTLASS_FMHA_JOBS": str(self.jobs),
            "Python_EXECUTABLE": sys.executable,
        }
        if pybind11 := pybind11_directory():
            cache["pybind11_DIR"] = pybind11
        ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
        given = [f"-D{name}={value}" for name, value in cache.items()]
        return [find_program("cmake"), "-S", str(ROOT), "-B", str(self.directory), *ninja, *given]


def build(options: Options, target: str) -> None:
    """Configures and builds a target; what the programs print goes to build.log. Raises BuildError."""
    options.directory.mkdir(parents=True, exist_ok=True)
    log = options.directory / "build.log"
    build_command = [find_program("cmake"), "--build", str(options.directory), "--target", target]
    with (options.directory / "lock").open("w") as lock, log.open("w", encoding="utf-8") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time in a directory
        for command in (options.configure(), [*build_command, "-j", str(options.jobs)]):
            if subprocess.run(command, stdout=file, stderr=file, check=False).returncode:
                raise BuildError(f"the simulator build failed, {log} ends with:\n{tail(log)}")


def build_extension(options: Options) -> Path:
    """The extension ``_C`` with the rows of ``options``. Raises BuildError."""
    build(options, "_C")
    return _only(options.directory, "_C.*.so")


def build_library(options: Options) -> Path:
    """The simulator alone, as a library for programs that bring their PTX with them. Raises BuildError."""
    build(options, "simulator_ptx")
    return _only(options.directory, "libsimulator_ptx.so")


def _only(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern))
    if not found:
        raise BuildError(f"there is no {pattern} in {directory} after the build")
    return found[0]


def tail(log: Path, lines: int = 25) -> str:
    """The errors of a log, or its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in text if "error" in line.lower() or "cutlass_fmha:" in line]
    return "\n".join((errors or text)[-lines:])
