"""What ``make`` runs to set up .venv and build into it: each step says what it does; a failure is a sentence.

    develop.py venv DIRECTORY             create it, after looking for a C++ compiler and Python's headers
    develop.py torch SPEC                 install torch, unless one is there
    develop.py requirements FILE...       install what requirements files pin
    develop.py build ARCHITECTURES JOBS SUBSET
                                          compile kernels ("89;90;120", or "auto": one) and install, editable;
                                          all that the manifest has, or its subset "ci"

``venv`` runs under the machine's Python, everything else under .venv's. The standard library is enough.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import probe

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOG = BUILD / "install.log"
DEFAULT_ARCHITECTURE = "89"
# Where torch's builds without CUDA are: 200 MB in place of several GB. Not needed, so not waited for.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Lines of a build that say how far it is: Ninja's "[3/14] Building ..." and CMake's "-- cutlass_fmha: ...".
PROGRESS = re.compile(r"^\s*(\[\d+/\d+\] .*|-- (cutlass_fmha: .*))$")


class Failure(Exception):
    """Ends a step; its message is the sentence to print."""


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *arguments]
    if subprocess.run(command).returncode:
        what = " ".join(word for word in arguments if not word.startswith("-"))
        raise Failure(f"pip could not install {what}: see its message above")


def create_venv(directory: str) -> None:
    """Creates the virtual environment, after checks for what only the machine's administrator can add."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise Failure(
            f"{sys.executable} can't create virtual environments; install the missing module "
            f"(for example: apt install python{version}-venv)"
        )
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if not any(shutil.which(name) for name in (compiler[0], "g++", "clang++")):
        raise Failure("there is no C++ compiler; install one (for example: apt install g++) or set CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise Failure(
            f"the C headers of {sys.executable} (Python.h) are missing; install them "
            f"(for example: apt install python{version}-dev)"
        )
    say(f"creating {Path(directory).name} with Python {version} (10 s)")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", directory]).returncode:
        raise Failure(f"{sys.executable} -m venv failed: see its message above")


def install_torch(spec: str) -> None:
    if importlib.util.find_spec("torch") is not None:
        return
    options: list[str] = []
    if shutil.which("nvidia-smi") is None and reachable(CPU_TORCH_INDEX):
        options = ["--extra-index-url", CPU_TORCH_INDEX]
    say(f"installing {spec} (a minute for a build without CUDA, 200 MB; several GB with CUDA)")
    pip(spec, *options)


def reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def install_requirements(files: Sequence[str]) -> None:
    """Installs requirements files; packages that need none of their dependencies here come without them."""
    bare = {"nvcc.txt", "cutlass.txt", "inspect.txt", "demo-model.txt"}
    whole = [f for f in files if Path(f).name not in bare]
    alone = [f for f in files if Path(f).name in bare]
    names = ", ".join(Path(f).stem for f in files)
    say(f"installing what requirements/ pins for: {names} (a minute or two)")
    for group, options in ((whole, []), (alone, ["--no-deps"])):
        if group:
            pip(*options, *(word for f in group for word in ("-r", f)))


def this_gpu() -> str:
    """The architecture whose rows this machine's first GPU takes; the default one when there is none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return DEFAULT_ARCHITECTURE
    capability = answer[0].strip() if answer else ""
    older = {"8.0": "80", "8.6": "86", "8.7": "86"}  # sm_89's rows
    major = capability.partition(".")[0]
    return older.get(capability) or {"9": "90", "12": "120"}.get(major, DEFAULT_ARCHITECTURE)


def build(architectures: str, jobs: str, subset: str) -> None:
    """Compiles into build/, which keeps what is still right, and installs the package in place."""
    nvcc = probe.pypi_nvcc()
    if nvcc is None:
        raise Failure("the packages of requirements/nvcc.txt are not installed; run make again")
    if architectures == "auto":
        architectures = this_gpu()
    count = len(architectures.split(";"))
    names = ", ".join(f"sm_{a}" for a in architectures.split(";"))
    minutes, what = (2, f"the subset {subset} of the kernels") if subset else (3, "the kernels")
    first_time = f"{count * minutes} to {2 * count * minutes} minutes on two cores"
    say(f"compiling {what} of {names} (first time: {first_time})")
    settings = {
        "build-dir": str(BUILD),
        "cmake.define.CMAKE_CUDA_ARCHITECTURES": architectures,
        "cmake.define.CUTLASS_FMHA_JOBS": jobs,
        "cmake.define.CUTLASS_FMHA_SUBSET": subset,
    }
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--verbose"]
    command += ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    command += [f"--config-settings={key}={value}" for key, value in settings.items()]
    started = time.monotonic()
    # The pinned nvcc whatever else the machine has: tests judge the code that this one generates.
    if stream(command, dict(os.environ, CUDACXX=str(nvcc))):
        raise Failure(f"{reason(LOG.read_text())} (the whole log: {LOG.relative_to(ROOT)})")
    files, seconds = compile_time(*((BUILD / name).read_text() for name in (".ninja_log", "build.ninja")))
    compiled = f"nvcc took {seconds:.0f} thread-seconds for its {files} files"
    say(f"built and installed in {time.monotonic() - started:.0f} s; {compiled}")


def compile_time(log: str, build: str) -> tuple[int, float]:
    """Files of kernels of a build.ninja, and the seconds that they took in all when each was compiled last.

    A file that ccache knew took next to none.
    """
    last: dict[str, float] = {}
    for fields in (line.split("\t") for line in log.splitlines()):
        if len(fields) == 5 and fields[3].endswith(".cu.o") and f"build {fields[3]}:" in build:
            last[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return len(last), sum(last.values())


def stream(command: list[str], environment: dict[str, str]) -> int:
    """Runs `command`, logs all it says, prints the lines that say how far it is, and returns its status."""
    BUILD.mkdir(exist_ok=True)
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with (
        LOG.open("w") as log,
        subprocess.Popen(command, env=environment, stdout=pipe, stderr=both, text=True) as run,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            log.write(line)
            if match := PROGRESS.match(line.rstrip()):
                print("    " + (match[2] or match[1]), flush=True)
    return run.returncode


def reason(log: str) -> str:
    """The sentence a failed build ended with: our own, from CMake, or the compilers' first errors."""
    if match := re.search(r"CMake Error.*?\n\s*cutlass_fmha: (.*?)\n\s*(\n|Call Stack)", log, re.DOTALL):
        return " ".join(match[1].split())
    errors = re.findall(r"^.*\berror ?[:#](?! subprocess-exited).*$|^.*CMake Error.*$", log, re.MULTILINE)
    return "the build failed:\n    " + "\n    ".join(map(str.strip, errors[:5])) if errors else "the build failed"


def main(arguments: list[str]) -> int:
    command, *rest = arguments or [""]
    try:
        if command == "venv" and len(rest) == 1:
            create_venv(rest[0])
        elif command == "torch" and len(rest) == 1:
            install_torch(rest[0])
        elif command == "requirements" and rest:
            install_requirements(rest)
        elif command == "build" and len(rest) == 3:
            build(*rest)
        else:
            raise Failure(f"develop.py does not know {shlex.join(arguments)!r}")
    except Failure as failure:
        print(f"cutlass_fmha: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
