"""The command line: ``python -m cutlass_fmha``."""

from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest
from fake_build import L4, make_build

import cutlass_fmha
from cutlass_fmha import _C, __main__
from cutlass_fmha.cost import store
from cutlass_fmha.dispatch import device
from cutlass_fmha.dispatch import table as tables


@pytest.fixture
def build(monkeypatch):
    build = make_build(compiled_for={120: "120f"})
    monkeypatch.setattr(tables, "this_build", lambda: build)
    monkeypatch.setattr(__main__, "this_build", lambda: build)
    monkeypatch.delenv(device.FORCE_ARCH, raising=False)
    monkeypatch.delenv(store.WHICH, raising=False)
    monkeypatch.setenv(store.CACHE_DIR, "/nowhere")
    return build


def run(capsys, *arguments: str) -> tuple[int, str]:
    status = __main__.main(list(arguments))
    return status, capsys.readouterr().out


def refuse(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as error:
        __main__.main(list(arguments))
    assert error.value.code == 2
    return capsys.readouterr().err


def test_without_arguments_it_prints_help(capsys):
    status, out = run(capsys)
    assert status == 0
    for command in ("info", "explain", "calibrate", "bench", "demo"):
        assert re.search(rf"\n    {command}\s", out)


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "cutlass_fmha", "info"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"cutlass_fmha {cutlass_fmha.__version__}, torch " in done.stdout


def test_info_says_what_this_build_is(capsys):
    status, out = run(capsys, "info", "--rows")
    assert status == 0
    info = _C.build_info()
    if info["cuda"]:
        assert f"built with CUDA {info['cuda_version']}" in out
    else:
        assert "built without CUDA (CUTLASS_FMHA_CUDA=OFF): the CPU backend only" in out
    rows = _C.rows()
    assert all(f"  {row.name}: {row.smem_bytes} bytes" in out for row in rows)
    assert "driver: " in out


def test_info_counts_rows_and_names_devices(capsys, build, monkeypatch):
    old = device.Device("NVIDIA A100", (8, 0), 108, 163 * 1024)
    monkeypatch.setattr(_C, "device_count", lambda: 2)
    monkeypatch.setattr(_C, "driver_version", lambda: 13000)
    monkeypatch.setattr(device, "of_index", lambda index: (L4, old)[index])
    monkeypatch.setattr(
        _C, "build_info", lambda: {"cuda": True, "cuda_version": "13.0", "cutlass_version": "4.2.0"}
    )
    _, out = run(capsys, "info")
    for line in (
        "built with CUDA 13.0 and CUTLASS 4.2.0",
        "sm_89: 42 rows, compiled for sm_89",
        "sm_120: 42 rows, compiled for sm_120f",
        "driver: supports CUDA 13.0",
        "cuda:0: NVIDIA L4 (capability 8.9, 58 SMs), takes the sm_89 rows",
        "        costs of rows: the default for GPUs that were never measured",
        "cuda:1: NVIDIA A100 (capability 8.0, 108 SMs), NVIDIA A100 (capability 8.0, 108 SMs) is older than",
    ):
        assert line in out


def test_info_survives_a_driver_that_is_too_old(capsys, monkeypatch):
    def too_old():
        raise RuntimeError("the NVIDIA driver is too old: it supports CUDA 12.2")

    monkeypatch.setattr(_C, "device_count", too_old)
    status, out = run(capsys, "info")
    assert status == 0 and "devices: none, the NVIDIA driver is too old" in out


def test_explain_names_a_driver_that_is_too_old_where_it_matters(capsys, build, monkeypatch):
    def device_count():
        raise RuntimeError("the NVIDIA driver is too old: it supports CUDA 12.2")

    monkeypatch.setattr(_C, "device_count", device_count)
    assert "error: the NVIDIA driver is too old" in refuse(capsys, "explain", "--shape", "1,8,2,64")
    assert run(capsys, "explain", "--shape", "1,8,2,64", "--device", "l4")[0] == 0


def test_explain_prints_the_rows_in_question_and_all_when_asked(capsys, build):
    arguments = (
        *("explain", "--shape", "2,8192,16,128", "--kv-heads", "4", "--seqlen-k", "4096", "--causal"),
        *("--dtype", "float16", "--device", "l4"),
    )
    _, out = run(capsys, *arguments, "--all")
    assert all(f" {row.name} " in out for row in build.rows)
    status, out = run(capsys, *arguments)
    assert status == 0
    assert (
        "problem: batch 2, seqlen_q 8192, seqlen_k 4096, num_heads 16, num_heads_kv 4, head_dim 128, "
        "float16, causal bottom-right, aligned to 16 bytes"
    ) in out
    assert "device:  NVIDIA L4 (capability 8.9, 58 SMs)" in out
    assert not any(f" {row.name} " in out for row in build.rows if row.arch != 89)
    assert "\nruns: fwd_sm89_f16_d128_m256n64w8, the cheapest eligible row by predicted cost" in out


def test_explain_takes_alignment_top_left_and_a_row(capsys, build):
    _, out = run(capsys, "explain", "--shape", "1,5,1,64", "--alignment", "2", "--device", "sm_120")
    assert "runs: fwd_sm120_bf16_d64_m64n64w4_element" in out
    _, out = run(capsys, "explain", "--shape", "1,5,1,64", "--causal", "top-left", "--device", "sm_90:7")
    assert "causal top-left" in out and "7 SMs" in out
    name = "fwd_sm90_bf16_d64_m256n64w8"
    _, out = run(capsys, "explain", "--shape", "1,5,1,64", "--row", name, "--device", "h200")
    assert out.endswith(f"runs: {name}, forced by name\n")


def test_explain_without_a_gpu_is_about_the_cpu(capsys, build, monkeypatch):
    monkeypatch.setattr(_C, "device_count", lambda: 0)
    status, out = run(capsys, "explain", "--shape", "1,5,1,64")
    assert status == 0 and out.endswith("runs: the CPU backend, which needs no row\n")


def test_explain_reports_what_nothing_runs_with_its_exit_status(capsys, build):
    status, out = run(capsys, "explain", "--shape", "1,5,1,480", "--device", "rtx4090")
    assert status == 1 and "runs: nothing, because no row of this build can run this problem" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain"], "the following arguments are required: --shape"),
        (["explain", "--shape", "1,2,3"], "four sizes batch,seqlen_q,num_heads,head_dim are needed, got '1"),
        (["explain", "--shape", "1,2,3,x"], "four sizes batch,seqlen_q,num_heads,head_dim are needed"),
        (["explain", "--shape", "1,2,4,64", "--kv-heads", "3"], "num_heads_kv must divide num_heads 4, got"),
        (["explain", "--shape", "1,2,4,64", "--device", "cuda:77"], "device cuda:77 does not exist"),
        (["explain", "--shape", "1,2,4,64", "--device", "voodoo"], "device must be cuda, "),
        (["explain", "--shape", "1,2,4,64", "--dtype", "int8"], "dtype must be one of"),
        (["explain", "--shape", "1,2,4,64", "--causal", "left"], "invalid choice: 'left'"),
        (
            ["explain", "--shape", "1,2,4,64", "--row", "x", "--device", "l4"],
            "'x' is not a row of this build; `python -m cutlass_fmha info --rows` lists its 126",
        ),
        (["tune"], "invalid choice: 'tune'"),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(capsys, build, arguments: list[str], message: str):
    assert message in refuse(capsys, *arguments)


def test_calibrate_gets_its_own_arguments(monkeypatch):
    from cutlass_fmha.calibrate import command

    monkeypatch.setattr(command, "main", lambda argv: (argv == ["--report"]) * 3)
    assert __main__.main(["calibrate", "--report"]) == 3


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_bench_and_demo_get_their_own_arguments(monkeypatch, command: str):
    seen = []
    module = types.ModuleType(f"cutlass_fmha.{command}")
    module.main = lambda argv: seen.append(argv) or 3
    monkeypatch.setitem(sys.modules, f"cutlass_fmha.{command}", module)
    monkeypatch.setattr(cutlass_fmha, command, module, raising=False)
    assert __main__.main([command, "--help", "x"]) == 3
    assert seen == [["--help", "x"]]


def test_importing_the_package_imports_no_command():
    code = (
        "import sys, cutlass_fmha.__main__\n"
        "late = ('cutlass_fmha.bench', 'cutlass_fmha.demo', 'transformers')\n"
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
