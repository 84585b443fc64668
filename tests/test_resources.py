"""What the compiler made of every row, on every architecture: no spills, no stack, no traps, tensor cores
used, and resources that fit the smallest GPU. Judged without a GPU, from the built extension itself; rows
that it leaves out, from the committed report (tools/resources.py)."""

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cubin
import pytest
import release_check
import resources

from cutlass_fmha import _C
from cutlass_fmha.demo import binary, session

Rows = dict[str, _C.Row]
ROOT = Path(__file__).resolve().parents[1]
EXTENSION = Path(str(_C.__file__))
#: The one nvcc that kernels are judged with.
(PINNED,) = re.findall(r"^nvidia-cuda-nvcc==([\d.]+)", (ROOT / "requirements/nvcc.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Every kernel that the build is to hold, by name."""
    parts = _C.rows(), _C.backward_rows(), _C.helpers()
    assert all(parts), "this build has no CUDA kernels to inspect: build with CUTLASS_FMHA_CUDA=ON, as make does"
    return {row.name: row for part in parts for row in part}


def compiled_for(arch: int) -> list[int]:
    """Ascending; of sm_89's rows there may be several."""
    targets = _C.build_info()["compiled_for"]
    assert isinstance(targets, dict)
    return [int(target.rstrip("af")) for target in targets[arch].split(",")]


def test_every_kernel_has_code_of_the_pinned_nvcc_for_its_architecture(rows: Rows, machine_code: list[cubin.Kernel]):
    """And only that, but for sm_89's PTX. Registers and spills depend on the compiler."""
    wanted = ((name, target) for name, row in rows.items() for target in compiled_for(row.arch))
    assert sorted((kernel.name, kernel.arch) for kernel in machine_code) == sorted(wanted)
    assert cubin.read_ptx(EXTENSION) == {name: {compiled_for(89)[0]} for name, row in rows.items() if row.arch == 89}
    assert {_C.build_info()["nvcc_version"], *cubin.read_compilers(EXTENSION).values()} == {PINNED}


def test_no_kernel_has_anything_to_complain_about(rows: Rows, machine_code: list[cubin.Kernel]):
    wrong = [line for kernel in machine_code for line in resources.complaints(kernel, rows[kernel.name])]
    assert not wrong, "\n".join(wrong)


# ---- the committed report, also of the rows that are not in this build -------------------------------------


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return resources.read_report()


def test_the_demo_finds_the_kernels_of_this_build_as_they_were_meant(
    machine_code: list[cubin.Kernel], monkeypatch: pytest.MonkeyPatch
):
    def as_read(extension: Path, target: int) -> list[binary.Kernel]:
        kernels = (kernel for kernel in machine_code if kernel.arch == target)
        return [binary.Kernel(x.name, x.registers, x.stack, x.count("HMMA")) for x in kernels]

    monkeypatch.setattr(binary, "inspect", as_read)
    report = session.Report(quiet=True)
    session.show_kernels(report)
    assert "no stack, no spills" in report.text()


def test_no_kernel_of_the_report_has_anything_to_complain_about(report: dict[str, Any], tmp_path: Path):
    with pytest.raises(resources.ReportError, match="absent.json can't be read .*: make build && "):
        resources.read_report(tmp_path / "absent.json")
    assert {row["arch"] for row in report["rows"].values()} == {89, 90, 120}
    assert report["nvcc"] == PINNED, f"of another compiler: {resources.UPDATE}"
    assert not release_check.machine_code_complaints(report, report["source_hash"])
    lacking = report | {"rows": {name: row for name, row in report["rows"].items() if "rotary" not in name}}
    assert "rows and helpers" in release_check.machine_code_complaints(lacking, report["source_hash"])[0]


PLAIN, TMA = "fwd_sm89_f16_d128_m256n64w8", "fwd_sm120_f16_d32_m256n128w8_tma"
SIMT, WIDE, TF32 = "wide_sm89_f32_dany_m64n128w8_simt", "wide_sm89_bf16_dany_m64n128w8", "HMMA.1688.F32.TF32"
NO_TMA = "no TMA loads and stores (UTMALDG, UTMASTG) in a row"
BY_OPCODES: list[tuple[str, dict[str, int], str]] = [
    (PLAIN, {"LDL": 1}, "1 loads and stores of local memory"),
    (PLAIN, {}, "no tensor-core instruction"),
    ("wide_sm90_f16_dany_m32n128w4", {"STL.64": 2}, "2 loads and stores of local memory"),
    ("fwd_sm89_bf16_d64_m64n64w4", {"HMMA.16816.F32": 8, "LDGSTS": 1}, "plies bfloat16"),
    *((TMA, {"HMMA.16816.F32": 8, **x}, NO_TMA) for x in ({"UTMALDG": 1}, {"UTMASTG": 1}, {})),
    (SIMT, {"FFMA": 600, "BPT": 1}, "1 BPT.TRAP"),
    (SIMT, {"FFMA": 100}, "100 FMAs and tensor-core instructions []"),
    (SIMT, {"FFMA": 600, TF32: 3}, f"600 FMAs and tensor-core instructions ['{TF32}']"),
    (WIDE, {"LDGSTS": 1, "HMMA.1688.F32": 64}, "['HMMA.1688.F32'] in a row that multi"),
    (WIDE, {"HMMA.1688.F32.BF16": 64}, "no cp.async"),
]
BY_CONFIG: list[tuple[str, dict[str, int], str]] = [
    (PLAIN, {"warps": 40, "min_blocks": 48}, "registers x 1280 threads x 48 blocks exceed 65536"),
    (PLAIN, {"smem_bytes": 99 * 1024 + 1}, "bytes of shared memory, and a block has 101376"),
    (PLAIN, {"smem_bytes": 50 * 1024, "min_blocks": 2}, "bytes of shared memory do not fit"),
    (PLAIN, {"warps": 8, "min_blocks": 7}, "7 blocks of 8 warps exceed 48"),
]


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (PLAIN, {"local": 8}, "8 bytes of local memory"),
        ("fwd_sm90_f16_d96_m64n32w4_scored", {"stack": 16}, "a stack of 16 bytes"),
        ("rotary_sm120_f16", {"registers": 200}, "blocks of 128 threads on an SM"),
        (SIMT, {"opcodes": {"FFMA": 600}, "shared": 99 * 1024}, "shared memory, and a block has 101376"),
        *((name, {"opcodes": opcodes}, expected) for name, opcodes, expected in BY_OPCODES),
        *((name, {"config": config}, expected) for name, config, expected in BY_CONFIG),
    ],
)
def test_a_defect_in_the_report_is_found(report: dict[str, Any], name: str, change: dict[str, Any], expected: str):
    row = report["rows"][name]
    row = row | change | {"config": row["config"] | change.get("config", {})}
    found = resources.report_complaints({"rows": report["rows"] | {name: row}})
    assert found and all(name in line for line in found) and expected in "\n".join(found)


@pytest.mark.parametrize(
    ("said", "lacking"),
    [({"source_hash": f"{resources.source_hash()}+subset"}, 0), ({}, 1), ({"proxy": {120: 90}}, 0)],
    ids=["hash", "row", "own code"],
)
def test_a_report_of_a_build_that_is_not_whole_is_refused(said: dict[str, Any], lacking: int, monkeypatch):
    """Of a subset, of other sources, of one architecture, of a proxy."""
    named = [SimpleNamespace(name=name) for name in resources.manifest_rows()][lacking:]
    info = {"source_hash": resources.source_hash(), "proxy": {}} | said
    monkeypatch.setattr(resources, "read_kernels", lambda file: pytest.fail("read though refused"))
    module = {"build_info": lambda: info, "rows": lambda: named, "backward_rows": list}
    with pytest.raises(resources.ReportError, match="no build of all rows of these sources: make build"):
        resources.build_report(SimpleNamespace(__file__="_C.so", **module))


# ---- how much there is to compile --------------------------------------------------------------------------

#: Thread-seconds of nvcc for a row, with its share of its file, on two slow cores, where 656 rows took 2,815. "make
#: build" prints what it took here.
SECONDS_PER_ROW = 6
MIB = 2**20


def test_the_subset_has_every_tile_and_both_builds_are_within_their_budget():
    rows = resources.manifest_rows()
    subset = {name for name, in_subset in rows.items() if in_subset}
    half = {name for name in rows if "_f16_" in name}
    assert {name.replace("_f16_", "_bf16_") for name in half} <= subset, "a tile that the subset lacks"
    assert rows.keys() - subset < half
    assert half & subset == {name for name in half if re.search("_d(64|any)_", name)}
    assert SECONDS_PER_ROW * len(subset) <= 3000 and SECONDS_PER_ROW * len(rows) <= 7000


BUILD = "develop.py build '{}' '' '{}'"


@pytest.mark.parametrize(
    ("earlier", "arguments", "expected"),
    [
        ("", "test", BUILD.format("89;90;120", "ci")),
        ("", "test SUBSET=", BUILD.format("89;90;120", "")),
        ("", "test ARCHS=89", BUILD.format("89", "ci")),
        ("89-90-120", "test", None),
        ("89-90-120", "test SUBSET=ci", BUILD.format("89;90;120", "ci")),
        ("89-90-120-ci", "test", None),
        ("89", "test", BUILD.format("89;90;120", "ci")),
        ("89", "test ARCHS=89", None),
        ("89-90-120-ci", "wheel", "'cmake.define.CUTLASS_FMHA_SUBSET='"),  # whatever the CMake cache says
    ],
)
def test_make_test_compiles_the_subset_where_nothing_is_built_whole_and_wheel_all(
    earlier: str, arguments: str, expected: str | None, tmp_path: Path
):
    """In as much of a checkout as ``make -n`` asks for, with a build directory of its own."""
    files = ("Makefile", "pyproject.toml", "CMakeLists.txt")
    for name in (*files, "requirements", "tools", "cmake", "src", "build_backend"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "build").mkdir()
    if earlier:
        (tmp_path / "build" / f".built-{earlier}").touch()
    command = ["make", "-n", *arguments.split()]
    told = ("MAKEFLAGS", "SUBSET", "ARCHS", "ARGS")  # whatever the make that runs these tests was
    env = {name: value for name, value in os.environ.items() if name not in told}
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, env=env).stdout
    assert (expected or "pytest") in said and (expected or "develop.py build" not in said), said


def test_an_extension_takes_less_than_60_mib_even_with_every_row(report: dict[str, Any]):
    """Installed: a build of one architecture alone takes less still."""
    assert report.get("extension_bytes", 0) < 60 * MIB  # not there where the report is of several builds
    assert EXTENSION.stat().st_size < 60 * MIB


# ---- the parser, on kernels that are known to be wrong -----------------------------------------------------

PLANTED = r"""
// 120 live values and 64 registers: ptxas has to spill.
extern "C" __global__ void __launch_bounds__(1024) spills(float* x, int n) {
  float r[120];
  #pragma unroll
  for (int i = 0; i < 120; ++i) r[i] = x[i * n + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 120; ++i) x[i * n + threadIdx.x] = r[i] * r[(i * 7 + 3) % 120];
}

// An array that is indexed at run time lives on the stack.
extern "C" __global__ void traps(float* x, int n) {
  __shared__ float tile[12000];
  float r[64] = {};
  for (int k = 0; k < n; ++k) r[(k * n) & 63] += x[k];
  tile[threadIdx.x] = r[threadIdx.x & 63];
  __syncthreads();
  if ((x[threadIdx.x] = tile[threadIdx.x ^ 1]) > 1.f) __trap();
}
"""


def test_what_the_compiler_made_is_read(tmp_path: Path):
    """What is right is read from the rows of the build, above."""
    (tmp_path / "planted.cu").write_text(PLANTED)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (89, 90, 120)]
    cubin.run_tool("nvcc", "-fatbin", *targets, "-o", tmp_path / "planted.fatbin", tmp_path / "planted.cu")
    planted = {(kernel.name, kernel.arch): kernel for kernel in cubin.read_kernels(tmp_path / "planted.fatbin")}
    for arch in (89, 90, 120):
        spills, traps = planted.pop(("spills", arch)), planted.pop(("traps", arch))
        assert spills.count("LDL", "STL") > 0 and spills.stack + spills.local > 0
        assert (traps.stack, traps.shared, traps.count("BPT")) == (256, 48000, 1)
    assert not planted
