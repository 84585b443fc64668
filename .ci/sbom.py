"""What wheels are made of, as a CycloneDX document: what is compiled in, which version, which licence.

    python .ci/sbom.py --output cutlass_fmha.cdx.json dist/*.whl

Versions are those of requirements/; nothing here depends on the time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CUDA_EULA = "NVIDIA CUDA Toolkit End User License Agreement"


class Part(NamedTuple):
    """What is compiled in, under its name on PyPI; the file of requirements/ that says which version."""

    name: str
    file: str
    what: str
    license: str | None = "BSD-3-Clause"

    @property
    def version(self) -> str | None:
        lines = (ROOT / "requirements" / self.file).read_text().splitlines()
        (line,) = (line for line in lines if re.match(rf"{re.escape(self.name)}\b(?!-)", line))
        pinned = re.fullmatch(r".*==([\w.]+)", line)
        return pinned[1] if pinned else None


PARTS = (
    Part("nvidia-cutlass", "cutlass.txt", "headers that kernels are compiled from"),
    Part("nvidia-cuda-cccl", "nvcc.txt", "the same", "Apache-2.0 WITH LLVM-exception"),
    Part("nvidia-cuda-runtime", "nvcc.txt", "the CUDA runtime, linked statically", None),
    Part("pybind11", "build.txt", "headers that the extension is compiled from"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--cuda", metavar="VERSION", help="of another toolkit than requirements/nvcc.txt's")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="wheels, and the sdist")
    arguments = parser.parse_args()
    content = json.dumps(document(arguments.files, arguments.cuda), indent=1)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(content + "\n", encoding="utf-8")


def document(files: list[Path], cuda: str | None = None) -> dict[str, Any]:
    """``cuda``: the toolkit that it was built by, where that is not the one of requirements/."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    declared = dict(re.findall(r'^(\w+) = "(.*)"$', pyproject, re.MULTILINE))
    own = component(declared["name"], declared["version"], declared["license"], declared["description"])
    own["components"] = [file_of(file) for file in sorted(files)]
    parts = []
    for part in PARTS:
        version = cuda if cuda and part.file == "nvcc.txt" else part.version
        parts.append(component(part.name, version, part.license, part.what))
    torch = component("torch", None, "BSD-3-Clause", "needed at run time, and not in the wheel")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [*parts, {**torch, "scope": "excluded"}],
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [part["bom-ref"] for part in (*parts, torch)]}],
    }


def file_of(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"type": "file", "name": file.name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def component(name: str, version: str | None, licence: str | None, what: str) -> dict[str, Any]:
    url = f"pkg:pypi/{name}" + (f"@{version}" if version else "")
    found: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "description": what}
    found |= {"purl": url} | ({"version": version} if version else {})
    found["licenses"] = [{"expression": licence} if licence else {"license": {"name": CUDA_EULA}}]
    return found


if __name__ == "__main__":
    main()
