"""Emulation builds: their options, what they compile, how launches are padded, and the report of figures.
Needs no GPU; nvcc, CMake and the headers of CUTLASS as a build does."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import building
import cubin
import emulate
import mainloop
import pytest
from emulation import measure, report
from emulation.cases import SHAPES, Case, cases

from cutlass_fmha import _C

ROOT = Path(__file__).resolve().parents[1]
KIB = 1024


# ---- the build's options -----------------------------------------------------------------------------------


def configure(tmp_path: Path, **cache: str) -> subprocess.CompletedProcess[str]:
    """The part of CMake's configuration that judges an emulation's options; prints what follows from them."""
    settings = "\n".join(f'set({name} "{value}")' for name, value in cache.items())
    (tmp_path / "options.cmake").write_text(
        f'set(CUTLASS_FMHA_MMA_PASSES 1)\n{settings}\ninclude("{ROOT}/cmake/Architectures.cmake")\n'
        "fmha_check_emulation()\nforeach(arch 89 90 120)\n  fmha_code_flags(${arch} flags)\n"
        '  message("${arch}: ${flags}")\nendforeach()\nmessage("${FMHA_EMULATION_DEFINITIONS}")\n'
    )
    command = [building.find_program("cmake"), "-P", str(tmp_path / "options.cmake")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("passes", ["0", "2", "-1", "03", "three", "1.5", ""])
def test_passes_that_are_no_odd_number_are_refused(tmp_path: Path, passes: str):
    answer = configure(tmp_path, CUTLASS_FMHA_EMULATION="ON", CUTLASS_FMHA_MMA_PASSES=passes)
    assert answer.returncode != 0
    assert f'must be an odd number from 1 on, and it is "{passes}"' in " ".join(answer.stderr.split())


def test_slow_kernels_are_for_emulation_builds_only(tmp_path: Path):
    answer = configure(tmp_path, CUTLASS_FMHA_MMA_PASSES="3")
    assert answer.returncode != 0
    sentence = "CUTLASS_FMHA_MMA_PASSES=3 makes kernels slow on purpose and needs CUTLASS_FMHA_EMULATION=ON"
    assert sentence in " ".join(answer.stderr.split())


@pytest.mark.parametrize(
    ("cache", "on_sm_90"),
    [
        ({}, {90}),
        ({"CUTLASS_FMHA_SM120_PROXY": "90"}, {90, 120}),
        ({"CUTLASS_FMHA_EMULATION": "ON"}, {89, 90, 120}),
        ({"CUTLASS_FMHA_EMULATION": "ON", "CUTLASS_FMHA_MMA_PASSES": "15"}, {89, 90, 120}),
    ],
)
def test_an_emulation_build_compiles_every_row_for_sm_90(
    tmp_path: Path, cache: dict[str, str], on_sm_90: set[int]
):
    answer = configure(tmp_path, **cache)
    assert answer.returncode == 0, answer.stderr
    flags = dict(re.findall(r"^(\d+): (.*)$", answer.stderr, re.MULTILINE))
    assert {int(arch) for arch in flags if "sm_90" in flags[arch]} == on_sm_90
    assert f"CUTLASS_FMHA_MMA_PASSES={cache.get('CUTLASS_FMHA_MMA_PASSES', 1)}" in answer.stderr


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


@pytest.mark.parametrize(
    ("smem", "warps", "blocks"),
    [
        (97 * KIB, 8, 1),  # one block by shared memory
        (99 * KIB, 8, 1),  # the largest one
        (49 * KIB, 4, 2),  # exactly half of an SM
        (49 * KIB + 1, 4, 1),
        (33 * KIB, 8, 2),
        (24 * KIB, 4, 4),
        (4 * KIB, 16, 3),  # by warps: an sm_90 has room for four
        (4 * KIB, 4, 12),
        (0, 1, 24),  # by the number of blocks
    ],
)
def test_an_sm_90_holds_as_many_padded_blocks_as_the_target_holds(
    padding: Any, smem: int, warps: int, blocks: int
):
    assert blocks_per_sm(smem, warps, 100 * KIB, 48, 24) == blocks
    (padded,) = map(int, padding([(smem, warps)]))
    assert padded >= smem and padded <= 227 * KIB
    assert blocks_per_sm(padded, warps, 228 * KIB, 64, 32) == blocks


def test_padding_is_right_for_every_block_that_fits(padding: Any):
    asked = [(smem, warps) for warps in (1, 2, 4, 8, 9, 12, 16, 48) for smem in range(0, 99 * KIB + 1, 1008)]
    for (smem, warps), padded in zip(asked, map(int, padding(asked)), strict=True):
        expected = blocks_per_sm(smem, warps, 100 * KIB, 48, 24)
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


# ---- the command -------------------------------------------------------------------------------------------


def test_default_rows_are_those_for_long_problems():
    taken = [
        "fwd_sm89_bf16_d64_m64n64w4",
        "fwd_sm120_bf16_d128_m256n64w8",
        "fwd_sm120_bf16_d64_m128n64w8_tma",
    ]
    left = [
        *("fwd_sm89_f16_d64_m64n64w4", "fwd_sm89_bf16_d64_m64n64w4_element"),
        "fwd_sm90_bf16_d64_m32n32w8k8",
    ]
    assert [name for name in (*taken, *left) if re.search(emulate.ROWS, name)] == taken
    narrowed = emulate.rows_expression(emulate.parse_arguments(["--head-dims", "64", "128"]))
    assert [name for name in taken if re.search(narrowed, name)] == taken
    narrowed = emulate.rows_expression(emulate.parse_arguments(["--head-dims", "64"]))
    assert [name for name in taken if re.search(narrowed, name)] == [taken[0], taken[2]]
    assert emulate.rows_expression(emulate.parse_arguments([])) == emulate.ROWS
    assert emulate.rows_expression(emulate.parse_arguments(["--manifest", "x", "--rows", "y"])) == "y"
    assert emulate.rows_expression(emulate.parse_arguments(["--manifest", "x"])) == "_bf16_"


def test_a_build_is_configured_with_its_passes_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(emulate, "spills", lambda build: {})
    options = ["--archs", "89", "120", "--define", "A=B", "--jobs", "3", "--no-build", "--passes", "5"]
    options += ["--manifest", str(tmp_path / "x.cmake"), "--build-dir", str(tmp_path)]
    (build,) = emulate.make_builds(emulate.parse_arguments(options))
    command = build.tree.configuration
    assert {"-DCUTLASS_FMHA_EMULATION=ON", "-DCUTLASS_FMHA_MMA_PASSES=5", "-DA=B"} <= set(command)
    assert {f"-DCUTLASS_FMHA_MANIFEST={tmp_path}/x.cmake", "-DCMAKE_CUDA_ARCHITECTURES=89;120"} <= set(
        command
    )
    assert str(tmp_path / "x5") in command and "-DCUTLASS_FMHA_JOBS=3" in command
    with pytest.raises(building.BuildError, match=r"there is no _C\.\*\.so in .*: build it first"):
        build.extension  # noqa: B018 - asks for a file


def test_a_failed_build_ends_with_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sentence = "a sentence so long that CMake breaks it into lines" + ", word after word" * 9
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(x LANGUAGES NONE)\n"
        "add_custom_target(bad COMMAND echo 'x.cu(3): error: no such thing' COMMAND false)\n"
        f'if(WRONG)\n  message(FATAL_ERROR "cutlass_fmha: {sentence}")\nendif()\n'
        'message("${CUTLASS_FMHA_JOBS} ${Python_EXECUTABLE} ${pybind11_DIR} ${CMAKE_BUILD_TYPE}")\n'
    )
    monkeypatch.setattr(building, "ROOT", tmp_path)
    with pytest.raises(building.BuildError, match="(?s)build failed, .*error: no such thing"):
        building.Tree(tmp_path / "tree").build("bad", "*")
    with pytest.raises(building.BuildError, match=f"^cutlass_fmha: {sentence}$"):
        building.Tree(tmp_path / "tree", {"WRONG": 1}).configure()
    with pytest.raises(building.BuildError, match="the project has no CMake variable OTHER"):
        building.Tree(tmp_path / "tree", {"WRONG": 0, "OTHER": 1}).configure()


@pytest.mark.parametrize("how", ["timeout", "interrupt"])
def test_what_ends_a_program_ends_all_that_it_started(how: str, tmp_path: Path):
    """A child and its child hold a lock until they are dead."""
    script = (
        "import fcntl, os, signal\nlock = open('lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "if os.fork() == 0: signal.pause()\n"
        f"{'os.kill(os.getppid(), signal.SIGINT)' if how == 'interrupt' else ''}\nsignal.pause()"
    )
    command = ["sh", "-c", f'cd {tmp_path}; exec {sys.executable} -c "{script}"']
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if how == "timeout":
            assert building.run(command, tmp_path / "log", 2.0) == (None, "")
        else:
            with pytest.raises(KeyboardInterrupt):
                building.run(command, tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
    waiting = ["flock", "--timeout", "1200", str(tmp_path / "lock"), "true"]
    assert subprocess.run(waiting, check=False).returncode == 0, "one of both is alive"


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        building.BuildError, match="cmake was not found: pip install -r requirements/build.txt"
    ):
        building.find_program("cmake")


@pytest.mark.parametrize("arguments", [["--passes", "2"], ["--passes", "x"], ["--passes", "-3"]])
def test_passes_on_the_command_line_are_odd(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        emulate.main(arguments)
    assert "--passes" in capsys.readouterr().err


def test_a_head_dimension_without_a_shape_is_told_before_anything_is_built(
    capsys: pytest.CaptureFixture[str],
):
    assert emulate.main(["--head-dims", "80"]) == 1
    assert "head_dim must be one of 32, 64, 96, 128, 192, 256, got 80" in capsys.readouterr().err


def test_operations_are_counted_over_the_visible_pairs():
    assert Case(64, False, 1, 1, 4).flop == 4 * 16 * 64
    assert Case(64, True, 1, 1, 4).flop == 4 * 10 * 64
    assert len(cases(SHAPES)) == 2 * len(SHAPES)
    assert [case.causal for case in cases([64])] == [False, True]


# ---- the report --------------------------------------------------------------------------------------------

TFLOPS = {  # (row, arch): by (causal, passes)
    ("FA2 128x32 w4", None): {(False, 3): 150.0, (False, 5): 100.0, (True, 3): 120.0},
    ("FA2 64x64 w4", None): {(False, 3): 140.0, (False, 5): 101.0, (True, 3): 130.0},
    ("fwd_sm89_bf16_d128_m256n64w8", 89): {(False, 3): 180.0, (False, 5): 110.0, (True, 3): 160.0},
    ("fwd_sm89_bf16_d128_m64n32w4", 89): {(False, 3): 190.0, (False, 5): 108.0, (True, 3): 150.0},
    ("fwd_sm90_bf16_d128_m64n32w4", 90): {(False, 3): 199.0},
    ("fwd_sm120_bf16_d128_m64n32w4", 120): {(False, 3): 150.0, (False, 5): 90.0},
}


@pytest.fixture
def result() -> report.Result:
    def part(passes: int) -> dict[str, Any]:
        entries = [
            {
                "row": row,
                "arch": arch,
                "head_dim": 128,
                "causal": causal,
                "passes": n,
                "tflops": tflops,
                "share": tflops * passes / 600.0,
            }
            for (row, arch), figures in TFLOPS.items()
            for (causal, n), tflops in figures.items()
            if n == passes
        ]
        machine = {"gpu": "NVIDIA H200", "torch": "2.11", "driver": "580", "commit": None, "date": "today"}
        return {
            "passes": passes,
            "ceiling": {"64": 590.0 / passes, "128": 600.0 / passes},
            "machine": {**machine, "clocks_after": {"sm_clock_mhz": 1500.0}},
            "results": [{**entry, "error_ratio": 0.5} for entry in entries],
        }

    return report.merge([part(3), part(5)], [case.as_dict() for case in cases([128])])


def test_rows_are_ranked_per_target_head_dimension_and_mask(result: report.Result):
    l4, geforce = (report.Target("x", 89, passes) for passes in (3, 5))
    names = ["fwd_sm89_bf16_d128_m256n64w8", "fwd_sm89_bf16_d128_m64n32w4"]
    assert [entry.row for entry in report.ranking(result, l4, 128, False)] == names[::-1]
    assert [entry.row for entry in report.ranking(result, l4, 128, True)] == names
    assert [entry.row for entry in report.ranking(result, geforce, 128, False)] == names
    assert report.ranking(result, geforce, 64, False) == []


def test_rows_are_ranked_by_their_share_since_clocks_change(result: report.Result):
    slow_clock = next(
        e for e in result["results"] if e["row"] == "fwd_sm89_bf16_d128_m64n32w4" and not e["causal"]
    )
    slow_clock["tflops"] *= 0.9
    best = report.ranking(result, report.Target("x", 89, 3), 128, False)[0]
    assert (best.row, best.share) == (slow_clock["row"], pytest.approx(190 / 200))


def test_shares_are_of_the_ceiling_with_as_many_passes(result: report.Result):
    best = report.ranking(result, report.Target("x", 89, 3), 128, False)[0]
    assert best.share == pytest.approx(190 / 200)
    assert report.ranking(result, report.Target("x", 89, 5), 128, False)[0].share == pytest.approx(110 / 120)
    theirs = report.standard(result, 3, 128, False)
    assert theirs is not None and (theirs.row, theirs.share) == ("FA2 128x32 w4", pytest.approx(0.75))
    theirs = report.standard(result, 3, 128, True)
    assert theirs is not None and theirs.row == "FA2 64x64 w4"
    assert report.standard(result, 1, 128, True) is None


def test_the_report_says_that_it_is_a_model_and_of_which_gpu(result: report.Result):
    text = report.markdown(result)
    assert "A MODEL, measured on NVIDIA H200: no figure here was measured on a GPU that is named" in text
    line = (
        "| D128 full | fwd_sm89_bf16_d128_m64n32w4 | 190.0 | 95 % | fwd_sm89_bf16_d128_m256n64w8 90 % "
        "| FA2 128x32 w4 | 150.0 | 75 % | 1.27x |"
    )
    assert line in text
    assert "## L4, L40S: sm_89 rows, 3 passes" in text and "## RTX 5080, RTX 5090: sm_120 rows" in text
    assert "| fwd_sm120_bf16_d128_m64n32w4 | D128 | 75 % | 75 % | - | - |" in text
    assert "WRONG" not in text


def test_a_target_without_rows_has_no_table(result: report.Result):
    result["results"] = [entry for entry in result["results"] if entry["arch"] != 120]
    assert {target.arch for target in report.covered(result)} == {89}
    assert "sm_120" not in report.markdown(result)


def test_a_kept_result_is_rendered_without_a_gpu(
    result: report.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kept = tmp_path / "emulation-h200.json"
    kept.write_text(json.dumps(result))
    assert emulate.main(["--report", str(kept)]) == 0
    assert kept.with_suffix(".md").read_text() == capsys.readouterr().out == report.markdown(result)
    assert emulate.main(["--report", str(kept), "--output", str(tmp_path / "v1.2")]) == 0
    assert (tmp_path / "v1.2.md").is_file()
    assert emulate.default_stem(result).name == "emulation-h200"


def test_a_kernel_that_computed_something_else_fails_the_command(
    result: report.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wrong = next(entry for entry in result["results"] if entry["arch"] == 89)
    wrong["error_ratio"] = 1.5
    kept = tmp_path / "wrong.json"
    kept.write_text(json.dumps(result))
    assert emulate.main(["--report", str(kept)]) == 1
    printed = capsys.readouterr()
    assert "WRONG: fwd_sm89_bf16_d128_m256n64w8 D128 full, 3 passes: error 1.50" in printed.out
    assert "wrong: fwd_sm89_bf16_d128_m256n64w8" in printed.err


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"kind": "emulation", "schema": 99}', '{"schema": 1}'])
def test_a_file_that_is_no_result_is_told(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "x.json").write_text(text)
    assert emulate.main(["--report", str(tmp_path / "x.json")]) == 1
    assert re.search(r"x\.json is (not JSON|no result of tools/emulate.py)", capsys.readouterr().err)


def test_a_share_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch):
    """A row and the mma alone take turns; three clocks, and the row takes 1.25 times its mma at each."""
    clocks = [1.0, 1.1, 1.25]

    def timed(launches: list[Any]) -> list[float]:
        assert launches[::2] == [row] * 3 and launches[1::2] == [mma] * 3
        return [seconds / clock for clock in clocks for seconds in (0.02, 0.004)]

    def row() -> None: ...

    def mma() -> float:
        return 4e12

    bench = object.__new__(measure.Bench)
    bench.mma_alone, bench.budget = {measure.PACE: mma}, 0.06
    monkeypatch.setattr(measure, "timed", timed)
    monkeypatch.setattr(measure, "rounds", lambda launch, budget: 3)
    rate, share = bench.rate_and_share(row, 16e12)
    assert share == pytest.approx(0.8)
    assert rate == pytest.approx(16e12 / 0.02 * 1.1)  # the median's clock


def test_parts_are_measured_in_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Without an sm_90 GPU that process says so, and the command ends with it."""
    made = emulate.Build(3, building.Tree(tmp_path))
    for name in ("_C.x.so", "tools/emulation/libemulation_reference.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(emulate, "spills", lambda build: {"x": 7})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(emulate, "make_builds", lambda options: [made])
    assert emulate.main(["--head-dims", "64"]) == 1
    assert "measuring the build with 3 mma passes failed" in capsys.readouterr().err

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        assert command[2:5] == [
            str(made.extension),
            str(made.reference),
            str(tmp_path / "result.json"),
        ]
        Path(command[4]).write_text(json.dumps({"passes": 3, "results": [{"row": "x"}, {"row": "y"}]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(emulate.subprocess, "run", run)
    results = emulate.measure(made, [64], 0.01)["results"]
    assert results == [{"row": "x", "spills": 7}, {"row": "y", "spills": 0}]
