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


def differences(ours: ast.AST, theirs: ast.AST, where: str) -> Iterator[str]:
    """What a stand-in says and the release doesn't, of a module or a class."""
    own, there = members(ours), members(theirs)
    if missing := own.keys() - there.keys():
        yield f"{where} has no {', '.join(sorted(missing))}"
    both = [name for name in own if name in there]
    # The order of fields and of enumerated values is that of a dataclass's parameters.
    fields = {name for name in both if isinstance(own[name], ast.AnnAssign)}
    wanted, found = ([name for name in which if name in fields] for which in (own, there))
    if wanted != found:
        yield f"{where} has the order {', '.join(found)}, not {', '.join(wanted)}"
    for name in both:
        here = f"{where}.{name}"
        if type(own[name]) is not type(there[name]):
            yield f"{here} is another kind of thing"
        elif isinstance(own[name], ast.ClassDef):
            yield from differences(own[name], there[name], here)
        elif isinstance(own[name], ast.FunctionDef):
            if (wanted := parameters(own[name])) != (found := parameters(there[name])):
                yield f"{here} takes {found}, not {wanted}"
        elif (wanted := value(own[name])) not in (
            "[]",
            found := value(there[name]),
        ):  # [] stands for any list
            yield f"{here} is {found}, not {wanted}"


def members(tree: ast.AST) -> dict[str, ast.AST]:
    """Classes, functions and fields by name, as a module or a class has them."""
    found: dict[str, ast.AST] = {}
    for node in getattr(tree, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = ast.AnnAssign(node.targets[0], node.targets[0], node.value, 1)
        elif isinstance(node, ast.If):  # for type checkers alone
            found |= members(node)
    return found


def parameters(function: ast.AST) -> str:
    """Names, order and defaults."""
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    for each in (arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(arguments)


def value(field: ast.AST) -> str:
    assert isinstance(field, ast.AnnAssign)
    return "nothing" if field.value is None else ast.unparse(field.value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            theirs = ast.parse(release.read(name))
            found += differences(ast.parse(file.read_text()), theirs, name)
    print(*found, f"{wheel.name}: {compared} modules, {len(found)} differences", sep="\n")
    return 1 if found or not compared else 0


if __name__ == "__main__":
    raise SystemExit(main())
