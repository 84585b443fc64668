"""The compiled extension: its table of rows, its arguments, its stubs, and what it needs from the system."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elf import Elf

from cutlass_fmha import _C

ROOT = Path(__file__).resolve().parents[1]
assert _C.__file__ is not None
EXTENSION = Path(_C.__file__)
WITH_CUDA = bool(_C.build_info()["cuda"])
ROWS = _C.templates()

ONE = (1, 1, 1, 1, 1)
STRIDES = (64,) * 12
NOWHERE = (0, 0, 0, 0, 0)


def run(**changes: Any) -> None:
    """A call that is right but for ``changes``, and for there being nothing at its addresses."""
    arguments: dict[str, Any] = {
        "row": 0,
        "pointers": NOWHERE,
        "sizes": ONE,
        "strides": STRIDES,
        "scale": 1.0,
        "diagonal": None,
        "device": 0,
        "stream": 0,
    }
    _C.run(**{**arguments, **changes})


# ---- the table ---------------------------------------------------------------------------------------------


def named(archs: str, architectures: list[int]) -> list[int]:
    """The architectures of a line, for which the manifest has two variables."""
    lists = {"${ALL}": architectures, "${TMA}": [90, 120]}
    return lists[archs] if archs in lists else [int(arch) for arch in archs.split(";")]


def manifest_names(architectures: list[int]) -> set[str]:
    """Names of the rows that src/templates.cmake asks for, read independently of CMake."""
    names = set()
    for line in (ROOT / "src" / "templates.cmake").read_text().splitlines():
        if match := re.match(r"fmha_general\((.*)\)", line):
            names |= general_names(match[1].replace('"', "").split(), architectures)
            continue
        if not (match := re.match(r"fmha_forward\((.*)\)", line)):
            continue
        archs, dtypes, head_dim, m, n, warps, kv_warps, *_, copy, overlaps = (
            match[1].replace('"', "") + ("" if match[1].endswith("true") else " false")
        ).split()
        for arch in named(archs, architectures):
            for dtype in dtypes.split(";"):
                suffix = "" if kv_warps == "1" else f"k{kv_warps}"
                suffix += f"_{copy}" if copy in ("element", "tma") else ""
                suffix += "_pdl" if overlaps == "true" else ""
                names.add(f"fwd_sm{arch}_{dtype}_d{head_dim}_m{m}n{n}w{warps}{suffix}")
    return {name for name in names if int(name.split("_")[1][2:]) in architectures}


def general_names(words: list[str], architectures: list[int]) -> set[str]:
    archs, dtypes, head_dim, head_dim_v, m, n, warps, kv_warps, *_ = words
    dims = f"d{head_dim}" + ("" if head_dim == head_dim_v else f"v{head_dim_v}")
    tile = f"m{m}n{n}w{warps}" + ("" if kv_warps == "1" else f"k{kv_warps}")
    return {
        f"fwd_sm{arch}_{dtype}_{dims}_{tile}_general"
        for arch in named(archs, architectures)
        for dtype in dtypes.split(";")
    }


def test_the_build_holds_the_manifests_rows_for_its_architectures():
    architectures = _C.build_info()["architectures"]
    assert isinstance(architectures, list)
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert set(names) == manifest_names(architectures)
    assert bool(names) == WITH_CUDA


def test_every_architecture_has_every_dtype_and_head_dim_aligned_and_not():
    architectures = {row.arch for row in ROWS}
    rows = [row for row in ROWS if row.kv_warps == 1 and not row.general]
    assert {(row.arch, row.dtype, row.head_dim, row.copy == "element") for row in rows} == {
        (arch, dtype, head_dim, by_element)
        for arch in architectures
        for dtype in ("float16", "bfloat16")
        for head_dim in (32, 64, 96, 128, 192, 256)
        for by_element in (False, True)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rows_attributes_agree_with_its_name(row: _C.Template):
    dtype = {"float16": "f16", "bfloat16": "bf16"}[row.dtype]
    suffix = f"k{row.kv_warps}" if row.kv_warps > 1 else ""
    suffix += {"cp_async_16": "", "ldg_16": "", "element": "_element", "tma": "_tma"}[row.copy]
    suffix += "_pdl" if row.dependent_launch else ""
    suffix += "_general" if row.general else ""
    dims = f"d{row.head_dim}" + ("" if row.head_dim_v == row.head_dim else f"v{row.head_dim_v}")
    name = f"fwd_sm{row.arch}_{dtype}_{dims}_m{row.tile_m}n{row.tile_n}w{row.warps}{suffix}"
    assert row.name == name
    assert ROWS[row.index].name == row.name
    aligned = {"cp_async_16": 16, "ldg_16": 16, "tma": 16, "element": 2}[row.copy]
    assert row.alignment == (2 if row.general else aligned)
    assert row.warps % row.kv_warps == 0
    assert row.copy == "cp_async_16" if row.general else row.kv_warps == 1 or row.copy in ("ldg_16", "tma")
    assert row.copy != "ldg_16" or row.kv_warps > 1
    assert row.general or row.head_dim_v == row.head_dim
    assert row.copy != "tma" or row.arch >= 90
    assert not row.dependent_launch or (row.arch >= 90 and row.kv_warps > 1)
    assert row.tile_m % (16 * row.warps // row.kv_warps) == 0, "a warp's mma has 16 rows"
    assert row.tile_n % 16 == 0
    assert row.stages >= 1
    assert row.min_blocks >= 1
    assert 0 < row.smem_bytes <= 99 * 1024
    assert repr(row) == f"<Template {name}>"
    with pytest.raises(AttributeError):
        row.tile_m = 1  # type: ignore[misc]


def test_build_info():
    info = _C.build_info()
    assert {"cuda", "cuda_version", "nvcc_version", "cutlass_version", "architectures", "proxy"} <= set(info)
    assert info["architectures"] == sorted({row.arch for row in ROWS})
    assert info["proxy"] in ({}, {120: 90})
    targets = {89: {"89"}, 90: {"90"}, 120: {"120", "120a", "120f", "90"}}
    compiled_for = info["compiled_for"]
    assert isinstance(compiled_for, dict) and list(compiled_for) == info["architectures"]
    assert all(target in targets[arch] for arch, target in compiled_for.items())
    if WITH_CUDA:
        assert str(info["nvcc_version"]).startswith(str(info["cuda_version"]) + ".")
        assert re.fullmatch(r"\d+\.\d+\.\d+", str(info["cutlass_version"]))


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sizes": (-1, 1, 1, 1, 1)}, "batch must be between 0 and"),
        ({"sizes": (1, -1, 1, 1, 1)}, "seqlen_q must be between 0 and"),
        ({"sizes": (1, 1, 2**40, 1, 1)}, r"seqlen_k must be between 0 and \d+, got 1099511627776"),
        ({"sizes": (1, 1, 1, 3, 2)}, r"num_heads \(3\) must be a multiple of num_heads_kv \(2\)"),
        ({"sizes": (1, 1, 1, 3, 0)}, r"num_heads \(3\) must be a multiple of num_heads_kv \(0\)"),
        ({"scale": float("nan")}, "scale must be a finite float"),
        ({"scale": float("inf")}, "scale must be a finite float"),
        ({"scale": -3e38}, "scale must be a finite float of at most 2e38"),
        ({"diagonal": 2**40}, "diagonal must be between"),
        ({"diagonal": -(2**40)}, "diagonal must be between"),
    ],
)
def test_a_wrong_argument_is_a_value_error_with_a_sentence(changes: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        run(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"pointers": NOWHERE[:4]},
        {"sizes": ONE[:4]},
        {"strides": STRIDES[:11]},
        {"scale": "1"},
        {"diagonal": 0.5},
    ],
)
def test_a_call_of_another_form_is_a_type_error(changes: dict[str, Any]):
    with pytest.raises(TypeError):
        run(**changes)


@pytest.mark.skipif(not WITH_CUDA, reason="a build without CUDA has no rows")
class TestRows:
    """What only a build with kernels can refuse."""

    @pytest.mark.parametrize("row", [-1, len(ROWS)])
    def test_a_row_that_is_none(self, row: int):
        with pytest.raises(ValueError, match=f"row must be between 0 and {len(ROWS) - 1}, got {row}"):
            run(row=row)

    @pytest.mark.parametrize("operand", range(4))
    def test_misaligned_pointers_and_strides(self, operand: int):
        aligned = next(row for row in ROWS if row.alignment == 16 and not row.general)
        name = "qkvo"[operand]
        pointers = [4096] * 5
        pointers[operand] += 8
        with pytest.raises(ValueError, match=f"pointers aligned to 16 bytes, and that of {name} is not"):
            run(row=aligned.index, pointers=tuple(pointers))
        for dimension in range(3):
            strides = list(STRIDES)
            strides[3 * operand + dimension] += 4
            with pytest.raises(ValueError, match=f"multiples of 16 bytes, and a stride of {name} is not"):
                run(row=aligned.index, sizes=(2, 2, 2, 2, 2), strides=tuple(strides))

    @pytest.mark.parametrize("sizes", [(0, 1, 1, 1, 1), (1, 0, 1, 1, 1), (1, 1, 1, 0, 0)])
    def test_nothing_to_compute_needs_no_gpu(self, sizes: tuple[int, ...]):
        run(row=next(row.index for row in ROWS if not row.general), sizes=sizes)


def test_a_call_without_a_gpu_is_a_runtime_error_with_a_sentence():
    # With the driver out of sight this also holds on a machine with a GPU.
    found = in_a_process_without_gpu(
        "try:\n"
        "    _C.run(0, (0,) * 5, (1,) * 5, (64,) * 12, 1.0, None, 0, 0)\n"
        "except RuntimeError as error:\n"
        "    print(error)"
    )
    assert re.search("failed: .*(driver|device)" if WITH_CUDA else "built without CUDA", found), found
    assert found.count("\n") == 1, found


def test_devices_without_a_gpu():
    assert in_a_process_without_gpu("print(_C.device_count())") == "0\n"
    found = in_a_process_without_gpu(
        "try:\n    _C.device_properties(0)\nexcept (ValueError, RuntimeError) as error:\n    print(error)"
    )
    assert re.search("one of the 0 CUDA devices here, got 0" if WITH_CUDA else "built without CUDA", found), (
        found
    )


def in_a_process_without_gpu(code: str) -> str:
    """Output of ``code`` in a fresh interpreter that sees no GPU, with _C loaded and without torch."""
    load = (
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('cutlass_fmha._C', {str(EXTENSION)!r})\n"
        "_C = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(_C)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", load + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


# ---- stubs -------------------------------------------------------------------------------------------------


def stub_names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names that a stub file defines: functions, classes and their members."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield prefix + node.name
        elif isinstance(node, ast.AnnAssign):
            yield prefix + ast.unparse(node.target)
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from stub_names(node.body, f"{prefix}{node.name}.")


def module_names(module: Any, prefix: str = "") -> Iterator[str]:
    """The same of the module: public names, and those of its classes that differ from ``object``'s."""
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type(sys)):
            continue
        yield prefix + name
        if isinstance(value, type):
            yield from module_names(value, f"{prefix}{name}.")


def test_the_stubs_say_what_is_there():
    stubs = ast.parse((ROOT / "cutlass_fmha" / "_C.pyi").read_text())
    top_level = [node for node in stubs.body if not (isinstance(node, ast.ClassDef) and node.name == "host")]
    assert set(stub_names(top_level)) == set(module_names(_C))


@pytest.mark.parametrize("name", ["run", "run_general"])
def test_the_stubs_arguments_are_those_of_a_launch(name: str):
    stubs = ast.parse((ROOT / "cutlass_fmha" / "_C.pyi").read_text())
    function = next(node for node in stubs.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names = [argument.arg for argument in function.args.args]
    signature = str(getattr(_C, name).__doc__).splitlines()[0]
    assert re.findall(r"(\w+):", signature) == names


# ---- what it needs from the system -------------------------------------------------------------------------


def test_it_needs_nothing_but_the_c_and_cpp_runtimes():
    needed = Elf(EXTENSION).needed()
    assert "libc.so.6" in needed
    allowed = r"(libc|libm|libpthread|libdl|librt|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+"
    foreign = sorted(name for name in needed if not re.fullmatch(allowed, name))
    assert not foreign, f"{EXTENSION.name} needs {', '.join(foreign)}"


def test_sources_that_are_not_built_say_so(tmp_path: Path):
    (tmp_path / "cutlass_fmha").mkdir()
    shutil.copy(ROOT / "cutlass_fmha" / "__init__.py", tmp_path / "cutlass_fmha")
    # Without site and PYTHONPATH, so that no installed package is found either.
    command = [sys.executable, "-S", "-E", "-c", "import cutlass_fmha"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert re.match(r"ImportError: the compiled extension cutlass_fmha\._C is not in .*pip install", last)


def test_it_loads_without_torch_and_without_the_driver():
    loaded = in_a_process_without_gpu(
        "import sys\n"
        "print('torch' in sys.modules, 'libcuda' in open('/proc/self/maps').read(), len(_C.templates()))"
    )
    assert loaded == f"False False {len(ROWS)}\n"


def test_its_symbols_stay_its_own():
    # torch has a CUDA runtime of its own in the process: one must not be mistaken for the other.
    exported = Elf(EXTENSION).exported()
    assert "PyInit__C" in exported
    # Templates of the standard library are weak and the same everywhere.
    foreign = [name for name in exported if re.search("cuda|cutlass|fwd_|nv[A-Z]", name)]
    assert not foreign
