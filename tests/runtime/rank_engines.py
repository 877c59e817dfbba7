"""Tiny engines of every family for the tests of several ranks, built at first use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from tests.models import tiny_models
from tests.models.all_families import CASES
from tests.models.families.gemma4_text import NO_EXPERTS

PLAIN_GEMMA4 = {"enable_moe_block": False, **NO_EXPERTS}  # the others' pages are of one size


def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function of a family, or of family-int8, that returns the engine's folder."""
    made: dict[str, Path] = {}

    def engine(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            checkpoint = folder / "checkpoint"
            quantization = "int8" if name.endswith("-int8") else "none"
            family = name.removesuffix("-int8")
            if family in CASES:
                CASES[family].save(checkpoint, **(PLAIN_GEMMA4 if family == "gemma4_text" else {}))
            else:
                tiny_models.save_hf(family, checkpoint)
            config = BuildConfig(dtype="float32", target="cpu", quantization=quantization)
            made[name] = folder / "tiny.engine"
            build_engine(checkpoint, made[name], config, check=False, tune=False)
        return made[name]

    return engine
