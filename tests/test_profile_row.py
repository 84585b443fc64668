"""tools/profile_row.py: what Nsight Compute writes is read and shown; a program plays ncu."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import profile_row
import pytest

ROW = "fwd_sm89_bf16_d128_m256n64w8"
#: Column -> unit and cell, as ncu 2025.3 writes `--csv --page raw`, with and without --print-units base.
COLUMNS = {
    "ID": ("", "0"), "Process ID": ("", "4711"), "Process Name": ("", "python"), "Host Name": ("", "::1"),
    "Kernel Name": ("", ROW), "Context": ("", "1"), "Stream": ("", "7"), "Block Size": ("", "(256, 1, 1)"),
    "Grid Size": ("", "(512, 1, 1)"), "Device": ("", "0"), "CC": ("", "8.9"),
    "gpu__time_duration.sum": ("ms", "9.5"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "88.25"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("", "n/a"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "12,345,678"),
    "launch__registers_per_thread": ("register/thread", "255"),
    "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "99.696"),
    **{
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": ("inst", value)
        for name, value in {"wait": "0.9", "barrier": "0.8", "math_pipe_throttle": "2.5",
                            "long_scoreboard": "0.7", "mio_throttle": "0.0", "short_scoreboard": ".6"}.items()
    },
}  # fmt: skip


def recorded(columns: dict[str, tuple[str, str]] = COLUMNS) -> str:
    lines = [list(columns), [unit for unit, _ in columns.values()], [cell for _, cell in columns.values()]]
    table = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f'==PROF== Profiling "{ROW}": 0%....50%....100% - 9 passes\n{table}\n==PROF== Disconnected\n'


def test_a_recorded_csv_is_shown_beside_what_the_machine_code_lets_expect(tmp_path, capsys):
    file = tmp_path / "ncu.csv"
    file.write_text(recorded(), encoding="utf-8")
    assert profile_row.main(["--csv", str(file)]) == 0
    shown = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
    assert shown["time under ncu, us"] == ["9,500", "-"]
    assert shown["tensor pipe active, %"] == ["88.2", "100"]
    assert shown["tensor ops (HMMA) active, %"] == ["-", "-"]
    assert shown["registers per thread"] == ["255", "255"]
    assert shown["shared memory per block, bytes"] == ["99,696", "99,696"]
    assert shown["occupancy possible, %"] == ["-", "16.7"], "one block of 8 warps of 48"
    assert profile_row.main(["--csv", str(file), "--json"]) == 0
    [kernel] = json.loads(capsys.readouterr().out)["kernels"]
    assert list(kernel["stalls"]) == [
        "math_pipe_throttle", "wait", "barrier", "long_scoreboard", "mio_throttle"
    ]  # fmt: skip
    assert kernel["measured"][profile_row.WAVEFRONTS] == 12345678.0


def test_the_busiest_pipe_is_that_of_the_gpu_and_other_kernels_have_no_expectation() -> None:
    l4, geforce = (profile_row.expected(ROW, gpu) for gpu in ("NVIDIA L4", "NVIDIA GeForce RTX 4090"))
    assert l4[profile_row.TENSOR] == geforce[profile_row.TENSOR] == 100.0
    assert l4[profile_row.MUFU] == 2 * geforce[profile_row.MUFU], "their tensor pipe is half as fast"
    h200 = profile_row.expected("fwd_sm90_bf16_d128_m256n64w8_tma", "NVIDIA H200")
    assert h200[profile_row.MUFU] > 2 * l4[profile_row.MUFU]
    others = ("combine", "combine_sm89_f16", "backward_before_sm90_bf16")
    assert all(profile_row.expected(name, "NVIDIA L4") == {} for name in others)
    rows = json.loads(profile_row.REPORT.read_text(encoding="utf-8"))["rows"]
    assert all(profile_row.expected(name, "NVIDIA H200") for name in rows if name.startswith(("fwd", "wide", "bwd")))


FAKE = """import json, sys
log, metrics = (sys.argv[sys.argv.index(name) + 1] for name in ("--log-file", "--metrics"))
with open(log, "w") as file:
    if {denied} in metrics:
        file.write("==ERROR== Failed to find metric regex:^" + {denied}.replace(".", "\\\\.") + "(...)$")
        sys.exit(1)
    file.write(open({recorded!r}).read())
json.dump(sys.argv, open({asked!r}, "w"))
sys.exit({status})
"""


def fake_ncu(tmp_path: Path, text: str, status: int = 0) -> str:
    """A program that plays ncu: it lacks a metric, and writes what was recorded."""
    program, files = tmp_path / "ncu", {name: str(tmp_path / name) for name in ("recorded", "asked")}
    Path(files["recorded"]).write_text(text, encoding="utf-8")
    body = FAKE.format(denied=f"{profile_row.TENSOR!r}", **files, status=status)
    program.write_text(f"#!{sys.executable}\n{body}", encoding="utf-8")
    program.chmod(0o755)
    return str(program)


def test_ncu_is_asked_for_what_it_has_and_runs_this_tool_once(tmp_path, monkeypatch, capsys):
    timed = {"gpu": "NVIDIA L4", "row": ROW, "p50_us": 9.0, "p90_us": 9.5, "tflops": 90.0}
    timed |= {"tbytes_per_s": 0.1, "mean_abs_error": 1e-4, "error_ratio": 0.5}
    monkeypatch.setattr(profile_row, "measure", lambda *arguments: timed)
    asked = ["--shape", "1,8192,32,128", "--causal", "--ncu", fake_ncu(tmp_path, recorded())]
    assert profile_row.main(asked) == 0
    assert "p50 9.0 us, p90 9.5 us, 90 TFLOP/s, 0.10 TB/s; mean error 1.00e-04" in capsys.readouterr().out
    command: list[str] = json.loads((tmp_path / "asked").read_text())
    assert command[-2:] == [asked[-1], "--once"] and command[command.index("--causal") - 1] == "1,8192,32,128"
    metrics = command[command.index("--metrics") + 1].split(",")
    assert set(profile_row.METRICS) - set(metrics) == {profile_row.TENSOR}
    assert command[command.index("--profile-from-start") + 1] == "off"


@pytest.mark.parametrize(
    ("said", "status", "sentence"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user may not", 1, "may not read this GPU's counters"),
        ("==ERROR== An error occurred", 9, "ncu ended with status 9 and said: ==ERROR== An error occurred"),
        ("==WARNING== No kernels were profiled.", 0, "no kernel in it"),
    ],
)
def test_what_keeps_ncu_from_it_is_one_sentence(
    said: str, status: int, sentence: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(profile_row, "measure", lambda *arguments: {})
    assert profile_row.main(["--shape", "1,64,1,64", "--ncu", fake_ncu(tmp_path, said, status)]) == 1
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--shape", "1,64,1,64"], 1, "ncu is not on PATH"),
        (["dense"], 2, "name one"),
        (["nothing"], 2, "unknown preset 'nothing'"),
        (["--csv", "missing.csv"], 1, "missing.csv"),
        (["--shape", "1,64,1,64", "--once"], 1, "a GPU is timed"),
    ],
)
def test_what_cannot_be_profiled_is_named(
    arguments: list[str], status: int, sentence: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(profile_row.shutil, "which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    try:
        left: Any = profile_row.main(arguments)
    except SystemExit as exit:
        left = exit.code
    assert left == status and sentence in capsys.readouterr().err
