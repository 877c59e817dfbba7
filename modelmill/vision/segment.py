"""Segment pictures: ``see`` once, then ask as often as you like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import RequestError
from modelmill.nn.still import Still
from modelmill.vision import masks as shapes
from modelmill.vision.everything import Crop, Everything, crops_of, cut_off, grid_of
from modelmill.vision.image import as_image, fitted, pixels
from modelmill.vision.known import KEPT_BYTES, Known, Seen, digest_of
from modelmill.vision.prompts import Prompt, alike, arranged

THRESHOLD = 0.0
_PIXELS = 1 << 26  # mask pixels enlarged at a time


@dataclass(frozen=True)
class Mask:
    """One answer. pixels: [H, W] bool on the CPU; box: x0, y0, x1, y1 of its outermost pixels.

    score: the IoU that the model predicts. logits: [4·G, 4·G] float32, to be given back as a prompt.
    stability, point, crop: where all of a picture was segmented.
    """

    pixels: torch.Tensor = field(repr=False)
    score: float
    box: tuple[int, int, int, int]
    area: int
    logits: torch.Tensor | None = field(default=None, repr=False)
    stability: float | None = None
    point: tuple[float, float] | None = None
    crop: tuple[int, int, int, int] | None = None

    def to_dict(self, rle: bool = False) -> dict[str, Any]:
        """JSON-able; rle: with the pixels in COCO's compressed run lengths."""
        found: dict[str, Any] = {"box": list(self.box), "score": self.score, "area": self.area}
        if self.stability is not None and self.point is not None and self.crop is not None:
            found |= {"stability": self.stability, "point": list(self.point), "crop": list(self.crop)}
        if rle:
            height, width = self.pixels.shape
            found["rle"] = shapes.coco(shapes.runs_of(self.pixels[None])[0], height, width)
        return found


class Eye:
    """A segmentation model on its device. Not thread-safe."""

    def __init__(
        self, model: nn.Module, still: Still, mean: Sequence[float], std: Sequence[float], kept: int = KEPT_BYTES
    ) -> None:
        """kept: bytes that the embeddings of pictures seen before may take."""
        self.model, self.still = model, still
        weight = model.prompt_encoder.no_mask_embed.weight  # type: ignore[union-attr]
        assert isinstance(weight, torch.Tensor)
        self.device = weight.device
        self.image = int(model.config.image)  # type: ignore[union-attr, arg-type]
        self.dtype = next(b for b in model.image_encoder.buffers() if b.is_floating_point()).dtype  # type: ignore[union-attr]
        self._mean = torch.tensor(mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(std, device=self.device).view(3, 1, 1)
        self.known = Known(kept)
        self.looks = 0  # pictures embedded so far

    def see(self, image: Any) -> Seen:
        """The picture's embedding, from the cache where it was seen before. Raises RequestError."""
        return self.see_all([image])[0]

    @torch.inference_mode()
    def see_all(self, images: Sequence[Any], salts: Sequence[str] = ()) -> list[Seen]:
        """Several pictures in one batch. salts: one for each; pictures of different salts share nothing."""
        pictures = [as_image(image) for image in images]
        keys = [digest_of(p, salt) for p, salt in zip(pictures, salts or [""] * len(pictures), strict=True)]
        found = {key: seen for key in keys if (seen := self.known.get(key)) is not None}
        new = [i for i, key in enumerate(keys) if key not in found and key not in keys[:i]]
        if new:
            sizes = [fitted(pictures[i].size, self.image) for i in new]
            batch = torch.zeros(len(new), 3, self.image, self.image, device=self.device, dtype=self.dtype)
            for row, (i, size) in enumerate(zip(new, sizes, strict=True)):
                part = pixels(pictures[i], size).to(self.device).float()
                batch[row, :, : size[1], : size[0]] = ((part - self._mean) / self._std).to(self.dtype)
            self.looks += len(new)
            embedded = self.model.embed(batch, self.still).float()  # type: ignore[operator]
            for row, (i, size) in enumerate(zip(new, sizes, strict=True)):
                seen = Seen(embedded[row : row + 1].clone(), pictures[i].size, size, keys[i])
                found[keys[i]] = seen
                self.known.keep(seen)
        return [found[key] for key in keys]

    @torch.inference_mode()
    def decode(self, seen: Seen, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, 4, 4·G, 4·G] and predicted IoUs [N, 4] on the device, float32: the single mask, then the three."""
        logits: list[torch.Tensor | None] = [None] * len(prompts)
        scores: list[torch.Tensor | None] = [None] * len(prompts)
        for group in alike(prompts):
            part = [prompts[i] for i in group]
            points, labels = arranged(part, seen.size, seen.fitted)
            given = None
            if part[0].mask is not None:
                given = torch.stack([p.mask for p in part if p.mask is not None])[:, None].to(self.device)
            out = self.model.decode(  # type: ignore[operator]
                seen.embedding, points.to(self.device), labels.to(self.device), given, self.still
            )
            for row, i in enumerate(group):
                logits[i], scores[i] = out[0][row], out[1][row]
        return torch.stack([x for x in logits if x is not None]), torch.stack([x for x in scores if x is not None])

    def predict(self, seen: Seen, prompt: Prompt, multimask: bool = True) -> list[Mask]:
        """Masks for one prompt, best first: three, or with multimask off the one for an unambiguous prompt."""
        return self.predict_all(seen, [prompt], multimask)[0]

    @torch.inference_mode()
    def predict_all(self, seen: Seen, prompts: Sequence[Prompt], multimask: bool = True) -> list[list[Mask]]:
        """The same for several prompts on one picture, in one call of the decoder."""
        logits, scores = self.decode(seen, prompts)
        chosen = slice(1, None) if multimask else slice(0, 1)
        logits, scores = logits[:, chosen], scores[:, chosen]
        found = []
        for low, score in zip(logits, scores, strict=True):
            big = shapes.enlarged(low[None], self.image, seen.fitted, seen.size)[0] > THRESHOLD
            boxes, areas, kept = shapes.boxes_of(big).tolist(), big.sum((-2, -1)).tolist(), big.cpu()
            order = torch.argsort(score, descending=True, stable=True).tolist()
            found.append([Mask(kept[i], float(score[i]), tuple(boxes[i]), int(areas[i]), low[i].cpu()) for i in order])
        return found

    @torch.inference_mode()
    def everything(
        self, image: Any, options: Everything | None = None, progress: Callable[[int, int], None] | None = None
    ) -> list[Mask]:
        """Masks of all that a grid of points finds, best predicted IoU first.

        image: as for ``see``, or what that returned, where no crops are asked for. progress: told (points done, of how
        many) before each batch of points and at the end; what it raises ends the work.
        """
        options = options or Everything()
        picture = image if isinstance(image, Seen) else as_image(image)
        if isinstance(image, Seen) and options.crop_n_layers:
            raise RequestError("crops are cut from the picture: give the image itself with crop_n_layers")
        crops = crops_of(picture.size, options)
        points = [len(grid_of(crop, options)) for crop in crops]
        found: list[Mask] = []
        for number, crop in enumerate(crops):
            before = sum(points[:number])

            def told(done: int, before: int = before) -> None:
                if progress is not None:
                    progress(before + done, sum(points))

            found += self._crop(picture, crop, options, told)
        if progress is not None:
            progress(sum(points), sum(points))
        if len(crops) > 1 and found:
            # masks of smaller crops are finer
            areas = torch.tensor([float((c[2] - c[0]) * (c[3] - c[1])) for c in (m.crop for m in found) if c])
            boxes = torch.tensor([m.box for m in found]).float()
            found = [found[i] for i in shapes.suppressed(boxes, 1 / areas, options.crop_nms_thresh).tolist()]
        return sorted(found, key=lambda m: -m.score)

    def _crop(self, picture: Any, crop: Crop, options: Everything, told: Callable[[int], None]) -> list[Mask]:
        """The masks of one crop, in the whole picture's pixels."""
        seen = (
            picture if isinstance(picture, Seen) else self.see(picture if crop.layer == 0 else picture.crop(crop.box))
        )
        grid = grid_of(crop, options)
        low, score, stable, box, point = [], [], [], [], []
        for start in range(0, len(grid), options.points_per_batch):
            told(start)
            at = grid[start : start + options.points_per_batch]
            prompts = [Prompt(((float(x), float(y)),), (1,)) for x, y in at]
            logits, ious = self.decode(seen, prompts)
            # what is thrown away by its score alone need not be enlarged
            good = ious[:, 1:] > options.pred_iou_thresh
            logits, ious = logits[:, 1:][good], ious[:, 1:][good]
            asked = at.repeat_interleave(3, 0)[good.flatten().cpu()]
            for piece in torch.arange(len(logits)).split(max(1, _PIXELS // (seen.size[0] * seen.size[1]))):
                big = shapes.enlarged(logits[piece][:, None], self.image, seen.fitted, seen.size)[:, 0]
                steady = shapes.stability(big, THRESHOLD, options.stability_score_offset)
                boxes = shapes.boxes_of(big > THRESHOLD)
                keep = (steady >= options.stability_score_thresh) & ~cut_off(boxes, crop, picture.size)
                low.append(logits[piece][keep])
                score.append(ious[piece][keep])
                stable.append(steady[keep])
                box.append(boxes[keep])
                point.append(asked[piece][keep.cpu()])
        if not low or not sum(map(len, low)):
            return []
        return self._kept(
            seen, crop, picture.size, options, (torch.cat(low), torch.cat(score), torch.cat(stable), torch.cat(box)),
            torch.cat(point),
        )  # fmt: skip

    def _kept(
        self, seen: Seen, crop: Crop, size: tuple[int, int], options: Everything,
        found: tuple[torch.Tensor, ...], points: torch.Tensor,
    ) -> list[Mask]:  # fmt: skip
        """Of the crop's masks those that are not doubles, placed in the picture."""
        logits, scores, steady, boxes = found
        keep = shapes.suppressed(boxes, scores, options.box_nms_thresh)
        left, top, right, bottom = crop.box
        masks = []
        for i in keep.tolist():
            big = shapes.enlarged(logits[i][None, None], self.image, seen.fitted, seen.size)[0, 0] > THRESHOLD
            whole = torch.zeros(size[1], size[0], dtype=torch.bool)
            whole[top:bottom, left:right] = big.cpu()
            x0, y0, x1, y1 = boxes[i].tolist()
            at = (float(points[i][0]) + left, float(points[i][1]) + top)
            masks.append(
                Mask(
                    whole, float(scores[i]), (x0 + left, y0 + top, x1 + left, y1 + top), int(whole.sum()),
                    stability=float(steady[i]), point=at, crop=crop.box,
                )
            )  # fmt: skip
        return masks
