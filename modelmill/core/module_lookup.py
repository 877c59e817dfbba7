"""The folder is the registry: modules are looked up by file name; nothing is registered."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType


def list_module_names(package: str) -> list[str]:
    """Return the names of a package's modules without private ones; imports none of them."""
    return list(_list_public_modules(tuple(importlib.import_module(package).__path__)))


# opening an engine calls these thousands of times; folders of an installed package do not change
@cache
def _list_public_modules(folders: tuple[str, ...]) -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_"))


@cache
def _list_subpackages(folders: tuple[str, ...]) -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(folders) if m.ispkg)


def import_module_if_exists(package: str, name: str) -> ModuleType | None:
    """Import the module ``package.name``; None if the folder has no such file."""
    if name not in list_module_names(package):
        return None
    return importlib.import_module(f"{package}.{name}")


def import_module_from_subfolders(package: str, name: str) -> ModuleType | None:
    """Import the module ``name`` of one of the package's sub-folders; None if none has the file."""
    for folder in _list_subpackages(tuple(importlib.import_module(package).__path__)):
        found = import_module_if_exists(f"{package}.{folder}", name)
        if found is not None:
            return found
    return None


def most_similar_name(name: str, names: list[str], cutoff: float = 0.55) -> str | None:
    """Return the name most similar to ``name``, for error messages; None if there is none.

    cutoff: how similar it must be, 0 to 1 (equal).
    """
    import difflib

    match = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return match[0] if match else None
