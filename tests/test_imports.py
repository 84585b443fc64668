"""Data goes down once: no module of the package imports one that imports it, at its top or in a function."""

import ast
import graphlib
import importlib.util
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "cutlass_fmha"

#: Imports in functions that are not counted, and why they may go up.
UPWARDS = {
    ("arguments.signature", ""): "an error asks what a public function takes",
    ("cost.store", ""): "the version that a calibration is of",
    ("calibrate.measurements", ""): "the same",
    ("dispatch.explain", "calibrate.timing"): "explain(measure=True) times rows: only then is that imported",
}
MODULES = {
    ".".join(part for part in file.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"): file
    for file in PACKAGE.rglob("*.py")
}  # "dispatch.table"; "" for the package itself


def imported(name: str) -> set[str]:
    """What a module imports of the package, but for types alone."""
    nodes = [*ast.walk(ast.parse(MODULES[name].read_text()))]
    types = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unread = {id(inside) for node in types for inside in ast.walk(node)}
    own = ".".join((PACKAGE.name, *MODULES[name].relative_to(PACKAGE).parent.parts))
    found = set()
    for node in (node for node in nodes if id(node) not in unread):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), own)
            inside = {f"{module}.{each.name}" for each in node.names}
            known = {x for x in inside if x.removeprefix(f"{PACKAGE.name}.") in (*MODULES, "_C")}
            found |= known | ({module} if known < inside else set())
    of_package = {x.removeprefix(PACKAGE.name) for x in found if x.split(".")[0] == PACKAGE.name}
    return {x.removeprefix(".") for x in of_package} & MODULES.keys() - {name}


def test_no_module_imports_one_that_imports_it():
    edges = {name: imported(name) for name in MODULES}
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
others = "transformers diffusers kernels comfy vllm sglang flash_attn rich jax cupy numpy".split()
parts = "bench demo flash_attn cli. calibrate.fit calibrate.timing nn".split()
own = tuple(f"cutlass_fmha.{part}" for part in parts)
print([name for name in {*sys.modules} - before if name.split(".")[0] in others or name.startswith(own)])
print("torch.distributed.tensor" in sys.modules, cutlass_fmha.sdpa.enabled, torch.backends.mha.get_fastpath_enabled())
from cutlass_fmha.integrations import comfyui, diffusers, hub, sglang, transformers, vllm
print([name for name in {*sys.modules} - before if name.split(".")[0] in others])
"""


def test_importing_the_package_imports_no_command_and_no_surface_and_changes_nothing():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.stdout == "[]\nFalse () True\n[]\n", done.stderr
