"""The acceptance contract for segmentation engines: every stage against the float32 reference.

Each module of the staged engine reads the input of the reference's module, so that errors do not
accumulate; every norm also reads inputs of the size of √eps, where a wrong eps shows in any dtype;
then generated images and prompts run through the whole engine, and embedding, mask logits, masks
and scores are checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.quantized_vision_reference import (
    DequantizedEncoderMatrices,
    check_vision_encoder_weights,
)
from modelmill.accept.reference.sam import SamReference, check_is_sam
from modelmill.accept.reference.sam_decoder import SamDecoderReference
from modelmill.accept.reference.vision_reference import ReferenceStage
from modelmill.accept.tolerances_segmentation import image_embedding_bound, mask_logits_bound
from modelmill.accept.unused_tensors import apply_unused_tensor_verdict, explain_unused_sam_tensors
from modelmill.accept.vision_stage_check import (
    ACCEPTED_VERDICT,
    VisionStageCheck,
    make_acceptance_report,
    round_significant_digits,
)
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.checkpoint.open import Checkpoint
from modelmill.core.errors import RequestError
from modelmill.core.progress_callback import Progress
from modelmill.vision.masks import elementwise_mask_iou
from modelmill.vision.prompts import Prompt, make_prompt_tensors
from modelmill.vision.sam_loader import open_sam_model
from modelmill.vision.sam_model import ImageEmbedding, SamModel

PROGRESS_STAGE_NAMES = ("encoder", "norms", "prompts and masks", "whole")
MASK_IOU_TOLERANCE = 1e-3  # a mask of few pixels differs by one
# share of clear pixels (logits far from 0) that must agree with the reference
MIN_CONFIDENT_PIXEL_AGREEMENT = 0.999


def run_segmentation_acceptance(
    staged: Path, checkpoint: Checkpoint, *, on_progress: Progress | None = None
) -> dict[str, Any]:
    """Check a staged engine on its target device if that exists here; return the report."""
    artifact = open_artifact(staged, staged=True)
    device = (
        "cuda:0"
        if artifact.manifest.build["target"] == "cuda" and torch.cuda.is_available()
        else "cpu"
    )
    return compare_segmentation_engine(
        artifact, open_sam_model(artifact, device), checkpoint, on_progress=on_progress
    )


@torch.inference_mode()
def compare_segmentation_engine(
    artifact: Artifact,
    sam_model: SamModel,
    checkpoint: Checkpoint,
    *,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare an opened engine with its checkpoint; return the report.

    Keys: "accepted", "reason", "verdict", "module", "layers", "masks".
    """

    def on_stage(step: int) -> None:
        if on_progress is not None:
            name = PROGRESS_STAGE_NAMES[min(step, len(PROGRESS_STAGE_NAMES) - 1)]
            on_progress(f"acceptance: {name}", step, len(PROGRESS_STAGE_NAMES))

    checkpoint_reference = SamReference(checkpoint)
    check_is_sam(checkpoint_reference)
    engine_matrices = DequantizedEncoderMatrices(sam_model.model)
    reference = (
        SamReference(checkpoint, engine_matrices) if engine_matrices else checkpoint_reference
    )
    build = artifact.manifest.build
    stage_check = VisionStageCheck(
        sam_model.model, sam_model.vision, str(sam_model.device), artifact.manifest
    )
    stage_check.findings += check_vision_encoder_weights(
        engine_matrices, build["dtype"], checkpoint_reference.checkpoint_matrix_by_engine_path
    )
    picture = draw_sample_image(sam_model.image_size)
    on_stage(0)
    embedding = stage_check.check_stages(
        reference.encoder_stages(reference.normalize_image(picture))
    )[0]
    on_stage(2)
    decoder, prompts = SamDecoderReference(reference), sample_point_prompts(sam_model.image_size)
    size = (sam_model.image_size, sam_model.image_size * 2 // 3)
    points, labels = make_prompt_tensors(prompts, size, size)
    generator = torch.Generator().manual_seed(5)
    side = 4 * reference.tokens_per_side
    mask = torch.randn(1, 1, side, side, generator=generator) * 8
    stage_check.check_stages(decoder.prompt_encoder_stages(points[:1], labels[:1], mask))
    sparse, dense, places = stage_check.check_stages(
        decoder.prompt_encoder_stages(points, labels, None), num_outputs=3
    )
    logits, scores = stage_check.check_stages(
        decoder.mask_decoder_stages(embedding, places, sparse, dense), num_outputs=2
    )
    on_stage(1)
    stage_check.check_norm_eps(reference.norms)
    stage_check.check_declared_modules_compared()
    on_stage(3)
    if engine_matrices:
        normalized = checkpoint_reference.normalize_image(picture)
        embedding = _run_to_last_reference_stage(checkpoint_reference.encoder_stages(normalized))[0]
        exact_decoder = SamDecoderReference(checkpoint_reference)
        logits, scores = _run_to_last_reference_stage(
            exact_decoder.mask_decoder_stages(embedding, places, sparse, dense)
        )
    expected = embedding, logits, scores
    whole = _check_whole_model(
        sam_model, build["dtype"], engine_matrices.weight_formats, picture, prompts, expected
    )
    on_stage(4)
    return apply_unused_tensor_verdict(
        _make_segmentation_report(artifact, stage_check, whole),
        explain_unused_sam_tensors(checkpoint_reference, reference),
    )


def draw_sample_image(image_size: int) -> Tensor:
    """Draw an image [2/3 side, side, 3] uint8: discs and boxes on a gradient, with seeded noise."""
    height = image_size * 2 // 3
    y, x = torch.meshgrid(
        torch.arange(height) / image_size, torch.arange(image_size) / image_size, indexing="ij"
    )
    canvas = torch.stack((60 + 120 * x, 90 + 90 * y, 170 - 80 * x), -1)
    for cx, cy, size, colour in _DRAWN_OBJECTS[:3]:
        canvas[((x - cx) ** 2 + (y - cy) ** 2) < size**2] = torch.tensor(colour)
    for cx, cy, size, colour in _DRAWN_OBJECTS[3:]:
        canvas[((x - cx).abs() < size) & ((y - cy).abs() < 0.7 * size)] = torch.tensor(colour)
    canvas += 6 * torch.randn(canvas.shape, generator=torch.Generator().manual_seed(3))
    return canvas.clamp(0, 255).round().to(torch.uint8)


_DRAWN_OBJECTS = (
    (0.2, 0.2, 0.1, (220.0, 40.0, 30.0)),
    (0.55, 0.15, 0.06, (240.0, 220.0, 60.0)),
    (0.8, 0.45, 0.13, (30.0, 30.0, 40.0)),
    (0.25, 0.48, 0.12, (250.0, 250.0, 245.0)),
    (0.55, 0.4, 0.05, (20.0, 140.0, 60.0)),
)


def sample_point_prompts(image_size: int) -> list[Prompt]:
    """Return a point on every shape of the sample image, and some on the background."""
    places = [(cx * image_size, cy * image_size) for cx, cy, _, _ in _DRAWN_OBJECTS] + [
        (0.05 * image_size, 0.6 * image_size),
        (0.9 * image_size, 0.1 * image_size),
    ]
    return [Prompt(((x, y),), (1,)) for x, y in places]


def _run_to_last_reference_stage(stages: Iterator[ReferenceStage]) -> tuple[Tensor, ...]:
    """Run the reference's stages; return the output of the last."""
    expected: tuple[Tensor, ...] = ()
    for stage in stages:
        expected = stage.expected
    return expected


def _check_whole_model(
    sam_model: SamModel,
    dtype: str,
    weight_formats: Mapping[str, str],
    picture: Tensor,
    prompts: list[Prompt],
    expected: tuple[Tensor, Tensor, Tensor],
) -> dict[str, Any]:
    """Run an image and its prompts through the whole engine.

    weight_formats: of its quantized matrices. expected: embedding, logits, scores in float32.
    """
    try:
        image_embedding = sam_model.embed_image(picture)
    except RequestError:  # an overflow is checked like any other result
        size = (picture.shape[1], picture.shape[0])
        image_embedding = ImageEmbedding(
            torch.full_like(expected[0], math.nan, device=sam_model.device), size, size
        )
    embedding_error = compare_tensors("embedding", image_embedding.embedding, expected[0])
    logits = expected[1]
    ours, ours_scores = (x.cpu() for x in sam_model.decode(image_embedding, prompts))
    off = compare_tensors("logits", ours, logits)
    formats = weight_formats.values()
    bound, most = image_embedding_bound(dtype, formats), mask_logits_bound(dtype, formats)
    margin = 2 * most * float(logits.pow(2).mean().sqrt())
    sure = logits.abs() > margin
    same = ((ours > 0) == (logits > 0)) & ours.isfinite()
    share = float(same[sure].float().mean()) if bool(sure.any()) else 1.0
    overlap = elementwise_mask_iou(ours > 0, logits > 0)
    # the uncertainty of a mask: the reference's own masks, cut a margin above and below 0, differ
    # by this much
    steady = elementwise_mask_iou(logits > margin / 2, logits > -margin / 2)
    difference = (ours_scores - expected[2]).abs()
    broken = {
        f"embedding off by {embedding_error.rel_l2:.2g}, bound {bound:.2g}": not embedding_error.rel_l2  # noqa: E501
        <= bound,
        f"mask logits off by {off.rel_l2:.2g}, bound {most:.2g}": not off.rel_l2 <= most,
        f"{100 * (1 - share):.2g} % of the clear mask pixels differ": not share
        >= MIN_CONFIDENT_PIXEL_AGREEMENT,
        f"IoU of the masks {float(overlap.mean()):.3f}, bound {float(steady.mean()):.3f}": not bool(
            overlap.mean() >= steady.mean() - MASK_IOU_TOLERANCE
        ),
    }
    return {
        "embedding_rel_l2": embedding_error.rel_l2,
        "embedding_max_rel": embedding_error.max_rel,
        "embedding_bound": bound,
        "logits_rel_l2": off.rel_l2,
        "logits_bound": most,
        "clear_pixels": float(sure.float().mean()),
        "clear_pixels_equal": share,
        "mask_iou_mean": float(overlap.mean()),
        "mask_iou_min": float(overlap.min()),
        "mask_iou_bound": float(steady.mean()) - MASK_IOU_TOLERANCE,
        "score_difference": float(difference.max()),
        "prompts": len(prompts),
        "finite": embedding_error.is_finite and off.is_finite,
        "broken": [what for what, wrong in broken.items() if wrong],
        "ok": not any(broken.values()),
    }


def _make_segmentation_report(
    artifact: Artifact, stage_check: VisionStageCheck, whole_model_report: dict[str, Any]
) -> dict[str, Any]:
    manifest = artifact.manifest
    first = stage_check.failure_for_verdict(lambda f: f.name.endswith(".eps"))
    if first is not None:
        where = (
            first.name.split(".")[0].replace("_", " ")
            if first.layer is None
            else f"layer {first.layer}"
        )
        verdict = f"bug at {where}, module {first.module}"
        reason = (
            f"{verdict}: {'; '.join(first.bound.describe_violations(first.metrics))}; try another "
            "--dtype or --kernel"
        )
        if not math.isfinite(first.metrics.max_abs):
            verdict = f"overflow at {where}, module {first.module}"
            reason = (
                f"{verdict}: it is not finite in {manifest.build['dtype']}; build with "
                "--dtype bfloat16"
            )
    elif not whole_model_report["finite"]:
        verdict = "overflow between the modules"
        reason = (
            f"{verdict}: what they add up to is not finite in {manifest.build['dtype']}; "
            "build with --dtype bfloat16"
        )
    elif not whole_model_report["ok"]:
        verdict = "bug between the modules: every module is right alone, the whole is not"
        reason = f"{verdict} ({'; '.join(whole_model_report['broken'])}); try another --dtype"
    else:
        verdict = reason = ACCEPTED_VERDICT
    report = make_acceptance_report(
        artifact,
        stage_check.vision.ops.backends,
        first,
        stage_check.findings,
        verdict=verdict,
        reason=reason,
        whole_ok=whole_model_report["ok"],
        whole={
            "masks": {
                name: round_significant_digits(value) for name, value in whole_model_report.items()
            }
        },
    )
    return {"engine_type": manifest.engine_type, **report}
