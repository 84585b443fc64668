"""Are tests/engines, stand-ins for what can't be installed here, and flash_attn's names true to a release?
Exit status 1 when not, with the differences.

    pip download --no-deps vllm==0.33.0 && python tools/check_engines.py vllm-0.33.0-*.whl
    python tools/check_engines.py flash_attn-2.8.3.tar.gz
    git clone -b v0.38.1 https://github.com/Comfy-Org/ComfyUI && python tools/check_engines.py ComfyUI

Of each module there, the release must have the classes, functions, fields and values, and their parameters,
with these names, in this order and with these defaults. It may have more of them, but for parameters. In
modules of cutlass_fmha.flash_attn that is asked of each function that both have.
"""

from __future__ import annotations

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
    with tempfile.TemporaryDirectory() as unpacked:
        if not release.is_dir():
            shutil.unpack_archive(release, unpacked, "zip" if zipfile.is_zipfile(release) else "gztar")
        texts = {}
        for file in (root := release if release.is_dir() else Path(unpacked)).rglob("*.py"):
            inside = file.relative_to(root).parts
            if begins := [i for i, each in enumerate(inside[:3]) if each in packages]:
                texts["/".join(inside[begins[0] :])] = file.read_text(encoding="utf-8")
        return texts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", type=Path, help="a wheel, an sdist (.tar.gz) or a checkout")
    release = parser.parse_args(arguments).release
    stand_ins = {file.relative_to(STAND_INS).as_posix(): file for file in STAND_INS.rglob("*.py")}
    ours = {f"flash_attn/{x.relative_to(FLASH_ATTN).as_posix()}": x for x in FLASH_ATTN.rglob("*.py")}
    theirs = modules_of(release, {name.partition("/")[0] for name in (*stand_ins, *ours)})
    packages, found = {name.partition("/")[0] for name in theirs}, []
    compared = [name for name in sorted(stand_ins) if name.partition("/")[0] in packages]
    for name in compared:
        if name not in theirs:
            found.append(f"there is no {name}")
            continue
        found += differences(*(declared(ast.parse(x), name) for x in (stand_ins[name].read_text(), theirs[name])))
    functions = 0
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = (declared(ast.parse(text), name) for text in (ours[name].read_text(), theirs[name]))
        for function, wanted in mine.items():
            # torch's op in the release, of the function without that word
            takes = other.get(function.replace("._wrapped_", "._"), "")
            if wanted.startswith("a function") and takes.startswith("a function"):
                functions += 1
                if wanted != takes:
                    found.append(f"{function} is {takes}, not {wanted}")
    of_names = f", {functions} functions" if functions else ""
    print(*found, f"{release.name}: {len(compared)} modules{of_names}, {len(found)} differences", sep="\n")
    return 1 if found or not compared + [""] * functions else 0


if __name__ == "__main__":
    raise SystemExit(main())
