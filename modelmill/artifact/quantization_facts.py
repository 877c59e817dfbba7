"""``quantization/layer-NNNN.json``: facts of a layer's quantization, hashed like its weights.

facts: linear module (inside the layer) → errors, bits, outlier channels. scales: site → what the
inputs at that site were divided by when a recipe folded scales into the layer, float32: the
acceptance contract undoes them for the comparison.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from modelmill.artifact.store import Artifact
from modelmill.core.errors import CorruptArtifact

FOLDER = "quantization"
Scales = dict[str, torch.Tensor]


def facts_path(layer: int) -> str:
    """Return the path of a layer's file inside the engine."""
    return f"{FOLDER}/layer-{layer:04d}.json"


def facts_to_bytes(facts: Mapping[str, Any], scales: Mapping[str, torch.Tensor]) -> bytes:
    """Return the file's content."""
    kept = {
        site: base64.b64encode(s.float().cpu().numpy().tobytes()).decode()
        for site, s in scales.items()
    }
    return (json.dumps({"facts": facts, "scales": kept}, indent=1, sort_keys=True) + "\n").encode()


def read_quantization_facts(artifact: Artifact) -> dict[int, tuple[dict[str, Any], Scales]]:
    """Return (facts, scales) of each layer that a calibrated recipe changed.

    Raises:
        CorruptArtifact: if a file is damaged.
    """
    facts_by_layer = {}
    for name in artifact.manifest.files:
        if not name.startswith(FOLDER + "/"):
            continue
        try:
            raw = json.loads((artifact.path / name).read_bytes())
            scales = {str(site): _decode_vector(text) for site, text in raw["scales"].items()}
            facts_by_layer[int(name.removesuffix(".json").rpartition("-")[2])] = (
                dict(raw["facts"]),
                scales,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CorruptArtifact(
                f"{artifact.path / name} is damaged; rebuild the engine"
            ) from None
    return facts_by_layer


def _decode_vector(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32))
