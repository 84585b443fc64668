"""The hash of src/: what ties a parity report or a build to the sources it was made from."""

import hashlib
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"


def source_files(directory: Path) -> list[Path]:
    """Every file under ``directory`` in a fixed order, but for hidden ones (editors' backups and locks)."""
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted((x for x in files if not any(part.startswith(".") for part in x.parts)), key=Path.as_posix)


def source_hash(directory: Path = SOURCES) -> str:
    """SHA-256, in hex, over the names and the contents of the files under ``directory``."""
    files = source_files(directory)
    if not files:
        raise FileNotFoundError(f"there are no sources under {directory}")
    digest = hashlib.sha256()
    for path in files:
        content = (directory / path).read_bytes()
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


if __name__ == "__main__":
    print(source_hash())
