"""The guides: their examples run, and everything is named that a call may say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cutlass_fmha.features import FeatureArguments

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDE = DOCS / "attention.md"
TEXT = GUIDE.read_text(encoding="utf-8")
SETUP, *EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def line_of(example: str) -> int:
    return TEXT[: TEXT.index(example)].count("\n")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {line_of(example)}")
def test_the_examples_run(example: str):
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(SETUP, str(GUIDE), "exec"), names)
    exec(compile("\n" * line_of(example) + example, str(GUIDE), "exec"), names)


def test_the_examples_about_caches_run_one_after_the_other():
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    text = (DOCS / "caches.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 5
    for example in examples:
        exec(compile(example, "docs/caches.md", "exec"), names)


def test_every_keyword_is_explained_and_shown():
    code = "".join(EXAMPLES)
    for name in FeatureArguments.__annotations__:
        assert f"**{name}**" in TEXT or f"**{name}=" in TEXT, f"{name} is not explained"
        assert f"{name}=" in code, f"{name} is in no example"
