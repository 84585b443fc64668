"""What is wrong with a kernel's use of registers, memory and instructions, whatever GPU it is for.

    python tools/resources.py --rows d128             a line per kernel of the installed build, and its complaints
    python tools/resources.py --opcodes --rows NAME   and its main loop (mainloop.py): by class, and every opcode
    python tools/resources.py --write                 tests/data/resources.json: all, of every row of the manifest

The report is committed: tests hold the rows that they have compiled, which are a subset, against it, and
``make release-check`` its hash against the sources.
"""

import argparse
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from building import BuildError, find_program
from cubin import RESERVED_SHARED, Kernel, read_compilers, read_kernels
from source_hash import source_hash

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests" / "data" / "resources.json"
KIND = "cutlass_fmha resource report"
UPDATE = "make build && .venv/bin/python tools/resources.py --write"
SIZES = ("arch", "registers", "stack", "local", "shared")
CONFIG = ("family", "dtype", "mma", "copy", "warps", "kv_warps", "threads", "min_blocks", "smem_bytes")
#: Opcodes that complaints are about.
JUDGED = ("HMMA", "FFMA", "LDGSTS", "UTMALDG", "UTMASTG", "LDL", "STL", "BPT")

REGISTERS_PER_SM, WARPS_PER_SM = 64 * 1024, 48
#: What sm_89 and sm_120 have (CUDA Programming Guide, technical specifications), and so every row stays within.
SHARED_PER_BLOCK, SHARED_PER_SM = 99 * 1024, 100 * 1024
#: What sm_90 has: an SM for its own scored rows, dQ of dS and FEW_QUERIES, a block for wide rows too.
SHARED_PER_BLOCK_90, SHARED_PER_SM_90 = 227 * 1024, 228 * 1024
#: A line for all architectures with launch bounds that suit sm_90: elsewhere one of its blocks fits, and has
#: fewer registers than it could.
FEW_QUERIES = "_d128_m16n16w4k4_scored"
#: Gradients by three groups of four warps.
THREE_GROUPS = "w12_groups"
HELPER_THREADS_PER_SM = WARPS_PER_SM * 32 // 2  # bound by memory: half of the warps keep it busy
OTHER_THREADS = {"rms_norm": 512, "rope_backward": 384, r"backward_after_sm\d+_f32": 640}  # that sums sinks alone

Check = tuple[bool, str]
"""Whether something is fine, and the sentence that says what is wrong when it isn't."""


def complaints(kernel: Kernel, row: Any) -> list[str]:
    """What is wrong with the kernel of a row, one of ``_C.rows()`` or of ``_C.helpers()``, a sentence each."""
    own = _of_a_row if hasattr(row, "warps") else _of_a_helper
    checks = (*_of_every_kernel(kernel), *own(kernel, row))
    return [f"{row.name} (sm_{kernel.arch}): {sentence}" for fine, sentence in checks if not fine]


def _of_a_row(kernel: Kernel, row: Any) -> list[Check]:
    count, threads, blocks = kernel.count, row.warps * 32, row.min_blocks
    registers = -(-kernel.registers // 8) * 8 * threads * blocks  # given out in eights
    shared = kernel.shared + row.smem_bytes
    per_block, per_sm = shared_memory(kernel, row)
    simt, copy = row.mma == "simt", getattr(row, "copy", "cp_async_16")
    mma = [opcode for opcode in kernel.opcodes if opcode.startswith("HMMA")]
    kind = "TF32" if row.mma == "tf32x3" else "BF16" if row.dtype == "bfloat16" else "F32"
    others = {"TF32", "BF16"} - {kind}
    right = [o for o in mma if kind in o and ".F32" in o and not any(other in o for other in others)]
    stores = row.family == "plain" and row.kv_warps == 1  # the others' rows of O are not all there
    tma = count("UTMALDG") > 0 and (count("UTMASTG") > 0 or not stores)
    cp_async, fma = count("LDGSTS") > 0, count("FFMA")
    fits, of_all = blocks * (shared + RESERVED_SHARED) <= per_sm, f"{threads} threads x {blocks} blocks"
    return [
        (simt or bool(mma), "no tensor-core instruction (HMMA)"),
        (right == mma, f"tensor-core instructions {mma} in a row that multiplies {row.dtype}"),
        (not simt or (fma >= 512 and not mma), f"{fma} FMAs and tensor-core instructions {mma}"),
        (simt or copy != "cp_async_16" or cp_async, "no cp.async (LDGSTS) in a row that copies with it"),
        (copy != "tma" or tma, "no TMA loads and stores (UTMALDG, UTMASTG) in a row that copies with them"),
        (registers <= REGISTERS_PER_SM, f"{kernel.registers} registers x {of_all} exceed {REGISTERS_PER_SM}"),
        (shared <= per_block, f"{shared} bytes of shared memory, and a block has {per_block}"),
        (fits, f"{blocks} blocks of {shared} bytes of shared memory do not fit an SM's {per_sm}"),
        (blocks * row.warps <= WARPS_PER_SM, f"{blocks} blocks of {row.warps} warps exceed {WARPS_PER_SM}"),
    ]


def shared_memory(kernel: Kernel, row: Any) -> tuple[int, int]:
    """Bytes that a block and an SM have for the row."""
    if kernel.arch == 90 and (row.family == "wide" or THREE_GROUPS in row.name):
        return SHARED_PER_BLOCK_90, SHARED_PER_SM_90
    own_line = row.name.endswith(("_ranged", "_score_mod", "_masked", "_scored", "_dq"))
    if own_line and (kernel.arch == 90 or row.name.endswith(FEW_QUERIES)):
        return SHARED_PER_BLOCK, SHARED_PER_SM_90
    return SHARED_PER_BLOCK, SHARED_PER_SM


def _of_a_helper(kernel: Kernel, row: Any) -> list[Check]:
    """Of a kernel beside attention: enough threads to hide latency.

    A norm's and rope_backward's have whole rows on their way, 64 bytes a thread, where others have 16.
    """
    least = next((n for name, n in OTHER_THREADS.items() if re.match(name, kernel.name)), HELPER_THREADS_PER_SM)
    registers = -(-kernel.registers // 8) * 8 * row.threads
    blocks = min(REGISTERS_PER_SM // registers, SHARED_PER_SM // (kernel.shared + RESERVED_SHARED))
    told = f"{blocks} blocks of {row.threads} threads on an SM, for {kernel.registers} registers and {kernel.shared}"
    return [(blocks * row.threads >= least, f"{told} bytes of shared memory")]


def _of_every_kernel(kernel: Kernel) -> list[Check]:
    spills, traps = kernel.count("LDL", "STL"), kernel.count("BPT")
    return [
        (spills == 0, f"{spills} loads and stores of local memory (spills)"),
        (kernel.stack == 0, f"a stack of {kernel.stack} bytes"),
        (kernel.local == 0, f"{kernel.local} bytes of local memory"),
        (traps == 0, f"{traps} BPT.TRAP: an instruction this architecture does not have"),
        (kernel.registers <= 255, f"{kernel.registers} registers"),
    ]


# ---- the report --------------------------------------------------------------------------------------------


class ReportError(ValueError):
    """There is no report of every row of the present sources: none was made, or a build can't give one."""


def manifest_rows() -> dict[str, bool]:
    """Row of the manifest -> whether it is in the subset that ``make test`` compiles. Raises ReportError where CMake,
    whose language the manifest is in, is missing or too old."""
    try:
        return dict(_listed(find_program("cmake")))
    except BuildError as error:
        raise ReportError(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise ReportError(f"CMake can't list the manifest's rows: {' '.join(error.stderr.split())}") from error


@functools.cache
def _listed(cmake: str) -> tuple[tuple[str, bool], ...]:
    command = [cmake, "-P", str(ROOT / "cmake" / "list_rows.cmake")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple((name, in_subset == "ON") for name, in_subset in map(str.split, text.splitlines()))


def helper_names(rows: Iterable[str]) -> set[str]:
    """The kernels beside attention that CMake compiles for the architectures of ``manifest_rows``."""
    kinds = re.findall(r'^  "(\w+) \w+ ([\w ]+)"\)?$', (ROOT / "cmake" / "Helpers.cmake").read_text(), re.MULTILINE)
    return {f"{kind}_{arch}_{x}" for kind, xs in kinds for x in xs.split() for arch in {r.split("_")[1] for r in rows}}


def record(kernel: Kernel, row: Any) -> dict[str, Any]:
    """A kernel's part of the report: what ``complaints`` asks of it and of its row."""
    opcodes = {name: n for name, n in sorted(kernel.opcodes.items()) if name.partition(".")[0] in JUDGED}
    config = {name: getattr(row, name) for name in CONFIG if hasattr(row, name)}
    sizes = {name: getattr(kernel, name) for name in SIZES} | {"instructions": kernel.opcodes.total()}
    return sizes | {"opcodes": opcodes, "config": config}


def build_report(module: Any) -> dict[str, Any]:
    """The report of an extension. Raises ReportError for one that lacks rows of the present manifest, or is of
    other sources."""
    import mainloop  # not above: release_check.py reads reports where no package is

    info, file = module.build_info(), Path(module.__file__)
    rows = {row.name: row for row in (*module.rows(), *module.backward_rows())}
    other_code = info["proxy"] or info.get("compiled_for", {}).get(89, "89") != "89"
    if info["source_hash"] != source_hash() or other_code or rows.keys() != manifest_rows().keys():
        raise ReportError(f"{file} is no build of all rows of these sources: {UPDATE}")
    table = rows | {row.name: row for row in module.helpers()}
    kernels = read_kernels(file)
    named = {kernel.name: kernel for kernel in kernels}
    entries = {name: record(named[name], row) for name, row in table.items()}
    for row, _, loop in mainloop.loops_of(kernels, module.rows()):
        entries[row.name]["loop"] = loop.entry
    (nvcc,) = set(read_compilers(file).values())
    head = {"kind": KIND, "update": UPDATE, "source_hash": info["source_hash"], "nvcc": nvcc}
    return {**head, "extension_bytes": file.stat().st_size, "rows": entries}


class Twin:
    """A float16 row that this build lacks, as the bfloat16 row of its tile says it is."""

    def __init__(self, name: str, row: Any) -> None:
        fields = (field for field in dir(row) if not field.startswith("_") and hasattr(row, field))
        self.__dict__.update({field: getattr(row, field) for field in fields})
        self.__dict__.update(name=name, dtype="float16", index=-1)


@functools.cache
def whole_table() -> tuple[Any, ...]:
    """This build's rows of attention and their twins, in the manifest's order: for tests of selection."""
    from cutlass_fmha import _C

    built = {row.name: row for row in _C.rows()}
    twins = {name: built.get(name.replace("_f16_", "_bf16_")) for name in manifest_rows()}
    return tuple(built.get(name) or Twin(name, row) for name, row in twins.items() if name in built or row)


def report_complaints(report: dict[str, Any]) -> list[str]:
    """What is wrong with the kernels of a report: the same as of kernels that were just compiled."""
    found = []
    for name, recorded in report["rows"].items():
        kernel = Kernel(name, **{key: recorded[key] for key in SIZES}, opcodes=Counter(recorded["opcodes"]))
        found += complaints(kernel, SimpleNamespace(name=name, **recorded["config"]))
    return found


def write_report(report: dict[str, Any], path: Path = REPORT) -> None:
    """JSON with one line per row, so that a changed row is a changed line in a diff."""
    rows = ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in report["rows"].items())
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in report.items() if key != "rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{head} "rows": {{\n{rows}\n }}\n}}\n', encoding="utf-8")


def read_report(path: Path = REPORT) -> dict[str, Any]:
    """Raises ReportError with the command that makes the file."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path.name} can't be read ({error}): {UPDATE}") from error
    if report.get("kind") != KIND:
        raise ReportError(f"{path.name} is no resource report: {UPDATE}")
    return report


def write() -> int:
    """Writes REPORT from the installed build. Exit status 1, and nothing written, when a kernel is wrong."""
    from cutlass_fmha import _C

    try:
        report = build_report(_C)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 1
    if found := report_complaints(report):
        print("\n".join([*found, "nothing was written"]), file=sys.stderr)
        return 1
    write_report(report)
    print(f"wrote {REPORT.relative_to(ROOT)}: {len(report['rows'])} kernels")
    return 0


def main(arguments: list[str] | None = None) -> int:
    from cutlass_fmha.cli import output

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="", metavar="REGEX", help="only kernels in whose name it is found")
    parser.add_argument("--opcodes", action="store_true", help="list what the main loops of plain rows hold")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.relative_to(ROOT)}")
    output.add_json(parser)
    options = parser.parse_args(arguments)
    if options.write:
        return write()
    import mainloop

    from cutlass_fmha import _C

    rows = {row.name: row for row in (*_C.rows(), *_C.backward_rows(), *_C.helpers())}
    kernels = [kernel for kernel in read_kernels(Path(str(_C.__file__))) if re.search(options.rows, kernel.name)]
    found: list[dict[str, Any]] = [
        {"kernel": x.name, "arch": x.arch, "registers": x.registers, "spills": x.count("LDL", "STL")}
        | {"shared": x.shared + getattr(rows[x.name], "smem_bytes", 0), "code": x.opcodes.total()}
        | {"HMMA": x.count("HMMA"), "complaints": "; ".join(complaints(x, rows[x.name]))}
        for x in kernels
    ]
    parts: list[str | output.Table] = [
        output.Table(list(found[0]) if found else ["kernel"], [[*map(str, x.values())] for x in found])
    ]
    loops = mainloop.loops_of(kernels, _C.rows()) if options.opcodes else []
    parts += [f"\n{row.name}: {loop.entry}\n{dict(loop.opcodes.most_common())}" for row, _, loop in loops]
    output.emit(found, parts, options.json)
    return 1 if any(each["complaints"] for each in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
