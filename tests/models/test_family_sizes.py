"""A family like an existing one is one file of at most 80 lines; what is new stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.core.module_lookup import list_module_names

MODELS = Path(__file__).parents[2] / "modelmill" / "models"
MAX_LINES = 80
UNLIKE_OTHERS = {
    "gemma4_text": "layers of two kinds that share keys and values, inputs beside the stream",
    "minigpt4": "a vision encoder in front of a language model",
    "qwen": "dynamic NTK by prompt, and queries that grow with the length",
    "sam": "segments images",
}
"""Families with a structure of their own, which their file makes."""


@pytest.mark.parametrize(
    "name", [name for name in list_module_names("modelmill.models") if name not in UNLIKE_OTHERS]
)
def test_a_family_is_a_short_file(name: str) -> None:
    assert len((MODELS / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_each_exception_is_one() -> None:
    for name in UNLIKE_OTHERS:
        assert len((MODELS / f"{name}.py").read_text().splitlines()) > MAX_LINES, name
