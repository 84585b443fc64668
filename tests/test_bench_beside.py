"""bench.finetune and bench.beside, small and on the CPU: their tables, and that they notice what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cutlass_fmha.bench import beside, finetune


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def told(module: Any, capsys: pytest.CaptureFixture[str], kept: Path, *argv: str) -> str:
    """What is printed, and again of what was kept."""
    status = module.main([*argv, "--json", str(kept)])
    text = capsys.readouterr().out
    assert module.main(["--from-json", str(kept)]) == status == 0
    assert capsys.readouterr().out == text
    return text


def test_a_training_step_is_told_by_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers", reason="requirements/demo.txt is not installed")
    text = told(finetune, capsys, tmp_path / "found.json", "--shapes", "1x16", "--rounds", "1")
    for name, model in finetune.MODELS.items():
        assert f"| {name} | 1 x 16 |" in text
        assert len(finetune.contenders(model)) == (4 if model.applies else 3)
    with mock.patch("cutlass_fmha.integrations.transformers.attention", lambda q, *_, **__: 2 * q):
        assert finetune.main(["--shapes", "1x16", "--rounds", "1", "--models", "Llama 3.2 3B"]) == 1
    assert "gradients of Llama 3.2 3B are further off" in capsys.readouterr().err


def test_ops_are_told_beside_torchs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = told(beside, capsys, tmp_path / "found.json", "--sizes", "8192", "--budget", "0.001")
    for name in beside.OPS:
        assert f"| {name}, forward |" in text and (f"| {name}, backward |" in text or "- |" in text)
    assert text.count("x | 1 | 16 |") == text.count("x | 1 | - |") == 1
    with mock.patch("cutlass_fmha.rms_norm", lambda x, *_, **__: x):
        assert beside.main(["--ops", "append", "--budget", "0.001"]) == 1
    assert "append is" in capsys.readouterr().err
    with mock.patch.dict(beside.OPS, {"swiglu": beside.OPS["swiglu"]._replace(ours=lambda gate, up: gate * up)}):
        assert beside.main(["--ops", "swiglu", "--sizes", "4096", "--budget", "0.001"]) == 1
    assert "swiglu is" in capsys.readouterr().err
    peers = {"liger": ("json", lambda m: m.LigerSiLUMulFunction.apply), "quack": ("no_such_module", lambda m: m)}
    found, refused = beside.functions(beside.OPS["swiglu"]._replace(peers=peers))
    assert [*found] == [beside.OURS, beside.TORCH] and "LigerSiLUMulFunction" in refused["liger"]


def test_a_run_that_is_cut_leaves_the_cases_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kept, measure = tmp_path / "found.json", beside.measure

    def cut(name: str, size: int, *said: Any) -> dict[str, Any]:
        if size == 8192:
            raise KeyboardInterrupt
        return measure(name, size, *said)

    asked = ["--ops", "swiglu", "--sizes", "4096", "8192", "--budget", "0.001", "--json", str(kept)]
    with mock.patch.object(beside, "measure", cut), pytest.raises(KeyboardInterrupt):
        beside.main(asked)
    assert json.loads(kept.read_text())["unfinished"] and [*tmp_path.iterdir()] == [kept]
    assert beside.main(["--from-json", str(kept)]) == 0
    assert "| swiglu, forward | 4,096 |" in capsys.readouterr().out


@pytest.mark.parametrize("name", beside.OPS)
def test_bytes_that_must_move_are_those_of_tensors(name: str):
    """Forward: what is read and what is written, weights and tables aside."""
    op = beside.OPS[name]
    tensors = op.make(1 << 16, torch.device("cpu"), torch.float32)
    read = [x for x in tensors if x.dim() == 4 or (x.dim() == 2 and name not in ("rotary_qk", "qk_norm_rope"))]
    results = op.ours(*tensors)
    written = results if isinstance(results, tuple) else (results,)
    assert op.moved(tensors[0].nbytes)[0] == sum(x.nbytes for x in (*read, *written))
