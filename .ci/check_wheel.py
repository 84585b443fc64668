"""Checks a built extension without torch or a driver: it imports, has rows, needs libc and libstdc++ only.

python .ci/check_wheel.py [WHEEL]     the wheel, or else the installed package
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ALLOWED = re.compile(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux-(x86-64|aarch64))\.so\.\d+")
MAX_WHEEL_BYTES = 40 * 2**20


def main(arguments: list[str]) -> None:
    if arguments:
        wheel = Path(arguments[0])
        with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
            check_content(wheel, archive)
            archive.extractall(directory)
            check_extension(Path(directory) / "cutlass_fmha")
    else:
        check_extension(Path(sysconfig.get_path("platlib")) / "cutlass_fmha")


def check_content(wheel: Path, archive: zipfile.ZipFile) -> None:
    strangers = [n for n in archive.namelist() if not re.match(r"cutlass_fmha(-[^/]+\.dist-info)?/", n)]
    if strangers:
        sys.exit(f"{wheel.name} holds files outside the package: {', '.join(strangers[:5])}")
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes; at most {MAX_WHEEL_BYTES} are allowed")


def check_extension(package: Path) -> None:
    if shutil.which("readelf"):
        (binary,) = package.glob("_C.*.so")
        dynamic = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
        if strangers := [library for library in needed if not ALLOWED.fullmatch(library)]:
            sys.exit(f"{binary.name} needs {', '.join(strangers)}")
    extension = load(package)
    rows = extension.rows()
    built_for = extension.build_info()["architectures"]
    if not rows or sorted({row.arch for row in rows}) != sorted(built_for):
        sys.exit(f"{package} was built for {built_for} and has rows for {sorted({row.arch for row in rows})}")
    devices = extension.device_count()
    print(f"{package.name}._C: {len(rows)} rows for {built_for}, {devices} CUDA devices here")


def load(package: Path) -> ModuleType:
    """The extension alone: the package around it needs torch."""
    spec = importlib.machinery.PathFinder.find_spec("_C", [str(package)])
    if spec is None or spec.loader is None:
        sys.exit(f"there is no _C for this Python in {package}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
