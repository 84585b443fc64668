"""``cutlass-fmha info``: what is installed, what GPUs are here, what would run on them and what not.

It answers in an installation that is broken, too: at the top it imports nothing that needs torch or _C.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import subprocess
from collections import Counter
from typing import Any

import cutlass_fmha
from cutlass_fmha.cli import output
from cutlass_fmha.cli.output import one_line

#: Calls that show what a GPU can do: a title, and what describes it to ``explain``.
PROBES: dict[str, dict[str, Any]] = {
    "bf16, head dim 128, causal": {"shape": (1, 4096, 16, 128), "causal": True},
    "fp16, head dim 64, short": {"shape": (1, 256, 8, 64), "dtype": "float16"},
    "fp32, head dim 128": {"shape": (1, 2048, 8, 128), "dtype": "float32"},
    "head dim 320": {"shape": (1, 2048, 8, 320)},
    "decoding, pages of 16": {"shape": (8, 1, 32, 128), "seqlen_k": 8192, "num_heads_kv": 8, "page_size": 16},
    "packed documents, causal": {"shape": (4, 2048, 16, 128), "causal": True, "features": ("varlen",)},
    "additive bias": {"shape": (1, 2048, 16, 128), "features": ("bias",)},
    "fp32, left window": {"shape": (1, 2048, 8, 64), "dtype": "float32", "window": (256, 0)},
    "backward, bf16": {"shape": (1, 4096, 16, 128), "causal": True, "backward": True},
    "backward, fp32": {"shape": (1, 2048, 8, 64), "dtype": "float32", "backward": True},
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cutlass-fmha info",
        description="Print versions, GPUs, the rows of this build, and what would run here; exit status 1 "
        "where the package can't be imported.",
    )
    parser.add_argument("--rows", action="store_true", help="list every row, too")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="what would run on that GPU, as explain names it; default: those here",
    )
    output.add_json(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Prints what there is. Returns 1 where the package can't be imported."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    found = versions()
    try:
        found |= of_the_extension(arguments.rows)
    except Exception as error:  # an extension that doesn't load
        found["extension_error"] = one_line(error)
    try:
        found["runs"] = what_runs(arguments.device, found.get("devices", []))
    except ValueError as error:
        parser.error(str(error))
    output.emit(found, as_text(found), arguments.json)
    return 0 if cutlass_fmha.import_error is None else 1


def versions() -> dict[str, Any]:
    """What can be asked of any installation."""
    error = cutlass_fmha.import_error
    return {
        "cutlass_fmha": cutlass_fmha.__version__,
        "path": cutlass_fmha.__path__[0],
        "python": platform.python_version(),
        "torch": torch_version(),
        "driver": driver_of_smi(),
        "import_error": None if error is None else one_line(error),
    }


def torch_version() -> str | None:
    """As torch says it, with what it was built for; else as pip does."""
    if cutlass_fmha.import_error is None:
        return str(importlib.import_module("torch").__version__)
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_of_smi() -> str | None:
    """The driver's version and the GPUs it has, as nvidia-smi tells them."""
    command = ["nvidia-smi", "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def of_the_extension(with_rows: bool) -> dict[str, Any]:
    """What _C knows: the build, its rows, the driver and the devices. Raises what importing it does."""
    from cutlass_fmha import _C
    from cutlass_fmha.dispatch import device as devices
    from cutlass_fmha.dispatch.table import backward, this_build

    build, gradients = this_build(), backward()
    forward = Counter(row.arch for row in build.rows)
    rows = (*build.rows, *gradients.rows)
    found: dict[str, Any] = {
        "build": {key: value for key, value in _C.build_info().items() if not isinstance(value, dict)},
        "architectures": {
            f"sm_{arch}": {
                "rows": forward[arch],
                "backward_rows": sum(row.arch == arch for row in gradients.rows),
                "compiled_for": devices.described(compiled_for),
            }
            for arch, compiled_for in build.architectures.items()
        },
        "cuda_of_driver": _C.driver_version(),
    }
    if with_rows:
        names = ("name", "smem_bytes", "alignment")
        found["rows"] = [{name: getattr(row, name) for name in names} for row in rows]
    try:
        found["devices"] = [describe(index) for index in range(_C.device_count())]
    except RuntimeError as error:  # a driver that is too old: the rest is still true
        found |= {"devices": [], "devices_error": one_line(error)}
    return found


def describe(index: int) -> dict[str, Any]:
    """A CUDA device, and whose rows it takes or why none."""
    from cutlass_fmha.cost import store
    from cutlass_fmha.dispatch import device as devices
    from cutlass_fmha.dispatch.any_rows import no_rows
    from cutlass_fmha.dispatch.table import this_build

    device = devices.of_index(index)
    nothing = no_rows(device)
    found = {"name": f"cuda:{index}", "gpu": str(device), "takes": None, "why_not": nothing, "costs": None}
    found["code"] = None
    if nothing is None:
        built = this_build().architectures
        arch = devices.rows_arch(device, built)
        assert arch is not None
        found["takes"] = f"sm_{arch}"
        found["code"] = devices.code_for(built[arch], device.capability)
        if cutlass_fmha.import_error is None:
            found["costs"] = store.for_device(device).origin
    return found


def what_runs(device: str | None, devices: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Of each device what runs ``PROBES``, in a sentence. Raises ValueError for one that there isn't."""
    if cutlass_fmha.import_error is not None:
        return {}
    from cutlass_fmha.dispatch.explain import explain

    names = [device] if device is not None else [each["name"] for each in devices] or ["cpu"]
    return {name: {title: explain(**probe, device=name).note for title, probe in PROBES.items()} for name in names}


def as_text(found: dict[str, Any]) -> list[str | output.Table]:
    build = found.get("build", {})
    lines: list[str | output.Table] = [
        f"cutlass_fmha {found['cutlass_fmha']}, torch {found['torch'] or 'not installed'}, "
        f"Python {found['python']}, in {found['path']}"
    ]
    if found["import_error"] is not None:
        lines.append(f"the package can't be imported: {found['import_error']}")
    if "extension_error" in found and "_C" not in (found["import_error"] or ""):  # which says so itself
        lines.append(f"the extension can't be loaded: {found['extension_error']}")
    if build.get("cuda"):
        lines.append(f"built with CUDA {build['cuda_version']} and CUTLASS {build['cutlass_version']}")
    elif build:
        lines.append("built without CUDA (CUTLASS_FMHA_CUDA=OFF): the CPU backend only")
    lines += [
        f"{arch}: {of['rows']} rows of the forward, {of['backward_rows']} of the backward, "
        f"compiled for {of['compiled_for']}"
        for arch, of in found.get("architectures", {}).items()
    ]
    if rows := found.get("rows"):
        cells = [[row["name"], str(row["smem_bytes"]), str(row["alignment"])] for row in rows]
        headings = ["row", "bytes of shared memory", "bytes of alignment"]
        lines += ["", output.Table(headings, cells), ""]
    cuda = found.get("cuda_of_driver") or 0
    known = [f"supports CUDA {cuda // 1000}.{cuda % 1000 // 10}"] if cuda else []
    lines.append("driver: " + (", ".join([*known, *filter(None, [found["driver"]])]) or "none"))
    if "devices_error" in found:
        lines.append(f"devices: none, {found['devices_error']}")
    elif found.get("devices") == []:
        computed = "; CPU tensors are computed by the CPU backend" if found["runs"] else ""
        lines.append(f"devices: none{computed}")
    for device in found.get("devices", []):
        takes = device["why_not"] or f"takes the {device['takes']} rows"
        if (code := device["code"]) not in (None, device["takes"]):
            takes += f", as {code}" + ("'s PTX" if code.startswith("compute") else "")
        lines.append(f"{device['name']}: {device['gpu']}, {takes}")
        if device["costs"] is not None:
            lines.append(f"        costs of rows: {device['costs']}")
    if not found["runs"]:
        lines.append("runs: nothing, as long as the package can't be imported")
    for name, notes in found["runs"].items():
        lines += ["", output.Table([f"on {name}", "runs"], [list(item) for item in notes.items()], left=2)]
    return lines
