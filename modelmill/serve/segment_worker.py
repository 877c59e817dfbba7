"""The worker's side of a segmentation engine: pictures come in over the channel, masks go out over
it.

One thing is done at a time. While all of a picture is segmented, which takes long, what came
meanwhile is answered between two batches of points, and who left is no longer worked for.
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
from modelmill.core.config import RunConfig, from_dict
from modelmill.core.errors import RequestError
from modelmill.runtime.device import pick_device, use_threads
from modelmill.runtime.stats import Stats
from modelmill.serve.segment_messages import SEGMENTATION, SegmentFailure, SegmentJob, SegmentResult
from modelmill.serve.worker_messages import (
    AbortRequest,
    EngineReady,
    GetStats,
    Heartbeat,
    OpenEngine,
    Ping,
    StatsReply,
)
from modelmill.vision.automatic_mask_generator import AutomaticMaskOptions
from modelmill.vision.draw import mask_prompt_logits, mask_to_png
from modelmill.vision.embedding_cache import ImageEmbedding
from modelmill.vision.image import BLACK, open_image
from modelmill.vision.open_model import open_sam_model
from modelmill.vision.prompts import Prompt, check_inside, make_prompt
from modelmill.vision.sam_model import Mask, SamModel

MAX_MASK_PIXELS = 1 << 28
"""Pixels of all masks of one answer."""
MAX_AUTOMATIC_MASK_PIXELS = 1 << 22
"""Pixels of a picture of which everything is segmented: some hundred masks of it are held."""
MAX_EMBED_BATCH = 8
"""Most pictures embedded together, on a GPU."""


class _UnknownImageId(Exception):
    """No picture of that digest is kept."""


class _RequestAborted(Exception):
    """Nobody waits for this answer any more."""


def load_sam(open_engine: OpenEngine, artifact: Any) -> SamModel:
    """The engine's model on its device, having seen one picture: what it needs is taken before
    others measure.
    """
    config = from_dict(RunConfig, open_engine.run, "run")
    device = pick_device(config.device)
    if device == "cpu":
        use_threads(config.threads)
    eye = open_sam_model(artifact, device, config.kernels, open_engine.image_cache_bytes)
    if open_engine.warm_up:
        eye.predict(eye.embed_image(np.zeros((64, 64, 3), np.uint8)), Prompt(((1.0, 1.0),), (1,)))
        eye.embedding_cache.clear()
    return eye


def ready_message(sam: SamModel, path: str) -> EngineReady:
    """What the server has to know of it."""
    return EngineReady(path, str(sam.device), 0, 0, 0, 0, 0, 1, SEGMENTATION)


class SegmentWorker:
    """Answers for as long as its server is there."""

    def __init__(self, sam: SamModel, channel: Any, inbox: Any, max_pixels: int) -> None:
        """channel, inbox: the worker's. max_pixels: of one image."""
        self.sam, self._channel, self._inbox, self._max_pixels = (
            sam,
            channel,
            inbox.messages,
            max_pixels,
        )
        self._waiting_jobs: deque[SegmentJob] = deque()
        self._current_job: SegmentJob | None = None
        self._num_answered = 0
        # digests embedded in a batch, whose turn has not come
        self._batch_embedded: set[str] = set()

    def run(self) -> None:
        """Until the server is gone."""
        try:
            while self._receive(wait=True):
                while self._waiting_jobs:
                    self._embed_batch()
                    self._process(self._waiting_jobs.popleft())
                    self._receive(wait=False)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _receive(self, wait: bool) -> bool:
        """Take in what has come; False once the server is gone."""
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is None:
                return False
            if isinstance(message, SegmentJob):
                self._waiting_jobs.append(message)
            elif isinstance(message, AbortRequest):
                self._drop(message.id)
            elif isinstance(message, GetStats):
                running = int(self._current_job is not None)
                told = Stats(
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
                self._channel.send(StatsReply(message.number, asdict(told)))
            elif isinstance(message, Ping):
                self._channel.send(Heartbeat())
        return True

    def _drop(self, id: str) -> None:
        self._waiting_jobs = deque(look for look in self._waiting_jobs if look.id != id)
        if self._current_job is not None and self._current_job.id == id:
            self._current_job = None

    def _embed_batch(self) -> None:
        """On a GPU several pictures that wait are embedded together; the answers then find them in
        the cache.
        """
        new = [look for look in list(self._waiting_jobs)[:MAX_EMBED_BATCH] if look.image]
        if len(new) < 2 or self.sam.device.type == "cpu":
            return
        pictures, salts = [], []
        for look in new:
            try:
                pictures.append(open_image(look.image, max_pixels=self._max_pixels))
            except RequestError:
                continue  # told when its turn comes
            salts.append(look.cache_salt)
        try:
            before = self.sam.num_embedded
            seen = self.sam.embed_images(pictures, salts)
            self._batch_embedded = (
                {each.digest for each in seen} if self.sam.num_embedded > before else set()
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()

    def _process(self, job: SegmentJob) -> None:
        try:
            found: SegmentResult | SegmentFailure = self._segment(job)
        except _RequestAborted:
            return
        except _UnknownImageId:
            found = SegmentFailure(
                job.id,
                "unknown",
                "no picture of this image_id is kept here; send the image",
                "image_id",
            )
        except _InvalidField as wrong:
            found = SegmentFailure(job.id, "invalid", str(wrong), wrong.param)
        except RequestError as error:
            found = SegmentFailure(job.id, "invalid", str(error))
        except (torch.OutOfMemoryError, MemoryError):
            if self.sam.device.type == "cuda":
                torch.cuda.empty_cache()
            found = SegmentFailure(
                job.id,
                "memory",
                "the engine has no memory left for this request; send a smaller image",
            )
        self._num_answered += 1
        self._channel.send(found)

    def _segment(self, job: SegmentJob) -> SegmentResult:
        began = time.perf_counter()
        seen, cached = self._embed_image(job)
        saw = time.perf_counter()
        if job.automatic_masks is not None:
            masks = [(0, mask) for mask in self._automatic_masks(job, seen)]
        else:
            masks = self._prompted_masks(job, seen)
        asked = time.perf_counter()
        told, blobs = _encode_masks(masks, job)
        image = {"id": seen.digest, "width": seen.size[0], "height": seen.size[1], "cached": cached}
        times = {
            "embedding": saw - began,
            "masks": asked - saw,
            "encoding": time.perf_counter() - asked,
        }
        milliseconds = {name: round(1000 * seconds, 2) for name, seconds in times.items()}
        return SegmentResult(
            job.id, {"image": image, "masks": told, "milliseconds": milliseconds}, blobs
        )

    def _embed_image(self, job: SegmentJob) -> tuple[ImageEmbedding, bool]:
        """The picture, and whether its embedding was there already.

        Raises _UnknownImageId, _InvalidField.
        """
        if job.image_digest:
            found = self.sam.embedding_cache.get(job.image_digest)
            # who knows an id is not yet who may see
            if found is None or found.salt != job.cache_salt:
                raise _UnknownImageId
            return found, True
        try:
            picture = open_image(job.image, max_pixels=self._max_pixels)
        except RequestError as error:
            raise _InvalidField(str(error), "image") from None
        pixels = picture.width * picture.height
        if job.automatic_masks is not None and pixels > MAX_AUTOMATIC_MASK_PIXELS:
            raise _too_large(pixels)
        before = self.sam.num_embedded
        seen = self.sam.embed_images([picture], [job.cache_salt])[0]
        cached = self.sam.num_embedded == before and seen.digest not in self._batch_embedded
        self._batch_embedded.discard(seen.digest)
        return seen, cached

    def _prompted_masks(
        self, job: SegmentJob, image_embedding: ImageEmbedding
    ) -> list[tuple[int, Mask]]:
        """Masks with the index of their prompt."""
        count = len(job.prompts) * (3 if job.multimask else 1)
        width, height = image_embedding.size
        if count * width * height > MAX_MASK_PIXELS:
            raise RequestError(
                f"{count} masks of {width} × {height} pixels are too much for one answer; "
                "send fewer prompts, a smaller image, or multimask: false"
            )
        prompts = [self._make_prompt(each, job, image_embedding) for each in job.prompts]
        if not prompts:
            return []
        found = self.sam.predict_all(image_embedding, prompts, job.multimask)
        return [(place, mask) for place, masks in enumerate(found) for mask in masks]

    def _make_prompt(
        self, given: Mapping[str, Any], job: SegmentJob, image_embedding: ImageEmbedding
    ) -> Prompt:
        mask = (
            None
            if given["mask"] is None
            else self._mask_prompt(job.masks[given["mask"]], image_embedding)
        )
        prompt = make_prompt(given["points"], given["labels"], given["box"], mask)
        check_inside(prompt, image_embedding.size)
        return prompt

    def _mask_prompt(self, blob: bytes, image_embedding: ImageEmbedding) -> torch.Tensor:
        """A prompt's logits, of logits as they are or of a picture. Raises _InvalidField."""
        side = image_embedding.embedding.shape[-1] * 4
        if len(blob) == side * side * 4:
            logits = torch.frombuffer(bytearray(blob), dtype=torch.float32).view(side, side)
            if bool(torch.isfinite(logits).all()):
                return logits
            raise _InvalidField("the mask's logits must be finite", "mask")
        try:
            drawn = open_image(blob, "the mask", self._max_pixels, BLACK)
        except RequestError as error:
            raise _InvalidField(str(error), "mask") from None
        return mask_prompt_logits(
            drawn, image_embedding.size, image_embedding.encoder_size, side, self.sam.image_size
        )

    def _automatic_masks(self, job: SegmentJob, image_embedding: ImageEmbedding) -> list[Mask]:
        pixels = image_embedding.size[0] * image_embedding.size[1]
        if pixels > MAX_AUTOMATIC_MASK_PIXELS:
            raise _too_large(pixels)
        self._current_job = job

        def on_progress(*_: int) -> None:
            if not self._receive(wait=False):
                raise BrokenPipeError
            if self._current_job is not job:
                raise _RequestAborted
            quick = [each for each in self._waiting_jobs if each.automatic_masks is None]
            self._waiting_jobs = deque(
                each for each in self._waiting_jobs if each.automatic_masks is not None
            )
            for each in quick:
                self._process(each)

        try:
            return self.sam.generate_masks(
                image_embedding,
                from_dict(AutomaticMaskOptions, job.automatic_masks or {}, "everything"),
                on_progress,
            )
        finally:
            self._current_job = None
            malloc.trim_heap()


class _InvalidField(RequestError):
    """A field of the request is at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _too_large(pixels: int) -> RequestError:
    return RequestError(
        f"everything is segmented in pictures of up to {MAX_AUTOMATIC_MASK_PIXELS} pixels, this "
        f"one has {pixels}; "
        "make it smaller"
    )


def _encode_masks(
    masks: list[tuple[int, Mask]], job: SegmentJob
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The masks for JSON, and their blobs."""
    told: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for place, mask in masks:
        one = {
            "prompt": place,
            **replace(mask, score=round(mask.score, 6)).to_dict(rle=job.mask_format == "rle"),
        }
        if job.mask_format == "png":
            one["png"] = len(blobs)
            blobs.append(mask_to_png(mask))
        if job.return_logits and mask.logits is not None:
            one["logits"] = len(blobs)
            blobs.append(mask.logits.contiguous().numpy().astype("<f4").tobytes())
        told.append(one)
    return told, blobs
