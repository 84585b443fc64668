"""What a wheel holds, and what the installed distribution says of itself.

The wheel is the one that WHEEL names, or else one built here without CUDA, which takes seconds and differs in
the contents of _C only.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import elf
import pytest

import cutlass_fmha

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 40 * 2**20  # bytes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("WHEEL"):
        return Path(given)
    directory = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory,
    ]  # fmt: skip
    settings = ("cmake.define.CUTLASS_FMHA_CUDA=OFF", f"build-dir={directory}/build")
    command += [f"--config-settings={setting}" for setting in settings]
    result = subprocess.run([*command, ROOT], capture_output=True, text=True, check=False, cwd=directory)
    assert result.returncode == 0, f"pip wheel failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def package_files() -> set[str]:
    """What the repository tracks, or would, below the package's directory."""
    files = (path for path in (ROOT / "cutlass_fmha").rglob("*") if path.is_file())
    left_out = re.compile(r"__pycache__|\.so$|\.py[cod]$|/\.")
    return {name for path in files if not left_out.search(name := path.relative_to(ROOT).as_posix())}


def test_the_wheel_holds_the_package_and_nothing_else(names: set[str]):
    binaries = {name for name in names if name.endswith(".so")}
    information = {name for name in names if re.match(r"cutlass_fmha-[^/]+\.dist-info/", name)}
    assert names - binaries - information == package_files()
    assert {"cutlass_fmha/py.typed", "cutlass_fmha/_C.pyi"} <= names
    (binary,) = binaries
    assert re.fullmatch(r"cutlass_fmha/_C\.cpython-\d+-x86_64-linux-gnu\.so", binary)


def test_the_wheel_is_for_this_python_and_small(wheel: Path):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"cutlass_fmha-[^-]+-{tag}-{tag}-(many)?linux[\w.]*_x86_64\.whl", wheel.name)
    assert wheel.stat().st_size <= LIMIT


def test_its_extension_needs_the_c_and_cpp_runtimes_only(wheel: Path, names: set[str], tmp_path: Path):
    (binary,) = (name for name in names if name.endswith(".so"))
    with zipfile.ZipFile(wheel) as archive:
        extension = Path(archive.extract(binary, tmp_path))
    known = r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)|ld-linux)"
    foreign = {name for name in elf.needed(extension) if not re.match(known, name)}
    assert not foreign


def test_its_metadata_and_licences(wheel: Path, names: set[str]):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
        licences = {name: archive.read(name) for name in names if "/licenses/" in name}
    assert fields["Name"] == "cutlass-fmha"
    assert fields["Requires-Python"] == ">=3.10"
    assert required(fields.get_all("Requires-Dist", [])) == ["torch>=2.6"]
    assert any(name.endswith("/licenses/LICENSE") for name in licences)
    assert any(b"NVIDIA CORPORATION" in text for text in licences.values()), "CUTLASS's notice is missing"


def test_the_installed_distribution_is_this_package():
    assert importlib.metadata.version("cutlass-fmha") == cutlass_fmha.__version__
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert cutlass_fmha.__version__ == declared[1]
    assert required(importlib.metadata.requires("cutlass-fmha") or []) == ["torch>=2.6"]


def required(requirements: list[str]) -> list[str]:
    """What is installed along in any case: without the extras, and without spaces."""
    return [line.replace(" ", "") for line in requirements if "extra ==" not in line]
