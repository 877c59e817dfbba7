"""The acceptance contract for the eyes of a model that talks about pictures: tower, norm, Q-Former, projection.

Each module reads what the float32 reference's module read; blocks and layers are judged as wholes too, so that what
connects their modules is seen; every norm reads inputs of the size of √eps; then a picture goes through freely.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.dropped import dropped_of_eyes, with_dropped
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.own_encoder import OwnMatrices, weight_findings
from modelmill.accept.reference.reader import ReaderReference
from modelmill.accept.stages import Judge, row_of, short
from modelmill.accept.tolerances_segment import embedding_bound
from modelmill.checkpoint.open import Checkpoint
from modelmill.nn.still import Still
from modelmill.runtime.loop import Loop

TOWER = "reader.visual_encoder.blocks."
WHOLE = ("tower.block", "qformer.layer", "tower.attn", "qformer.attention", "qformer.crossattention")


def sample_square(side: int) -> Tensor:
    """[side, side, 3] uint8: a disc and a box on a slope, seeded noise on all of it."""
    y, x = torch.meshgrid(torch.arange(side) / side, torch.arange(side) / side, indexing="ij")
    canvas = torch.stack((60 + 120 * x, 90 + 90 * y, 170 - 80 * x), -1)
    canvas[((x - 0.3) ** 2 + (y - 0.35) ** 2) < 0.04] = torch.tensor((220.0, 40.0, 30.0))
    canvas[((x - 0.7).abs() < 0.15) & ((y - 0.6).abs() < 0.2)] = torch.tensor((20.0, 140.0, 60.0))
    canvas += 6 * torch.randn(canvas.shape, generator=torch.Generator().manual_seed(3))
    return canvas.clamp(0, 255).round().to(torch.uint8)


@torch.inference_mode()
def judge_eyes(loop: Loop, checkpoint: Checkpoint) -> dict[str, Any]:
    """{"ok", "reason", "verdict", "layer", "module", "pictures", "layers"} of an opened engine's eyes."""
    assert loop.artifact is not None, "a loop made by Loop.open knows its artifact"
    dtype = loop.artifact.manifest.build["dtype"]
    own = OwnMatrices(loop.model, TOWER)
    true = reference = ReaderReference(checkpoint)
    if own:
        reference = ReaderReference(checkpoint, own)
    judge = Judge(loop.model, Still(loop.ops), loop.device, dtype, lambda path: not path.startswith("reader.ln_vision"))
    judge.findings += weight_findings(own, loop.model, dtype, partial(_checkpoints, true), _place)
    picture = sample_square(reference.size)
    [expected] = judge.stages(reference.stages(reference.normalised(picture)))
    judge.norms(reference.norms)
    if own:  # what rounding costs is told by the checkpoint's own
        for stage in true.stages(true.normalised(picture)):
            [expected] = stage.expected
    batch = picture.permute(2, 0, 1)[None].to(loop.device)
    whole = compare_tensors("embeddings", loop.model.read(batch, loop.ops)[0], expected)  # type: ignore[operator]
    bound = embedding_bound(dtype, loop.artifact.manifest.build.get("tower", "none"))
    bad = [finding for finding in judge.findings if not finding.ok]
    # a module that is wrong alone beats a block that is wrong as a whole
    first = min(bad, key=lambda f: (f.module in WHOLE, judge.findings.index(f)), default=None)
    eps = next((f for f in bad if first is not None and f.name == f"{first.name}.eps"), None)
    first = eps or first
    if first is not None:
        where = "the eyes" if first.layer is None else f"layer {first.layer} of the eyes"
        verdict = f"bug at {where}, module {first.module}"
        reason = f"{verdict}: {'; '.join(first.bound.broken_by(first.row))}; try another --dtype or --kernel"
    elif not whole.rel_l2 <= bound:
        verdict = "bug between the modules of the eyes: every module is right alone, the whole is not"
        reason = f"{verdict} (embeddings off by {whole.rel_l2:.2g}, bound {bound:.2g}); try another --dtype"
    else:
        verdict = reason = "numerical noise"
    return {
        "ok": verdict == "numerical noise",
        "verdict": verdict,
        "reason": reason,
        "layer": None if first is None else first.layer,
        "module": None if first is None else first.module,
        "dropped": dropped_of_eyes(true),
        "pictures": {"rel_l2": short(whole.rel_l2), "max_rel": short(whole.max_rel), "bound": bound},
        "layers": [row_of(finding) for finding in judge.findings],
    }


def _checkpoints(true: ReaderReference, path: str) -> Tensor:
    """The checkpoint's matrix by the engine's path."""
    return true.matrix(path.removeprefix("reader.")).weight


def _place(path: str) -> tuple[int, str]:
    """The tower's block, and what a matrix in it is called in a report."""
    block, _, module = path.removeprefix(TOWER).partition(".")
    return int(block), f"tower.{module.rpartition('.')[2]}"


def joined(eyes: dict[str, Any], language: dict[str, Any]) -> dict[str, Any]:
    """The report of both: accepted where both are; what is wrong with the eyes is told first."""
    told = {**language, "pictures": eyes["pictures"], "layers": [*eyes["layers"], *language["layers"]]}
    if not eyes["ok"]:
        told |= {key: eyes[key] for key in ("verdict", "reason", "layer", "module")}
    return with_dropped(told | {"accepted": eyes["ok"] and language["accepted"]}, eyes["dropped"])
