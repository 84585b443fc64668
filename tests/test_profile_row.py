"""tools/profile_row.py: what Nsight Compute writes is read and shown."""

import json

import profile_row
import pytest

ROW = "fwd_sm89_bf16_d128_m256n64w8"
#: Column -> unit and cell, as ncu 2025.3 writes `--csv --page raw --print-units base`.
COLUMNS = {
    "ID": ("", "0"), "Process Name": ("", "python"), "Kernel Name": ("", ROW), "Grid Size": ("", "(512, 1, 1)"),
    "gpu__time_duration.sum": ("ns", "9,500,000"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "88.25"),
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": ("", "n/a"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "12,345,678"),
    "launch__registers_per_thread": ("register/thread", "255"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "99,696"),
    **{
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": ("inst", value)
        for name, value in {"wait": "0.9", "barrier": "0.8", "math_pipe_throttle": "2.5",
                            "long_scoreboard": "0.7", "mio_throttle": "0.0", "short_scoreboard": ".6"}.items()
    },
}  # fmt: skip


def test_a_recorded_csv_is_shown_beside_what_the_machine_code_lets_expect(tmp_path, printed):
    lines = [COLUMNS, *zip(*COLUMNS.values(), strict=True)]
    table = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    file = tmp_path / "ncu.csv"
    file.write_text(f'==PROF== Profiling "{ROW}": 0%....50%....100% - 9 passes\n{table}\n==PROF== Disconnected\n')
    lines = printed(profile_row.main, "--csv", file).out.splitlines()
    shown = {line.split("  ")[0]: line.split()[-2:] for line in lines}
    assert shown["time under ncu, us"] == ["9,500.0", "-"]
    assert shown["tensor pipe active, %"] == ["88.2", "100.0"]
    assert shown["tensor ops (HMMA) active, %"] == ["-", "-"]
    assert shown["registers per thread"] == ["255.0", "255.0"]
    assert shown["shared memory per block, bytes"] == ["99,696.0", "99,696.0"]
    assert shown["occupancy possible, %"] == ["-", "16.7"], "one block of 8 warps of 48"
    [kernel] = json.loads(printed(profile_row.main, "--csv", file, "--json").out)["kernels"]
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


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["b2_h16_s8192_d128_bf16"], 1, "ncu is not on PATH"),
        (["dense"], 2, "name one"),
        (["nothing"], 2, "unknown preset 'nothing'"),
        (["--csv", "missing.csv"], 1, "missing.csv"),
        (["b2_h16_s8192_d128_bf16", "--once"], 1, "a GPU is timed"),
    ],
)
def test_what_cannot_be_profiled_is_named(arguments, status, sentence, monkeypatch, printed) -> None:
    monkeypatch.setattr(profile_row.shutil, "which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sentence in printed(profile_row.main, *arguments, status=status).err
