"""Rows that copy by TMA, without a GPU: what CMake makes of their lines, and nvcc of their kernels.

What they compute is test_parity_tma.py's business.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import building
import cubin
import pytest
import resources
from test_resources import a_row

from cutlass_fmha import _C
from cutlass_fmha.dispatch import choose, eligibility
from cutlass_fmha.dispatch import table as tables
from cutlass_fmha.dispatch.device import Device
from cutlass_fmha.dispatch.problem import Problem

ROOT = Path(__file__).resolve().parents[1]
ROWS = {row.name: row for row in _C.rows() if row.family in tables.PLAIN and row.copy == "tma"}
ARCHS = {90, 120}


def configure(tree: Path, **defines: str) -> subprocess.CompletedProcess[str]:
    command = [building.find_program("cmake"), "-S", str(ROOT), "-B", str(tree), "-G", "Ninja"]
    if pybind11 := building.pybind11_directory():
        command.append(f"-Dpybind11_DIR={pybind11}")
    defines = {"CMAKE_BUILD_TYPE": "Release", "Python_EXECUTABLE": sys.executable, **defines}
    command += [f"-D{name}={value}" for name, value in defines.items()]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


# ---- the rows of this build --------------------------------------------------------------------------------


def test_every_architecture_that_has_tma_has_rows_of_it():
    built = {row.arch for row in _C.rows()}
    assert built, "this build has no CUDA kernels to inspect: build with CUTLASS_FMHA_CUDA=ON, as make does"
    assert {row.arch for row in ROWS.values()} == ARCHS & built
    for row in ROWS.values():
        assert row.alignment == 16
        assert row.smem_bytes <= resources.SHARED_PER_BLOCK


def test_no_thread_of_theirs_copies(machine_code: list[cubin.Kernel]):
    kernels = {kernel.name: kernel for kernel in machine_code if kernel.name in ROWS}
    assert kernels.keys() == ROWS.keys()
    for name, kernel in kernels.items():
        assert kernel.count("LDGSTS") == 0, name
        if ROWS[name].kv_warps == 1:
            assert kernel.count("UTMASTG") >= ROWS[name].head_dim // 64, "a box for each panel of O"


def test_selection_offers_them_to_aligned_tensors_on_their_gpus():
    found = tables.Table(tuple(ROWS.values()))
    gpus = {90: Device("H200", (9, 0), 132, 227 * 1024), 120: Device("RTX 5090", (12, 0), 170, 99 * 1024)}
    for row in ROWS.values():
        problem = Problem(2, 4096, 4096, 16, 16, row.head_dim, row.dtype)
        for arch, gpu in gpus.items():
            refusal = eligibility.reasons(row, problem, gpu, found)
            assert refusal == [] if row.arch == arch else "made for" in refusal[0], (row.name, gpu, refusal)
        unaligned = Problem(2, 4096, 4096, 16, 16, row.head_dim, row.dtype, alignment=8)
        (reason,) = eligibility.reasons(row, unaligned, gpus[row.arch], found)
        assert "aligned to 16 bytes" in reason
        assert choose.predicted_us(row, problem, gpus[row.arch]) > 0


# ---- lines that CMake refuses ------------------------------------------------------------------------------

COLUMNS_OF_A_TILE = "64 64 64 4 1 2 2 true false"


@pytest.mark.parametrize("archs", ["89", "90;89"])
def test_sm_89_has_no_tma(archs: str, tmp_path: Path):
    manifest = tmp_path / "manifest.cmake"
    manifest.write_text(f'fmha_forward("{archs}" "bf16" {COLUMNS_OF_A_TILE} tma)\n')
    done = configure(tmp_path / "tree", CUTLASS_FMHA_MANIFEST=str(manifest))
    assert done.returncode != 0
    words = " ".join((done.stdout + done.stderr).split())
    assert "asks for fwd_sm89_bf16_d64_m64n64w4_tma, and sm_89 has no TMA" in words, words[-1000:]
    assert not list((tmp_path / "tree").glob("generated/*.cu")), "written before the manifest was checked"


@pytest.mark.parametrize(
    ("version", "copy", "target"),
    [
        ("12.8.93", "cp_async_16", "120"),  # also runs on 12.1, which 120a does not
        ("12.8.93", "tma", "120a"),
        ("12.9.41", "cp_async_16", "120f"),
        ("12.9.41", "tma", "120f"),
        ("13.0.88", "tma", "120f"),
    ],
)
def test_sm_120_is_compiled_as_what_has_tma(version: str, copy: str, target: str, tmp_path: Path):
    script = tmp_path / "flags.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.26)\n"
        f"include({ROOT}/cmake/Architectures.cmake)\ninclude({ROOT}/cmake/Instances.cmake)\n"
        f"set(FMHA_NVCC_VERSION {version})\nset(FMHA_ARCHITECTURES 120)\n"
        f'fmha_forward(120 "bf16" {COLUMNS_OF_A_TILE} {copy})\n'
        'fmha_code_flags(120 found)\nmessage("${found}")\n'
        'fmha_set_compiled_for()\nmessage("${FMHA_COMPILED_FOR_CXX}")\n'
    )
    command = [building.find_program("cmake"), "-P", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    flags, pairs = done.stderr.strip().split("\n")
    assert flags == f"-gencode=arch=compute_{target},code=sm_{target}"
    assert pairs == f'{{120, "{target}"}}'


# ---- the check, on kernels that are known to be wrong ------------------------------------------------------

PLANTED = r"""
#include <cuda_fp16.h>
#include <mma.h>
#include <cute/arch/copy_sm90_tma.hpp>

__device__ void multiply(char* tile, float* c) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> x;
  fragment<matrix_b, 16, 16, 16, half, col_major> y;
  fragment<accumulator, 16, 16, 16, float> z;
  fill_fragment(z, 0.f);
  load_matrix_sync(x, reinterpret_cast<half const*>(tile), 16);
  load_matrix_sync(y, reinterpret_cast<half const*>(tile), 16);
  mma_sync(z, x, y, z);
  store_matrix_sync(c, z, 16, mem_row_major);
}

__device__ void load(void const* map, uint64_t* barrier, char* tile) {
  cute::SM90_TMA_LOAD_4D::copy(map, barrier, 0, tile, 0, 0, 0, 0);
}

__device__ void store(void const* map, char* tile) { cute::SM90_TMA_STORE_4D::copy(map, tile, 0, 0, 0, 0); }

#define KERNEL(NAME, BODY)                                                  \
  extern "C" __global__ void NAME(void const* map, half const* a, float* c) { \
    __shared__ uint64_t barrier;                                            \
    extern __shared__ __align__(1024) char tile[];                          \
    BODY;                                                                   \
    multiply(tile, c);                                                      \
  }

KERNEL(loads_and_stores, load(map, &barrier, tile); store(map, tile))
KERNEL(only_loads, load(map, &barrier, tile))
KERNEL(only_stores, store(map, tile))
KERNEL(copies_by_thread, tile[threadIdx.x] = reinterpret_cast<char const*>(a)[threadIdx.x])
"""
MISSING = "no TMA loads and stores (UTMALDG, UTMASTG) in a row that copies with them"


@pytest.fixture(scope="module", params=["90", "120f", "120"])
def planted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, cubin.Kernel]]:
    directory = tmp_path_factory.mktemp("planted")
    (directory / "planted.cu").write_text(PLANTED)
    probe = [sys.executable, str(ROOT / "build_backend" / "probe.py"), "cutlass"]
    headers = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    cubin.run_tool(
        "nvcc", "-fatbin", "-std=c++20",
        f"-gencode=arch=compute_{request.param},code=sm_{request.param}",
        "-I", headers, "-o", directory / "planted.fatbin", directory / "planted.cu",
    )  # fmt: skip
    found = cubin.read_kernels(directory / "planted.fatbin")
    return request.param, {kernel.name: kernel for kernel in found}


def complaints(kernels: dict[str, cubin.Kernel], name: str, copy: str = "tma") -> list[str]:
    found = resources.complaints(kernels[name], a_row(name=name, copy=copy))
    return [line.partition(": ")[2] for line in found]


def test_a_kernel_without_its_copies_is_found(planted: tuple[str, dict[str, cubin.Kernel]]):
    target, kernels = planted
    assert complaints(kernels, "copies_by_thread") == [MISSING]
    assert complaints(kernels, "copies_by_thread", "ldg_16") == []
    if target == "120":
        return  # the next test's
    assert complaints(kernels, "loads_and_stores") == []
    assert complaints(kernels, "only_loads") == [MISSING]
    assert complaints(kernels, "only_stores") == [MISSING]


def test_what_plain_sm_120_makes_of_it_is_found(planted: tuple[str, dict[str, cubin.Kernel]]):
    """CuTe compiles a trap in place of the copy, without a word: so rows are built for 120f or 120a."""
    target, kernels = planted
    found = " ".join(complaints(kernels, "loads_and_stores"))
    assert bool(re.search(r"BPT\.TRAP", found)) == (target == "120"), (target, found)
    assert (MISSING in found) == (target == "120")
