"""From an engine that segments images to a ``SamModel`` on its device."""

from __future__ import annotations

from collections.abc import Mapping

from modelmill.artifact.manifest import check_engine_type
from modelmill.artifact.store import Artifact
from modelmill.core.registry import find_module
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from modelmill.runtime.model_loader import load_model
from modelmill.runtime.unpack_weights import unpack_cpu_weights
from modelmill.vision.embedding_cache import DEFAULT_CACHE_BYTES
from modelmill.vision.sam_model import SamModel

ENGINE_TYPE = "segmentation"


def open_sam_model(
    artifact: Artifact,
    device: str,
    kernels: Mapping[str, str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> SamModel:
    """The engine's model, ready to see. device: cpu or cuda:N. kernels: switched for this start.
    cache_bytes: what the embeddings of pictures seen before may take.

    Raises UsageError for an engine of another kind, ArtifactError for a damaged one.
    """
    manifest = artifact.manifest
    check_engine_type(artifact.path, manifest.engine_type, ENGINE_TYPE)
    ops = select_backends(device, {**manifest.build["kernels"], **(kernels or {})})
    model = load_model(artifact, device)
    family = find_module("modelmill.models", manifest.model_type)
    assert family is not None, "load has found it"
    sam_model = SamModel(
        model, VisionContext(ops), family.IMAGE_MEAN, family.IMAGE_STD, cache_bytes
    )
    unpack_cpu_weights(model, ops, sam_model.dtype, device)
    return sam_model
