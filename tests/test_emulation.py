"""Emulation builds: their options, what they compile, how launches are padded, what is timed with them.
Needs no GPU; nvcc, CMake and the headers of CUTLASS as a build does."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import building
import cubin
import emulate
import mainloop
import pytest
import torch
from tuning import families

from cutlass_fmha import _C
from cutlass_fmha.dispatch import device as devices
from cutlass_fmha.launch import gradients

ROOT = Path(__file__).resolve().parents[1]
KIB = 1024


@pytest.mark.parametrize(
    ("emulation", "passes", "told"),
    [
        *(("ON", x, f'must be an odd number from 1 on, and it is "{x}"') for x in ("0", "2", "-1", "03", "1.5", "")),
        ("", "3", "MMA_PASSES=3 makes kernels slow on purpose and needs CUTLASS_FMHA_EMULATION=ON"),
        ("", "1", {90}),
        ("proxy", "1", {90, 120}),
        ("ON", "1", {89, 90, 120}),
        ("ON", "15", {89, 90, 120}),
    ],
)
def test_an_emulation_build_is_all_for_sm_90(tmp_path: Path, emulation: str, passes: str, told: set[int] | str):
    """And its passes are odd; kernels are slow there only."""
    asked = "SM120_PROXY 90" if emulation == "proxy" else f'EMULATION "{emulation}"'
    answer = building.script(
        tmp_path,
        f'set(CUTLASS_FMHA_{asked})\nset(CUTLASS_FMHA_MMA_PASSES "{passes}")',
        f'include("{ROOT}/cmake/Architectures.cmake")\nfmha_check_emulation()\nforeach(arch 89 90 120)',
        'fmha_code_flags(${arch} flags)\nmessage("${arch}: ${flags}")\nendforeach()',
        'message("${FMHA_EMULATION_DEFINITIONS}")',
    )
    if isinstance(told, str):
        assert answer.returncode and told in " ".join(answer.stderr.split())
    else:
        assert {int(arch) for arch in re.findall(r"^(\d+): .*sm_90", answer.stderr, re.MULTILINE)} == told
        assert answer.returncode == 0 and f"CUTLASS_FMHA_MMA_PASSES={passes}" in answer.stderr


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


def blocks_per_sm(smem: int, warps: int, smem_per_sm: int, warps_per_sm: int, most: int) -> int:
    allocated = -(-(smem + KIB) // 128) * 128
    return min(smem_per_sm // allocated, warps_per_sm // warps, most)


def test_padding_is_right_for_every_block_that_fits_and_others_are_errors(tmp_path: Path):
    """An sm_90 holds as many as the GPU that it stands in for: by shared memory, by warps, and by number."""
    (tmp_path / "padding.cpp").write_text(PROGRAM)
    flags = ("-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'src'}", "-o", "padding", "padding.cpp")
    subprocess.run([os.environ.get("CXX") or "c++", *flags], cwd=tmp_path, check=True)
    asked = [(smem, warps) for warps in (1, 2, 4, 8, 9, 12, 16, 48) for smem in range(0, 99 * KIB + 1, 1008)]
    asked += [(49 * KIB, 4), (49 * KIB + 1, 4), (99 * KIB, 8)]  # half of an SM, a byte more, the largest
    emulated = {one: blocks_per_sm(*one, 100 * KIB, 48, 24) for one in asked}
    assert [emulated[one] for one in (*asked[-3:], (0, 16), (0, 1))] == [2, 1, 1, 3, 24]
    lines = "".join(f"{smem} {warps}\n" for smem, warps in (*emulated, (100 * KIB, 8), (0, 49)))
    *answers, too_large, too_many = subprocess.check_output(tmp_path / "padding", input=lines, text=True).splitlines()
    assert too_large == "a block of 8 warps with 102400 bytes of shared memory fits no SM of sm_89 or sm_120"
    assert "a block of 49 warps" in too_many
    for ((smem, warps), expected), padded in zip(emulated.items(), map(int, answers), strict=True):
        assert smem <= padded <= 227 * KIB
        assert blocks_per_sm(padded, warps, 228 * KIB, 64, 32) == expected, (smem, warps, padded)


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


def test_every_case_has_rows_and_they_are_built():
    """Of both architectures; and tiles make whole waves, but for documents of any length."""
    asked = list(families.cases())
    known = {*families.ROWS, "scored", "few_query_scored", "wide_scored"}
    assert {name for names, _ in asked for name in names} == known
    left_out = "_element|_ds$|^bwd_.*_scored"
    built = families.rows_of(tuple(families.ROWS))
    for names, case in asked:
        few = names[0] == "few_query"
        assert names[0] in families.ROWS
        if not few and names[0] != "wide" and case.group != "packed":
            assert case.batch * case.num_heads * case.seqlen_q // 256 % 132 == 0
        for arch in (89, 120):
            of_arch = [row for row in (*_C.rows(), *_C.backward_rows()) if row.arch == arch]
            rows = families.rows_for(names[:2] if few else names, case, of_arch)
            wanted = [row for row in rows if not re.search(left_out, row)]
            assert wanted and all(re.search(built, row) for row in wanted), (case.name, arch)
            assert any(re.search(families.ROWS[names[0]], row) for row in wanted), (case.name, arch)


def test_a_family_alone_builds_its_rows_and_plain_ones():
    """Those of FlashAttention-2, too, where there are."""
    command = [building.find_program("cmake"), "-D", f"CUTLASS_FMHA_MANIFEST={ROOT}/tools/tuning/beside.cmake"]
    command += ["-P", str(ROOT / "cmake" / "list_rows.cmake")]
    names = [line.split()[0] for line in subprocess.check_output(command, text=True).splitlines()]
    built = {x: [name for name in names if re.search(families.rows_of([x]), name)] for x in families.ROWS}
    for family, arch in itertools.product(built, (89, 120)):
        of_arch = [name for name in built[family] if f"_sm{arch}_" in name]
        assert any(re.search(families.ROWS[family], name) for name in of_arch)
        assert any(f"fwd_sm{arch}_bf16_d128_m256" in name for name in of_arch)
    assert sorted(name for name in built["backward"] if name.startswith(("bwd_sm89", "bwd_sm120"))) == [
        *("bwd_sm120_bf16_d128_m64n128w8_tma", "bwd_sm120_bf16_d64_m64n256w8_tma"),
        *("bwd_sm89_bf16_d128_m64n128w8", "bwd_sm89_bf16_d128_m64n64w4_fa2"),
        *("bwd_sm89_bf16_d64_m64n128w8_fa2", "bwd_sm89_bf16_d64_m64n256w8"),
    ]


@pytest.mark.parametrize("gpu", ["l4", "rtxpro6000"])
def test_gradients_are_timed_by_the_row_that_is_named(gpu: str):
    """What the benchmark calls takes each row's name to the launch, and a row of no backward is refused."""
    device = devices.PRESETS[gpu]
    of_arch = [row for row in _C.backward_rows() if row.arch == emulate.ARCHITECTURES[device.capability]]
    for case in (case for names, case in families.cases() if names == ("backward",)):
        assert case.flop == 5 * 2 * case.num_heads * case.visible_pairs * case.head_dim
        shape = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(5)]
        lse = torch.empty(case.batch, case.num_heads, case.seqlen_q, device="meta")
        about = (lse, None, 0.1, "bottom-right" if case.causal else "none", {}, (True, True, True, False, False))
        launch = partial(gradients.launch, tensors[4], tuple(tensors[:3]), tensors[3], *about, device=device)
        rows = families.rows_for(("backward",), case, of_arch)
        assert len(rows) >= 2
        for row in rows:
            launch(row=row)
        with pytest.raises(ValueError, match="is not a row"):
            launch(row="fwd")


def test_a_case_without_rows_or_times_is_named():
    asked = [(case, ["row"] if names[0] != "backward" else []) for names, case in families.cases()]
    sentence = families.unmet(asked, "row of sm_89")
    assert sentence and sentence.startswith("no row of sm_89 of 4 cases: b12_h11_s4096_d64_bf16_backward, ")
    assert families.unmet([one for one in asked if one[1]], "row") is None


@pytest.mark.parametrize(
    ("options", "asked"),
    [(["--families"], tuple(families.ROWS)), (["--family", "backward", "--family", "wide"], ["backward", "wide"])],
)
def test_families_that_are_asked_for_are_measured(options: list[str], asked: Any, monkeypatch, capsys):
    given: list[Any] = []

    def measure(*arguments: Any) -> None:
        given.append(arguments)
        raise building.BuildError("no row of sm_89 of 4 cases")

    monkeypatch.setattr(emulate, "measure_families", measure)
    assert emulate.main(["rtx4090", *options]) == emulate.main(["l4", "--report", "--leaderboard", "nowhere"]) == 1
    assert given[0][:2] == (89, 5) and given[0][4] == asked
    told, of_search = capsys.readouterr().err.splitlines()
    assert told == "emulate: no row of sm_89 of 4 cases" and of_search.startswith("emulate: nowhere can't be read")


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


def test_nothing_of_the_record_was_wrong():
    record = json.loads((ROOT / "benchmarks" / "results" / "emulation-families-h200.json").read_text())
    assert all(one["error"] <= 1 for run in record["runs"] for one in run["entries"] if "us" in one)
