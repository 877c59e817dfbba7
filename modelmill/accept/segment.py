"""The acceptance contract for engines that segment images: every stage against the plain float32 reference.

Each module of the staged engine reads what the reference's module read, so that nothing accumulates and a fault names
itself; every norm reads inputs of the size of √eps too, where a wrong eps shows in any dtype; then pictures and prompts
of our own go through the whole engine, and embedding, mask logits, masks and scores are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.dropped import dropped_of_sam, with_dropped
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.own_encoder import OwnMatrices, weight_findings
from modelmill.accept.reference.sam import SamReference, check_names, layer_of
from modelmill.accept.reference.sam_decoder import SamDecoder
from modelmill.accept.reference.stage import Stage
from modelmill.accept.stages import Judge, row_of, short
from modelmill.accept.tolerances_segment import embedding_bound, logits_bound
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.checkpoint.open import Checkpoint
from modelmill.core.errors import RequestError
from modelmill.vision.masks import mask_iou
from modelmill.vision.open import open_eye
from modelmill.vision.prompts import Prompt, arranged
from modelmill.vision.segment import Eye, Seen

Progress = Callable[[str, int, int], None]
STEPS = ("encoder", "norms", "prompts and masks", "whole")
SLACK = 1e-3  # a mask of few pixels changes by one
SURE = 0.999  # of the pixels whose logits are clear of 0, so many must fall on the reference's side


def accept_segmentation(staged: Path, checkpoint: Checkpoint, *, progress: Progress | None = None) -> dict[str, Any]:
    """Judge a staged engine on the device that it is built for, where that is here. Returns the report."""
    artifact = open_artifact(staged, staged=True)
    device = "cuda:0" if artifact.manifest.build["target"] == "cuda" and torch.cuda.is_available() else "cpu"
    return compare_segmentation(artifact, open_eye(artifact, device), checkpoint, progress=progress)


@torch.inference_mode()
def compare_segmentation(
    artifact: Artifact, eye: Eye, checkpoint: Checkpoint, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Compare an opened engine with its checkpoint: {"accepted", "reason", "verdict", "module", "layers", "masks"}."""

    def told(step: int) -> None:
        if progress is not None:
            progress(f"acceptance: {STEPS[min(step, len(STEPS) - 1)]}", step, len(STEPS))

    true = SamReference(checkpoint)
    check_names(true)
    own = OwnMatrices(eye.model)
    reference = SamReference(checkpoint, own) if own else true
    build = artifact.manifest.build
    judge = Judge(eye.model, eye.still, str(eye.device), build["dtype"], in_encoder)
    judge.findings += weight_findings(own, eye.model, build["dtype"], lambda path: true.matrix(path).weight, layer_of)
    picture = sample_picture(eye.image)
    told(0)
    embedding = judge.stages(reference.encoder(reference.normalised(picture)))[0]
    told(2)
    decoder, prompts = SamDecoder(reference), sample_prompts(eye.image)
    points, labels = arranged(prompts, (eye.image, eye.image * 2 // 3), (eye.image, eye.image * 2 // 3))
    generator = torch.Generator().manual_seed(5)
    mask = torch.randn(1, 1, 4 * reference.grid, 4 * reference.grid, generator=generator) * 8
    judge.stages(decoder.prompts(points[:1], labels[:1], mask))
    sparse, dense, places = judge.stages(decoder.prompts(points, labels, None), last=3)
    logits, scores = judge.stages(decoder.decoder(embedding, places, sparse, dense), last=2)
    told(1)
    judge.norms(reference.norms)
    told(3)
    if own:
        embedding = _last(true.encoder(true.normalised(picture)))[0]
        logits, scores = _last(SamDecoder(true).decoder(embedding, places, sparse, dense))
    whole = _whole(eye, build["dtype"], build["quantization"], picture, prompts, (embedding, logits, scores))
    told(4)
    return with_dropped(_report(artifact, judge, whole), dropped_of_sam(true, reference))


def in_encoder(path: str) -> bool:
    """The encoder computes in the engine's dtype, prompts and decoder in float32."""
    return path.startswith("image_encoder")


def sample_picture(side: int) -> Tensor:
    """[2/3 side, side, 3] uint8: discs and boxes of several colours on a slope, seeded noise on all of it."""
    height = side * 2 // 3
    y, x = torch.meshgrid(torch.arange(height) / side, torch.arange(side) / side, indexing="ij")
    canvas = torch.stack((60 + 120 * x, 90 + 90 * y, 170 - 80 * x), -1)
    for cx, cy, size, colour in _SHAPES[:3]:
        canvas[((x - cx) ** 2 + (y - cy) ** 2) < size**2] = torch.tensor(colour)
    for cx, cy, size, colour in _SHAPES[3:]:
        canvas[((x - cx).abs() < size) & ((y - cy).abs() < 0.7 * size)] = torch.tensor(colour)
    canvas += 6 * torch.randn(canvas.shape, generator=torch.Generator().manual_seed(3))
    return canvas.clamp(0, 255).round().to(torch.uint8)


_SHAPES = (
    (0.2, 0.2, 0.1, (220.0, 40.0, 30.0)),
    (0.55, 0.15, 0.06, (240.0, 220.0, 60.0)),
    (0.8, 0.45, 0.13, (30.0, 30.0, 40.0)),
    (0.25, 0.48, 0.12, (250.0, 250.0, 245.0)),
    (0.55, 0.4, 0.05, (20.0, 140.0, 60.0)),
)


def sample_prompts(side: int) -> list[Prompt]:
    """A point on every shape of the sample picture, and some on the ground."""
    places = [(cx * side, cy * side) for cx, cy, _, _ in _SHAPES] + [
        (0.05 * side, 0.6 * side),
        (0.9 * side, 0.1 * side),
    ]
    return [Prompt(((x, y),), (1,)) for x, y in places]


def _last(stages: Iterator[Stage]) -> tuple[Tensor, ...]:
    """What the last of them puts out."""
    expected: tuple[Tensor, ...] = ()
    for stage in stages:
        expected = stage.expected
    return expected


def _whole(
    eye: Eye, dtype: str, recipe: str, picture: Tensor, prompts: list[Prompt], right: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Any]:
    """A picture and its prompts through the engine as a user asks them. right: embedding, logits, scores in float32."""
    try:
        seen = eye.see(picture)
    except RequestError:  # it overflows, and is judged as what it is
        size = (picture.shape[1], picture.shape[0])
        seen = Seen(torch.full_like(right[0], math.nan, device=eye.device), size, size)
    told = compare_tensors("embedding", seen.embedding, right[0])
    logits = right[1]
    ours, ours_scores = (x.cpu() for x in eye.decode(seen, prompts))
    off = compare_tensors("logits", ours, logits)
    bound, most = embedding_bound(dtype, recipe), logits_bound(dtype, recipe)
    margin = 2 * most * float(logits.pow(2).mean().sqrt())
    sure = logits.abs() > margin
    same = ((ours > 0) == (logits > 0)) & ours.isfinite()
    share = float(same[sure].float().mean()) if bool(sure.any()) else 1.0
    overlap = mask_iou(ours > 0, logits > 0)
    # a mask is as steady as its logits: cut a margin higher and lower, the reference's own lie this far apart
    steady = mask_iou(logits > margin / 2, logits > -margin / 2)
    difference = (ours_scores - right[2]).abs()
    broken = {
        f"embedding off by {told.rel_l2:.2g}, bound {bound:.2g}": not told.rel_l2 <= bound,
        f"mask logits off by {off.rel_l2:.2g}, bound {most:.2g}": not off.rel_l2 <= most,
        f"{100 * (1 - share):.2g} % of the clear mask pixels differ": not share >= SURE,
        f"IoU of the masks {float(overlap.mean()):.3f}, bound {float(steady.mean()):.3f}": not bool(
            overlap.mean() >= steady.mean() - SLACK
        ),
    }
    return {
        "embedding_rel_l2": told.rel_l2,
        "embedding_max_rel": told.max_rel,
        "embedding_bound": bound,
        "logits_rel_l2": off.rel_l2,
        "logits_bound": most,
        "clear_pixels": float(sure.float().mean()),
        "clear_pixels_equal": share,
        "mask_iou_mean": float(overlap.mean()),
        "mask_iou_least": float(overlap.min()),
        "mask_iou_bound": float(steady.mean()) - SLACK,
        "score_difference": float(difference.max()),
        "prompts": len(prompts),
        "finite": told.finite and off.finite,
        "broken": [what for what, wrong in broken.items() if wrong],
        "ok": not any(broken.values()),
    }


def _report(artifact: Artifact, judge: Judge, whole: dict[str, Any]) -> dict[str, Any]:
    manifest = artifact.manifest
    bad = [f for f in judge.findings if not f.ok]
    first = min(bad, key=lambda f: (f.name.endswith(".eps"), judge.findings.index(f)), default=None)
    eps = next((f for f in bad if first is not None and f.name == f"{first.name}.eps"), None)
    first = eps or first
    if first is not None:
        where = first.name.split(".")[0].replace("_", " ") if first.layer is None else f"layer {first.layer}"
        verdict = f"bug at {where}, module {first.module}"
        reason = f"{verdict}: {'; '.join(first.bound.broken_by(first.row))}; try another --dtype or --kernel"
        if not math.isfinite(first.row.max_abs):
            verdict = f"overflow at {where}, module {first.module}"
            reason = f"{verdict}: it is not finite in {manifest.build['dtype']}; build with --dtype bfloat16"
    elif not whole["finite"]:
        verdict = "overflow between the modules"
        reason = (
            f"{verdict}: what they add up to is not finite in {manifest.build['dtype']}; build with --dtype bfloat16"
        )
    elif not whole["ok"]:
        verdict = "bug between the modules: every module is right alone, the whole is not"
        reason = f"{verdict} ({'; '.join(whole['broken'])}); try another --dtype"
    else:
        verdict = reason = "numerical noise"
    return {
        "kind": manifest.kind,
        "accepted": first is None and whole["ok"],
        "verdict": verdict,
        "reason": reason,
        "layer": None if first is None else first.layer,
        "module": None if first is None else first.module,
        "dtype": manifest.build["dtype"],
        "quantization": manifest.build["quantization"],
        "kernels": dict(judge.still.ops.chosen),
        "bytes": artifact.nbytes(),
        "masks": {name: short(value) for name, value in whole.items()},
        "layers": [row_of(f) for f in judge.findings],
    }
