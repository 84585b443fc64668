"""The machine code inside a built extension, object file, fatbin or cubin, as cuobjdump and nvdisasm print it
(PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm). Needs no GPU."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

RESERVED_SHARED = 1024  # what CUDA keeps per block from sm_80 on; counted into SHARED of sm_90 and later code


class ToolMissingError(RuntimeError):
    """A program of the CUDA toolkit is not installed."""


class Instruction(NamedTuple):
    """One line of SASS: ``@!P0 BRA 0x2a0`` is guard ``!P0``, opcode ``BRA``, operands ``0x2a0``."""

    address: int
    guard: str  # "" without a predicate
    opcode: str  # with its modifiers
    operands: str

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


@dataclass
class Kernel:
    """One kernel in one architecture's code. Sizes in bytes, registers per thread."""

    name: str
    arch: int
    registers: int = 0
    stack: int = 0
    local: int = 0
    shared: int = 0  # static, without what CUDA reserves
    code: list[Instruction] = field(default_factory=list)
    opcodes: Counter[str] = field(default_factory=Counter)  # "HMMA.16816.F32.BF16" -> how many

    def count(self, *opcodes: str) -> int:
        """Instructions whose opcode is one of these, modifiers aside: ``count("LDL", "STL")``."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.partition(".")[0] in opcodes)


def find_tool(name: str) -> Path:
    """A program of the CUDA toolkit: from PyPI's packages, or else on PATH."""
    site = {Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")} | {Path(p) for p in sys.path}
    candidates = [max(found) for at in sorted(site) if (found := list(at.glob(f"nvidia/cu1[0-9]/bin/{name}")))]
    if found := candidates[0] if candidates else shutil.which(name):
        return Path(found)
    raise ToolMissingError(f"{name} was not found: pip install -r requirements/inspect.txt")


def run_tool(name: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a CUDA tool. cuobjdump calls nvdisasm and looks for it on PATH."""
    path = os.pathsep.join([str(find_tool("nvdisasm").parent), os.environ.get("PATH", "")])
    command, environment = [str(find_tool(name)), *map(str, arguments)], os.environ | {"PATH": path}
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def read_kernels(file: Path) -> list[Kernel]:
    """Every kernel in an extension, object file, fatbin or cubin, in each architecture there is code for."""
    with _cubins(file) as cubins, ThreadPoolExecutor(os.cpu_count()) as pool:  # of one file, cuobjdump takes one core
        return [kernel for kernels in pool.map(_kernels, cubins or [file]) for kernel in kernels]


@contextmanager
def _cubins(file: Path) -> Iterator[list[Path]]:
    """Those in a file, in files of their own for as long as they are asked for."""
    with tempfile.TemporaryDirectory() as directory:
        run_tool("cuobjdump", "-xelf", "all", file.resolve(), cwd=Path(directory))
        yield sorted(Path(directory).iterdir(), key=lambda cubin: (len(cubin.name), cubin.name))


_FUNCTION = re.compile(r"^\s*Function\s*:?\s+([\w$.]+?):?\s*$")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;/]*(?:/[^*;][^;/]*)*)"
)


def _kernels(cubin: Path) -> list[Kernel]:
    """Of one architecture: what a cubin has."""
    sass = run_tool("cuobjdump", "-sass", cubin)
    kernels: dict[str, Kernel] = {}
    name = ""
    # Its head tells the architecture, which -res-usage doesn't of a bare cubin.
    arch = int(re.findall(r"code for sm_(\d+)", sass)[0])
    for line in f"{run_tool('cuobjdump', '-res-usage', cubin)}\n{sass}".splitlines():
        if match := _FUNCTION.match(line):
            name = match[1]
        elif match := _USAGE.search(line):
            registers, stack, shared, local = map(int, match.groups())
            shared = max(0, shared - RESERVED_SHARED) if arch >= 90 else shared
            kernels[name] = Kernel(name, arch, registers, stack, local, shared)
        elif match := _INSTRUCTION.match(line):
            address, guard, opcode, operands = match.groups()
            kernels[name].code.append(Instruction(int(address, 16), guard or "", opcode, operands.strip()))
            kernels[name].opcodes[opcode] += 1
    return list(kernels.values())


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
    note = rb"Cuda compilation tools, release [\d.]+, V([\d.]+)"
    with _cubins(file) as cubins:
        found = {cubin.name: sorted(set(re.findall(note, cubin.read_bytes()))) for cubin in cubins}
    return {name: b", ".join(versions).decode() or "unknown" for name, versions in found.items()}
