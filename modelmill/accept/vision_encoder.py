"""The acceptance contract for a vision encoder with its norm, Q-Former and projection.

Each module reads the input of the float32 reference's module; blocks and layers are also checked as
wholes, so that their connections are covered; every norm reads inputs of the size of √eps; then an
image runs through the whole encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.quantized_vision_reference import (
    DequantizedEncoderMatrices,
    check_vision_encoder_weights,
)
from modelmill.accept.reference.minigpt4_vision import MiniGpt4VisionReference
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances_segmentation import image_embedding_bound
from modelmill.accept.unused_tensors import (
    apply_unused_tensor_verdict,
    explain_unused_vision_tensors,
)
from modelmill.accept.vision_stage_check import (
    ACCEPTED_VERDICT,
    VisionStageCheck,
    round_significant_digits,
    tolerance_check_to_json,
)
from modelmill.checkpoint.open import Checkpoint
from modelmill.nn.vision_context import VisionContext
from modelmill.runtime.engine_core import EngineCore


def draw_square_sample_image(image_size: int) -> Tensor:
    """Draw an image [side, side, 3] uint8: a disc and a box on a gradient, with seeded noise."""
    y, x = torch.meshgrid(
        torch.arange(image_size) / image_size, torch.arange(image_size) / image_size, indexing="ij"
    )
    canvas = torch.stack((60 + 120 * x, 90 + 90 * y, 170 - 80 * x), -1)
    canvas[((x - 0.3) ** 2 + (y - 0.35) ** 2) < 0.04] = torch.tensor((220.0, 40.0, 30.0))
    canvas[((x - 0.7).abs() < 0.15) & ((y - 0.6).abs() < 0.2)] = torch.tensor((20.0, 140.0, 60.0))
    canvas += 6 * torch.randn(canvas.shape, generator=torch.Generator().manual_seed(3))
    return canvas.clamp(0, 255).round().to(torch.uint8)


@torch.inference_mode()
def check_vision_encoder(engine_core: EngineCore, checkpoint: Checkpoint) -> dict[str, Any]:
    """Check the image part of an opened engine; return the report.

    Keys: "ok", "reason", "verdict", "layer", "module", "image_embeddings", "layers".
    """
    manifest = engine_core.opened_artifact.manifest
    dtype = manifest.build["dtype"]
    engine_matrices = DequantizedEncoderMatrices(engine_core.model)
    checkpoint_reference = reference = MiniGpt4VisionReference(checkpoint)
    if engine_matrices:
        reference = MiniGpt4VisionReference(checkpoint, engine_matrices)
    stage_check = VisionStageCheck(
        engine_core.model, VisionContext(engine_core.ops), engine_core.device, manifest
    )
    stage_check.findings += check_vision_encoder_weights(
        engine_matrices, dtype, checkpoint_reference.checkpoint_matrix_by_engine_path
    )
    picture = draw_square_sample_image(reference.image_size)
    [expected] = stage_check.check_stages(
        reference.encoder_stages(reference.normalize_image(picture))
    )
    stage_check.check_norm_eps(reference.norms)
    stage_check.check_declared_modules_compared()
    if engine_matrices:  # the effect of quantization is measured against the checkpoint's own
        for stage in checkpoint_reference.encoder_stages(
            checkpoint_reference.normalize_image(picture)
        ):
            [expected] = stage.expected
    batch = picture.permute(2, 0, 1)[None].to(engine_core.device)
    encode_images: Callable[..., torch.Tensor] = engine_core.model.encode_images  # type: ignore[assignment]
    whole = compare_tensors("embeddings", encode_images(batch, engine_core.ops)[0], expected)
    bound = image_embedding_bound(dtype, engine_matrices.weight_formats.values())
    first = stage_check.failure_for_verdict(stage_check.contains_compared_modules)
    verdict, reason = _make_vision_verdict(first, whole.rel_l2, bound)
    return {
        "ok": verdict == ACCEPTED_VERDICT,
        "verdict": verdict,
        "reason": reason,
        "layer": None if first is None else first.layer,
        "module": None if first is None else first.module,
        "unused_tensors": explain_unused_vision_tensors(checkpoint_reference),
        "image_embeddings": {
            "rel_l2": round_significant_digits(whole.rel_l2),
            "max_rel": round_significant_digits(whole.max_rel),
            "bound": bound,
        },
        "layers": [tolerance_check_to_json(finding) for finding in stage_check.findings],
    }


def _make_vision_verdict(
    first: ToleranceCheckResult | None, embedding_error: float, bound: float
) -> tuple[str, str]:
    """Return the verdict and its reason.

    first: the faulty module, None if all modules are correct.
    """
    if first is not None:
        encoder = "the vision encoder"
        where = encoder if first.layer is None else f"layer {first.layer} of {encoder}"
        verdict = f"bug at {where}, module {first.module}"
        violations = "; ".join(first.bound.describe_violations(first.metrics))
        return verdict, f"{verdict}: {violations}; try another --dtype or --kernel"
    if embedding_error <= bound:
        return ACCEPTED_VERDICT, ACCEPTED_VERDICT
    verdict = (
        "bug between the modules of the vision encoder: every module is right alone, "
        "the whole is not"
    )
    return verdict, (
        f"{verdict} (embeddings off by {embedding_error:.2g}, bound {bound:.2g}); try "
        "another --dtype"
    )


def merge_vision_language_reports(
    vision_report: dict[str, Any], language_report: dict[str, Any]
) -> dict[str, Any]:
    """Merge both reports: accepted if both are; a vision encoder's fault is named first."""
    merged = {
        **language_report,
        "image_embeddings": vision_report["image_embeddings"],
        "layers": [*vision_report["layers"], *language_report["layers"]],
    }
    if not vision_report["ok"]:
        merged |= {key: vision_report[key] for key in ("verdict", "reason", "layer", "module")}
    return apply_unused_tensor_verdict(
        merged | {"accepted": vision_report["ok"] and language_report["accepted"]},
        vision_report["unused_tensors"],
    )
