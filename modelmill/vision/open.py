"""From an engine that segments images to an ``Eye`` on its device."""

from __future__ import annotations

from collections.abc import Mapping

from modelmill.artifact.manifest import check_kind
from modelmill.artifact.store import Artifact
from modelmill.core.find import find
from modelmill.nn.still import Still
from modelmill.ops.shelf import resolve
from modelmill.runtime.expand import prepare_weights
from modelmill.runtime.load import load
from modelmill.vision.known import KEPT_BYTES
from modelmill.vision.segment import Eye

KIND = "segmentation"


def open_eye(artifact: Artifact, device: str, kernels: Mapping[str, str] | None = None, kept: int = KEPT_BYTES) -> Eye:
    """The engine's model, ready to see. device: cpu or cuda:N. kernels: switched for this start. kept: bytes that the
    embeddings of pictures seen before may take.

    Raises UsageError for an engine of another kind, ArtifactError for a damaged one.
    """
    manifest = artifact.manifest
    check_kind(artifact.path, manifest.kind, KIND)
    ops = resolve(device, {**manifest.build["kernels"], **(kernels or {})})
    model = load(artifact, device)
    family = find("modelmill.models", manifest.model_type)
    assert family is not None, "load has found it"
    eye = Eye(model, Still(ops), family.MEAN, family.STD, kept)
    prepare_weights(model, ops, eye.dtype, device)
    return eye
