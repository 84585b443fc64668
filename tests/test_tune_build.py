"""A tuner's builds: whose fault a failure is, and a real build."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from building import ROOT
from cubin import Kernel
from tuning import build, manifest
from tuning.build import Builder, BuildError, judge_resources
from tuning.candidate import Candidate
from tuning.space import Limits

SMALL = Candidate(32, 64, 16, 4, 1, 1, 2, True, False, "cp_async_16")
OTHERS = [replace(SMALL, stages=stages, tile_n=n) for stages in (1, 2) for n in (32, 48, 64)]
BOTH = ("bfloat16", "float16")


NINJA = """[1/9] Building CXX object CMakeFiles/_C.dir/src/registry.cpp.o
[2/9] Building CUDA object CMakeFiles/fmha_sm90.dir/generated/sm90_d32_t1111111111_0.cu.o
FAILED: [code=2] CMakeFiles/fmha_sm90.dir/generated/sm90_d32_t1111111111_0.cu.o
/usr/local/bin/nvcc -gencode=arch=compute_90,code=sm_90 -c generated/sm90_d32_t1111111111_0.cu
In file included from generated/sm90_d32_t1111111111_0.cu:2:
/home/user/project/src/forward/kernel.cuh(38): error: static assertion failed with "tiles"
          detected during instantiation of "void forward<C>(const ForwardParams &)"
1 error detected in the compilation of "sm90_d32_t1111111111_0.cu".
[3/9] Building CUDA object CMakeFiles/fmha_sm90.dir/generated/sm90_d32_t2222222222_0.cu.o
FAILED: CMakeFiles/fmha_sm90.dir/generated/sm90_d32_t2222222222_0.cu.o
nvcc error   : 'cicc' died due to signal 9 (Kill signal)
FAILED: CMakeFiles/fmha_sm90.dir/generated/sm90_d32_t3333333333_0.cu.o
ninja: build stopped: cannot make progress due to previous errors.
"""


def test_whose_compiler_said_what():
    assert build.failures(NINJA) == {
        "t1111111111": 'kernel.cuh(38): error: static assertion failed with "tiles"',
        "t2222222222": "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "t3333333333": "nvcc failed without a word",
    }


def kernel(candidate: Candidate, dtype: str = "f16", **values: int) -> Kernel:
    opcodes = Counter({"HMMA.16816.F32": 64, "LDGSTS.E": 8, "STL": values.pop("stl", 0)})
    opcodes += Counter()
    name = f"fwd_sm89_{dtype}_d32_m64n32w4_{candidate.tag}"
    return Kernel(name, 89, **{"registers": 128, **values}, opcodes=opcodes)  # type: ignore[arg-type]


def test_what_the_machine_code_has_against_a_candidate():
    fine, spills, stack, wide, absent = OTHERS[:5]
    kernels = [
        kernel(fine),
        kernel(fine, "bf16", registers=140),
        kernel(spills, stl=3),
        kernel(stack, stack=16),
        kernel(replace(wide, min_blocks=4)),
        kernel(SMALL, stl=9),  # a row of the manifest, nobody's candidate
    ]
    wanted = {
        fine: BOTH,
        spills: ("float16",),
        stack: ("float16",),
        replace(wide, min_blocks=4): ("float16",),
        absent: ("float16",),
    }
    found, registers = judge_resources(kernels, wanted, Limits())
    assert found[fine] == [] and registers[fine] == 140
    assert found[spills] == ["f16 (sm_89): 3 loads and stores of local memory (spills)"]
    assert found[stack] == ["f16 (sm_89): a stack of 16 bytes"]
    assert found[replace(wide, min_blocks=4)] == []
    assert found[absent] == ["the extension has no float16 kernel of it"]
    too_many = {replace(fine, min_blocks=5): ("float16",)}
    found, _ = judge_resources([kernel(replace(fine, min_blocks=5))], too_many, Limits())
    assert "registers x 128 threads x 5 blocks exceed" in found[replace(fine, min_blocks=5)][0]


@pytest.mark.parametrize("define", ["NOVALUE", "=3", "A B=3"])
def test_a_define_has_a_name_and_a_value(define: str, tmp_path: Path):
    with pytest.raises(BuildError, match="NAME=VALUE"):
        Builder(tmp_path, 90, defines=[define])


def test_a_variable_that_the_project_does_not_have_is_an_error(tmp_path: Path):
    builder = Builder(tmp_path, 89, defines=["CUTLASS_FMHA_NO_SUCH_THING=1"])
    with pytest.raises(BuildError, match="no CMake variable CUTLASS_FMHA_NO_SUCH_THING"):
        builder.nvcc_version()
    builder = Builder(tmp_path / "other", 89, defines=["CUTLASS_FMHA_CUTLASS_DIR=/nowhere"])
    with pytest.raises(
        BuildError, match=r"^cutlass_fmha: CUTLASS_FMHA_CUTLASS_DIR is /nowhere, and there is no"
    ):
        builder.nvcc_version()


def test_candidates_are_compiled_and_the_bad_one_is_dropped(tmp_path: Path):
    """The real path, nvcc and all: two candidates that no name tells apart, and one that can't compile."""
    good, twin, bad = SMALL, replace(SMALL, min_blocks=1), replace(SMALL, tile_n=24)
    assert manifest.identity(good) == manifest.identity(twin)
    builder = Builder(tmp_path, 89, jobs=1)
    built = builder.build("batch", {good: ("float16",), twin: ("float16",), bad: ("float16",)}, {})
    assert built.failed == {bad: built.failed[bad]}
    assert "static assertion" in built.failed[bad]
    assert built.complaints == {good: [], twin: []}
    assert all(32 < count <= 255 for count in built.registers.values())
    assert built.extension.parent == tmp_path / "batch"
    # As the worker finds them, without an installed package.
    listing = (
        "import sys; sys.path.insert(0, sys.argv[2]); from tuning import worker; from pathlib import Path\n"
        "module = worker.load_extension(Path(sys.argv[1])); from tuning import gates\n"
        "from cutlass_fmha.bench import timing\n"
        "print(*(row.name for row in module.templates()), module.build_info()['source_hash'])"
    )
    command = [sys.executable, "-c", listing, str(built.extension), str(ROOT / "tools")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *names, source_hash = done.stdout.split()
    assert sorted(names) == sorted(f"fwd_sm89_f16_d32_m64n16w4_{c.tag}" for c in (good, twin))
    assert source_hash.endswith("+manifest"), "the parity gate must not take it for a build of src/"
