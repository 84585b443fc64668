"""Reads the machine code of the compiled extension: without a GPU, the proof that kernels were built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600


class CannotInspect(RuntimeError):
    """The machine code can't be read; the message says what is missing."""


class WrongCode(RuntimeError):
    """The machine code is not what the build should have made; the message says which kernel and what."""


@dataclass(frozen=True)
class Kernel:
    """One kernel as ptxas left it. ``mma`` counts tensor-core instructions; spills go to the stack."""

    name: str
    registers: int
    stack_bytes: int
    mma: int


def find_cuobjdump() -> Path:
    """cuobjdump of the PyPI package nvidia-cuda-cuobjdump, or else the one on PATH. Raises CannotInspect."""
    packages = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    shipped = sorted(tool for root in packages for tool in root.glob("nvidia/*/bin/cuobjdump"))
    on_path = shutil.which("cuobjdump")
    if shipped:
        return shipped[-1]
    if on_path:
        return Path(on_path)
    raise CannotInspect("there is no cuobjdump to read them with: pip install nvidia-cuda-cuobjdump.")


def inspect(extension: Path, arch: int) -> list[Kernel]:
    """Every kernel that ``extension`` holds machine code of for ``arch`` (89 for sm_89), sorted by name."""
    tool = find_cuobjdump()
    # sm_120 rows may be built for sm_120a or sm_120f: cuobjdump filters by the exact name, so the sections
    # are listed.
    listed = re.findall(r"\.(sm_\d+[a-z]?)\.cubin", _run([tool, "--list-elf", extension]))
    targets = sorted({target for target in listed if re.fullmatch(rf"sm_{arch}[a-z]?", target)})
    if not targets:
        held = ", ".join(sorted(set(listed))) or "none"
        raise CannotInspect(f"{extension.name} holds no machine code for sm_{arch} (it holds {held}).")
    kernels: list[Kernel] = []
    for target in targets:
        usage = parse_usage(_run([tool, "--dump-resource-usage", "--gpu-architecture", target, extension]))
        mma = parse_mma(_run([tool, "--dump-sass", "--gpu-architecture", target, extension]))
        kernels += [
            Kernel(name, registers, stack, mma.get(name, 0)) for name, (registers, stack) in sorted(usage.items())
        ]
    return kernels


def check(kernels: list[Kernel], rows: set[str], others: Set[str] = frozenset()) -> None:
    """Raise WrongCode unless each row has a kernel with tensor-core instructions and without a stack.

    ``others``: kernels that need no tensor cores.
    """
    expected = rows | others
    # A row's name is in its kernel's symbol, which may be mangled; the longest match wins: one name can start
    # another.
    found = {max((row for row in expected if row in kernel.name), key=len, default=kernel.name) for kernel in kernels}
    if found != expected:
        raise WrongCode(f"rows and kernels differ: {', '.join(sorted(found ^ expected))}.")
    for kernel in kernels:
        if kernel.stack_bytes:
            raise WrongCode(f"{kernel.name} uses {kernel.stack_bytes} bytes of stack: it spills registers.")
        if not kernel.mma and kernel.name not in others:
            raise WrongCode(f"{kernel.name} has no tensor-core instruction.")


def parse_usage(text: str) -> dict[str, tuple[int, int]]:
    """Registers and stack bytes by kernel, from cuobjdump --dump-resource-usage."""
    found = re.findall(r"Function (\S+?):\s*\n\s*REG:(\d+) STACK:(\d+)", text)
    return {name: (int(registers), int(stack)) for name, registers, stack in found}


def parse_mma(text: str) -> dict[str, int]:
    """Tensor-core instructions (HMMA for fp16 and bf16) by kernel, from cuobjdump --dump-sass."""
    counts: dict[str, int] = {}
    name = None
    for line in text.splitlines():
        if "Function :" in line:
            name = line.split("Function :")[1].strip()
            counts[name] = 0
        elif name is not None and " HMMA." in line:
            counts[name] += 1
    return counts


def _run(command: list[str | Path]) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
        raise CannotInspect(f"{Path(command[0]).name} failed: {reason[-1]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInspect(f"{Path(command[0]).name} did not run: {error}") from error
    return done.stdout
