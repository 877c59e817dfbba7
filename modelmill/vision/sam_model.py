"""Segment pictures: ``embed_image`` once, then ``predict`` as often as you like."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import RequestError
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.cpu.thread_pool import single_thread_torch
from modelmill.ops.registry import with_heartbeat
from modelmill.ops.upsample_masks import masks_to_boxes
from modelmill.vision import masks as shapes
from modelmill.vision.automatic_mask_generator import (
    AutomaticMaskOptions,
    Crop,
    make_crops,
    point_grid,
    touches_crop_edge,
)
from modelmill.vision.captured_calls import CapturedCalls
from modelmill.vision.embedding_cache import (
    DEFAULT_CACHE_BYTES,
    EmbeddingCache,
    ImageEmbedding,
    image_digest,
)
from modelmill.vision.image import as_image, fit_longest_side, resize_pixels
from modelmill.vision.prompts import Prompt, check_mask, group_by_shape, prompt_tensors
from modelmill.vision.regions import remove_small_regions

_MAX_MASK_PIXELS = 1 << 26  # mask pixels enlarged at a time
_ENCODER_BATCHES = (8, 4, 1)  # pictures that are embedded at once; more gain nothing
_MAX_SLOW_THREADS = 2  # threads that gain less from torch's loops than they lose at their barriers
# prompts that a CPU decodes at a time, so that tensors fit into memory that was freed before
_CPU_DECODE_CHUNK = 8
_MAX_GRAPHED_PROMPTS = 8  # prompts whose decoding is many small kernels, worth a graph of its own


@dataclass(frozen=True)
class Mask:
    """One answer. box: x0, y0, x1, y1 of its outermost pixels; box_pixels: [y1 + 1 − y0, x1 + 1 −
    x0] bool, what lies inside.

    On the CPU. size: (width, height) of the picture. score: the IoU that the model predicts.
    logits: [4·G, 4·G] float32, to be given back as a prompt. stability, point, crop: where all of a
    picture was segmented. The box's pixels alone are kept: a hundred whole masks of a 48-megapixel
    photo would take 4.8 GB.
    """

    box_pixels: torch.Tensor = field(repr=False)
    size: tuple[int, int]
    score: float
    box: tuple[int, int, int, int]
    area: int
    logits: torch.Tensor | None = field(default=None, repr=False)
    stability: float | None = None
    point: tuple[float, float] | None = None
    crop: tuple[int, int, int, int] | None = None

    @property
    def pixels(self) -> torch.Tensor:
        """[H, W] bool on the CPU, made when it is asked for."""
        x0, y0, x1, y1 = self.box
        mask = torch.zeros(self.size[1], self.size[0], dtype=torch.bool)
        mask[y0 : y1 + 1, x0 : x1 + 1] = self.box_pixels
        return mask

    def to_dict(self, rle: bool = False) -> dict[str, Any]:
        """JSON-able; rle: with the pixels in COCO's compressed run lengths."""
        found: dict[str, Any] = {"box": list(self.box), "score": self.score, "area": self.area}
        if self.stability is not None and self.point is not None and self.crop is not None:
            found |= {
                "stability": self.stability,
                "point": list(self.point),
                "crop": list(self.crop),
            }
        if rle:
            width, height = self.size
            found["rle"] = shapes.to_coco_rle(
                shapes.encode_rle(self.box_pixels, self.box[:2], (height, width)), height, width
            )
        return found


class SamModel:
    """A segmentation model on its device. Not thread-safe."""

    def __init__(
        self,
        model: nn.Module,
        vision: VisionContext,
        mean: Sequence[float],
        std: Sequence[float],
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """cache_bytes: what the embeddings of pictures seen before may take."""
        self.model, self.vision = model, vision
        weight = model.prompt_encoder.no_mask_embed.weight  # type: ignore[union-attr]
        assert isinstance(weight, torch.Tensor)
        self.device = weight.device
        self.image_size = int(model.config.image)  # type: ignore[union-attr, arg-type]
        self.mask_size = 4 * int(model.config.grid)  # type: ignore[union-attr, arg-type]  # of masks' logits
        self.dtype = next(b for b in model.image_encoder.buffers() if b.is_floating_point()).dtype  # type: ignore[union-attr]
        self._mean = torch.tensor(mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(std, device=self.device).view(3, 1, 1)
        self.embedding_cache = EmbeddingCache(cache_bytes)
        self.captured_calls = CapturedCalls(enabled=self.device.type == "cuda")
        self.num_embedded = 0  # pictures embedded so far

    def on_heartbeat(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` after every operation from now on, so that who watches a long picture
        sees that it goes on."""
        self.vision = replace(self.vision, ops=with_heartbeat(self.vision.ops, heartbeat))

    def embed_image(self, image: Any) -> ImageEmbedding:
        """The picture's embedding, from the cache where it was seen before. Raises RequestError."""
        return self.embed_images([image])[0]

    @torch.inference_mode()
    def embed_images(
        self, images: Sequence[Any], salts: Sequence[str] = ()
    ) -> list[ImageEmbedding]:
        """Several pictures in one batch.

        salts: one for each; pictures of different salts share nothing.
        """
        pictures = [as_image(image) for image in images]
        salts = salts or [""] * len(pictures)
        keys = [image_digest(p, salt) for p, salt in zip(pictures, salts, strict=True)]
        found = {
            key: embedding
            for key in keys
            if (embedding := self.embedding_cache.get(key)) is not None
        }
        new = [i for i, key in enumerate(keys) if key not in found and key not in keys[:i]]
        if new:
            sizes = [fit_longest_side(pictures[i].size, self.image_size) for i in new]
            batch = torch.zeros(
                len(new), 3, self.image_size, self.image_size, device=self.device, dtype=self.dtype
            )
            for row, (i, size) in enumerate(zip(new, sizes, strict=True)):
                part = resize_pixels(pictures[i], size).to(self.device).float()
                batch[row, :, : size[1], : size[0]] = ((part - self._mean) / self._std).to(
                    self.dtype
                )
            self.num_embedded += len(new)
            embedded = self.run_encoder(batch)
            if self.dtype is torch.float16 and not all(
                bool(each.isfinite().all()) for each in embedded
            ):
                raise RequestError(
                    "the picture overflows the engine's float16; build it with --dtype bfloat16"
                )
            for row, (i, size) in enumerate(zip(new, sizes, strict=True)):
                embedding = ImageEmbedding(embedded[row], pictures[i].size, size, keys[i], salts[i])
                found[keys[i]] = embedding
                self.embedding_cache.put(embedding)
        return [found[key] for key in keys]

    def run_encoder(self, batch: torch.Tensor) -> list[torch.Tensor]:
        """Normalised, padded pictures [B, 3, S, S] → B embeddings [1, 256, G, G] float32."""

        def embed(part: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.model.encode_image(part, self.vision).float(),)  # type: ignore[operator]

        found: list[torch.Tensor] = []
        while len(found) < len(batch):
            size = next(n for n in _ENCODER_BATCHES if n <= len(batch) - len(found))
            with self._thread_scope():
                (out,) = self.captured_calls("embed", embed, batch[len(found) : len(found) + size])
            found += [row.clone() for row in out.split(1)]
        return found

    @torch.inference_mode()
    def decode(
        self, embedding: ImageEmbedding, prompts: Sequence[Prompt]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, 4, 4·G, 4·G] and predicted IoUs [N, 4] on the device, float32: the single
        mask, then the three.
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        places: list[int] = []
        for group, few in self._decode_batches(prompts):
            part = [prompts[i] for i in group]
            points, labels = prompt_tensors(part, embedding.size, embedding.encoder_size)
            given = [embedding.embedding, points.to(self.device), labels.to(self.device)]
            if part[0].mask is not None:
                given.append(
                    torch.stack([p.mask for p in part if p.mask is not None])[:, None].to(
                        self.device
                    )
                )
            with self._thread_scope(few):
                decoded = (
                    self.captured_calls("decode", self._run_decoder, *given)
                    if few
                    else self._run_decoder(*given)
                )
            found.append((decoded[0].clone(), decoded[1].clone()))
            places += group
        if len(found) == 1:
            return found[0]
        back = torch.tensor(places, device=self.device).argsort()
        return torch.cat([x for x, _ in found])[back], torch.cat([x for _, x in found])[back]

    def _decode_batches(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], bool]]:
        """Indices of prompts that are decoded in one call, and whether these are few.

        A prompt's keys are [4096, 256] float32: those of 64 are 268 MB, which malloc takes from the
        system and gives back with each operation. Half of the time went into the faults of their
        pages.
        """
        groups = [
            (list(group), len(group) <= _MAX_GRAPHED_PROMPTS) for group in group_by_shape(prompts)
        ]
        if self.device.type != "cpu":
            return groups
        return [
            (group[i : i + _CPU_DECODE_CHUNK], few)
            for group, few in groups
            for i in range(0, len(group), _CPU_DECODE_CHUNK)
        ]

    def _thread_scope(self, few: bool = False) -> contextlib.AbstractContextManager[None]:
        """Torch on one thread of a CPU where its loops are small (few prompts), or where two would
        wait for each other.

        On two cores that others use, too, a cold picture takes MobileSAM 1.4 s so, and 3.0 with two
        threads of torch's."""
        alone = self.device.type == "cpu" and (few or torch.get_num_threads() <= _MAX_SLOW_THREADS)
        return single_thread_torch() if alone else contextlib.nullcontext()

    def _run_decoder(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """inputs: embedding, points, labels, and masks if there are any."""
        mask = inputs[3] if len(inputs) > 3 else None
        return self.model.decode_masks(*inputs[:3], mask, self.vision)  # type: ignore[operator]

    def predict(
        self, embedding: ImageEmbedding, prompt: Prompt, multimask: bool = True
    ) -> list[Mask]:
        """Masks for one prompt, best first: three, or with multimask off the one for an unambiguous
        prompt.
        """
        return self.predict_all(embedding, [prompt], multimask)[0]

    @torch.inference_mode()
    def predict_all(
        self, embedding: ImageEmbedding, prompts: Sequence[Prompt], multimask: bool = True
    ) -> list[list[Mask]]:
        """The same for several prompts on one picture, in one call of the decoder.

        Raises RequestError.
        """
        for prompt in prompts:
            check_mask(prompt, self.mask_size)
        if not prompts:
            return []
        logits, scores = self.decode(embedding, prompts)
        chosen = slice(1, None) if multimask else slice(0, 1)
        logits, scores = logits[:, chosen], scores[:, chosen]
        masks, numbers = [], []
        for low, score in zip(logits, scores, strict=True):
            big, boxes, areas, _ = self.vision.ops.upsample_masks(
                low, self.image_size, embedding.encoder_size, embedding.size
            )
            masks.append(to_pinned_host(big))
            numbers.append(
                torch.cat((score[:, None].double(), boxes.double(), areas[:, None].double()), 1)
            )
        lows, answers = to_pinned_host(logits), torch.stack(numbers).tolist()
        found = []
        for big, low, rows in zip(masks, lows, answers, strict=True):
            pixel_boxes = [_int_box(row[1:5]) for row in rows]
            each = [
                Mask(_crop_to_box(big[i], box), embedding.size, row[0], box, int(row[5]), low[i])
                for i, (row, box) in enumerate(zip(rows, pixel_boxes, strict=True))
            ]
            found.append(sorted(each, key=lambda mask: -mask.score))
        return found

    @torch.inference_mode()
    def generate_masks(
        self,
        image: Any,
        options: AutomaticMaskOptions | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Mask]:
        """Masks of all that a grid of points finds, best predicted IoU first.

        image: as for ``embed_image``, or what that returned, where no crops are asked for.
        on_progress: called with (points done, of how many) before each batch of points and at the
        end; what it raises ends the work.
        """
        options = options or AutomaticMaskOptions()
        picture = image if isinstance(image, ImageEmbedding) else as_image(image)
        if isinstance(image, ImageEmbedding) and options.crop_n_layers:
            raise RequestError(
                "crops are cut from the picture: give the image itself with crop_n_layers"
            )
        crops = make_crops(picture.size, options)
        points = [len(point_grid(crop, options)) for crop in crops]
        found: list[Mask] = []
        for number, crop in enumerate(crops):
            before = sum(points[:number])

            def report(done: int, before: int = before) -> None:
                if on_progress is not None:
                    on_progress(before + done, sum(points))

            found += self._masks_of_crop(picture, crop, options, report)
        if on_progress is not None:
            on_progress(sum(points), sum(points))
        if len(crops) > 1 and found:
            # masks of smaller crops are finer
            areas = torch.tensor(
                [float((c[2] - c[0]) * (c[3] - c[1])) for c in (m.crop for m in found) if c]
            )
            boxes = torch.tensor([m.box for m in found]).float()
            found = [
                found[i] for i in shapes.nms(boxes, 1 / areas, options.crop_nms_thresh).tolist()
            ]
        if options.min_mask_region_area and found:
            found = _remove_small_regions(found, options)
        return sorted(found, key=lambda m: -m.score)

    def _masks_of_crop(
        self,
        picture: Any,
        crop: Crop,
        options: AutomaticMaskOptions,
        on_progress: Callable[[int], None],
    ) -> list[Mask]:
        """The masks of one crop, in the whole picture's pixels."""
        embedding = (
            picture
            if isinstance(picture, ImageEmbedding)
            else self.embed_image(picture if crop.layer == 0 else picture.crop(crop.box))
        )
        grid = point_grid(crop, options)
        low, score, stable, box, point = [], [], [], [], []
        for start in range(0, len(grid), options.points_per_batch):
            on_progress(start)
            at = grid[start : start + options.points_per_batch]
            prompts = [Prompt(((float(x), float(y)),), (1,)) for x, y in at]
            logits, ious = self.decode(embedding, prompts)
            # what is thrown away by its score alone need not be enlarged
            good = (ious[:, 1:] > options.pred_iou_thresh).flatten().nonzero()[:, 0]
            for some in good.split(self._max_masks_per_batch(embedding.size)):
                candidates = logits[:, 1:].flatten(0, 1)[some]
                _, boxes, _, steady = self.vision.ops.upsample_masks(
                    candidates,
                    self.image_size,
                    embedding.encoder_size,
                    embedding.size,
                    options.stability_score_offset,
                    pixels=False,
                )
                keep = steady >= options.stability_score_thresh
                keep = (keep & ~touches_crop_edge(boxes, crop, picture.size)).nonzero()[:, 0]
                some = some[keep]
                low.append(candidates[keep])
                score.append(ious[:, 1:].flatten()[some])
                stable.append(steady[keep])
                box.append(boxes[keep])
                point.append(at[(some // 3).cpu()])
        if not low or not sum(map(len, low)):
            return []
        return self._suppress_duplicates(
            embedding, crop, picture.size, options,
            (torch.cat(low), torch.cat(score), torch.cat(stable), torch.cat(box)), torch.cat(point),
        )  # fmt: skip

    def _max_masks_per_batch(self, size: tuple[int, int]) -> int:
        """Masks that may be measured at once: where a kernel does it none is ever in memory,
        enlarged.
        """
        measured = self.vision.ops.backends["upsample_masks"] != "torch"
        return 1 << 20 if measured else max(1, _MAX_MASK_PIXELS // (size[0] * size[1]))

    def _suppress_duplicates(
        self, embedding: ImageEmbedding, crop: Crop, size: tuple[int, int],
        options: AutomaticMaskOptions,
        candidates: tuple[torch.Tensor, ...], points: torch.Tensor,
    ) -> list[Mask]:  # fmt: skip
        """Of the crop's masks those that are not doubles, placed in the picture."""
        logits, scores, steady, boxes = candidates
        keep = shapes.nms(boxes, scores, options.box_nms_thresh)
        left, top = crop.box[:2]
        logits, points = logits[keep], points[keep.cpu()] + torch.tensor([left, top])
        numbers = torch.cat(
            [x.double() for x in (scores[keep, None], steady[keep, None], boxes[keep])], 1
        ).tolist()
        step = max(1, _MAX_MASK_PIXELS // (embedding.size[0] * embedding.size[1]))
        masks: list[Mask] = []
        for piece in logits.split(step):
            big, _, area, _ = self.vision.ops.upsample_masks(
                piece, self.image_size, embedding.encoder_size, embedding.size
            )
            host, areas = to_pinned_host(big), area.tolist()
            for mask, count in zip(host, areas, strict=True):
                (score, stable, *ends), at = numbers[len(masks)], points[len(masks)].tolist()
                x0, y0, x1, y1 = box = _int_box(ends)
                moved = (x0 + left, y0 + top, x1 + left, y1 + top)
                extra: dict[str, Any] = {
                    "stability": stable,
                    "point": (at[0], at[1]),
                    "crop": crop.box,
                }
                masks.append(Mask(_crop_to_box(mask, box), size, score, moved, int(count), **extra))
        return masks


def _remove_small_regions(masks: list[Mask], options: AutomaticMaskOptions) -> list[Mask]:
    """Without small holes and islands; of what is double then, a mask that was clean already
    stays.
    """
    found, clean = [], []
    for mask in masks:
        tidy, changed = remove_small_regions(mask.pixels.numpy(), options.min_mask_region_area)
        if changed:
            pixels = torch.from_numpy(tidy)
            box = _int_box(masks_to_boxes(pixels).tolist())
            mask = replace(
                mask, box_pixels=_crop_to_box(pixels, box), box=box, area=int(pixels.sum())
            )
        found.append(mask)
        clean.append(float(not changed))
    boxes = torch.tensor([mask.box for mask in found]).float()
    threshold = max(options.box_nms_thresh, options.crop_nms_thresh)
    return [found[i] for i in shapes.nms(boxes, torch.tensor(clean), threshold).tolist()]


def to_pinned_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, to be read once something behind it on the stream has been waited for.

    From a GPU it goes to locked memory, which torch keeps for the next: into fresh memory it would
    take ten times as long.
    """
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _crop_to_box(mask: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    """A copy of what lies in a box of a mask [H, W]."""
    x0, y0, x1, y1 = box
    return mask[y0 : y1 + 1, x0 : x1 + 1].clone()


def _int_box(numbers: Sequence[float]) -> tuple[int, int, int, int]:
    x0, y0, x1, y1 = (int(n) for n in numbers)
    return x0, y0, x1, y1
