"""The families of the folder ``families`` by name."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.models.family_cases import FamilyCase

CASES: dict[str, FamilyCase] = {
    name: importlib.import_module(f"tests.models.families.{name}").CASE
    for name in sorted(path.stem for path in (Path(__file__).parent / "families").glob("*.py"))
}
