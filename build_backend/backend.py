"""The PEP 517 backend: scikit-build-core, plus the CUDA compiler and CUTLASS from PyPI for machines without.

``pip install .`` asks ``get_requires_for_build_*`` what to put into the isolated build environment. What is
there already (an nvcc that is named or on PATH, a CUTLASS directory) or not wanted (CUTLASS_FMHA_CUDA=OFF) is
not downloaded.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import probe
from scikit_build_core import build as _scikit_build
from scikit_build_core.build import *  # noqa: F403  every hook that is not redefined below

Settings = Mapping[str, Any] | None
REQUIREMENTS = Path(__file__).parent.parent / "requirements"


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return _scikit_build.get_requires_for_build_wheel(config_settings) + cuda_requirements(config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return _scikit_build.get_requires_for_build_editable(config_settings) + cuda_requirements(config_settings)


def cuda_requirements(config_settings: Settings) -> list[str]:
    """Pinned requirements for what the CUDA part of the build lacks on this machine."""
    defines = cmake_defines(config_settings)
    if not is_true(defines.get("CUTLASS_FMHA_CUDA", "ON")) or not sys.platform.startswith("linux"):
        return []
    wanted = []
    if not defines.get("CUTLASS_FMHA_CUTLASS_DIR"):
        wanted += read_requirements("cutlass.txt")
    if probe.installed_nvcc(defines.get("CMAKE_CUDA_COMPILER")) is None:
        wanted += read_requirements("nvcc.txt")
    return wanted


def cmake_defines(config_settings: Settings) -> dict[str, str]:
    """CMake variables from every place scikit-build-core reads them: -C settings and the environment."""
    defines: dict[str, str] = {}
    for word in shlex.split(os.environ.get("CMAKE_ARGS", "")):
        if match := re.fullmatch(r"-D(\w+)(?::\w+)?=(.*)", word):
            defines[match[1]] = match[2]
    for pair in filter(None, os.environ.get("SKBUILD_CMAKE_DEFINE", "").split(";")):
        key, _, value = pair.partition("=")
        defines[key] = value
    for name, value in (config_settings or {}).items():
        for prefix in ("cmake.define.", "skbuild.cmake.define."):
            if name.startswith(prefix):
                defines[name.removeprefix(prefix)] = str(value)
    return defines


def is_true(value: str) -> bool:
    """CMake's idea of a boolean constant."""
    return value.upper() in {"1", "ON", "YES", "TRUE", "Y"}


def read_requirements(name: str) -> list[str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
