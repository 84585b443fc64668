"""examples/: each runs as a user runs it, on the CPU where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: What examples need besides: "make test" installs all but jax (diffusers with Python 3.11 and newer).
NEEDS = {"transformers_generate": "transformers", "diffusers_transformer": "diffusers", "jax_gradients": "jax"}
NEEDS |= {"kernels_hub": "kernels"}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LONG = {"train_gpt"}  # tests of its own run it with less


@pytest.mark.parametrize("name", sorted({path.stem for path in EXAMPLES.glob("*.py")} - LONG))
def test_an_example_runs(name: str):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
