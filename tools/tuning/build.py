"""Compiles candidates into a scratch extension, through the project's own CMake.

One build directory serves a whole search: the files of kernels that were compiled before stay as they are.
Candidates that nvcc refuses are found and left out; what refuses an extension of the others is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import resources
from building import BuildError, find_program, pybind11_directory
from cubin import Kernel, find_tool, read_kernels

from .candidate import DTYPES, SHORT, Candidate
from .manifest import Line, scratch
from .space import Limits

ROOT = Path(__file__).resolve().parents[2]
Wanted = Mapping[Candidate, tuple[str, ...]]
"""Candidates and the dtypes (float16, bfloat16) that each is compiled for."""
_ROW_NAME = re.compile(r"fwd_sm\d+_(f16|bf16)_\w+_(t[0-9a-f]{10})")
_FAILED = re.compile(r"^FAILED: .*?generated/(\w+)\.cu\.o")
_DEFINE = re.compile(r"[A-Za-z_]\w*=.*")


class Stopped(Exception):
    """A build was stopped from outside."""


@dataclass(frozen=True)
class Chunk:
    """The lines of one generated file (or a few, where they are for several head dims or dtypes)."""

    lines: tuple[Line, ...]
    incumbents: bool = False

    @property
    def suffix(self) -> str:
        keys = ";".join(line.text() for line in self.lines)
        return f"_{'i' if self.incumbents else 'c'}{hashlib.sha256(keys.encode()).hexdigest()[:10]}"


@dataclass
class Built:
    """An extension, the candidates that are not in it and why, and what the compiler made of the rest."""

    extension: Path
    failed: dict[Candidate, str] = field(default_factory=dict)
    complaints: dict[Candidate, list[str]] = field(default_factory=dict)
    registers: dict[Candidate, int] = field(default_factory=dict)
    seconds: float = 0.0


def chunks_of(arch: int, wanted: Wanted, per_file: int, incumbents: bool = False) -> list[Chunk]:
    """Lines for one architecture, at most ``per_file`` kernels to a file, of one head dim each."""
    chunks: list[Chunk] = []
    lines: list[Line] = []
    for candidate in sorted(wanted):
        line = Line((arch,), tuple(SHORT[dtype] for dtype in wanted[candidate]), candidate)
        kernels = sum(len(other.dtypes) for other in [*lines, line])
        if lines and (kernels > per_file or lines[0].candidate.head_dim != candidate.head_dim):
            chunks.append(Chunk(tuple(lines), incumbents))
            lines = []
        lines.append(line)
    return [*chunks, Chunk(tuple(lines), incumbents)] if lines else chunks


def judge_resources(
    kernels: Iterable[Kernel], wanted: Wanted, limits: Limits
) -> tuple[dict[Candidate, list[str]], dict[Candidate, int]]:
    """What tools/resources.py has against each candidate's kernels, and the registers of its largest one.

    Shared memory is the space's business, which may allow more than sm_89 has. A candidate without a kernel
    for one of its dtypes is complained about, too.
    """
    by_tag = {candidate.tag: candidate for candidate in wanted}
    found: dict[Candidate, list[str]] = {candidate: [] for candidate in wanted}
    registers: dict[Candidate, int] = {}
    missing = {(candidate, dtype) for candidate, dtypes in wanted.items() for dtype in dtypes}
    for kernel in kernels:
        match = _ROW_NAME.fullmatch(kernel.name)
        if not match or match[2] not in by_tag:
            continue
        candidate = by_tag[match[2]]
        row = SimpleNamespace(
            name=match[1],
            warps=candidate.warps,
            min_blocks=candidate.min_blocks,
            copy=candidate.copy,
            kv_warps=candidate.kv_warps,
            smem_bytes=0,
        )
        found[candidate] += resources.complaints(kernel, row)
        registers[candidate] = max(registers.get(candidate, 0), kernel.registers)
        missing.discard((candidate, DTYPES[match[1]]))
        if kernel.shared > limits.shared_per_block:
            found[candidate].append(f"{kernel.shared} bytes of static shared memory")
    for candidate, dtype in sorted(missing):
        found[candidate].append(f"the extension has no {dtype} kernel of it")
    return found, registers


def prune(errors: str) -> str:
    """The first error of a compiler's output, without directories; its last line when there is none."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    first = next(
        (line for line in lines if re.search(r"\berror\b|\bfatal\b", line)), lines[-1] if lines else ""
    )
    return re.sub(r"(?:/[\w.+-]+)+/", "", first)[:300] or "nvcc failed without a word"


class Builder:
    """Builds extensions for one architecture in ``directory``, which it owns.

    defines: more CMake variables, as ``NAME=VALUE``. timeout_s: what one build may take; candidates that are
    not compiled by then are tried again alone, and fail when that takes as long.
    """

    def __init__(
        self,
        directory: Path,
        arch: int,
        *,
        mma_passes: int = 1,
        per_file: int = 2,
        jobs: int | None = None,
        defines: Iterable[str] = (),
        limits: Limits | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.directory = directory
        self.arch = arch
        self.per_file = per_file
        self.limits = limits or Limits()
        self.timeout_s = timeout_s
        self.manifest = directory / "manifest.cmake"
        self.tree = directory / "tree"
        self.stopped = threading.Event()
        self._defines = [
            f"CUTLASS_FMHA_MANIFEST={self.manifest}",
            f"CMAKE_CUDA_ARCHITECTURES={arch}",
            f"CUTLASS_FMHA_ROWS_PER_FILE={per_file}",
            f"CUTLASS_FMHA_JOBS={jobs or ''}",
            "CMAKE_BUILD_TYPE=Release",
            f"Python_EXECUTABLE={sys.executable}",
        ]
        if mma_passes != 1:
            self._defines += ["CUTLASS_FMHA_EMULATION=ON", f"CUTLASS_FMHA_MMA_PASSES={mma_passes}"]
        for define in defines:
            if not _DEFINE.fullmatch(define):
                raise BuildError(f"a CMake variable is given as NAME=VALUE, got {define!r}")
            self._defines.append(define)

    def nvcc_version(self) -> str:
        """The version of the nvcc that builds, after configuring an empty tree when there is none yet."""
        if not (self.tree / "CMakeCache.txt").exists():
            self._write_manifest([])
            self._configure()
        text = (self.tree / "generated" / "build_config.h").read_text()
        match = re.search(r'NVCC_VERSION "([^"]*)"', text)
        return match[1] if match else ""

    def build(self, name: str, wanted: Wanted, incumbents: Wanted | None = None) -> Built:
        """Compile into ``<directory>/<name>/``. Raises BuildError, and Stopped after ``stop()``."""
        begin = time.monotonic()
        chunks = chunks_of(self.arch, incumbents or {}, self.per_file, incumbents=True)
        chunks += chunks_of(self.arch, wanted, self.per_file)
        failed: dict[Candidate, str] = {}
        while True:
            self._write_manifest(chunks)
            self._configure()
            broken = self._compile(chunks)
            if not broken:
                break
            chunks = self._without(chunks, broken, failed)
        output = self.directory / name
        output.mkdir(parents=True, exist_ok=True)
        module = self._module()
        extension = Path(shutil.copy2(module, output / module.name))
        left = {candidate: dtypes for candidate, dtypes in wanted.items() if candidate not in failed}
        complaints, registers = judge_resources(read_kernels(extension), left, self.limits)
        return Built(extension, failed, complaints, registers, time.monotonic() - begin)

    def stop(self) -> None:
        """Ends a build that runs in another thread, and all later ones."""
        self.stopped.set()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _write_manifest(self, chunks: Iterable[Chunk]) -> None:
        lines = [(line, f"_{line.candidate.tag}", chunk.suffix) for chunk in chunks for line in chunk.lines]
        self.directory.mkdir(parents=True, exist_ok=True)
        self.manifest.write_text(scratch(lines))

    def _configure(self) -> None:
        command = [find_program("cmake"), "-S", str(ROOT), "-B", str(self.tree), "-G", "Ninja"]
        if pybind11 := pybind11_directory():
            command.append(f"-Dpybind11_DIR={pybind11}")
        status, output = self._run([*command, *(f"-D{define}" for define in self._defines)])
        if status:
            sentence = re.search(r"cutlass_fmha: [^\n]*(?:\n  [^\n]*)*(?=\n(?:Call Stack|\s*\n))", output)
            raise BuildError(
                " ".join(sentence[0].split()) if sentence else f"CMake failed:\n{output[-2000:]}"
            )
        if unused := re.search(r"Manually-specified variables were not used by the project:\s+(\S+)", output):
            raise BuildError(f"this version of the project has no CMake variable {unused[1]}")

    def _compile(self, chunks: list[Chunk]) -> dict[Chunk, str]:
        """Build the module. Chunks that did not compile, and why; none when it is built."""
        command = [find_program("cmake"), "--build", str(self.tree), "--target", "_C", "--", "-k", "0"]
        status, output = self._run(command, self.timeout_s)
        if status == 0:
            return {}
        by_unit = _failures(output)
        broken = {}
        for chunk in chunks:
            # Ninja stops before it comes to a file only when it runs out of time.
            words = [text for unit, text in by_unit.items() if chunk.suffix in unit]
            if words:
                broken[chunk] = prune(words[0])
            elif status is None and not self._is_compiled(chunk):
                broken[chunk] = f"not compiled within {self.timeout_s:.0f} s"
        if not broken:
            raise BuildError(f"the extension was not built:\n{output[-2000:]}")
        return broken

    def _without(
        self, chunks: list[Chunk], broken: Mapping[Chunk, str], failed: dict[Candidate, str]
    ) -> list[Chunk]:
        """The next attempt: broken files are cut into lines, and a line that is alone in its file is out."""
        kept = []
        for chunk in chunks:
            if chunk not in broken:
                kept.append(chunk)
            elif len(chunk.lines) > 1:
                kept += [Chunk((line,), chunk.incumbents) for line in chunk.lines]
            elif chunk.incumbents:
                label = chunk.lines[0].candidate.label
                raise BuildError(f"a row of src/templates.cmake does not compile ({label}): {broken[chunk]}")
            else:
                failed[chunk.lines[0].candidate] = broken[chunk]
        return kept

    def _is_compiled(self, chunk: Chunk) -> bool:
        sources = list((self.tree / "generated").glob(f"*{chunk.suffix}*.cu"))
        objects = [
            self.tree / "CMakeFiles" / f"fmha_sm{self.arch}.dir" / "generated" / f"{s.name}.o"
            for s in sources
        ]
        return all(o.exists() and (o.stat().st_size > 0) for o in objects)

    def _module(self) -> Path:
        modules = sorted(self.tree.glob("_C*.so"), key=lambda path: path.stat().st_mtime)
        if not modules:
            raise BuildError(f"the build left no extension in {self.tree}")
        return modules[-1]

    def _run(self, command: list[str], timeout_s: float | None = None) -> tuple[int | None, str]:
        """Exit status (None: it took too long and was killed, with all it had started) and all output."""
        if self.stopped.is_set():
            raise Stopped
        log = self.directory / "build.log"
        begin = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
            try:
                while True:
                    try:
                        status: int | None = process.wait(timeout=0.2)
                        break
                    except subprocess.TimeoutExpired:
                        if self.stopped.is_set():
                            raise Stopped from None
                        if timeout_s is not None and time.monotonic() - begin > timeout_s:
                            status = None
                            break
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return status, log.read_text(errors="replace")


def _failures(output: str) -> dict[str, str]:
    """Ninja's output -> generated file (without .cu) that failed, and what its compiler said."""
    found: dict[str, str] = {}
    current = None
    for line in output.splitlines():
        if match := _FAILED.match(line):
            current = match[1]
            found[current] = ""
        elif re.match(r"^\[\d+/\d+\]|^FAILED: |^ninja: ", line):
            current = None
        elif current is not None and "-gencode" not in line:  # the command line is no message
            found[current] += line + "\n"
    return found


def check_tools() -> None:
    """Raise BuildError or cubin.ToolMissingError when a program that every batch needs is not there."""
    for program in ("cmake", "ninja"):
        find_program(program)
    for program in ("cuobjdump", "nvdisasm"):
        find_tool(program)
