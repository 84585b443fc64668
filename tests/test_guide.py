"""The guides: their examples run, and everything is named that a call may say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cutlass_fmha import _C, flash_attn
from cutlass_fmha.features import FeatureArguments

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDE = DOCS / "attention.md"
TEXT = GUIDE.read_text(encoding="utf-8")
SETUP, *EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def line_of(example: str) -> int:
    return TEXT[: TEXT.index(example)].count("\n")


def needs_rows(*examples: str) -> None:
    """What would run on a GPU is asked of the build's rows, of which one without CUDA has none."""
    if not _C.rows() and any(re.search(r'\bdevice="(?!cpu|cuda|meta)', example) for example in examples):
        pytest.skip("this build has no rows")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {line_of(example)}")
def test_the_examples_run(example: str):
    needs_rows(example)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(SETUP, str(GUIDE), "exec"), names)
    exec(compile("\n" * line_of(example) + example, str(GUIDE), "exec"), names)


PAGES = [
    ("caches.md", 6),
    ("beside.md", 4),
    ("beside-rope.md", 1),
    ("memory.md", 2),
    ("flash_attn.md", 2),
    ("sdpa.md", 1),
    ("arrays.md", 1),
    ("transformers.md", 2),
    ("nn.md", 2),
    ("diffusers.md", 1),
    ("jax.md", 1),
]


@pytest.mark.parametrize(("page", "least"), PAGES)
def test_the_examples_of_other_pages_run_one_after_the_other(page: str, least: int):
    if page in ("transformers.md", "diffusers.md", "jax.md"):
        pytest.importorskip(page.removesuffix(".md"), reason="it is not installed")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    text = (DOCS / page).read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) >= least
    needs_rows(*examples)
    try:
        for example in examples:
            exec(compile(example, f"docs/{page}", "exec"), names)
    finally:
        flash_attn.uninstall()


def test_every_keyword_is_explained_and_shown():
    code = "".join(EXAMPLES)
    for name in FeatureArguments.__annotations__:
        assert f"**{name}**" in TEXT or f"**{name}=" in TEXT, f"{name} is not explained"
        assert f"{name}=" in code, f"{name} is in no example"
