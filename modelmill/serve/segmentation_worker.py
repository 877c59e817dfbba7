"""The worker of a segmentation engine: images arrive over the channel, masks leave over it.

It runs one job at a time. Segmenting all objects takes long, so other jobs run between two batches
of its points, and an aborted one is stopped there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from modelmill.core import malloc
from modelmill.core.config import RunConfig, config_from_dict
from modelmill.core.errors import RequestError
from modelmill.core.types import EngineStats
from modelmill.loader.device import resolve_device, set_cpu_threads
from modelmill.serve.segmentation_messages import (
    SEGMENTATION_ENGINE_TYPE,
    SegmentationFailure,
    SegmentationJob,
    SegmentationResult,
)
from modelmill.serve.worker_messages import (
    AbortRequest,
    EngineReady,
    GetStats,
    Heartbeat,
    OpenEngine,
    Ping,
    StatsReply,
)
from modelmill.vision.automatic_mask_options import AutomaticMaskOptions
from modelmill.vision.draw import mask_prompt_logits, mask_to_png
from modelmill.vision.image import BLACK_BACKGROUND, open_image
from modelmill.vision.image_embedding import ImageEmbedding
from modelmill.vision.prompts import Prompt, check_prompt_inside_image, make_prompt
from modelmill.vision.sam_loader import open_sam_model
from modelmill.vision.sam_model import Mask, SamModel

MAX_MASK_PIXELS = 1 << 28
"""Limit of pixels in all masks of one response."""
MAX_AUTOMATIC_MASK_IMAGE_PIXELS = 1 << 22
"""Limit of pixels to segment all objects: some hundred masks of that size are in memory."""
MAX_EMBED_BATCH = 8
"""Most images embedded together, on a GPU."""


class _UnknownImageId(Exception):
    """No embedding of that digest is cached."""


class _RequestAborted(Exception):
    """The request was aborted."""


def load_sam(open_engine: OpenEngine, artifact: Any) -> SamModel:
    """Load the engine's model on its device.

    It runs one image, so that all memory is allocated before other engines measure what is free.
    """
    config = config_from_dict(RunConfig, open_engine.run, "run")
    device = resolve_device(config.device)
    if device == "cpu":
        set_cpu_threads(config.threads)
    model = open_sam_model(artifact, device, config.kernels, open_engine.image_cache_bytes)
    if open_engine.warm_up:
        model.predict(
            model.embed_image(np.zeros((64, 64, 3), np.uint8)), Prompt(((1.0, 1.0),), (1,))
        )
        model.embedding_cache.clear()
    return model


def make_ready_message(sam: SamModel, path: str) -> EngineReady:
    """Describe the open model to the server."""
    return EngineReady(path, str(sam.device), 0, 0, 0, 0, 0, 1, SEGMENTATION_ENGINE_TYPE)


class SegmentationWorker:
    """Runs jobs until its server is gone."""

    def __init__(self, sam: SamModel, channel: Any, inbox: Any, max_pixels: int) -> None:
        """Prepare the loop.

        Args:
            sam: the model.
            channel: of the worker.
            inbox: of the worker.
            max_pixels: limit of one image.
        """
        self.sam = sam
        self._channel = channel
        self._inbox = inbox.messages
        self._max_pixels = max_pixels
        self._waiting_jobs: deque[SegmentationJob] = deque()
        self._current_job: SegmentationJob | None = None
        self._num_answered = 0
        # digests embedded in a batch, whose jobs have not run yet
        self._batch_embedded: set[str] = set()

    def run(self) -> None:
        """Run jobs until the server is gone."""
        try:
            while self._process_messages(wait=True):
                while self._waiting_jobs:
                    self._embed_waiting_images()
                    self._process_job(self._waiting_jobs.popleft())
                    self._process_messages(wait=False)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _process_messages(self, wait: bool) -> bool:
        """Process pending messages; False once the server is gone."""
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is None:
                return False
            if isinstance(message, SegmentationJob):
                self._waiting_jobs.append(message)
            elif isinstance(message, AbortRequest):
                self._abort_job(message.id)
            elif isinstance(message, GetStats):
                running = int(self._current_job is not None)
                stats = EngineStats(
                    running,
                    len(self._waiting_jobs),
                    0,
                    0,
                    len(self.sam.embedding_cache),
                    self._num_answered,
                    0,
                    0,
                    0,
                    0,
                )
                self._channel.send(StatsReply(message.number, asdict(stats)))
            elif isinstance(message, Ping):
                self._channel.send(Heartbeat())
        return True

    def _abort_job(self, id: str) -> None:
        self._waiting_jobs = deque(job for job in self._waiting_jobs if job.id != id)
        if self._current_job is not None and self._current_job.id == id:
            self._current_job = None

    def _embed_waiting_images(self) -> None:
        """On a GPU, embed the images of several waiting jobs together, into the cache."""
        jobs = [job for job in list(self._waiting_jobs)[:MAX_EMBED_BATCH] if job.image]
        if len(jobs) < 2 or self.sam.device.type == "cpu":
            return
        images, salts = [], []
        for job in jobs:
            try:
                images.append(open_image(job.image, max_pixels=self._max_pixels))
            except RequestError:
                continue  # reported when its job runs
            salts.append(job.cache_salt)
        try:
            before = self.sam.num_embedded
            embeddings = self.sam.embed_images(images, salts)
            self._batch_embedded = (
                {each.digest for each in embeddings} if self.sam.num_embedded > before else set()
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()

    def _process_job(self, job: SegmentationJob) -> None:
        try:
            result: SegmentationResult | SegmentationFailure = self._segment_image(job)
        except _RequestAborted:
            return
        except _UnknownImageId:
            result = SegmentationFailure(
                job.id,
                "unknown",
                "the image of this image_id is not cached; send the image",
                "image_id",
            )
        except _InvalidField as error:
            result = SegmentationFailure(job.id, "invalid", str(error), error.param)
        except RequestError as error:
            result = SegmentationFailure(job.id, "invalid", str(error))
        except (torch.OutOfMemoryError, MemoryError):
            if self.sam.device.type == "cuda":
                torch.cuda.empty_cache()
            result = SegmentationFailure(
                job.id,
                "memory",
                "the engine has no memory left for this request; send a smaller image",
            )
        self._num_answered += 1
        self._channel.send(result)

    def _segment_image(self, job: SegmentationJob) -> SegmentationResult:
        started_at = time.perf_counter()
        embedding, cached = self._embed_image(job)
        embedded_at = time.perf_counter()
        if job.automatic_masks is not None:
            masks = [(0, mask) for mask in self._generate_automatic_masks(job, embedding)]
        else:
            masks = self._predict_prompted_masks(job, embedding)
        predicted_at = time.perf_counter()
        mask_dicts, blobs = _encode_masks(masks, job)
        image = {
            "id": embedding.digest,
            "width": embedding.size[0],
            "height": embedding.size[1],
            "cached": cached,
        }
        times = {
            "embedding": embedded_at - started_at,
            "masks": predicted_at - embedded_at,
            "encoding": time.perf_counter() - predicted_at,
        }
        milliseconds = {name: round(1000 * seconds, 2) for name, seconds in times.items()}
        return SegmentationResult(
            job.id, {"image": image, "masks": mask_dicts, "milliseconds": milliseconds}, blobs
        )

    def _embed_image(self, job: SegmentationJob) -> tuple[ImageEmbedding, bool]:
        """Return the image's embedding, and whether it was cached.

        Raises:
            _UnknownImageId: the image_id is not cached for this salt.
            _InvalidField: the image is invalid.
        """
        if job.image_digest:
            embedding = self.sam.embedding_cache.get(job.image_digest)
            # an embedding of another salt must not be used, even if the id is known
            if embedding is None or embedding.salt != job.cache_salt:
                raise _UnknownImageId
            return embedding, True
        try:
            image = open_image(job.image, max_pixels=self._max_pixels)
        except RequestError as error:
            raise _InvalidField(str(error), "image") from None
        pixels = image.width * image.height
        if job.automatic_masks is not None and pixels > MAX_AUTOMATIC_MASK_IMAGE_PIXELS:
            raise _image_too_large_error(pixels)
        before = self.sam.num_embedded
        embedding = self.sam.embed_images([image], [job.cache_salt])[0]
        cached = self.sam.num_embedded == before and embedding.digest not in self._batch_embedded
        self._batch_embedded.discard(embedding.digest)
        return embedding, cached

    def _predict_prompted_masks(
        self, job: SegmentationJob, image_embedding: ImageEmbedding
    ) -> list[tuple[int, Mask]]:
        """Masks, each with the index of its prompt."""
        count = len(job.prompts) * (3 if job.multimask else 1)
        width, height = image_embedding.size
        if count * width * height > MAX_MASK_PIXELS:
            raise RequestError(
                f"{count} masks of {width} × {height} pixels are too many for one response; "
                "send fewer prompts, a smaller image, or multimask: false"
            )
        prompts = [self._make_prompt(each, job, image_embedding) for each in job.prompts]
        if not prompts:
            return []
        masks_by_prompt = self.sam.predict_all(image_embedding, prompts, job.multimask)
        return [(index, mask) for index, masks in enumerate(masks_by_prompt) for mask in masks]

    def _make_prompt(
        self, fields: Mapping[str, Any], job: SegmentationJob, image_embedding: ImageEmbedding
    ) -> Prompt:
        mask = (
            None
            if fields["mask"] is None
            else self._decode_mask_prompt(job.masks[fields["mask"]], image_embedding)
        )
        prompt = make_prompt(fields["points"], fields["labels"], fields["box"], mask)
        check_prompt_inside_image(prompt, image_embedding.size)
        return prompt

    def _decode_mask_prompt(self, blob: bytes, image_embedding: ImageEmbedding) -> torch.Tensor:
        """Return a prompt's logits, given as logits or as an image.

        Raises:
            _InvalidField: the mask is invalid.
        """
        side = image_embedding.embedding.shape[-1] * 4
        if len(blob) == side * side * 4:
            logits = torch.frombuffer(bytearray(blob), dtype=torch.float32).view(side, side)
            if bool(torch.isfinite(logits).all()):
                return logits
            raise _InvalidField("the mask's logits must be finite", "mask")
        try:
            image = open_image(blob, "the mask", self._max_pixels, BLACK_BACKGROUND)
        except RequestError as error:
            raise _InvalidField(str(error), "mask") from None
        return mask_prompt_logits(
            image, image_embedding.size, image_embedding.encoder_size, side, self.sam.image_size
        )

    def _generate_automatic_masks(
        self, job: SegmentationJob, image_embedding: ImageEmbedding
    ) -> list[Mask]:
        pixels = image_embedding.size[0] * image_embedding.size[1]
        if pixels > MAX_AUTOMATIC_MASK_IMAGE_PIXELS:
            raise _image_too_large_error(pixels)
        self._current_job = job

        def on_progress(*_: str | int) -> None:
            if not self._process_messages(wait=False):
                raise BrokenPipeError
            if self._current_job is not job:
                raise _RequestAborted
            quick_jobs = [each for each in self._waiting_jobs if each.automatic_masks is None]
            self._waiting_jobs = deque(
                each for each in self._waiting_jobs if each.automatic_masks is not None
            )
            for each in quick_jobs:
                self._process_job(each)

        try:
            return self.sam.generate_masks(
                image_embedding,
                config_from_dict(AutomaticMaskOptions, job.automatic_masks or {}, "everything"),
                on_progress,
            )
        finally:
            self._current_job = None
            malloc.trim_heap()


class _InvalidField(RequestError):
    """A field of the request is invalid."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _image_too_large_error(pixels: int) -> RequestError:
    return RequestError(
        f"everything takes images of up to {MAX_AUTOMATIC_MASK_IMAGE_PIXELS} pixels, this one has "
        f"{pixels}; make it smaller"
    )


def _encode_masks(
    masks: list[tuple[int, Mask]], job: SegmentationJob
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Convert masks for JSON; return them and their blobs."""
    mask_dicts: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for prompt_index, mask in masks:
        mask_dict = {
            "prompt": prompt_index,
            **replace(mask, score=round(mask.score, 6)).to_dict(rle=job.mask_format == "rle"),
        }
        if job.mask_format == "png":
            mask_dict["png"] = len(blobs)
            blobs.append(mask_to_png(mask))
        if job.return_logits and mask.logits is not None:
            mask_dict["logits"] = len(blobs)
            blobs.append(mask.logits.contiguous().numpy().astype("<f4").tobytes())
        mask_dicts.append(mask_dict)
    return mask_dicts, blobs
