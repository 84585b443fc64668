"""What is wrong with a kernel's use of registers, memory and instructions, whatever GPU it is for.

python tools/resources.py            one line per kernel of the installed build, and its complaints
python tools/resources.py FILE       of another extension, object file or fatbin
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from cubin import RESERVED_SHARED, Kernel, read_kernels

REGISTERS_PER_SM = 64 * 1024
# What sm_89 and sm_120 have (CUDA Programming Guide, technical specifications), and so every row stays
# within.
SHARED_PER_BLOCK = 99 * 1024
SHARED_PER_SM = 100 * 1024
#: A line for all architectures with launch bounds that suit sm_90: elsewhere one of its blocks fits, and has
#: fewer registers than it could.
FEW_QUERIES = "_d128_m16n16w4k4_scored"
#: What sm_90 has, for its own scored rows and that one.
SHARED_PER_SM_90 = 228 * 1024
WARPS_PER_SM = 48
HELPER_THREADS_PER_SM = WARPS_PER_SM * 32 // 2  # bound by memory: half of the warps keep it busy


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


Check = tuple[bool, str]
"""Whether something is fine, and the sentence that says what is wrong when it isn't."""


def complaints(kernel: Kernel, row: Row) -> list[str]:
    """What is wrong with a row's kernel, one sentence each; empty when nothing is."""
    registers = (
        -(-kernel.registers // 8) * 8 * row.warps * 32 * row.min_blocks
    )  # given out in eights per thread
    shared = kernel.shared + row.smem_bytes
    for_sm_90 = row.name.endswith("_scored") and (kernel.arch == 90 or row.name.endswith(FEW_QUERIES))
    per_sm = SHARED_PER_SM_90 if for_sm_90 else SHARED_PER_SM
    checks = [
        *_of_every_kernel(kernel),
        (kernel.count("HMMA") > 0, "no tensor-core instruction (HMMA)"),
        (
            row.copy != "cp_async_16" or kernel.count("LDGSTS") > 0,
            "no cp.async (LDGSTS) in a row that copies with it",
        ),
        (
            row.copy != "tma"
            or (kernel.count("UTMALDG") > 0 and (row.kv_warps > 1 or kernel.count("UTMASTG") > 0)),
            "no TMA loads and stores (UTMALDG, UTMASTG) in a row that copies with them",
        ),
        (
            registers <= REGISTERS_PER_SM,
            f"{kernel.registers} registers x {row.warps * 32} threads x {row.min_blocks} blocks exceed "
            f"{REGISTERS_PER_SM}",
        ),
        (shared <= SHARED_PER_BLOCK, f"{shared} bytes of shared memory, and a block has {SHARED_PER_BLOCK}"),
        (
            row.min_blocks * (shared + RESERVED_SHARED) <= per_sm,
            f"{row.min_blocks} blocks of {shared} bytes of shared memory do not fit an SM's {per_sm}",
        ),
        (
            row.min_blocks * row.warps <= WARPS_PER_SM,
            f"{row.min_blocks} blocks of {row.warps} warps exceed {WARPS_PER_SM}",
        ),
    ]
    return [f"{row.name} (sm_{kernel.arch}): {sentence}" for fine, sentence in checks if not fine]


def support_complaints(kernel: Kernel, threads: int) -> list[str]:
    """The same of a kernel beside attention, in blocks of ``threads``: enough of them to hide latency."""
    registers = -(-kernel.registers // 8) * 8 * threads
    blocks = min(REGISTERS_PER_SM // registers, SHARED_PER_SM // (kernel.shared + RESERVED_SHARED))
    checks = [
        *_of_every_kernel(kernel),
        (
            blocks * threads >= HELPER_THREADS_PER_SM,
            f"{blocks} blocks of {threads} threads on an SM, for {kernel.registers} registers and "
            f"{kernel.shared} bytes of shared memory",
        ),
    ]
    return [f"{kernel.name} (sm_{kernel.arch}): {sentence}" for fine, sentence in checks if not fine]


def _of_every_kernel(kernel: Kernel) -> list[Check]:
    return [
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
        (kernel.registers <= 255, f"{kernel.registers} registers"),
    ]


def main() -> int:
    from cutlass_fmha import _C

    assert _C.__file__ is not None
    rows = {row.name: row for row in _C.templates()}
    support = {kernel.name: kernel.threads for kernel in _C.helpers()}
    bad = 0
    for kernel in read_kernels(Path(sys.argv[1] if len(sys.argv) > 1 else _C.__file__)):
        dynamic = rows[kernel.name].smem_bytes if kernel.name in rows else 0
        print(
            f"{kernel.name:40} sm_{kernel.arch:<4} {kernel.registers:3} registers "
            f"{kernel.shared + dynamic:6} B shared {kernel.count('LDL', 'STL'):4} spills "
            f"{kernel.count('HMMA'):5} of {kernel.opcodes.total():6} HMMA"
        )
        found = complaints(kernel, rows[kernel.name]) if kernel.name in rows else []
        found += support_complaints(kernel, support[kernel.name]) if kernel.name in support else []
        for sentence in found:
            bad += 1
            print(f"    {sentence}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
