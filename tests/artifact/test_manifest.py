"""The manifest: its own digest, schema and packing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from modelmill.artifact.manifest import MANIFEST_SCHEMA_VERSION, Manifest
from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact


def manifest(**more: Any) -> Manifest:
    base: dict[str, Any] = {
        "schema": MANIFEST_SCHEMA_VERSION,
        "engine_type": "language",
        "model_type": "llama",
        "packing": "rows/2",
        "max_model_len": 8,
        "config": {"hidden_size": 4},
        "build": {"dtype": "float32", "kernels": {}},
        "weight_formats": {"head": "dense"},
        "aliases": {},
        "generation": {},
        "source": {},
        "versions": {},
        "files": {},
    }
    return Manifest(**(base | more))


def test_round_trip() -> None:
    one = manifest()
    assert Manifest.from_json(one.to_json(), "e") == one
    assert one.to_json() == manifest().to_json()


def test_any_change_is_noticed() -> None:
    raw = json.loads(manifest().to_json())
    raw["config"]["hidden_size"] = 5
    with pytest.raises(CorruptArtifact, match="changed after the build"):
        Manifest.from_json(json.dumps(raw), "e")


def test_another_schema_says_how_to_rebuild() -> None:
    text = replace(manifest(), schema=99).to_json()
    with pytest.raises(IncompatibleArtifact, match="modelmill build CHECKPOINT -o e"):
        Manifest.from_json(text, "e")


def test_another_packing_says_how_to_rebuild() -> None:
    with pytest.raises(IncompatibleArtifact, match="tiles/7"):
        Manifest.from_json(manifest(packing="tiles/7").to_json(), "e")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', "null"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(CorruptArtifact):
        Manifest.from_json(text, "e")
