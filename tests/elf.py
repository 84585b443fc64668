"""What a shared library needs and shows, as the binutils of every C++ compiler tell it; nothing is loaded."""

import re
import subprocess
from pathlib import Path


def needed(file: Path) -> set[str]:
    """Libraries that the loader has to find."""
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "--dynamic", file)))


def exported(file: Path) -> set[str]:
    """Symbols that other libraries can see: defined, global or weak."""
    lines = _output("nm", "--dynamic", "--defined-only", "--format=posix", file).splitlines()
    return {line.split()[0].partition("@")[0] for line in lines}


def versions(file: Path, which: str) -> dict[str, set[str]]:
    """Symbol -> its versions, of those that it defines or needs (``which``: "defined" or "undefined")."""
    found: dict[str, set[str]] = {}
    lines = _output("nm", "--dynamic", f"--{which}-only", "--with-symbol-versions", file)
    for symbol, version in re.findall(r"(\S+?)@+(\S+)$", lines, re.MULTILINE):
        found.setdefault(symbol, set()).add(version)
    return found


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
