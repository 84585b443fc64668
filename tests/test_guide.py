"""The guides: their examples run, and everything is named that a call may say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cutlass_fmha import _C, flash_attn
from cutlass_fmha.features import FeatureArguments

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDE = DOCS / "attention.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
SETUP, *EXAMPLES = CODE.findall(TEXTS[GUIDE])
PAGES = [page for page, text in TEXTS.items() if page != GUIDE and CODE.search(text)]


def run(page: Path, *examples: str) -> None:
    """One after the other. What would run on a GPU is asked of the build's rows: one without CUDA has none."""
    if not _C.rows() and any(re.search(r'\bdevice="(?!cpu|cuda|meta)', example) for example in examples):
        pytest.skip("this build has no rows")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for example in examples:
        lines = "\n" * TEXTS[page][: TEXTS[page].index(example)].count("\n")
        exec(compile(lines + example, str(page), "exec"), names)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(example: str):
    run(GUIDE, SETUP, example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_other_pages_run_one_after_the_other(page: Path):
    assert len(PAGES) >= 11
    if page.stem in ("transformers", "diffusers", "jax"):
        pytest.importorskip(page.stem, reason="it is not installed")
    try:
        run(page, *CODE.findall(TEXTS[page]))
    finally:
        flash_attn.uninstall()


def test_every_keyword_is_explained_and_shown():
    code = "".join(EXAMPLES)
    for name in FeatureArguments.__annotations__:
        assert re.search(rf"\*\*{name}(\*\*|=)", TEXTS[GUIDE]), f"{name} is not explained"
        assert f"{name}=" in code, f"{name} is in no example"
