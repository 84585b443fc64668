"""Rows that compute gradients, by their PTX on the simulator, against dense fp64: docs/simulation.md."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: One of each kind and head dim, and each architecture.
ROWS = (
    *("bwd_sm89_bf16_d32_m64n256w8", "bwd_sm89_f16_d64_m64n256w8"),
    *("bwd_sm120_bf16_d96_m64n128w8_tma", "bwd_sm120_f16_d128_m64n128w8_tma"),
    *("bwd_sm90_bf16_d64_m64n192w8_groups_tma", "bwd_sm90_bf16_d128_m64n128w8_groups_tma"),
    "bwd_sm90_f16_d256_m32n64w8_groups_tma",
    *("bwd_sm89_bf16_d32_m64n256w8_scored", "bwd_sm120_f16_d64_m64n128w8_scored"),
    *("bwd_sm90_bf16_d128_m64n128w8_tma_scored", "bwd_sm120_bf16_d256_m32n64w8_groups_scored"),
    *("bwd_sm89_f16_d64_m64n256w8_ds", "bwd_sm120_bf16_d96_m64n128w8_ds", "bwd_sm90_f16_d256_m32n64w8_groups_ds"),
    *("bwd_sm90_bf16_d64_m64n192w8_groups_tma_ds", "bwd_sm90_bf16_d128_m64n128w8_groups_tma_ds"),
    *("widebwd_sm89_f32_d128_m64n64w8", "widebwd_sm90_f16_d512_m64n64w8"),
)
#: What makes dQ of their dS.
PRODUCTS = "bwd_sm(89_f16_d64|120_bf16_d96|90_bf16_d64|90_bf16_d128|90_f16_d256)_.*_dq"


@functools.cache
def extension() -> Path:
    """The build with ROWS, made when it is not there or older than its sources."""
    from simulator import DIRECTORY, build_extension

    return build_extension("^(" + "|".join((*ROWS, PRODUCTS)) + ")$", DIRECTORY / "backward")


def run(arch: str, *said: str) -> str:
    """What main() prints, in a process of its own. Sums in a fixed order await those of blocks before, which
    another seed would have run afterwards."""
    environment = os.environ | {"CUTLASS_FMHA_FORCE_ARCH": arch, "CUTLASS_FMHA_SIMULATOR_SEED": "0"}
    command = [sys.executable, str(Path(__file__)), str(extension()), *said]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("row", ROWS)
def test_row_agrees_with_fp64(row: str):
    run(row.partition("_sm")[2].partition("_")[0], row)


def test_a_long_run_draws_gradients():
    said = "--gradients --problems 6 --processes 1 --longest 60 --rows d32_.*_scored"
    assert "6 problems on 1 rows" in run("89", *said.split())


# ---- in a process of its own, with the simulator's extension -----------------------------------------------


def main(extension: str, name: str, *said: str) -> int:
    """Exit status 1 where a listed problem's gradients are off, or a drawn one's."""
    sys.path.insert(0, str(ROOT / "tools"))
    from building import load_extension

    load_extension(Path(extension))
    if said:
        import parity_run

        return parity_run.main([name, *said])
    import gpu
    from backward_launch import OVERFLOWING, BackwardLaunch, listed

    from cutlass_fmha.dispatch.gradients import writes_scores

    (row,) = (row for row in gpu.backward_rows() if row.name == name)
    bad = 0
    launches = [BackwardLaunch.of(row, problem, "cpu") for problem in listed(row)]
    for number, launch in enumerate(launches):
        launch.deterministic = writes_scores(row) or (row.scored and len(launch.problem.features) % 2 == 0)
        launch.heads_at_once = 1 + number % 3
    if row.dtype == "float16":
        launches += [BackwardLaunch.overflowing(row, problem, "cpu") for problem in OVERFLOWING]
    for launch in launches:
        launch.run()
        errors = launch.errors()
        what = errors.complaint or ("" if launch.intact() else "wrote elsewhere")
        bad += not errors.worst <= 1 or bool(what)
        print(f"{launch.problem}: {errors.worst:.3f} of what is allowed {what}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
