"""The compiled extension: its table of rows, its arguments, its stubs, and what it needs from the system."""

from __future__ import annotations
import __future__

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import elf
import pytest
import resources
from test_binding_features import ANY_ROW, RIGHT

from cutlass_fmha import _C
from cutlass_fmha.dispatch.table import WIDE

ROOT = Path(__file__).resolve().parents[1]
assert _C.__file__ is not None
EXTENSION = Path(_C.__file__)
WITH_CUDA = bool(_C.build_info()["cuda"])
ROWS = _C.rows()


# ---- the table ---------------------------------------------------------------------------------------------


ARCHS_OF = {"${ALL}": "89;90;120", "${TMA}": "90;120"}  # the manifest's variables
BEGINS = {"wide": "wide", "wide_scored": "wide", "backward": "bwd", "query_product": "bwd", "backward_wide": "widebwd"}


def manifest_begins() -> list[str]:
    """How the names of src/rows.cmake's rows begin, in its order, read independently of CMake."""
    lines = (ROOT / "src" / "rows.cmake").read_text().splitlines()
    found = [re.match(r'fmha_(\w+)\("?([^" ]+)"?\s+"?([\w;]+)"?\s', line) for line in lines]
    return [
        f"{BEGINS.get(row[1], 'fwd')}_sm{arch}_{dtype}"
        for row in filter(None, found)
        for arch in ARCHS_OF.get(row[2], row[2]).split(";")
        for dtype in row[3].split(";")
    ]


def test_the_build_holds_the_manifests_rows_for_its_architectures():
    architectures = _C.build_info()["architectures"]
    assert isinstance(architectures, list)
    table = (*ROWS, *_C.backward_rows())
    names = [row.name for row in table]
    in_subset = resources.manifest_rows()
    assert ["_".join(name.split("_")[:3]) for name in in_subset] == manifest_begins()
    subset = str(_C.build_info()["source_hash"]).endswith("+subset")
    built = [name for name in in_subset if int(name.split("_")[1][2:]) in architectures]
    assert names == [name for name in built if in_subset[name] or not subset]
    assert all(f"m{row.tile_m}n{row.tile_n}w{row.warps}" in row.name for row in table)
    assert bool(names) == WITH_CUDA
    assert [row.index for row in (*table, *_C.helpers())] == list(range(len(names) + len(_C.helpers())))


def test_every_architecture_has_every_dtype_and_head_dim_aligned_and_not():
    rows = [row for row in resources.whole_table() if row.family == "plain"]
    architectures = {row.arch for row in ROWS}
    assert {(row.arch, row.dtype, row.head_dim, row.copy == "element") for row in rows} == {
        (arch, dtype, head_dim, by_element)
        for arch in architectures
        for dtype in ("float16", "bfloat16")
        for head_dim in (32, 64, 96, 128, 192, 256)
        for by_element in (False, True)
    }


@pytest.mark.parametrize("row", [row for row in ROWS if row.family not in WIDE], ids=lambda row: row.name)
def test_a_rows_attributes_agree_with_its_name(row: _C.Row):
    dtype = {"float16": "f16", "bfloat16": "bf16"}[row.dtype]
    suffix = f"k{row.kv_warps}" if row.kv_warps > 1 else ""
    suffix += {"cp_async_16": "", "ldg_16": "", "element": "_element", "tma": "_tma"}[row.copy]
    suffix += "_pdl" if row.dependent_launch and not row.takes_features else ""
    suffix += ("_scored" if row.scored else f"_{row.family}") if row.takes_features else ""
    dims = f"d{row.head_dim}" + ("" if row.head_dim_v == row.head_dim else f"v{row.head_dim_v}")
    name = f"fwd_sm{row.arch}_{dtype}_{dims}_m{row.tile_m}n{row.tile_n}w{row.warps}{suffix}"
    assert row.name == name
    assert ROWS[row.index].name == row.name
    assert (row.mma, row.element_bytes, row.threads) == ("m16n8k16", 2, 32 * row.warps)
    aligned = {"cp_async_16": 16, "ldg_16": 16, "tma": 16, "element": 2}[row.copy]
    assert row.alignment == (2 if row.scored else aligned)
    assert row.copy != "tma" or row.arch >= 90
    assert not row.dependent_launch or (row.arch >= 90 and row.kv_warps > 1)
    assert row.tile_m % (16 * row.warps // row.kv_warps) == 0, "a warp's mma has 16 rows"
    assert row.tile_n % 16 == 0 and 0 < row.smem_bytes <= 99 * 1024
    assert repr(row) == f"<Row {name}>"
    with pytest.raises(AttributeError):
        row.tile_m = 1  # type: ignore[misc]


def test_build_info():
    info = _C.build_info()
    assert {"cuda", "cuda_version", "nvcc_version", "cutlass_version"} <= set(info)
    assert {"architectures", "proxy", "ptx_compiler"} <= set(info)
    assert info["architectures"] == sorted({row.arch for row in ROWS})
    assert info["proxy"] in ({}, {120: 90})
    older = {f"{older}{own}" for older in ("80", "86", "80,86") for own in ("", ",89")}
    targets = {89: {"89"} | older, 90: {"90"}, 120: {"120", "120a", "120f", "90"}}
    compiled_for = info["compiled_for"]
    assert isinstance(compiled_for, dict) and list(compiled_for) == info["architectures"]
    assert all(target in targets[arch] for arch, target in compiled_for.items())
    if WITH_CUDA:
        assert str(info["nvcc_version"]).startswith(str(info["cuda_version"]) + ".")
        assert re.fullmatch(r"\d+\.\d+\.\d+", str(info["cutlass_version"]))


def test_there_is_one_launch_one_attribute_cache_and_one_device_guard():
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".cpp", ".h"))
    for what in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaFuncSetAttribute", "DeviceGuard guard"):
        assert sources.count(f"{what}(") == 1, what


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(0, None, 0, 0), (0.5, _C.AttentionParams(), 0, 0), (0, _C.Rotary(), 0, 0)])
def test_a_call_of_another_form_is_a_type_error(arguments: tuple[Any, ...]):
    with pytest.raises(TypeError):
        _C.run(*arguments)


def test_a_call_without_a_gpu_is_a_runtime_error_with_a_sentence():
    # With the driver out of sight this also holds on a machine with a GPU.
    found = in_a_process_without_gpu(
        "try:\n"
        f"    params = _C.AttentionParams()\n    for name, value in {RIGHT!r}.items():\n"
        f"        setattr(params, name, value)\n    _C.run({ANY_ROW}, params, 0, 0)\n"
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
    assert re.search("of the 0 CUDA devices here, got 0" if WITH_CUDA else "built without CUDA", found), found


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


STUBS = (ROOT / "cutlass_fmha" / "_C.pyi").read_text()


def public_names(module: Any, prefix: str = "") -> Iterator[str]:
    """Dotted: what a module or a class has or annotates, and so of its classes."""
    for name, value in {**vars(module), **getattr(module, "__annotations__", {})}.items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        yield prefix + name
        if isinstance(value, type):
            yield from public_names(value, f"{prefix}{name}.")


def test_the_stubs_say_what_is_there():
    stubs = ModuleType("stubs")
    exec(compile(STUBS, "_C.pyi", "exec", __future__.annotations.compiler_flag), vars(stubs))
    assert set(public_names(stubs)) == set(public_names(_C))


def test_the_stubs_arguments_are_those_of_a_launch():
    function = next(node for node in ast.parse(STUBS).body if isinstance(node, ast.FunctionDef) and node.name == "run")
    signatures = re.findall(r"\d\. run\((.*)\)", str(_C.run.__doc__))
    for signature in signatures:
        assert re.findall(r"(\w+):", signature) == [argument.arg for argument in function.args.args]
    (annotation,) = (x.annotation for x in function.args.args if x.arg == "params" and x.annotation)
    names = re.findall(r"params: cutlass_fmha\._C\.(\w+)", " ".join(signatures))
    assert names == ast.unparse(annotation).split(" | ")


# ---- what it needs from the system -------------------------------------------------------------------------


def test_it_needs_nothing_but_the_c_and_cpp_runtimes():
    needed = elf.needed(EXTENSION)
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
        "import sys\nprint('torch' in sys.modules, 'libcuda' in open('/proc/self/maps').read(), len(_C.rows()))"
    )
    assert loaded == f"False False {len(ROWS)}\n"


def test_its_symbols_stay_its_own():
    # torch has a CUDA runtime of its own in the process: one must not be mistaken for the other.
    exported = elf.exported(EXTENSION)
    assert "PyInit__C" in exported
    # Templates of the standard library are weak and the same everywhere.
    foreign = [name for name in exported if re.search("cuda|cutlass|fwd_|nv[A-Z]", name)]
    assert not foreign
