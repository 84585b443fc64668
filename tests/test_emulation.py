"""Emulation builds: their options, what they compile, how launches are padded, what is timed with them.
Needs no GPU; nvcc, CMake and the headers of CUTLASS as a build does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import building
import cubin
import emulate
import mainloop
import pytest
from tuning import families

from cutlass_fmha import _C

ROOT = Path(__file__).resolve().parents[1]
KIB = 1024


# ---- the build's options -----------------------------------------------------------------------------------


def configure(tmp_path: Path, **cache: str) -> subprocess.CompletedProcess[str]:
    """The part of CMake's configuration that judges an emulation's options; prints what follows from them."""
    settings = (f'set({name} "{value}")' for name, value in {"CUTLASS_FMHA_MMA_PASSES": "1", **cache}.items())
    return building.script(
        tmp_path,
        *settings,
        f'include("{ROOT}/cmake/Architectures.cmake")\nfmha_check_emulation()',
        "foreach(arch 89 90 120)",
        'fmha_code_flags(${arch} flags)\nmessage("${arch}: ${flags}")\nendforeach()',
        'message("${FMHA_EMULATION_DEFINITIONS}")',
    )


@pytest.mark.parametrize(
    ("emulation", "passes", "told"),
    [
        *(
            ("ON", passes, f'must be an odd number from 1 on, and it is "{passes}"')
            for passes in ("0", "2", "-1", "03", "three", "1.5", "")
        ),
        ("", "3", "MMA_PASSES=3 makes kernels slow on purpose and needs CUTLASS_FMHA_EMULATION=ON"),
        ("", "1", {90}),
        ("proxy", "1", {90, 120}),
        ("ON", "1", {89, 90, 120}),
        ("ON", "15", {89, 90, 120}),
    ],
)
def test_an_emulation_build_is_all_for_sm_90(tmp_path: Path, emulation: str, passes: str, told: set[int] | str):
    """And its passes are odd; kernels are slow there only."""
    cache = {"CUTLASS_FMHA_SM120_PROXY": "90"} if emulation == "proxy" else {"CUTLASS_FMHA_EMULATION": emulation}
    answer = configure(tmp_path, **cache, CUTLASS_FMHA_MMA_PASSES=passes)
    if isinstance(told, str):
        assert answer.returncode and told in " ".join(answer.stderr.split())
        return
    assert answer.returncode == 0, answer.stderr
    flags = dict(re.findall(r"^(\d+): (.*)$", answer.stderr, re.MULTILINE))
    assert {int(arch) for arch in flags if "sm_90" in flags[arch]} == told
    assert f"CUTLASS_FMHA_MMA_PASSES={passes}" in answer.stderr


def test_build_info_says_how_often_an_mma_pass_runs():
    info = _C.build_info()
    if info["emulation"]:
        assert info["proxy"] == {89: 90, 120: 90} and int(str(info["mma_passes"])) % 2 == 1
    else:
        assert info["mma_passes"] == 1 and 89 not in info["proxy"]  # type: ignore[operator]


# ---- padded shared memory ----------------------------------------------------------------------------------

PROGRAM = r"""
#include <cstdio>
#include "emulation.h"
int main() {
  for (int smem, warps; std::scanf("%d %d", &smem, &warps) == 2;) {
    try {
      std::printf("%d\n", cutlass_fmha::emulated_smem_bytes(smem, warps));
    } catch (std::invalid_argument const& error) {
      std::printf("%s\n", error.what());
    }
  }
}
"""


@pytest.fixture(scope="module")
def padding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """emulated_smem_bytes() for a list of (bytes, warps), as the compiler of the host has it."""
    directory = tmp_path_factory.mktemp("padding")
    (directory / "padding.cpp").write_text(PROGRAM)
    program = directory / "padding"
    compiler = os.environ.get("CXX") or "c++"
    command = [*(compiler, "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'src'}", "-o"), program]
    subprocess.run([*map(str, command), str(directory / "padding.cpp")], check=True)

    def ask(blocks: list[tuple[int, int]]) -> list[str]:
        lines = "".join(f"{smem} {warps}\n" for smem, warps in blocks)
        answer = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True)
        return answer.stdout.splitlines()

    return ask


def blocks_per_sm(smem: int, warps: int, smem_per_sm: int, warps_per_sm: int, most: int) -> int:
    allocated = -(-(smem + KIB) // 128) * 128
    return min(smem_per_sm // allocated, warps_per_sm // warps, most)


def test_padding_is_right_for_every_block_that_fits(padding: Any):
    """An sm_90 holds as many as the GPU that it stands in for: by shared memory, by warps, and by number."""
    asked = [(smem, warps) for warps in (1, 2, 4, 8, 9, 12, 16, 48) for smem in range(0, 99 * KIB + 1, 1008)]
    asked += [(49 * KIB, 4), (49 * KIB + 1, 4), (99 * KIB, 8)]  # half of an SM, a byte more, the largest
    assert [blocks_per_sm(*one, 100 * KIB, 48, 24) for one in [*asked[-3:], (4 * KIB, 16), (0, 1)]] == [
        *(2, 1, 1, 3, 24)
    ]
    for (smem, warps), padded in zip(asked, map(int, padding(asked)), strict=True):
        expected = blocks_per_sm(smem, warps, 100 * KIB, 48, 24)
        assert smem <= padded <= 227 * KIB
        assert blocks_per_sm(padded, warps, 228 * KIB, 64, 32) == expected, (smem, warps, padded)


def test_a_block_that_fits_no_target_is_an_error(padding: Any):
    sentence = "a block of 8 warps with 102400 bytes of shared memory fits no SM of sm_89 or sm_120"
    assert padding([(100 * KIB, 8)]) == [sentence]
    assert "a block of 49 warps" in padding([(0, 49)])[0]


# ---- repeated passes, in machine code ----------------------------------------------------------------------

KERNEL = """
#include "forward/kernel.cuh"
using namespace cutlass_fmha;
constexpr ForwardConfig config{{.arch = 90, .dtype = DType::bfloat16, .head_dim = 64, .tile_m = 64,
    .tile_n = 64, .warps = 4, .min_blocks = 2}, {.stages = 1, .q_in_registers = true, .ping_pong = false,
    .copy = Copy::cp_async_16}};
extern "C" __global__ void __launch_bounds__(config.threads(), config.min_blocks)
    row(__grid_constant__ ForwardParams const params) { forward<config>(params); }
"""


def compile_row(directory: Path, passes: int) -> cubin.Kernel:
    probe = [sys.executable, str(ROOT / "build_backend" / "probe.py"), "cutlass"]
    include = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    assert include, "CUTLASS was not found: pip install --no-deps -r requirements/cutlass.txt"
    (directory / "row.cu").write_text(KERNEL)
    output = directory / f"row{passes}.cubin"
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-gencode=arch=compute_90,code=sm_90", "-cubin"]
    flags += [f"-I{ROOT / 'src'}", f"-I{include}", f"-DCUTLASS_FMHA_MMA_PASSES={passes}"]
    cubin.run_tool("nvcc", *flags, "-o", output, directory / "row.cu")
    (kernel,) = cubin.read_kernels(output)
    return kernel


def test_extra_passes_multiply_the_mma_of_a_main_loop_and_leave_the_rest_alone(tmp_path: Path):
    once, thrice = (compile_row(tmp_path, passes) for passes in (1, 3))
    before, after = (mainloop.main_loop(kernel).counts for kernel in (once, thrice))
    assert before["mma"] > 0 and after["mma"] == 3 * before["mma"]
    others = [sum(c.values()) - c["mma"] - c["nop"] for c in (before, after)]
    assert abs(others[1] - others[0]) <= 0.05 * others[0], (before, after)
    assert thrice.count("LDL", "STL") == 0
    # The operands come from constant memory, so that ptxas knows nothing of them.
    assert "[0x3]" in " ".join(i.operands for i in thrice.code if i.base == "LDC")
    assert "[0x3]" not in " ".join(i.operands for i in once.code if i.base == "LDC")
    # Every accumulator that the loop writes, it reads: no repeated mma starts from zero or drops its result.
    extra = [i for i in thrice.code if i.base == "HMMA"]
    chained = sum(i.operands.split(",")[0].strip() == i.operands.split(",")[3].strip() for i in extra)
    assert chained > 0.6 * len(extra)


# ---- rows of all families ----------------------------------------------------------------------------------


def test_every_case_has_rows_and_they_are_built():
    """Of both architectures; and tiles make whole waves, but for documents of any length."""
    asked = list(families.cases())
    assert {name for names, _ in asked for name in names} == {
        *("plain", "ranged", "score_mod", "masked", "scored", "few_query", "few_query_scored", "wide", "wide_scored"),
        "backward",
    }
    left_out = "_element|_ds$|^bwd_.*_scored"
    for names, case in asked:
        few = names[0] == "few_query"
        if not few and names[0] != "wide" and case.group != "packed":
            assert case.batch * case.num_heads * case.seqlen_q // 256 % 132 == 0
        for arch in (89, 120):
            rows = families.rows_for(names[:2] if few else names, case, [row for row in _C.rows() if row.arch == arch])
            wanted = [row for row in rows if not re.search(left_out, row)]
            assert wanted and all(re.search(families.ROWS, row) for row in wanted), (case.name, arch)


def entry(case: str, row: str, share: float, **more: Any) -> dict[str, Any]:
    figures = {"us": 1 / share, "tflops": 200 * share, "share": share, "tbytes_per_s": 1.0, "error_ratio": 0.5}
    return {"family": "plain", "case": case, "row": row, "plain": None, **figures, **more}


def test_shares_are_told_beside_those_of_plain_rows(capsys: pytest.CaptureFixture[str], monkeypatch):
    refused = {"family": "ranged", "case": "packed", "row": "other", "plain": "dense", "reason": "it is odd"}
    entries = [entry("dense", "slow", 0.5), entry("dense", "fast", 0.9)]
    entries += [refused, entry("packed", "ranged", 0.88, family="ranged", plain="dense", error_ratio=float("nan"))]
    found = {"passes": 3, "arch": 89, "machine": {"gpu": "an H200"}, "entries": entries, "stack": {"slow": 64}}
    monkeypatch.setattr(emulate, "measure_families", lambda *asked: {**found, "asked": asked})
    assert emulate.main(["l4", "--families", "-D", "A=B"]) == 0
    told = capsys.readouterr().out
    assert "A MODEL, made of an H200" in told and "divided by 3 passes" in told
    lines = [line.split() for line in told.splitlines()[-4:]]
    assert [line[1] for line in lines] == ["fast", "slow", "ranged", "other"]
    assert lines[1][-4:] == ["64", "B", "of", "stack"]
    assert lines[2][-4:] == ["88.0", "%", "-2.0", "WRONG"] and lines[3][-3:] == ["it", "is", "odd"]
