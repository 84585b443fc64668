"""Rows of every kind, by their PTX on the simulator, against dense fp64, those of an architecture in a process, two
processes at a time: no GPU, sm_120's TMA code included. docs/simulation.md says what that shows."""

import functools
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from simulator import DIRECTORY, build_extension

ROOT = Path(__file__).resolve().parents[1]

#: At least one row of each kind, and each architecture: the PTX of one row differs with it.
ROWS = (
    "fwd_sm89_f16_d64_m64n64w4",  # small tiles, cp.async
    "fwd_sm89_bf16_d64_m64n64w4_element",  # unaligned tensors
    "fwd_sm89_f16_d128_m256n64w8",  # warps that take turns
    "fwd_sm89_bf16_d64_m32n32w8k8",  # warps that share the keys
    *("fwd_sm89_f16_d64_m64n64w4_scored", "fwd_sm89_f16_d64_m16n32w4k4_scored", "fwd_sm89_f16_d64_m64n64w4_ranged"),
    "fwd_sm90_f16_d64_m256n64w8",
    *("fwd_sm90_bf16_d64_m64n64w4_tma", "fwd_sm90_f16_d128_m256n64w8_tma"),  # the copy unit
    "fwd_sm120_f16_d64_m256n64w8",
    *("fwd_sm120_bf16_d64_m64n64w4_tma", "fwd_sm120_f16_d128_m256n64w8_tma"),
    *("fwd_sm90_f16_d128_m256n64w8_tma_ranged", "fwd_sm120_f16_d128_m256n64w8_ranged"),  # ranges and pages, with turns
    "fwd_sm120_bf16_d64_m256n64w8_tma_score_mod",
    *("fwd_sm89_f16_d64_m256n64w8_masked", "fwd_sm90_bf16_d128_m256n32w8_tma_masked"),
    *("fwd_sm120_bf16_d64_m32n32w8k8_pdl", "fwd_sm120_f16_d64_m32n64w4k4_tma_pdl"),  # launches that overlap
    *("wide_sm89_f32_d512_m64n64w8_scored", "wide_sm120_bf16_d512_m64n64w8_scored"),
)
#: Those that compute gradients: of each kind and head dim, too.
GRADIENTS = (
    *("bwd_sm89_bf16_d32_m64n256w8", "bwd_sm89_f16_d64_m64n256w8"),
    *("bwd_sm120_bf16_d96_m64n128w8_tma", "bwd_sm120_f16_d128_m64n128w8_tma"),
    *("bwd_sm90_bf16_d64_m64n192w12_groups_tma", "bwd_sm90_bf16_d128_m64n128w12_groups_tma"),
    *("bwd_sm90_f16_d96_m64n128w12_groups_tma", "bwd_sm90_f16_d256_m32n64w12_groups_tma"),
    *("bwd_sm89_bf16_d32_m64n256w8_scored", "bwd_sm120_f16_d64_m64n128w8_scored"),
    *("bwd_sm90_bf16_d128_m64n128w8_tma_scored", "bwd_sm120_bf16_d256_m32n64w8_groups_scored"),
    *("bwd_sm89_f16_d64_m64n256w8_ds", "bwd_sm120_bf16_d96_m64n128w8_ds", "bwd_sm120_f16_d256_m32n64w12_groups_tma_ds"),
    *("bwd_sm89_f16_d64_m64n256w8_scored_ds", "bwd_sm90_bf16_d128_m64n128w8_scored_ds"),
    *("bwd_sm90_bf16_d64_m64n192w12_groups_tma_ds", "bwd_sm90_bf16_d128_m64n128w12_groups_tma_ds"),
    *("widebwd_sm89_f32_d128_m64n64w8", "widebwd_sm90_f16_d512_m64n64w8"),
)
#: What makes dQ of their dS.
PRODUCTS = "bwd_sm(89_f16_d64|120_bf16_d96|90_bf16_d64|90_bf16_d128|120_f16_d256)_.*_dq"

#: What of the gate needs no row of attention: all of test_parity_beside.py, and of test_parity_helpers.py these.
BESIDE = "parity_beside or combine or merge or rota or position or append or place"


@functools.cache
def extension() -> Path:
    """The build with these rows, made when it is not there or older than its sources."""
    return build_extension("^(" + "|".join((*ROWS, *GRADIENTS, PRODUCTS)) + ")$", DIRECTORY / "tests")


Done = subprocess.CompletedProcess[str]


def simulate(rows: list[str], options: str, env: dict[str, str]) -> Done:
    command = [sys.executable, str(ROOT / "tools" / "simulate.py"), "--extension", str(extension()), "--seed", "1"]
    command += ["--rows", f"^({'|'.join(rows)})$", *options.split()]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module")
def runs() -> dict[str, Future[Done]]:
    """Every row's run, under way.

    Each has a copy of the environment: pytest and other tests of this process write to the one that a start of a
    process in another thread is reading, which then fails with EFAULT.
    """
    extension()
    pool, env, found = ThreadPoolExecutor(2), dict(os.environ), {}
    for kind, options in ((ROWS, ""), (GRADIENTS, "--problems 6 --longest 60")):
        for arch in ("89", "90", "120"):
            rows = [row for row in kind if f"_sm{arch}_" in row]
            found |= dict.fromkeys(rows, pool.submit(simulate, rows, options, env))
    return found


@pytest.mark.parametrize("row", ROWS + GRADIENTS)
def test_row_agrees_with_fp64(row: str, runs: dict[str, Future[Done]]):
    done = runs[row].result()
    told = [line.split() for line in done.stdout.splitlines() if line.startswith(f"{row} ")]
    assert told and int(told[0][1]) > 50, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arch", [89, 90, 120])
def test_the_gate_of_what_is_beside_attention_passes(arch: int):
    """In a process that loads the build, which says what it is, in place of an installed one."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from building import load_extension\n"
        "info = load_extension(Path(sys.argv[2])).build_info(); import pytest\n"
        "assert info['simulator'] and info['source_hash'].endswith('+simulator'), info\n"
        "options = '-q -p no:cacheprovider -n 0 -m gpu test_parity_beside.py test_parity_helpers.py'\n"
        "sys.exit(pytest.main([*options.split(), '-k', sys.argv[3]]))"
    )
    asked = {"OMP_NUM_THREADS": "1", "CUTLASS_FMHA_FORCE_ARCH": str(arch), "CUTLASS_FMHA_DRAWN": "10"}
    command = [sys.executable, "-c", code, str(ROOT / "tools"), str(extension()), BESIDE]
    where = {"env": os.environ | asked, "cwd": ROOT / "tests"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
