"""Calls of Triton's language that no CPU test runs, checked against its signatures."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import modelmill

FOLDER = Path(modelmill.__file__).parent / "ops" / "triton"


def _language_calls(path: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "tl"
    ]


def _unwrapped(function: Any) -> Any:
    """The Python function behind a compiled or interpreted one."""
    return getattr(function, "fn", function)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_keywords_of_triton_calls_exist(path: Path) -> None:
    language = pytest.importorskip("triton.language")
    for call in _language_calls(path):
        assert isinstance(call.func, ast.Attribute)
        parameters = inspect.signature(_unwrapped(getattr(language, call.func.attr))).parameters
        unknown = {word.arg for word in call.keywords if word.arg} - parameters.keys()
        assert not unknown, f"{path.name}:{call.lineno}: tl.{call.func.attr} has no {unknown}"
