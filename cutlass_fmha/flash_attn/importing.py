"""``import flash_attn`` finds ``cutlass_fmha.flash_attn``, and whoever asks for its version is told one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "2.8.3"
"""The release whose signatures these are."""

NAME = "flash_attn"
OURS = "cutlass_fmha.flash_attn"


class _Distribution(importlib.metadata.Distribution):
    """What ``importlib.metadata`` says of an installed flash_attn."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
            "top_level.txt": f"{NAME}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return Path(__file__).parent / path


class _SameModule(Loader):
    """Gives the module of this package, under its other name, too."""

    def __init__(self, real: str) -> None:
        self.real = real
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has just set that of the other name


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        real = OURS + fullname.removeprefix(NAME)
        try:
            found = importlib.util.find_spec(real)
        except ModuleNotFoundError:  # a parent that is no package of ours
            return None
        if found is None:
            return None
        package = found.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _SameModule(real), origin=found.origin, is_package=package)
        if package:
            spec.submodule_search_locations = list(found.submodule_search_locations or ())
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        name = None if context is None else context.name
        if name is None or name.replace("-", "_").lower() == NAME:
            yield _Distribution()


_finder = _Finder()
_hidden: dict[str, ModuleType] = {}
"""Modules of the real one, while ours are in their place."""


def install(*, replace: bool = False) -> None:
    """Makes ``import flash_attn`` find this module, ``find_spec`` and ``importlib.metadata`` included.

    ``replace``: even where flash_attn is installed or imported, which otherwise is an ImportError. Names that
    were imported from it already stay what they are. A second call changes nothing.
    """
    if _finder in sys.meta_path:
        return
    if not replace and (NAME in sys.modules or importlib.util.find_spec(NAME) is not None):
        raise ImportError(
            f"{NAME} is installed here: remove it, or take cutlass_fmha.flash_attn's in its place with "
            "install(replace=True)"
        )
    _hidden.update(_take_out())
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undoes ``install``. Names that were imported meanwhile stay what they are."""
    if _finder not in sys.meta_path:
        return
    sys.meta_path.remove(_finder)
    _take_out()
    sys.modules.update(_hidden)
    _hidden.clear()


def _take_out() -> dict[str, ModuleType]:
    """The modules of that name, which are imported no longer."""
    names = [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]
    return {name: sys.modules.pop(name) for name in names}
