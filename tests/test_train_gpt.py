"""examples/train_gpt.py in seconds: its comparison holds, and notices what is wrong."""

from __future__ import annotations

import importlib
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
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    module = importlib.import_module("train_gpt")
    monkeypatch.setitem(module.SIZES, "tiny", module.Size(1, 2, 16, 64, 4, 40, 2e-2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


def run(module: ModuleType, output: Path) -> tuple[int, dict[str, Any]]:
    status = module.main(["--seeds", "0", "1", "--output", str(output)])
    return status, json.loads(output.with_suffix(".json").read_text())


def test_all_ways_learn_the_same(train_gpt: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    status, found = run(train_gpt, tmp_path / "result")
    assert status == 0
    assert [(each["seed"], each["way"]) for each in found["runs"]] == [(s, w) for s in (0, 1) for w in train_gpt.WAYS]
    for each in found["runs"]:
        assert len(each["losses"]) == 40 and each["tokens_per_s"] > 0
        assert each["final"] < each["losses"][0] - 1.5  # a byte at random is 5.5 nats
    assert found["between_ways"] < 1e-4 < found["between_seeds"]
    assert (tmp_path / "result.png").stat().st_size > 10_000
    table = capsys.readouterr().out.partition("\n\n")[2]
    parts = [tmp_path / "cut.json", tmp_path / "again.json"]  # one that was cut, and what was run again
    for path, runs in zip(parts, (found["runs"][:5], found["runs"][3:]), strict=True):
        path.write_text(json.dumps({**found, "runs": runs}))
    assert train_gpt.main(["--from-json", *map(str, parts), "--output", str(tmp_path / "joined")]) == 0
    assert capsys.readouterr().out.strip() == table.strip()
    assert (tmp_path / "joined.png").exists() and json.loads((tmp_path / "joined.json").read_text()) == found
    parts[1].write_text(json.dumps({**found, "steps": 41}))
    with pytest.raises(SystemExit, match="differ in more than their runs"):
        train_gpt.main(["--from-json", *map(str, parts)])


def test_a_wrong_kernel_is_noticed(train_gpt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = cutlass_fmha.attention

    def wrong(q: Any, k: Any, v: Any, **said: Any) -> Any:
        return right(q, k, v, **said) + 9 * ("cu_seqlens_q" in said) * torch.randn_like(q)

    monkeypatch.setattr(cutlass_fmha, "attention", wrong)
    status, found = run(train_gpt, tmp_path / "result")
    assert status == 1 and found["between_ways"] > found["between_seeds"]
