"""What the tools that build the extension have in common: which programs that takes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


class BuildError(RuntimeError):
    """Nothing could be built: CMake or a compiler failed, or is not there."""


def find_program(name: str) -> str:
    """A build tool: the one beside this Python before one of the system, which may be too old.

    Raises BuildError.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        raise BuildError(f"{name} was not found: pip install -r requirements/build.txt")
    return found


def pybind11_directory() -> str | None:
    """Where pybind11's CMake files are, when this Python has it; CMake looks elsewhere by itself."""
    try:
        import pybind11
    except ImportError:
        return None
    return str(pybind11.get_cmake_dir())
