"""Segment pictures: one ``embed_image`` per picture, then any number of ``predict`` calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import RequestError
from modelmill.core.image_embedding_cache import ImageEmbeddingCache
from modelmill.core.progress_callback import Progress
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.cpu.common.thread_pool import single_thread_torch
from modelmill.ops.registry import with_heartbeat
from modelmill.ops.upsample_masks import UpsampleMasksInputs, masks_to_boxes
from modelmill.vision import masks as shapes
from modelmill.vision.automatic_mask_options import (
    AutomaticMaskOptions,
    Crop,
    make_crops,
    point_grid,
    touches_crop_edge,
)
from modelmill.vision.cuda_graph_cache import CudaGraphCache
from modelmill.vision.image import fit_longest_side, image_digest, resize_to_tensor, to_rgb_image
from modelmill.vision.image_embedding import DEFAULT_CACHE_BYTES, ImageEmbedding
from modelmill.vision.packed_mask import PackedMask, pack_mask_bits
from modelmill.vision.prompts import (
    Prompt,
    check_prompt_mask_shape,
    group_prompts_by_shape,
    make_prompt_tensors,
)
from modelmill.vision.regions import remove_small_regions

_MAX_PIXELS_PER_UPSAMPLING = 1 << 26  # mask pixels upsampled per call
_ENCODER_BATCH_SIZES = (8, 4, 1)  # batch sizes of the encoder; larger ones are no faster
# up to this many threads, torch's loops lose more at their barriers than they gain
_MAX_SINGLE_THREAD_CPUS = 2
# prompts per decoder call on a CPU, so that malloc reuses freed memory (see _split_into_batches)
_CPU_DECODE_CHUNK = 8
_MAX_GRAPHED_PROMPTS = 8  # up to this many, decoding is many small kernels and worth a CUDA graph


@dataclass(frozen=True)
class Mask:
    """One mask, on the CPU.

    Only the pixels in its box are stored, as bits: a hundred whole masks of a 48-megapixel photo
    would take 4.8 GB as bools.

    Attributes:
        packed: the mask inside its box.
        size: (width, height) of the picture.
        score: IoU predicted by the model.
        box: (x0, y0, x1, y1) of its outermost pixels.
        area: pixels of the mask.
        logits: [4·G, 4·G] float32, usable as the mask of another prompt.
        stability: stability score; only from ``generate_masks``, as are the next two.
        point: (x, y) of the grid point.
        crop: box of the crop.
    """

    packed: PackedMask = field(repr=False)
    size: tuple[int, int]
    score: float
    box: tuple[int, int, int, int]
    area: int
    logits: torch.Tensor | None = field(default=None, repr=False)
    stability: float | None = None
    point: tuple[float, float] | None = None
    crop: tuple[int, int, int, int] | None = None

    @property
    def box_pixels(self) -> torch.Tensor:
        """Return the mask inside its box [y1 + 1 − y0, x1 + 1 − x0] bool, built on each access."""
        return self.packed.unpack()

    @property
    def pixels(self) -> torch.Tensor:
        """Return the whole mask [H, W] bool, built on each access."""
        x0, y0, x1, y1 = self.box
        mask = torch.zeros(self.size[1], self.size[0], dtype=torch.bool)
        mask[y0 : y1 + 1, x0 : x1 + 1] = self.box_pixels
        return mask

    def to_dict(self, rle: bool = False) -> dict[str, Any]:
        """Convert to a JSON-serializable dict; with rle, add COCO's compressed run lengths."""
        fields: dict[str, Any] = {"box": list(self.box), "score": self.score, "area": self.area}
        if self.stability is not None and self.point is not None and self.crop is not None:
            fields |= {
                "stability": self.stability,
                "point": list(self.point),
                "crop": list(self.crop),
            }
        if rle:
            width, height = self.size
            fields["rle"] = shapes.to_coco_rle(
                shapes.encode_rle(self.box_pixels, self.box[:2], (height, width)), height, width
            )
        return fields


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
        """Wrap a loaded model.

        Args:
            model: the model, on its device.
            vision: its ops.
            mean: per RGB channel, of pixels 0 … 255.
            std: per RGB channel.
            cache_bytes: limit of the cache of image embeddings.
        """
        self.model, self.vision = model, vision
        weight = model.prompt_encoder.no_mask_embed.weight  # type: ignore[union-attr]
        assert isinstance(weight, torch.Tensor)
        self.device = weight.device
        self.image_size = int(model.config.encoder.image)  # type: ignore[union-attr, arg-type]
        self.mask_size = 4 * int(model.config.encoder.tokens_per_side)  # type: ignore[union-attr, arg-type]  # of masks' logits
        self.dtype = next(b for b in model.image_encoder.buffers() if b.is_floating_point()).dtype  # type: ignore[union-attr]
        self._mean = torch.tensor(mean, device=self.device).view(3, 1, 1)
        self._std = torch.tensor(std, device=self.device).view(3, 1, 1)
        self.embedding_cache: ImageEmbeddingCache[str, ImageEmbedding] = ImageEmbeddingCache(
            cache_bytes
        )
        self.cuda_graph_cache = CudaGraphCache(enabled=self.device.type == "cuda")
        self.num_embedded = 0  # pictures embedded so far

    def set_heartbeat(self, heartbeat: Callable[[], None]) -> None:
        """Call ``heartbeat`` after every op from now on, to show progress on large pictures."""
        self.vision = replace(self.vision, ops=with_heartbeat(self.vision.ops, heartbeat))

    def embed_image(self, image: Any) -> ImageEmbedding:
        """Return the picture's embedding, from the cache if present; see ``embed_images``."""
        return self.embed_images([image])[0]

    @torch.inference_mode()
    def embed_images(
        self, images: Sequence[Any], salts: Sequence[str] = ()
    ) -> list[ImageEmbedding]:
        """Embed several pictures in one batch.

        Args:
            images: as for ``to_rgb_image``.
            salts: one per picture; pictures of different salts share no cache entries.

        Raises:
            RequestError: if an image is invalid or overflows the engine's float16.
        """
        pictures = [to_rgb_image(image) for image in images]
        salts = salts or [""] * len(pictures)
        keys = [image_digest(p, salt) for p, salt in zip(pictures, salts, strict=True)]
        embeddings = {
            key: embedding
            for key in keys
            if (embedding := self.embedding_cache.get(key)) is not None
        }
        new = [i for i, key in enumerate(keys) if key not in embeddings and key not in keys[:i]]
        if new:
            sizes = [fit_longest_side(pictures[i].size, self.image_size) for i in new]
            batch = torch.zeros(
                len(new), 3, self.image_size, self.image_size, device=self.device, dtype=self.dtype
            )
            for row, (i, size) in enumerate(zip(new, sizes, strict=True)):
                part = resize_to_tensor(pictures[i], size).to(self.device).float()
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
                embeddings[keys[i]] = embedding
                self.embedding_cache.put(keys[i], embedding)
        return [embeddings[key] for key in keys]

    def run_encoder(self, batch: torch.Tensor) -> list[torch.Tensor]:
        """Encode normalised, padded pictures [B, 3, S, S]: B embeddings [1, 256, G, G] float32."""

        def embed(part: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.model.encode_image(part, self.vision).float(),)  # type: ignore[operator]

        embeddings: list[torch.Tensor] = []
        while (start := len(embeddings)) < len(batch):
            size = next(n for n in _ENCODER_BATCH_SIZES if n <= len(batch) - start)
            with self._cpu_thread_scope():
                (out,) = self.cuda_graph_cache("embed", embed, batch[start : start + size])
            embeddings += [row.clone() for row in out.split(1)]
        return embeddings

    @torch.inference_mode()
    def decode(
        self, embedding: ImageEmbedding, prompts: Sequence[Prompt]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode prompts on one picture.

        Returns:
            Logits [N, 4, 4·G, 4·G] and predicted IoUs [N, 4], float32 on the device: the single
            mask, then the three of multimask output.
        """
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        order: list[int] = []
        for group, few in self._split_into_batches(prompts):
            part = [prompts[i] for i in group]
            points, labels = make_prompt_tensors(part, embedding.size, embedding.encoder_size)
            inputs = [embedding.embedding, points.to(self.device), labels.to(self.device)]
            if part[0].mask is not None:
                inputs.append(
                    torch.stack([p.mask for p in part if p.mask is not None])[:, None].to(
                        self.device
                    )
                )
            with self._cpu_thread_scope(few):
                decoded = (
                    self.cuda_graph_cache("decode", self._run_decoder, *inputs)
                    if few
                    else self._run_decoder(*inputs)
                )
            results.append((decoded[0].clone(), decoded[1].clone()))
            order += group
        if len(results) == 1:
            return results[0]
        inverse = torch.tensor(order, device=self.device).argsort()
        logits = torch.cat([each for each, _ in results])
        ious = torch.cat([each for _, each in results])
        return logits[inverse], ious[inverse]

    def _split_into_batches(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], bool]]:
        """Split prompts into batches of one shape, on a CPU into small ones.

        A prompt's keys are [4096, 256] float32: those of 64 prompts are 268 MB, which malloc maps
        and unmaps for each op. Half of the time was spent in page faults.

        Returns:
            For each batch the indices of its prompts, and whether the group has few prompts.
        """
        groups = [
            (list(group), len(group) <= _MAX_GRAPHED_PROMPTS)
            for group in group_prompts_by_shape(prompts)
        ]
        if self.device.type != "cpu":
            return groups
        return [
            (group[i : i + _CPU_DECODE_CHUNK], few)
            for group, few in groups
            for i in range(0, len(group), _CPU_DECODE_CHUNK)
        ]

    def _cpu_thread_scope(self, few: bool = False) -> contextlib.AbstractContextManager[None]:
        """Run torch on one thread of a CPU with few prompts (small loops) or few threads.

        On two shared cores MobileSAM takes 1.4 s for an uncached picture this way, and 3.0 s with
        two torch threads.
        """
        single = self.device.type == "cpu" and (
            few or torch.get_num_threads() <= _MAX_SINGLE_THREAD_CPUS
        )
        return single_thread_torch() if single else contextlib.nullcontext()

    def _run_decoder(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Decode masks; inputs: embedding, points, labels, and optionally masks."""
        mask = inputs[3] if len(inputs) > 3 else None
        return self.model.decode_masks(*inputs[:3], mask, self.vision)  # type: ignore[operator]

    def predict(
        self, embedding: ImageEmbedding, prompt: Prompt, multimask: bool = True
    ) -> list[Mask]:
        """Predict the masks of one prompt, best first.

        Args:
            embedding: the picture's embedding.
            prompt: points, box or mask.
            multimask: three masks; if False one, for an unambiguous prompt.
        """
        return self.predict_all(embedding, [prompt], multimask)[0]

    @torch.inference_mode()
    def predict_all(
        self, embedding: ImageEmbedding, prompts: Sequence[Prompt], multimask: bool = True
    ) -> list[list[Mask]]:
        """Predict the masks of several prompts on one picture; see ``predict``.

        Raises:
            RequestError: if a prompt's mask has another shape than the model's.
        """
        for prompt in prompts:
            check_prompt_mask_shape(prompt, self.mask_size)
        if not prompts:
            return []
        logits, scores = self.decode(embedding, prompts)
        selected = slice(1, None) if multimask else slice(0, 1)
        logits, scores = logits[:, selected], scores[:, selected]
        masks, numbers = [], []
        for low, score in zip(logits, scores, strict=True):
            big, boxes, areas, _ = self.vision.ops.upsample_masks(
                UpsampleMasksInputs(low, self.image_size, embedding.encoder_size, embedding.size)
            )
            masks.append(copy_to_pinned_host_async(pack_mask_bits(big)))
            numbers.append(
                torch.cat((score[:, None].double(), boxes.double(), areas[:, None].double()), 1)
            )
        host_logits, results = copy_to_pinned_host_async(logits), torch.stack(numbers).tolist()
        predicted = []
        for big, low, rows in zip(masks, host_logits, results, strict=True):
            pixel_boxes = [_int_box(row[1:5]) for row in rows]
            each = [
                Mask(PackedMask.crop(big[i], box), embedding.size, row[0], box, int(row[5]), low[i])
                for i, (row, box) in enumerate(zip(rows, pixel_boxes, strict=True))
            ]
            predicted.append(sorted(each, key=lambda mask: -mask.score))
        return predicted

    @torch.inference_mode()
    def generate_masks(
        self, image: Any, options: AutomaticMaskOptions | None = None,
        on_progress: Progress | None = None,
    ) -> list[Mask]:  # fmt: skip
        """Segment everything in a picture with a grid of points; best predicted IoU first.

        Args:
            image: as for ``embed_image``; or its result, if options.crop_n_layers is 0.
            options: options of the generator.
            on_progress: called with (points done, points in total) before each batch of points and
                at the end; an exception that it raises stops the work.

        Raises:
            RequestError: if the image is invalid, or crops are requested of an embedding.
        """
        options = options or AutomaticMaskOptions()
        picture = image if isinstance(image, ImageEmbedding) else to_rgb_image(image)
        if isinstance(image, ImageEmbedding) and options.crop_n_layers:
            raise RequestError(
                "crops need the picture: with crop_n_layers pass the image, not its embedding"
            )
        crops = make_crops(picture.size, options)
        points = [len(point_grid(crop, options)) for crop in crops]
        masks: list[Mask] = []
        for number, crop in enumerate(crops):
            before = sum(points[:number])

            def report(done: int, before: int = before) -> None:
                if on_progress is not None:
                    on_progress("points", before + done, sum(points))

            masks += self._generate_crop_masks(picture, crop, options, report)
        if on_progress is not None:
            on_progress("points", sum(points), sum(points))
        if len(crops) > 1 and masks:
            # masks of smaller crops are finer: they win
            areas = torch.tensor(
                [float((c[2] - c[0]) * (c[3] - c[1])) for c in (m.crop for m in masks) if c]
            )
            boxes = torch.tensor([m.box for m in masks]).float()
            masks = [
                masks[i] for i in shapes.nms(boxes, 1 / areas, options.crop_nms_thresh).tolist()
            ]
        if options.min_mask_region_area and masks:
            masks = _clean_and_deduplicate_masks(masks, options)
        return sorted(masks, key=lambda m: -m.score)

    def _generate_crop_masks(
        self,
        picture: Any,
        crop: Crop,
        options: AutomaticMaskOptions,
        on_progress: Callable[[int], None],
    ) -> list[Mask]:
        """Segment one crop; the masks are in the whole picture's pixels."""
        embedding = (
            picture
            if isinstance(picture, ImageEmbedding)
            else self.embed_image(picture if crop.layer == 0 else picture.crop(crop.box))
        )
        grid = point_grid(crop, options)
        kept_logits = []
        kept_ious = []
        kept_stability = []
        kept_boxes = []
        kept_points = []
        for start in range(0, len(grid), options.points_per_batch):
            on_progress(start)
            batch = grid[start : start + options.points_per_batch]
            prompts = [Prompt(((float(x), float(y)),), (1,)) for x, y in batch]
            logits, ious = self.decode(embedding, prompts)
            # masks with a low predicted IoU are not upsampled
            good = (ious[:, 1:] > options.pred_iou_thresh).flatten().nonzero()[:, 0]
            for selected in good.split(self._max_masks_per_upsampling(embedding.size)):
                candidates = logits[:, 1:].flatten(0, 1)[selected]
                inputs = UpsampleMasksInputs(
                    candidates,
                    self.image_size,
                    embedding.encoder_size,
                    embedding.size,
                    options.stability_score_offset,
                    pixels=False,
                )
                _, boxes, _, stability = self.vision.ops.upsample_masks(inputs)
                keep = stability >= options.stability_score_thresh
                keep = (keep & ~touches_crop_edge(boxes, crop, picture.size)).nonzero()[:, 0]
                selected = selected[keep]
                kept_logits.append(candidates[keep])
                kept_ious.append(ious[:, 1:].flatten()[selected])
                kept_stability.append(stability[keep])
                kept_boxes.append(boxes[keep])
                kept_points.append(batch[(selected // 3).cpu()])
        if not kept_logits or not sum(map(len, kept_logits)):
            return []
        return self._build_unduplicated_masks(
            embedding, crop, picture.size, options,
            [logits for chunk in kept_logits for logits in chunk],
            (torch.cat(kept_ious), torch.cat(kept_stability), torch.cat(kept_boxes)),
            torch.cat(kept_points),
        )  # fmt: skip

    def _max_masks_per_upsampling(self, size: tuple[int, int]) -> int:
        """Limit of masks per upsampling; a kernel upsamples without storing the large masks."""
        fused = self.vision.ops.backends["upsample_masks"] != "torch"
        return 1 << 20 if fused else max(1, _MAX_PIXELS_PER_UPSAMPLING // (size[0] * size[1]))

    def _build_unduplicated_masks(
        self, embedding: ImageEmbedding, crop: Crop, size: tuple[int, int],
        options: AutomaticMaskOptions,
        logits: Sequence[torch.Tensor],
        candidates: tuple[torch.Tensor, ...], points: torch.Tensor,
    ) -> list[Mask]:  # fmt: skip
        """Drop a crop's duplicate masks and move the others to their position in the picture.

        Args:
            embedding: of the crop.
            crop: the crop.
            size: (width, height) of the picture.
            options: options of the generator.
            logits: N masks [4·G, 4·G]. They are gathered a few at a time, since a copy of all can
                take 800 MB.
            candidates: predicted IoUs [N], stability scores [N] and boxes [N, 4].
            points: [N, 2] on the CPU.
        """
        scores, steady, boxes = candidates
        keep = shapes.nms(boxes, scores, options.box_nms_thresh)
        left, top = crop.box[:2]
        kept = keep.tolist()
        places = (points[keep.cpu()] + torch.tensor([left, top])).tolist()
        numbers = torch.cat(
            [x.double() for x in (scores[keep, None], steady[keep, None], boxes[keep])], 1
        ).tolist()
        masks: list[Mask] = []
        for rows, area in self._upsample_in_pieces(embedding, [logits[row] for row in kept]):
            (score, stable, *ends), at = numbers[len(masks)], places[len(masks)]
            x0, y0, x1, y1 = box = _int_box(ends)
            moved = (x0 + left, y0 + top, x1 + left, y1 + top)
            extra: dict[str, Any] = {
                "stability": stable,
                "point": (at[0], at[1]),
                "crop": crop.box,
            }
            masks.append(Mask(PackedMask.crop(rows, box), size, score, moved, area, **extra))
        return masks

    def _upsample_in_pieces(
        self, embedding: ImageEmbedding, logits: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Upsample masks [4·G, 4·G], a few at a time.

        The device works on the next piece while the caller has the masks of one.

        Returns:
            Each mask's packed pixels [height, ceil(width / 8)] on the CPU and its area.
        """
        step = max(1, _MAX_PIXELS_PER_UPSAMPLING // (embedding.size[0] * embedding.size[1]))
        pending: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None] | None = None
        for start in range(0, len(logits), step):
            big, _, areas, _ = self.vision.ops.upsample_masks(
                UpsampleMasksInputs(
                    torch.stack(logits[start : start + step]),
                    self.image_size,
                    embedding.encoder_size,
                    embedding.size,
                )
            )
            copies = (
                copy_to_pinned_host_async(pack_mask_bits(big)),
                copy_to_pinned_host_async(areas),
            )
            started = *copies, _record_event(big.device)
            if pending is not None:
                yield from _wait_for_piece(*pending)
            pending = started
        if pending is not None:
            yield from _wait_for_piece(*pending)


def _clean_and_deduplicate_masks(masks: list[Mask], options: AutomaticMaskOptions) -> list[Mask]:
    """Remove small holes and islands, then duplicates; of these an unchanged mask is kept."""
    cleaned, unchanged = [], []
    for mask in masks:
        new_pixels, changed = remove_small_regions(
            mask.pixels.numpy(), options.min_mask_region_area
        )
        if changed:
            pixels = torch.from_numpy(new_pixels)
            box = _int_box(masks_to_boxes(pixels).tolist())
            packed = PackedMask.crop(pack_mask_bits(pixels), box)
            mask = replace(mask, packed=packed, box=box, area=int(pixels.sum()))
        cleaned.append(mask)
        unchanged.append(float(not changed))
    boxes = torch.tensor([mask.box for mask in cleaned]).float()
    threshold = max(options.box_nms_thresh, options.crop_nms_thresh)
    return [cleaned[i] for i in shapes.nms(boxes, torch.tensor(unchanged), threshold).tolist()]


def copy_to_pinned_host_async(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU asynchronously; synchronize the stream before reading it.

    The copy goes to pinned memory, which torch caches: to pageable memory it takes ten times as
    long. A CPU tensor is returned unchanged.
    """
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind what the device has to do so far; None for a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # not that of the current device
    return event


def _wait_for_piece(
    rows: torch.Tensor, areas: torch.Tensor, ready: torch.cuda.Event | None
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield each mask's packed pixels and area once their copies are on the CPU."""
    if ready is not None:
        ready.synchronize()
    yield from zip(rows, areas.tolist(), strict=True)


def _int_box(numbers: Sequence[float]) -> tuple[int, int, int, int]:
    x0, y0, x1, y1 = (int(n) for n in numbers)
    return x0, y0, x1, y1
