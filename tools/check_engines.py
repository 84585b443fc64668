"""Are tests/engines, stand-ins for what can't be installed here, and flash_attn's names true to a release?
Exit status 1 when not, with the differences.

    python tools/check_engines.py vllm-0.33.0-*.whl    # and flash_attn-2.8.3.tar.gz, as .github/workflows/ci.yml does
    git clone -b v0.38.1 https://github.com/Comfy-Org/ComfyUI && python tools/check_engines.py ComfyUI

Of each module the release must have the classes, functions with their parameters, fields and values, with these names,
in this order, with these defaults; it may have more, but for parameters. In cutlass_fmha.flash_attn functions that both
have must agree.
"""

import argparse
import ast
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAND_INS = ROOT / "tests" / "engines"
FLASH_ATTN = ROOT / "cutlass_fmha" / "flash_attn"


def declared(tree: ast.Module | ast.ClassDef | ast.If, where: str) -> dict[str, str]:
    """Classes, functions with their parameters, and fields with their values, by name, in their order."""
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef():
                found[f"{where}.{node.name}"] = "a class"
                found |= declared(node, f"{where}.{node.name}")
            case ast.FunctionDef(args=arguments):
                for each in ast.walk(arguments):
                    if isinstance(each, ast.arg):
                        each.annotation = None
                found[f"{where}.{node.name}"] = f"a function of {ast.unparse(arguments)}"
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found[f"{where}.{name}"] = ast.unparse(node.value) if node.value else "nothing"
            case ast.If():  # for type checkers alone
                found |= declared(node, where)
    return found


def differences(ours: dict[str, str], theirs: dict[str, str]) -> Iterator[str]:
    """What a stand-in says and the release doesn't."""
    for name, wanted in ours.items():
        found = theirs.get(name, "not there")
        if wanted not in (found, "[]") or found == "not there":  # [] stands for any list
            yield f"{name} is {found}, not {wanted}"
    # The order of fields and of enumerated values is that of a dataclass's parameters.
    fields = {name for name, what in ours.items() if name in theirs and not what.startswith("a ")}
    orders = [sorted(filter(fields.__contains__, each), key=lambda x: x.rpartition(".")[0]) for each in (ours, theirs)]
    for wanted, found in zip(*orders, strict=True):
        if wanted != found:
            yield f"{found} has the place of {wanted}"


def modules_of(release: Path, packages: set[str]) -> dict[str, str]:
    """Python files of a wheel, an sdist or a checkout that are in packages: by path, their texts."""
    if not release.is_dir():
        with tempfile.TemporaryDirectory() as unpacked:
            shutil.unpack_archive(release, unpacked, "zip" if zipfile.is_zipfile(release) else "gztar")
            return modules_of(Path(unpacked), packages)
    inside = {file: file.relative_to(release).parts for file in release.rglob("*.py")}
    begins = {file: [i for i, each in enumerate(parts[:3]) if each in packages] for file, parts in inside.items()}
    return {"/".join(inside[x][at[0] :]): x.read_text(encoding="utf-8") for x, at in begins.items() if at}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", type=Path, help="a wheel, an sdist (.tar.gz) or a checkout")
    release = parser.parse_args(arguments).release
    ours = modules_of(STAND_INS, {folder.name for folder in STAND_INS.iterdir()})
    ours |= modules_of(FLASH_ATTN.parent, {FLASH_ATTN.name})
    theirs = modules_of(release, {name.partition("/")[0] for name in ours})
    packages, found, compared = {name.partition("/")[0] for name in theirs} - {FLASH_ATTN.name}, [], 0
    for name, text in sorted(ours.items()):
        if name in theirs:
            wanted, there = (declared(ast.parse(x), name) for x in (text, theirs[name]))
            if name.startswith(FLASH_ATTN.name):  # functions that both have
                both = (x for x in wanted if all(y.get(x, "").startswith("a function") for y in (wanted, there)))
                wanted = {x: wanted[x] for x in both}
            found += differences(wanted, there)
            compared += bool(wanted)
        elif name.partition("/")[0] in packages:
            found.append(f"there is no {name}")
    print(*found, f"{release.name}: {compared} modules, {len(found)} differences", sep="\n")
    return int(bool(found) or not compared)


if __name__ == "__main__":
    raise SystemExit(main())
