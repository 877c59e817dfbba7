"""Open a segmentation engine as a ``SamModel``."""

from __future__ import annotations

from collections.abc import Mapping

from modelmill.artifact.manifest import check_engine_type
from modelmill.artifact.store import Artifact
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.loader.model_loader import load_model
from modelmill.loader.unpack_weights import unpack_weights_without_kernels
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from modelmill.vision.image_embedding import DEFAULT_CACHE_BYTES
from modelmill.vision.sam_model import SamModel

ENGINE_TYPE = "segmentation"


def open_sam_model(
    artifact: Artifact,
    device: str,
    kernels: Mapping[str, str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> SamModel:
    """Load a segmentation engine.

    Args:
        artifact: the engine.
        device: cpu or cuda:N.
        kernels: backend per op, overriding the engine's choice for this process.
        cache_bytes: limit of the cache of image embeddings.

    Raises:
        UsageError: if the engine is of another type.
        ArtifactError: if it is damaged.
    """
    manifest = artifact.manifest
    check_engine_type(artifact.path, manifest.engine_type, ENGINE_TYPE)
    ops = select_backends(device, {**manifest.build["kernels"], **(kernels or {})})
    model = load_model(artifact, device)
    family = import_module_if_exists("modelmill.models", manifest.model_type)
    assert family is not None, "load_model needs the same module"
    sam_model = SamModel(
        model, VisionContext(ops), family.IMAGE_MEAN, family.IMAGE_STD, cache_bytes
    )
    if device == "cpu":
        unpack_weights_without_kernels(model, ops, sam_model.dtype)
    return sam_model
