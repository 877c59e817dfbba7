"""The folder is the registry: things are found by their file's name, never registered."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType


def module_names(package: str) -> list[str]:
    """Names of the modules in a package folder, without importing them, private ones left out."""
    return list(_listed(tuple(importlib.import_module(package).__path__)))


# an engine that is opened asks thousands of times, and folders of an installed package stay as they
# are
@cache
def _listed(folders: tuple[str, ...]) -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(folders) if not m.name.startswith("_"))


def find_module(package: str, name: str) -> ModuleType | None:
    """The module ``package.name``, imported; None where the folder holds no such file."""
    if name not in module_names(package):
        return None
    return importlib.import_module(f"{package}.{name}")


def closest_name(name: str, names: list[str]) -> str | None:
    """The known name most like ``name``, for error messages; None where nothing is alike."""
    import difflib

    match = difflib.get_close_matches(name, names, n=1, cutoff=0.55)
    return match[0] if match else None
