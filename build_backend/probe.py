"""Where PyPI packages keep nvcc and CUTLASS, which nvcc a build takes, and how many jobs a machine bears.

Shared by CMake and the Makefile (``python build_backend/probe.py nvcc|cutlass|jobs``) and the build backend.
Needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NVCC_GIGABYTES = 4  # what one nvcc takes for a file of eight kernels
MINIMUM_NVCC = (12, 8)  # the first that knows sm_120


def pypi_nvcc() -> Path | None:
    """The nvcc of the packages in requirements/nvcc.txt, when this Python has them."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations if spec else None) or []:
        for nvcc in sorted(Path(location).glob("cu*/bin/nvcc"), reverse=True):
            return nvcc
    return None


def cutlass_include() -> Path | None:
    """The header directory of the package nvidia-cutlass, when this Python has it. Imports nothing of it."""
    spec = importlib.util.find_spec("cutlass_library")
    for location in (spec.submodule_search_locations if spec else None) or []:
        include = Path(location) / "source" / "include"
        if (include / "cute" / "tensor.hpp").is_file():
            return include
    return None


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """Its version as (major, minor), or None when it does not run."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"V(\d+)\.(\d+)\.\d+", text)
    return (int(match[1]), int(match[2])) if match else None


def installed_nvcc(cmake_cuda_compiler: str | None = None) -> str | None:
    """The nvcc that CMake takes before PyPI's: one that was named, else one on PATH that is new enough."""
    named = cmake_cuda_compiler or os.environ.get("CUDACXX")
    if named:
        return named
    on_path = shutil.which("nvcc")
    if on_path and (nvcc_version(on_path) or (0, 0)) >= MINIMUM_NVCC:
        return on_path
    return None


def available_bytes() -> int:
    """Memory that can be used without swapping; a container's limit counts."""
    if sys.platform == "win32":  # not asked: what a runner of GitHub has
        return 16 * 10**9
    meminfo = Path("/proc/meminfo").read_text()
    available = int(re.search(r"MemAvailable:\s+(\d+) kB", meminfo)[1]) * 1024  # type: ignore[index]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(limit).read_text().strip() if Path(limit).is_file() else "max"
        if text != "max":
            available = min(available, int(text))
    return available


def cores() -> int:
    """CPUs this process may use; a container's quota counts."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return count


def compile_jobs() -> int:
    """How many nvcc may run at once: one per core, as far as memory reaches."""
    return max(1, min(cores(), available_bytes() // (NVCC_GIGABYTES * 10**9)))


def main() -> None:
    answers = {"nvcc": pypi_nvcc, "cutlass": cutlass_include, "jobs": compile_jobs}
    if len(sys.argv) != 2 or sys.argv[1] not in answers:
        sys.exit(f"usage: probe.py {'|'.join(answers)}")
    answer = answers[sys.argv[1]]()
    print("" if answer is None else answer)


if __name__ == "__main__":
    main()
