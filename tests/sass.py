"""The machine code inside a built extension, as NVIDIA's own tools print it, and what is wrong with a
kernel's.

    python tests/sass.py            one line per kernel of the installed build, and its complaints
    python tests/sass.py FILE       of another extension, object file or fatbin

Needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm); runs no kernel and needs no
GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

REGISTERS_PER_SM = 64 * 1024
# What sm_89 and sm_120 have (CUDA Programming Guide, technical specifications), and so every row stays
# within.
SHARED_PER_BLOCK = 99 * 1024
SHARED_PER_SM = 100 * 1024
WARPS_PER_SM = 48
RESERVED_SHARED = 1024  # what CUDA keeps per block from sm_80 on; counted into SHARED of sm_90 and later code


class ToolMissingError(RuntimeError):
    """A program of the CUDA toolkit is not installed."""


class Row(Protocol):
    """The part of ``_C.Template`` that a kernel's resources are held against."""

    @property
    def name(self) -> str: ...
    @property
    def warps(self) -> int: ...
    @property
    def min_blocks(self) -> int: ...
    @property
    def copy(self) -> str: ...
    @property
    def smem_bytes(self) -> int: ...


@dataclass
class Kernel:
    """One kernel in one architecture's code. Sizes in bytes, registers per thread."""

    name: str
    arch: int
    registers: int = 0
    stack: int = 0
    local: int = 0
    shared: int = 0  # static, without what CUDA reserves
    opcodes: Counter[str] = field(default_factory=Counter)  # "HMMA.16816.F32.BF16" -> how many

    def count(self, *opcodes: str) -> int:
        """Instructions whose opcode is one of these, modifiers aside: ``count("LDL", "STL")``."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.split(".")[0] in opcodes)


def find_tool(name: str) -> Path:
    """A program of the CUDA toolkit: from PyPI's packages, or else on PATH."""
    site = {Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")} | {Path(p) for p in sys.path}
    for directory in sorted(site):
        for candidate in sorted(directory.glob(f"nvidia/cu1[0-9]/bin/{name}"), reverse=True):
            return candidate
    if found := shutil.which(name):
        return Path(found)
    raise ToolMissingError(f"{name} was not found: pip install -r requirements/inspect.txt")


def run_tool(name: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a CUDA tool. cuobjdump calls nvdisasm and looks for it on PATH."""
    program = find_tool(name)
    path = os.pathsep.join([str(find_tool("nvdisasm").parent), os.environ.get("PATH", "")])
    command = [str(program), *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "PATH": path}, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


# ---- parsing -----------------------------------------------------------------------------------------------

_ARCH = re.compile(r"^arch = sm_(\d+)|^\s*code for sm_(\d+)")
_FUNCTION = re.compile(r"^\s*Function\s*:?\s+([\w$.]+?):?\s*$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def _sections(text: str) -> Iterator[tuple[int, str, str]]:
    """(architecture, function, line) of each line below a "Function" line."""
    arch, function = 0, ""
    for line in text.splitlines():
        if match := _ARCH.match(line):
            arch, function = int(match[1] or match[2]), ""
        elif match := _FUNCTION.match(line):
            function = match[1]
        elif function:
            yield arch, function, line


def parse(usage: str, sass: str) -> list[Kernel]:
    """Kernels from what ``cuobjdump -res-usage`` and ``-sass`` print, which must be about the same ones."""
    kernels: dict[tuple[int, str], Kernel] = {}
    for arch, name, line in _sections(usage):
        if match := _USAGE.search(line):
            registers, stack, shared, local = map(int, match.groups())
            shared = max(0, shared - RESERVED_SHARED) if arch >= 90 else shared
            kernels[arch, name] = Kernel(name, arch, registers, stack, local, shared)
    for arch, name, line in _sections(sass):
        if match := _INSTRUCTION.match(line):
            if (arch, name) not in kernels:
                raise ValueError(f"cuobjdump -res-usage says nothing about {name} of sm_{arch}")
            kernels[arch, name].opcodes[match[1]] += 1
    for kernel in kernels.values():
        if not kernel.opcodes:
            raise ValueError(f"cuobjdump -sass prints no instruction of {kernel.name} of sm_{kernel.arch}")
    return list(kernels.values())


def read_kernels(file: Path) -> list[Kernel]:
    """Every kernel in an extension, object file or fatbin, in each architecture there is code for."""
    return parse(run_tool("cuobjdump", "-res-usage", file), run_tool("cuobjdump", "-sass", file))


def read_ptx(file: Path) -> dict[str, set[int]]:
    """Kernel name -> the architectures whose PTX for it is embedded."""
    found: dict[str, set[int]] = {}
    arch = 0
    for line in run_tool("cuobjdump", "-ptx", file).splitlines():
        if match := re.match(r"\.target\s+sm_(\d+)", line):
            arch = int(match[1])
        elif match := re.match(r"(?:\.visible\s+)?\.entry\s+([\w$]+)", line):
            found.setdefault(match[1], set()).add(arch)
    return found


def read_compilers(file: Path) -> dict[str, str]:
    """Embedded cubin -> version of the ptxas or nvlink that made it ("13.0.88"), from the note it left."""
    versions = {}
    with tempfile.TemporaryDirectory() as directory:
        run_tool("cuobjdump", "-xelf", "all", file.resolve(), cwd=Path(directory))
        for cubin in sorted(Path(directory).iterdir()):
            found = set(re.findall(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin.read_bytes()))
            versions[cubin.name] = b", ".join(sorted(found)).decode() or "unknown"
    return versions


# ---- judging -----------------------------------------------------------------------------------------------


def complaints(kernel: Kernel, row: Row) -> list[str]:
    """What is wrong with a kernel, one sentence each; empty when nothing is."""
    registers = (
        -(-kernel.registers // 8) * 8 * row.warps * 32 * row.min_blocks
    )  # given out in eights per thread
    shared = kernel.shared + row.smem_bytes
    checks = [
        (
            kernel.count("LDL", "STL") == 0,
            f"{kernel.count('LDL', 'STL')} loads and stores of local memory (spills)",
        ),
        (kernel.stack == 0, f"a stack of {kernel.stack} bytes"),
        (kernel.local == 0, f"{kernel.local} bytes of local memory"),
        (
            kernel.count("BPT") == 0,
            f"{kernel.count('BPT')} BPT.TRAP: an instruction this architecture does not have",
        ),
        (kernel.count("HMMA") > 0, "no tensor-core instruction (HMMA)"),
        (
            row.copy == "element" or kernel.count("LDGSTS") > 0,
            "no cp.async (LDGSTS) in a row that copies with it",
        ),
        (kernel.registers <= 255, f"{kernel.registers} registers"),
        (
            registers <= REGISTERS_PER_SM,
            f"{kernel.registers} registers x {row.warps * 32} threads x {row.min_blocks} blocks exceed "
            f"{REGISTERS_PER_SM}",
        ),
        (shared <= SHARED_PER_BLOCK, f"{shared} bytes of shared memory, and a block has {SHARED_PER_BLOCK}"),
        (
            row.min_blocks * (shared + RESERVED_SHARED) <= SHARED_PER_SM,
            f"{row.min_blocks} blocks of {shared} bytes of shared memory do not fit an SM's {SHARED_PER_SM}",
        ),
        (
            row.min_blocks * row.warps <= WARPS_PER_SM,
            f"{row.min_blocks} blocks of {row.warps} warps exceed {WARPS_PER_SM}",
        ),
    ]
    return [f"{row.name} (sm_{kernel.arch}): {sentence}" for fine, sentence in checks if not fine]


def main() -> int:
    from cutlass_fmha import _C

    assert _C.__file__ is not None
    rows = {row.name: row for row in _C.templates()}
    bad = 0
    for kernel in read_kernels(Path(sys.argv[1] if len(sys.argv) > 1 else _C.__file__)):
        dynamic = rows[kernel.name].smem_bytes if kernel.name in rows else 0
        print(
            f"{kernel.name:40} sm_{kernel.arch:<4} {kernel.registers:3} registers "
            f"{kernel.shared + dynamic:6} B shared {kernel.count('LDL', 'STL'):4} spills "
            f"{kernel.count('HMMA'):5} of {kernel.opcodes.total():6} HMMA"
        )
        for sentence in complaints(kernel, rows[kernel.name]) if kernel.name in rows else []:
            bad += 1
            print(f"    {sentence}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
