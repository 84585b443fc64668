"""The simulator's builds, in place of the CUDA runtime: docs/simulation.md."""

from collections.abc import Sequence
from pathlib import Path

from building import ROOT, Tree

DIRECTORY = ROOT / "build" / "simulator"


def build_extension(rows: str, directory: Path = DIRECTORY, architectures: Sequence[int] = (89, 90, 120)) -> Path:
    """``_C`` with the rows, or candidates, in whose name CMake finds the regular expression. Raises BuildError."""
    return tree(rows, directory, architectures).build("_C", "_C.*.so")


def build_library(directory: Path) -> Path:
    """The simulator alone, as a library for programs that bring their PTX with them. Raises BuildError."""
    return tree("^$", directory, (89, 90, 120)).build("simulator_ptx", "libsimulator_ptx.so")


def tree(rows: str, directory: Path, architectures: Sequence[int]) -> Tree:
    variables = {"CUTLASS_FMHA_SIMULATOR": "ON", "CUTLASS_FMHA_ROWS": rows}
    variables["CUTLASS_FMHA_MANIFEST"] = "src/candidates.cmake"  # what waits for a GPU is what a simulator is for
    return Tree(directory, {**variables, "CMAKE_CUDA_ARCHITECTURES": list(architectures)})
