"""The gate's tests of RMSNorm and gated units, by the kernels' PTX on the simulator: docs/simulation.md."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_simulated_parity import ROOT, extension

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from building import load_extension
load_extension(Path(sys.argv[2]))
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", "test_parity_beside.py"]))
"""


@pytest.mark.parametrize("arch", [89, 90, 120])
def test_the_gate_passes(arch: int):
    command = [sys.executable, "-c", CODE, str(ROOT / "tools"), str(extension())]
    env = {**os.environ, "CUTLASS_FMHA_FORCE_ARCH": str(arch), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=Path(__file__).parent
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
