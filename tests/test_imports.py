"""Data goes down once: no module of the package imports one that imports it, at its top or in a function."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cutlass_fmha"

#: Imports in functions that are not counted, and why they may go up.
UPWARDS = {
    ("arguments.signature", ""): "an error asks what a public function takes",
    ("cost.store", ""): "the version that a calibration is of",
    ("calibrate.measurements", ""): "the same",
    ("dispatch.explain", "calibrate.timing"): "explain(measure=True) times rows: only then is that imported",
}


def name_of(file: Path) -> str:
    """ "dispatch.table"; "" for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(file): file for file in PACKAGE.rglob("*.py")}


def imported(name: str) -> Iterator[str]:
    """What a module imports of the package, but for types alone."""
    tree = ast.parse(MODULES[name].read_text())
    unread = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }
    own = ".".join((PACKAGE.name, *MODULES[name].relative_to(PACKAGE).parent.parts))
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), own)
            for each in node.names:
                inside = f"{module}.{each.name}"
                yield inside if inside.removeprefix(f"{PACKAGE.name}.") in (*MODULES, "_C") else module


def graph() -> dict[str, set[str]]:
    found = {}
    for name in MODULES:
        of_package = {x for x in imported(name) if x.split(".")[0] == PACKAGE.name}
        found[name] = {x.removeprefix(PACKAGE.name).removeprefix(".") for x in of_package} & MODULES.keys() - {name}
    return found


def test_no_module_imports_one_that_imports_it():
    edges = graph()
    assert "launch.recent" in edges["launch.plan"] and "launch.plan" in edges["ops.attend"]
    assert edges["dispatch.problem"] == edges["dispatch.table"] == set()
    for name, above in UPWARDS:
        assert above in edges[name], f"{name} imports {above or 'the package'} no more: drop it from UPWARDS"
        edges[name].discard(above)
    graphlib.TopologicalSorter(edges).prepare()  # CycleError names the modules


LATE = """
import sys, torch
before = {*sys.modules}
import cutlass_fmha.__main__
others = ("transformers", "diffusers", "kernels", "comfy", "vllm", "sglang", "flash_attn", "rich")
others += ("jax", "cupy", "numpy")
parts = ("bench", "demo", "flash_attn", "cli.", "calibrate.fit", "calibrate.timing", "nn")
own = tuple(f"cutlass_fmha.{part}" for part in parts)
print([name for name in {*sys.modules} - before if name.split(".")[0] in others or name.startswith(own)])
print("torch.distributed.tensor" in sys.modules, cutlass_fmha.sdpa.enabled)
print(torch.backends.mha.get_fastpath_enabled())
from cutlass_fmha.integrations import comfyui, diffusers, hub, sglang, transformers, vllm
print([name for name in {*sys.modules} - before if name.split(".")[0] in others])
"""


def test_importing_the_package_imports_no_command_and_no_surface_and_changes_nothing():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.stdout == "[]\nFalse ()\nTrue\n[]\n", done.stderr
