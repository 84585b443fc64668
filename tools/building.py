"""How a tool builds the extension: the project's own CMake, with Ninja, in a directory of the tool's own."""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class BuildError(RuntimeError):
    """Nothing could be built: CMake or a compiler failed, or is not there."""


def find_program(name: str) -> str:
    """A build tool: the one beside this Python before one of the system, which may be too old. Raises BuildError."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        raise BuildError(f"{name} was not found: pip install -r requirements/build.txt")
    return found


def run(command: list[str], log: Path, timeout_s: float | None = None) -> tuple[int | None, str]:
    """Exit status and output, which ``log`` keeps. None: it took too long, and was killed.

    Whatever ends the wait, an interrupt too, ends all that the command has started.
    """
    status, known, dropped = None, threading.Event(), threading.Event()
    with log.open("w") as out, ThreadPoolExecutor(1) as thread:

        def start() -> subprocess.Popen[bytes] | None:
            known.wait()
            streams = {"stdout": out, "stderr": out, "stdin": subprocess.DEVNULL}
            return None if dropped.is_set() else subprocess.Popen(command, start_new_session=True, **streams)

        try:
            # An interrupt, which is the main thread's, would lose a process within Popen, and within submit() a thread
            # that starts one: it waits until it is known.
            starting = thread.submit(start)
            known.set()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = starting.result().wait(timeout_s)
        finally:
            if not known.is_set():
                dropped.set()
                known.set()
            elif starting.exception() is None and (process := starting.result()).poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return status, log.read_text(errors="replace")


def script(directory: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """What CMake says to a script of these lines, without a tree; its messages are on stderr."""
    file = directory / "script.cmake"
    file.write_text("\n".join(("cmake_minimum_required(VERSION 3.26)", *lines)))
    return subprocess.run([find_program("cmake"), "-P", str(file)], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Tree:
    """A build directory and what is built there. ``variables``: CMake's; a list is joined by semicolons."""

    directory: Path
    variables: Mapping[str, object] = field(default_factory=dict)
    jobs: int = len(os.sched_getaffinity(0))

    def configure(self) -> None:
        """Raises BuildError: with the project's own sentence where it has one."""
        defines = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_MAKE_PROGRAM": find_program("ninja"),
            "CUTLASS_FMHA_JOBS": self.jobs,
            "Python_EXECUTABLE": sys.executable,
            **{name: ";".join(map(str, x)) if isinstance(x, list | tuple) else x for name, x in self.variables.items()},
        }
        with contextlib.suppress(ImportError):  # CMake looks elsewhere by itself
            import pybind11

            defines.setdefault("pybind11_DIR", pybind11.get_cmake_dir())
        command = [find_program("cmake"), "-S", str(ROOT), "-B", str(self.directory), "-G", "Ninja"]
        command += [f"-D{name}={value}" for name, value in defines.items()]
        self.directory.mkdir(parents=True, exist_ok=True)
        status, output = run(command, self.directory / "configure.log")
        if status:
            sentence = re.search(r"cutlass_fmha: [^\n]*(?:\n  [^\n]*)*(?=\n(?:Call Stack|\s*\n))", output)
            raise BuildError(" ".join(sentence[0].split()) if sentence else f"CMake failed:\n{tail(output)}")
        if unused := re.search(r"Manually-specified variables were not used by the project:\s+(\S+)", output):
            raise BuildError(f"this version of the project has no CMake variable {unused[1]}")

    def compile(self, target: str) -> tuple[int | None, str]:
        """What ``run`` says of it. All that can be compiled is, whatever fails."""
        command = [find_program("cmake"), "--build", str(self.directory), "--target", target]
        return run([*command, "-j", str(self.jobs), "--", "-k", "0"], self.directory / "build.log")

    def build(self, target: str, pattern: str) -> Path:
        """Configures and builds a target, one process at a time. The file that is made; or BuildError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.configure()
            status, output = self.compile(target)
        if status:
            raise BuildError(f"the build failed, {self.directory / 'build.log'} ends with:\n{tail(output)}")
        return self.file(pattern)

    def file(self, pattern: str) -> Path:
        """What an earlier build made. Raises BuildError when it is not there."""
        found = sorted(self.directory.glob(pattern), key=lambda path: path.stat().st_mtime)
        if not found:
            raise BuildError(f"there is no {pattern} in {self.directory}: build it first")
        return found[-1]


def load_extension(path: Path) -> Any:
    """Make a scratch extension this process's ``cutlass_fmha._C``, beside this repository's Python and tests.

    The package is a bare one: importing it wants an installed distribution, of which nothing is needed here.
    """
    package = types.ModuleType("cutlass_fmha")
    package.__path__ = [str(ROOT / "cutlass_fmha")]
    spec = importlib.util.spec_from_file_location("cutlass_fmha._C", path)
    assert spec is not None and spec.loader is not None
    package._C = module = importlib.util.module_from_spec(spec)  # type: ignore[attr-defined]
    sys.modules.update({"cutlass_fmha": package, "cutlass_fmha._C": module})
    spec.loader.exec_module(module)
    sys.path[0:0] = [str(ROOT / "tools"), str(ROOT / "tests")]
    return module


def tail(output: str) -> str:
    """The errors of a program's output, or its last lines."""
    text = output.splitlines()
    errors = [line for line in text if "error" in line.lower() or "cutlass_fmha:" in line]
    return "\n".join((errors or text)[-25:])
