"""Rows of every kind, by their PTX on the simulator, against dense fp64, each in a process of its own, two at a time:
no GPU, sm_120's TMA code included. docs/simulation.md says what that shows."""

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
    "fwd_sm120_f16_d128_m256n64w8_tma_ranged",  # ranges and pages, with turns
    "fwd_sm120_bf16_d64_m256n64w8_tma_score_mod",
    *("fwd_sm89_f16_d64_m256n64w8_masked", "fwd_sm90_bf16_d128_m256n32w8_tma_masked"),
    *("fwd_sm120_bf16_d64_m32n32w8k8_pdl", "fwd_sm120_f16_d64_m32n64w4k4_tma_pdl"),  # launches that overlap
    *("wide_sm89_f32_d512_m64n64w8_scored", "wide_sm120_bf16_d512_m64n64w8_scored"),
)


@functools.cache
def extension() -> Path:
    """The build with ROWS, made when it is not there or older than its sources."""
    return build_extension("^(" + "|".join(ROWS) + ")$", DIRECTORY / "tests")


Done = subprocess.CompletedProcess[str]


def simulate(row: str, *options: str, env: dict[str, str] | None = None) -> Done:
    command = [sys.executable, str(ROOT / "tools" / "simulate.py"), "--extension", str(extension())]
    command += ["--rows", f"^{row}$", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module")
def runs() -> dict[str, Future[Done]]:
    """Every row's run, under way.

    Each has a copy of the environment: pytest and other tests of this process write to the one that a start of a
    process in another thread is reading, which then fails with EFAULT.
    """
    extension()
    pool, env = ThreadPoolExecutor(2), dict(os.environ)
    return {row: pool.submit(simulate, row, "--seed", "1", env=env) for row in ROWS}


@pytest.mark.parametrize("row", ROWS)
def test_row_agrees_with_fp64(row: str, runs: dict[str, Future[Done]]):
    done = runs[row].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) > 100, done.stdout


def test_drawn_problems_repeat_with_their_seed():
    options = ("--problems", "5", "--longest", "90", "--seed", "3", "--only-drawn")
    first, second = (simulate("fwd_sm120_bf16_d64_m64n64w4_tma", *options) for _ in range(2))
    assert first.returncode == 0, first.stderr
    one, other = (done.stdout.splitlines()[-1] for done in (first, second))
    assert one.split()[0] == "5" and one.split()[-3:] == other.split()[-3:]  # the worst ratio


#: What of the gate needs no row of attention.
BESIDE = {
    "test_parity_beside.py": "",
    "test_parity_helpers.py": "combine or merge or rota or position or append or place",
}


@pytest.mark.parametrize("file", BESIDE)
@pytest.mark.parametrize("arch", [89, 90, 120])
def test_the_gate_of_what_is_beside_attention_passes(arch: int, file: str):
    """In a process that loads the build, which says what it is, in place of an installed one."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from building import load_extension\n"
        "info = load_extension(Path(sys.argv[2])).build_info(); import pytest\n"
        "assert info['simulator'] and info['source_hash'].endswith('+simulator'), info\n"
        f"options = '-q -p no:cacheprovider -n 0 -m gpu {file}'\n"
        f"sys.exit(pytest.main([*options.split(), '-k', {BESIDE[file]!r}]))"
    )
    asked = {"OMP_NUM_THREADS": "1", "CUTLASS_FMHA_FORCE_ARCH": str(arch), "CUTLASS_FMHA_DRAWN": "20"}
    command = [sys.executable, "-c", code, str(ROOT / "tools"), str(extension())]
    where = {"env": os.environ | asked, "cwd": ROOT / "tests"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
