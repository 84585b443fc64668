"""The command line: ``cutlass-fmha`` and ``python -m cutlass_fmha``."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_build import L4, make_build
from test_calibration import a_calibration

import cutlass_fmha
from cutlass_fmha import _C, cli
from cutlass_fmha.bench.contenders import make_inputs
from cutlass_fmha.calibrate import command as command_of_calibrate
from cutlass_fmha.calibrate import fit, measurements
from cutlass_fmha.cli import output, parity
from cutlass_fmha.demo import session
from cutlass_fmha.dispatch import device
from cutlass_fmha.dispatch import table as tables

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def build(monkeypatch, hermetic):
    build = make_build(compiled_for={120: "120f"})
    monkeypatch.setattr(tables, "this_build", lambda: build)
    return build


def test_info_tells_of_the_build_of_devices_and_of_a_driver_that_is_too_old(printed, refused, build, monkeypatch):
    gpus = (L4, device.Device("NVIDIA T4", (7, 5), 40, 64 * 1024), device.PRESETS["gb10"])
    monkeypatch.setattr(_C, "device_count", lambda: len(gpus))
    monkeypatch.setattr(_C, "driver_version", lambda: 13000)
    monkeypatch.setattr(device, "of_index", lambda index: gpus[index])
    out = printed(cli.main, "info", "--rows").out
    info = _C.build_info()
    cuda = f" CUDA {info['cuda_version']}" if info["cuda"] else "out CUDA (CUTLASS_FMHA_CUDA=OFF): the CPU backend only"
    for line in (
        f"built with{cuda}",
        "driver: supports CUDA 13.0",
        "cuda:0: NVIDIA L4 (capability 8.9, 58 SMs), takes the sm_89 rows",
        "        costs of rows: the default for GPUs that were never measured",
        "cuda:1: NVIDIA T4 (capability 7.5, 40 SMs), NVIDIA T4 (capability 7.5, 40 SMs) is older than",
        "cuda:2: NVIDIA GB10 (capability 12.1, 48 SMs), takes the sm_120 rows, as sm_120f\n",
    ):
        assert line in out
    assert all(re.search(rf"\n{row.name} +{row.smem_bytes} ", out) for row in build.rows)
    assert re.search(r"sm_120: 42 rows of the forward, \d+ of the backward, compiled for sm_120f\n", out)
    monkeypatch.setattr(_C, "device_count", Mock(side_effect=RuntimeError("the NVIDIA driver is too old: it supports")))
    assert "devices: none, the NVIDIA driver is too old" in printed(cli.main, "info").out
    assert "error: the NVIDIA driver is too old" in refused(cli.main, "explain", "--shape", "1,8,2,64")
    assert cli.main(["explain", "--shape", "1,8,2,64", "--device", "l4"]) == 0


LARGE = "2,8192,16,128 --kv-heads 4 --seqlen-k 4096 --causal --dtype float16 --device l4"
LARGE_TOLD = [
    "problem: batch 2, seqlen_q 8192, seqlen_k 4096, num_heads 16, num_heads_kv 4, head_dim 128, float16, "
    "causal bottom-right, aligned to 16 bytes",
    "device:  NVIDIA L4 (capability 8.9, 58 SMs)",
    "\nruns: fwd_sm89_f16_d128_m256n64w8, the cheapest eligible row by predicted cost",
]
FORCED = "fwd_sm90_bf16_d64_m256n64w8"


def test_explain_says_what_runs(printed, build, monkeypatch):
    monkeypatch.setattr(_C, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, status, told in (
        (f"--shape {LARGE}", 0, LARGE_TOLD),
        (f"--shape {LARGE} --all", 0, [" fwd_sm120_bf16_d32_m64n64w4 "]),  # which is not in question
        ("--shape 1,5,1,64 --alignment 2 --device sm_120", 0, ["runs: fwd_sm120_bf16_d64_m64n64w4_element"]),
        ("--shape 1,5,1,64 --causal top-left --device sm_90:7", 0, ["causal top-left", "7 SMs"]),
        (f"--shape 1,5,1,64 --row {FORCED} --device h200", 0, [f"runs: {FORCED}, forced by name\n"]),
        ("--shape 1,5,1,64", 0, ["runs: the CPU backend, which needs no row\n"]),  # where there is no GPU
        ("--shape 1,5,1,64 --measure", 1, []),
        ("--shape 1,5,1,480 --device rtx4090", 1, ["runs: nothing, because no row of this build can run this pr"]),
        ("", 2, ["the following arguments are required: --shape"]),
        ("--shape 1,2,3", 2, ["four sizes batch,seqlen_q,num_heads,head_dim are needed, got '1"]),
        ("--shape 1,2,3,x", 2, ["four sizes batch,seqlen_q,num_heads,head_dim are needed"]),
        ("--shape 1,2,4,64 --kv-heads 3", 2, ["num_heads_kv must divide num_heads 4, got"]),
        ("--shape 1,2,4,64 --causal left", 2, ["invalid choice: 'left'"]),
        ("--shape 1,2,4,64 --row x --device l4", 2, ["'x' is not a row of this build; `python -m"]),
    ):
        found = printed(cli.main, "explain", *arguments.split(), status=status)
        assert all(part in found[status == 2] for part in told), arguments
        assert not found[status != 2] or status == 1


#: What answers quickly where there is no GPU, and what the answer has.
JSON = {
    "info": ((), {"cutlass_fmha", "torch", "runs"}),
    "explain": (("--shape", "1,256,8,64", "--device", "l4"), {"winner", "rows", "problem"}),
    "bench": (("--from-json", str(ROOT / "benchmarks/results/backward-h200.json")), {"machine", "cases"}),
    "calibrate": (("--from-timings", "t.json", "--output", "costs.json"), {"gpu", "rows", "quality"}),
    "memory": (("--shape", "1,256,8,64", "--device", "l4", "--backward"), {"total", "share_saved", "inputs"}),
    "parity": (("--device", "cpu", "--case", "b2_h4-2_s257_d64_bf16"), {"passed", "results"}),
    "demo": ((), {"row", "problems"}),
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_has_help_and_answers_in_json(command: str, printed, refused, tmp_path, monkeypatch):
    """Which is all of stdout, or goes to a file."""
    assert "invalid choice: 'tune'" in refused(cli.main, "tune")
    assert re.search(rf"\n    {command}\s", printed(cli.main).out)
    out = printed(cli.main, command, "--help").out
    assert out.startswith(f"usage: cutlass-fmha {command} ") and "--json" in out
    arguments, keys = JSON[command]
    if command == "calibrate":
        machine = SimpleNamespace(gpu=L4.name, package="1", device=L4)
        monkeypatch.setattr(
            measurements, "load", lambda _: SimpleNamespace(machine=machine, calibration=(), gradients=())
        )
        monkeypatch.setattr(fit, "fit", lambda *_: a_calibration())
        monkeypatch.setattr(command_of_calibrate, "_quality", lambda *_: "good")
    if command == "demo":  # tests/test_demo.py has a run of it
        fake = session.Report(["hello"], found={"row": None})
        monkeypatch.setattr(session, "run", lambda quiet, **_: (quiet or print("hello"), fake)[1])
    given = [command, *arguments, "--json"]
    monkeypatch.chdir(tmp_path)
    assert keys <= set(json.loads(printed(cli.main, *given).out))
    text = printed(cli.main, *given, tmp_path / "new" / "answer.json").out
    assert text and not text.startswith("{")
    assert keys <= set(json.loads((tmp_path / "new" / "answer.json").read_text()))


def test_parity_fails_on_a_wrong_result_and_takes_every_row_that_can_run_a_case(printed, refused, monkeypatch, build):
    monkeypatch.setattr(parity, "ours", lambda case, row: lambda q, k, v: torch.zeros_like(q))
    out, err = printed(cli.main, "parity", "--device", "cpu", "--case", "d64_bf16", status=1)
    assert "problems, " in out and "parity: wrong result: b2_h4-2_s257_d64_bf16, the CPU backend" in err
    assert "no case has that in its name" in refused(cli.main, "parity", "--case", "no such")
    assert "--device nowhere: " in refused(cli.main, "parity", "--device", "nowhere")
    monkeypatch.setattr(parity, "explain", partial(parity.explain, device="l4"))
    for group, family in (("parity", "fwd_sm89_bf16_d64"), ("backward", "bwd_sm89_bf16_d64")):
        case = next(each for each in parity.cases() if each.group == group)
        rows, refused = parity.rows_for(case, make_inputs(case, 1, torch.device("cpu")), None)
        assert refused is None and any(row.startswith(family) for row in rows)


def shown(capsys, *parts: Any) -> str:
    output.show(parts)
    return capsys.readouterr().out


def test_tables_are_drawn_by_rich_on_a_terminal_plain_elsewhere_and_no_number_is_cut(capsys, printed, monkeypatch):
    table = output.Table(["row", "us"], [["a [b]", "12.5"]])
    plain = shown(capsys, "what: [1]", table)
    assert plain == "what: [1]\nrow      us\n-----  ----\na [b]  12.5\n"
    recorded = str(ROOT / "benchmarks/results/h200.json")
    asked = ("bench", "--preset", "b2_h16_s8192_d128_bf16", "--from-json", recorded)
    wide = next(line for line in printed(cli.main, *asked).out.splitlines() if line.startswith("B2 H16"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    drawn = shown(capsys, "what: [1]", table)
    assert "─────" in drawn and "what: [1]" in drawn and "a [b]" in drawn and "----" not in drawn
    out = printed(cli.main, *asked).out
    assert wide in out.splitlines() and "…" not in out  # plain: rich has no room for it
    long = output.Table(["case", "us"], [["so many words " * 9, "12345.5"]])
    remarked = output.Table(["row", "us", ""], [["a_row" * 9, "12345.5", "so many words " * 9]], remarks=True)
    for drawn in (shown(capsys, long), shown(capsys, remarked)):
        assert "─────" in drawn and " 12345.5 " in drawn and "…" not in drawn
        assert all(len(re.sub(r"\x1b\[\d*m", "", line)) <= 80 for line in drawn.splitlines())
    assert "a_row" * 9 in drawn
    assert shown(capsys, output.Table(["row", ""], [], remarks=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert shown(capsys, "what: [1]", table) == plain


def test_a_file_that_cannot_be_written_is_a_sentence_and_a_reader_that_leaves_early_none(monkeypatch, tmp_path, capsys):
    assert cli.main(["info", "--json", f"{__file__}/x.json"]) == 1
    assert capsys.readouterr().err.startswith("info: [Errno")
    monkeypatch.setitem(sys.modules, "leaving", Mock(main=Mock(side_effect=BrokenPipeError)))
    monkeypatch.setitem(cli.COMMANDS, "info", cli.Command("leaving", ""))
    with (tmp_path / "stdout").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["info"]) == 1
        print("goes nowhere", flush=True)
    assert not (tmp_path / "stdout").read_text()


def in_process(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {"capture_output": True, "text": True, "env": {**os.environ, **environment}, "timeout": 300, "cwd": cwd}
    return subprocess.run([sys.executable, *arguments], check=False, **told)


@pytest.mark.parametrize("absent", [("torch",), ("cutlass_fmha._C",), ("torch", "cutlass_fmha._C")])
def test_info_answers_where_the_package_cannot_be_imported(tmp_path: Path, absent: tuple[str, ...]):
    said = "import of torch halted; None in sys.modules: pip install 'torch>=2.6'"
    if "cutlass_fmha._C" in absent:
        said = "the compiled extension cutlass_fmha._C is not in"
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n")
    python = partial(in_process, PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")
    done = python("-m", "cutlass_fmha", "info", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and said in found["import_error"] and found["runs"] == {}
    assert ("architectures" in found) == ("cutlass_fmha._C" not in absent)
    text = python("-m", "cutlass_fmha", "info").stdout
    assert f"the package can't be imported: {found['import_error']}" in text and "\nruns: nothing" in text
    assert "the extension can't be loaded" not in text
    other = python("-m", "cutlass_fmha", "bench")
    assert other.returncode == 1 and other.stderr.count("\n") == 1
    assert other.stderr.startswith("bench: cutlass_fmha can't be imported here: ")
    told = python("-m", "cutlass_fmha", "bench", "--help")
    assert told.returncode == 0 and told.stdout.startswith("usage: cutlass-fmha bench ") and not told.stderr
    assert cli.COMMANDS["bench"].help in told.stdout and "can't be imported here" in told.stdout
    done = python("-c", "import cutlass_fmha")  # for everybody else it is an error
    assert done.returncode == 1 and said.partition(": pip")[0] in done.stderr.splitlines()[-1]


def test_info_tells_of_a_part_of_an_extension(tmp_path: Path):
    """Loading it would end the process by a signal on Linux; Windows refuses it."""
    whole = Path(str(_C.__file__))
    shutil.copytree(ROOT / "cutlass_fmha", tmp_path / "cutlass_fmha", ignore=shutil.ignore_patterns("_C.*"))
    (tmp_path / "cutlass_fmha" / whole.name).write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    paths = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    # -S: without what finds an editable installation
    done = in_process("-S", "-m", "cutlass_fmha", "info", cwd=tmp_path, PYTHONPATH=paths)
    part = "is a part of what it should be: install the package anew" if sys.platform == "linux" else "DLL load failed"
    assert done.returncode == 1 and part in done.stdout


def test_who_imports_the_package(monkeypatch):
    for argv, original, runs in (
        (["-m", "info"], ["python", "-P", "-m", "cutlass_fmha", "info"], True),
        (["-m"], ["python", "-Pmcutlass_fmha"], True),
        (["-m", "x.py"], ["python", "-m", "pytest", "x.py"], False),
        (["-m", "cutlass_fmha"], ["python", "-m", "pdb", "cutlass_fmha"], False),
        (["/opt/bin/cutlass-fmha", "info"], ["python", "/opt/bin/cutlass-fmha", "info"], True),
        (["train.py"], ["python", "train.py"], False),
        ([], ["python"], False),
    ):
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "orig_argv", original)
        assert cutlass_fmha._runs_as_a_command() == runs, original
