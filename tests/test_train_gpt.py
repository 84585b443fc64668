"""examples/train_gpt.py in seconds: its comparison holds, and notices what is wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import cutlass_fmha

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example with a model of one layer."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.SIZES, "tiny", module.Size(1, 2, 16, 64, 4, 40, 2e-2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


def run(module: ModuleType, output: Path) -> tuple[int, dict[str, Any]]:
    status = module.main(["--seeds", "2", "--output", str(output)])
    return status, json.loads(output.with_suffix(".json").read_text())


def test_all_ways_learn_the_same(train_gpt: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, found = run(train_gpt, tmp_path / "result")
    assert status == 0
    assert [(each["seed"], each["way"]) for each in found["runs"]] == [
        (s, w) for s in (0, 1) for w in train_gpt.WAYS
    ]
    for each in found["runs"]:
        assert len(each["losses"]) == 40 and each["tokens_per_s"] > 0
        assert each["final"] < each["losses"][0] - 1.5  # a byte at random is 5.5 nats
    assert found["between_ways"] < 1e-4 < found["between_seeds"]
    picture = tmp_path / "result.png"
    assert picture.stat().st_size > 10_000
    picture.unlink()
    table = capsys.readouterr().out.partition("\n\n")[2]
    assert train_gpt.main(["--from-json", str(picture.with_suffix(".json"))]) == 0 and picture.exists()
    assert capsys.readouterr().out.strip() == table.strip()


def test_a_wrong_kernel_is_noticed(train_gpt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = cutlass_fmha.attention

    def wrong(q: Any, k: Any, v: Any, **said: Any) -> Any:
        return right(q, k, v, **said) + ("cu_seqlens_q" in said) * torch.randn_like(q)

    monkeypatch.setattr(cutlass_fmha, "attention", wrong)
    status, found = run(train_gpt, tmp_path / "result")
    assert status == 1 and found["between_ways"] > found["between_seeds"]
