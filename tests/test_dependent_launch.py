"""Rows whose launches overlap, without a GPU: what CMake makes of their lines, and nvcc of their kernels.

That calls in a row don't overtake each other is asked of every row under test by test_parity_runtime.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import building
import cubin
import pytest

from cutlass_fmha import _C

ROOT = Path(__file__).resolve().parents[1]
ROWS = [row.name for row in _C.rows() if row.family == "few_query" and row.dependent_launch]
LOADS = {"LDG", "UTMALDG"}
GLOBAL_ACCESSES = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UTMALDG", "UTMASTG"}


# ---- the manifest's column ---------------------------------------------------------------------------------


def rows_of(tmp_path: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """CMake's rows of some manifest lines, a "name: configuration" each, without compiling any."""
    (tmp_path / "manifest.cmake").write_text("\n".join(lines))
    return building.script(
        tmp_path,
        "set(FMHA_SUPPORTED_ARCHITECTURES 89 90 120)\nset(FMHA_ARCHITECTURES 89 90 120)",
        f'set(CUTLASS_FMHA_MANIFEST "{tmp_path}/manifest.cmake")',
        f'include("{ROOT}/cmake/Instances.cmake")\nfmha_include_manifest()',
        "get_property(names GLOBAL PROPERTY FMHA_ROW_NAMES)\nforeach(name IN LISTS names)",
        "  get_property(config GLOBAL PROPERTY FMHA_CONFIG_${name})",
        '  string(REPLACE "\\n" "" config "${config}")\n  message("${name}: ${config}")\nendforeach()',
    )


FEW_QUERY = "64 16 32 4 4 2 1 true false ldg_16"


def test_a_13th_column_makes_launches_overlap(tmp_path: Path):
    done = rows_of(
        tmp_path,
        f'fmha_forward("90" "f16" {FEW_QUERY} true)',
        f'fmha_forward("90;89" "f16" {FEW_QUERY})',
        f'fmha_forward("120" "bf16" {FEW_QUERY} false)',
    )
    assert done.returncode == 0, done.stderr
    configs = dict(line.split(": ", 1) for line in done.stderr.splitlines())
    assert {name: ".dependent_launch = true" in config for name, config in configs.items()} == {
        "fwd_sm90_f16_d64_m16n32w4k4_pdl": True,
        "fwd_sm90_f16_d64_m16n32w4k4": False,
        "fwd_sm89_f16_d64_m16n32w4k4": False,
        "fwd_sm120_bf16_d64_m16n32w4k4": False,
    }
    assert all(".copy = cutlass_fmha::Copy::ldg_16" in config for config in configs.values())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f'"89" "f16" {FEW_QUERY} true', "fwd_sm89_f16_d64_m16n32w4k4_pdl; only few-query rows from sm"),
        ('"90" "f16" 64 64 64 4 1 2 2 true false cp_async_16 true', "only few-query rows from sm_90 on"),
        (f'"90" "f16" {FEW_QUERY} yes', "too many columns"),
        (f'"90" "f16" {FEW_QUERY} true true', "too many columns"),
    ],
)
def test_a_line_that_asks_for_what_no_kernel_does_is_an_error(line: str, expected: str, tmp_path: Path):
    done = rows_of(tmp_path, f"fmha_forward({line})")
    assert done.returncode != 0
    assert expected in " ".join(done.stderr.split())


# ---- the machine code --------------------------------------------------------------------------------------


def test_the_few_query_rows_of_architectures_that_can_overlap_do():
    can = {row.name for row in _C.rows() if row.family == "few_query" and row.arch >= 90}
    assert can == set(ROWS)


def test_of_the_others_decoding_rows_what_follows_them_and_what_is_beside_attention_overlap():
    rows = [row for row in (*_C.rows(), *_C.backward_rows(), *_C.helpers()) if row.family != "few_query"]
    families = {"few_query_scored", "combine", "gated", "gated_backward"}
    families |= {"rms_norm", "rms_norm_backward", "rms_norm_weights", "rope", "rope_backward", "rope_weights"}
    can = {row.name for row in rows if row.family in families and row.arch >= 90}
    assert can == {row.name for row in rows if row.dependent_launch}


def places(kernel: cubin.Kernel, opcodes: Iterable[str]) -> list[int]:
    return [place for place, instruction in enumerate(kernel.code) if instruction.base in opcodes]


@pytest.mark.parametrize("name", ROWS)
def test_nothing_global_is_accessed_before_the_wait(name: str, machine_code: list[cubin.Kernel]):
    (kernel,) = (kernel for kernel in machine_code if kernel.name == name)
    (wait,) = places(kernel, ["ACQBULK"])
    assert kernel.code[wait].guard == "", "every thread waits"
    accesses = places(kernel, GLOBAL_ACCESSES)
    assert accesses and wait < min(accesses)
    assert min(places(kernel, ["EXIT"])) > wait, "no thread leaves before it has waited"
    assert max(places(kernel, ["CCTL"])) < wait, "a prefetch that comes after the wait is for nothing"
    assert not [i for i in kernel.code if i.base == "LDG" and "CONSTANT" in i.opcode]
    # The next launch is let in after the first loads and before the output: it waits for this one's end whenever it
    # comes, so that this is a matter of speed.
    triggers = places(kernel, ["PREEXIT"])
    assert len(triggers) == 2, "by the middle of the keys, and where there is no middle"
    assert min(places(kernel, LOADS)) < min(triggers)
    assert max(triggers) < min(places(kernel, ["STG"]))
