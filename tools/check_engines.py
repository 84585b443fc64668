"""Are tests/engines, which stand in for serving engines that can't be installed here, true to a release?
Exit status 1 when not, with the differences.

    pip download --no-deps vllm==0.33.0 && python tools/check_engines.py vllm-0.33.0-*.whl

Of each module there, the release must have the classes, functions, fields and values, and their parameters,
with these names, in this order and with these defaults. It may have more of them, but for parameters.
"""

from __future__ import annotations

import argparse
import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

STAND_INS = Path(__file__).resolve().parents[1] / "tests" / "engines"


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
    orders = [sorted(filter(fields.__contains__, each), key=scope) for each in (ours, theirs)]
    for wanted, found in zip(*orders, strict=True):
        if wanted != found:
            yield f"{found} has the place of {wanted}"


def scope(name: str) -> str:
    return name.rpartition(".")[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="of the release, as pip download leaves it")
    wheel = parser.parse_args(arguments).wheel
    compared, found = 0, []
    with zipfile.ZipFile(wheel) as release:
        names = set(release.namelist())
        packages = {name.partition("/")[0] for name in names}
        for file in sorted(STAND_INS.rglob("*.py")):
            name = file.relative_to(STAND_INS).as_posix()
            if name.partition("/")[0] not in packages:
                continue
            compared += 1
            if name not in names:
                found.append(f"there is no {name}")
                continue
            both = (declared(ast.parse(text), name) for text in (file.read_text(), release.read(name)))
            found += differences(*both)
    print(*found, f"{wheel.name}: {compared} modules, {len(found)} differences", sep="\n")
    return 1 if found or not compared else 0


if __name__ == "__main__":
    raise SystemExit(main())
