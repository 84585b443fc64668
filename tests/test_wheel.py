"""What a wheel holds, and what the installed distribution says of itself.

It is the one that WHEEL names, or one built here, from an sdist alone, without CUDA: it differs in what is in _C only.
"""

import email
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import elf
import pytest
import torch

import cutlass_fmha

ROOT = Path(__file__).resolve().parents[1]
MACHINE = platform.machine()  # as in names of wheels: x86_64, aarch64
LEFT_OUT = re.compile(r"__pycache__|\.so$|\.py[cod]$|/\.")


def run(command: list[str], directory: Path, **environment: str) -> str:
    """What it prints; where it fails, that is told with the failure."""
    told = {"cwd": directory, "env": {**os.environ, **environment}, "text": True, "timeout": 1200}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, **told)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sdist")
    code = f"import backend; print(backend.build_sdist({str(directory)!r}))"
    return directory / run([sys.executable, "-c", code], ROOT, PYTHONPATH=str(ROOT / "build_backend")).split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    if given := os.environ.get("WHEEL"):
        return Path(given)
    directory = tmp_path_factory.mktemp("wheel")
    run(["tar", "-xzf", str(sdist)], directory)
    (sources,) = directory.glob("cutlass_fmha-*")
    settings = ("cmake.define.CUTLASS_FMHA_CUDA=OFF", f"build-dir={directory}/build")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", str(sources)]
    command += [f"--config-settings={setting}" for setting in settings]
    # A compiler cache sees the same files each time, wherever they lie.
    run(command, directory, CCACHE_BASEDIR=str(directory), CCACHE_NOHASHDIR="1")
    (built,) = directory.glob("*.whl")
    return built


def files_of(*folders: str) -> set[str]:
    """What the repository tracks, or would, in these."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {name for path in files if not LEFT_OUT.search(name := path.relative_to(ROOT).as_posix())}


def test_the_sdist_has_all_that_a_build_and_its_tests_read(sdist: Path):
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("src", "cmake", "build_backend", "requirements", "third_party", "cutlass_fmha", "tests", ".ci")
    assert files_of(*folders) | {"CMakeLists.txt", "pyproject.toml", "LICENSE", "Makefile"} <= packed
    assert not [name for name in packed if name.startswith((".venv", "build/", "benchmarks/results"))]


def test_the_wheel_is_for_this_machine_and_holds_the_package_its_metadata_and_licences_and_nothing_else(wheel: Path):
    names, read = {*zipfile.ZipFile(wheel).namelist()}, zipfile.ZipFile(wheel).read
    binaries = {name for name in names if name.endswith(".so")}
    information = {name for name in names if re.match(r"cutlass_fmha-[^/]+\.dist-info/", name)}
    assert names - binaries - information == files_of("cutlass_fmha")
    assert {"cutlass_fmha/py.typed", "cutlass_fmha/_C.pyi"} <= names
    (binary,) = binaries
    assert re.fullmatch(rf"cutlass_fmha/_C\.cpython-\d+-{MACHINE}-linux-gnu\.so", binary)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"cutlass_fmha-[^-]+-{tag}-{tag}-(many)?linux[\w.]*_{MACHINE}\.whl", wheel.name)
    (fields,) = (email.message_from_bytes(read(name)) for name in names if name.endswith(".dist-info/METADATA"))
    licences = {Path(name).name: read(name) for name in names if "/licenses/" in name}
    (declared,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for told in (fields, importlib.metadata.metadata("cutlass-fmha")):
        assert (told["Name"], told["Version"], told["Requires-Python"]) == ("cutlass-fmha", declared, ">=3.10")
        required = [line.replace(" ", "") for line in told.get_all("Requires-Dist") if "extra ==" not in line]
        assert required == ["torch>=2.6"]
    assert declared == cutlass_fmha.__version__ and "LICENSE" in licences
    assert any(b"NVIDIA CORPORATION" in text for text in licences.values()), "CUTLASS's notice is missing"


#: What headers of g++ 11 and glibc 2.32 inline. The image's glibc is older, and its g++ links the other
#: three statically.
OF_NEWER_HEADERS = {"__libc_single_threaded", "_ZSt28__throw_bad_array_new_lengthv"}
OF_NEWER_HEADERS |= {f"_ZNSt15__exception_ptr13exception_ptr{x}Ev" for x in ("9_M_addref", "10_M_release")}


def test_its_symbols_are_those_of_manylinux_2_28(wheel: Path, tmp_path: Path):
    """A release wheel, of that image, needs no other version; one of this machine needs functions that glibc 2.28 has,
    too, in whatever version they are linked here (2.34 moved all of libpthread and libdl)."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (extension,) = tmp_path.rglob("*.so")
    import auditwheel.policy  # which a GPU machine need not have

    policies = json.loads((Path(auditwheel.policy.__file__).parent / "manylinux-policy.json").read_text())
    (policy,) = (policy for policy in policies if policy["name"] == "manylinux_2_28")
    listed = policy["symbol_versions"][MACHINE].items()
    allowed = {f"{library}_{version}" for library, versions in listed for version in versions}
    newer = {name for name, versions in elf.versions(extension, "undefined").items() if versions - allowed}
    assert not newer or "manylinux" not in wheel.name
    (libc,) = {*re.findall(r"\S*/libc\.so\.6$", Path("/proc/self/maps").read_text(), re.MULTILINE)}
    old = {name for name, versions in elf.versions(Path(libc), "defined").items() if versions & allowed}
    assert newer - old <= OF_NEWER_HEADERS


SESSION = """
import torch, cutlass_fmha
from cutlass_fmha import cli
q, k, v = torch.randn(3, 1, 64, 4, 32).unbind()
out = cutlass_fmha.attention(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out.transpose(1, 2), expected)
print(cutlass_fmha.explain(q, k, v, causal=True))
raise SystemExit(cli.main(["parity", "--device", "cpu", "--case", "d64_bf16"]))
"""


def test_a_new_user_installs_it_and_calls_it(wheel: Path, tmp_path: Path):
    """In an empty environment: install, info without torch, then with one a call, its explanation, parity."""
    run([sys.executable, "-m", "venv", "--without-pip", "new"], tmp_path)
    python, command = (str(tmp_path / "new" / "bin" / name) for name in ("python", "cutlass-fmha"))
    clean = {**os.environ, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", str(wheel)], tmp_path, **clean)
    info = subprocess.run([command, "info", "--json"], capture_output=True, check=False, env=clean)
    found = json.loads(info.stdout)
    (site,) = (tmp_path / "new").glob("lib/python*/site-packages")
    assert info.returncode == 1 and found["build"] and found["path"] == str(site / "cutlass_fmha")
    assert found["import_error"] == "No module named 'torch': pip install 'torch>=2.6'"
    # torch, and what it needs, from here; behind the new environment's own packages.
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    printed = run([python, "-c", SESSION], tmp_path, **clean)
    assert "\nruns: the CPU backend, which needs no row\n" in printed and "problems, none wrong\n" in printed


def test_what_a_wheel_is_made_of_is_told(wheel: Path, tmp_path: Path):
    output = tmp_path / "new" / "sbom.json"
    run([sys.executable, f"{ROOT}/.ci/sbom.py", "--cuda", "12.9", "--output", str(output), str(wheel)], tmp_path)
    told = json.loads(output.read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    own = told["metadata"]["component"]
    assert own["version"] == cutlass_fmha.__version__ and own["components"][0]["name"] == wheel.name
    (digest,) = own["components"][0]["hashes"]
    assert digest == {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    parts = {part["name"]: part for part in told["components"]}
    versions = {name: parts[name].get("version") for name in ("nvidia-cuda-runtime", "nvidia-cutlass", "torch")}
    assert [*versions.values()] == ["12.9", "4.2.0.0", None] and all(part["licenses"] for part in parts.values())
    ((ref, depends_on),) = ((each["ref"], set(each["dependsOn"])) for each in told["dependencies"])
    assert ref == own["bom-ref"] and depends_on == {part["bom-ref"] for part in parts.values()}
