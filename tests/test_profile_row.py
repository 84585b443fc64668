"""tools/profile_row.py: what Nsight Compute is asked for; a program plays ncu."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import profile_row
import pytest


def test_ncu_is_asked_for_the_metrics_of_one_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:], sep='\\n')\nsys.exit(3)\n")
    ncu.chmod(0o755)
    own = ["--shape", "1,64,2,64", "--row", "fwd_x", "--ncu", str(ncu), "--without", "hmma"]
    assert profile_row.main([*own, "--", "--csv"]) == 3
    said = capfd.readouterr().out.splitlines()
    metrics = said[said.index("--metrics") + 1].split(",")
    assert metrics == [name for name in profile_row.METRICS if "hmma" not in name] and len(metrics) > 25
    assert said[:2] == ["--profile-from-start", "off"] and said.index("--csv") < said.index(sys.executable)
    assert said[said.index(sys.executable) + 1 :] == [profile_row.__file__, *own, "--once"]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--shape", "1,64,1,64"], 1, "ncu is not on PATH"),
        (["dense"], 2, "name one"),
        (["nothing"], 2, "unknown preset 'nothing'"),
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
