"""The worker's side of a segmentation engine: pictures come in over the wire, masks go out over it.

One thing is done at a time. While all of a picture is segmented, which takes long, what came meanwhile is answered
between two batches of points, and who left is no longer worked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from modelmill.core import heap
from modelmill.core.config import RunConfig, from_dict
from modelmill.core.errors import RequestError
from modelmill.runtime.device import pick_device, use_threads
from modelmill.runtime.stats import Stats
from modelmill.serve.message import Abort, Ask, Count, Heartbeat, Open, Ping, Ready
from modelmill.serve.pictures import KIND, Found, Look, Missed
from modelmill.vision.draw import as_png, as_prompt
from modelmill.vision.everything import Everything
from modelmill.vision.image import BLACK, open_image
from modelmill.vision.known import Seen
from modelmill.vision.open import open_eye
from modelmill.vision.prompts import Prompt, check_inside, make
from modelmill.vision.segment import Eye, Mask

MOST_MASK_PIXELS = 1 << 28
"""Pixels of all masks of one answer."""
MOST_EVERYTHING = 1 << 22
"""Pixels of a picture of which everything is segmented: some hundred masks of it are held."""
BATCH = 8
"""Most pictures embedded together, on a GPU."""


class _Unknown(Exception):
    """No picture of that digest is kept."""


class _Left(Exception):
    """Nobody waits for this answer any more."""


def opened(order: Open, artifact: Any) -> Eye:
    """The engine's model on its device, having seen one picture: what it needs is taken before others measure."""
    config = from_dict(RunConfig, order.run, "run")
    device = pick_device(config.device)
    if device == "cpu":
        use_threads(config.threads)
    eye = open_eye(artifact, device, config.kernels, order.image_cache)
    if order.warm:
        eye.predict(eye.see(np.zeros((64, 64, 3), np.uint8)), Prompt(((1.0, 1.0),), (1,)))
        eye.known.clear()
    return eye


def ready(eye: Eye, path: str) -> Ready:
    """What the server has to know of it."""
    return Ready(path, str(eye.device), 0, 0, 0, 0, 0, 1, KIND)


class Viewer:
    """Answers for as long as its server is there."""

    def __init__(self, eye: Eye, wire: Any, inbox: Any, most_pixels: int) -> None:
        """wire, inbox: the worker's. most_pixels: of one picture."""
        self.eye, self._wire, self._inbox, self._most_pixels = eye, wire, inbox.messages, most_pixels
        self._waiting: deque[Look] = deque()
        self._current: Look | None = None
        self._steps = 0
        self._early: set[str] = set()  # digests embedded in a batch, whose turn has not come

    def run(self) -> None:
        """Until the server is gone."""
        try:
            while self._hear(wait=True):
                while self._waiting:
                    self._batch()
                    self._answer(self._waiting.popleft())
                    self._hear(wait=False)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _hear(self, wait: bool) -> bool:
        """Take in what has come; False once the server is gone."""
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is None:
                return False
            if isinstance(message, Look):
                self._waiting.append(message)
            elif isinstance(message, Abort):
                self._forget(message.id)
            elif isinstance(message, Ask):
                running = int(self._current is not None)
                told = Stats(running, len(self._waiting), 0, 0, len(self.eye.known), self._steps, 0, 0, 0, 0)
                self._wire.send(Count(message.number, asdict(told)))
            elif isinstance(message, Ping):
                self._wire.send(Heartbeat())
        return True

    def _forget(self, id: str) -> None:
        self._waiting = deque(look for look in self._waiting if look.id != id)
        if self._current is not None and self._current.id == id:
            self._current = None

    def _batch(self) -> None:
        """On a GPU several pictures that wait are embedded together; the answers then find them in the cache."""
        new = [look for look in list(self._waiting)[:BATCH] if look.image]
        if len(new) < 2 or self.eye.device.type == "cpu":
            return
        pictures, salts = [], []
        for look in new:
            try:
                pictures.append(open_image(look.image, most=self._most_pixels))
            except RequestError:
                continue  # told when its turn comes
            salts.append(look.salt)
        try:
            before = self.eye.looks
            seen = self.eye.see_all(pictures, salts)
            self._early = {each.digest for each in seen} if self.eye.looks > before else set()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()

    def _answer(self, look: Look) -> None:
        try:
            found: Found | Missed = self._looked(look)
        except _Left:
            return
        except _Unknown:
            found = Missed(look.id, "unknown", "no picture of this image_id is kept here; send the image", "image_id")
        except _Wrong as wrong:
            found = Missed(look.id, "invalid", str(wrong), wrong.param)
        except RequestError as error:
            found = Missed(look.id, "invalid", str(error))
        except (torch.OutOfMemoryError, MemoryError):
            if self.eye.device.type == "cuda":
                torch.cuda.empty_cache()
            found = Missed(look.id, "memory", "the engine has no memory left for this request; send a smaller image")
        self._steps += 1
        self._wire.send(found)

    def _looked(self, look: Look) -> Found:
        began = time.perf_counter()
        seen, cached = self._see(look)
        saw = time.perf_counter()
        if look.everything is not None:
            masks = [(0, mask) for mask in self._everything(look, seen)]
        else:
            masks = self._prompted(look, seen)
        asked = time.perf_counter()
        told, blobs = _described(masks, look)
        image = {"id": seen.digest, "width": seen.size[0], "height": seen.size[1], "cached": cached}
        times = {"embedding": saw - began, "masks": asked - saw, "encoding": time.perf_counter() - asked}
        milliseconds = {name: round(1000 * seconds, 2) for name, seconds in times.items()}
        return Found(look.id, {"image": image, "masks": told, "milliseconds": milliseconds}, blobs)

    def _see(self, look: Look) -> tuple[Seen, bool]:
        """The picture, and whether its embedding was there already. Raises _Unknown, _Wrong."""
        if look.digest:
            found = self.eye.known.get(look.digest)
            if found is None or found.salt != look.salt:  # who knows an id is not yet who may see
                raise _Unknown
            return found, True
        try:
            picture = open_image(look.image, most=self._most_pixels)
        except RequestError as error:
            raise _Wrong(str(error), "image") from None
        pixels = picture.width * picture.height
        if look.everything is not None and pixels > MOST_EVERYTHING:
            raise _too_large(pixels)
        before = self.eye.looks
        seen = self.eye.see_all([picture], [look.salt])[0]
        cached = self.eye.looks == before and seen.digest not in self._early
        self._early.discard(seen.digest)
        return seen, cached

    def _prompted(self, look: Look, seen: Seen) -> list[tuple[int, Mask]]:
        """Masks with the index of their prompt."""
        count = len(look.prompts) * (3 if look.multimask else 1)
        if count * seen.size[0] * seen.size[1] > MOST_MASK_PIXELS:
            raise RequestError(
                f"{count} masks of {seen.size[0]} × {seen.size[1]} pixels are too much for one answer; "
                "send fewer prompts, a smaller image, or multimask: false"
            )
        prompts = [self._prompt(each, look, seen) for each in look.prompts]
        if not prompts:
            return []
        found = self.eye.predict_all(seen, prompts, look.multimask)
        return [(place, mask) for place, masks in enumerate(found) for mask in masks]

    def _prompt(self, given: Mapping[str, Any], look: Look, seen: Seen) -> Prompt:
        mask = None if given["mask"] is None else self._mask(look.masks[given["mask"]], seen)
        prompt = make(given["points"], given["labels"], given["box"], mask)
        check_inside(prompt, seen.size)
        return prompt

    def _mask(self, blob: bytes, seen: Seen) -> torch.Tensor:
        """A prompt's logits, of logits as they are or of a picture. Raises _Wrong."""
        side = seen.embedding.shape[-1] * 4
        if len(blob) == side * side * 4:
            logits = torch.frombuffer(bytearray(blob), dtype=torch.float32).view(side, side)
            if bool(torch.isfinite(logits).all()):
                return logits
            raise _Wrong("the mask's logits must be finite", "mask")
        try:
            drawn = open_image(blob, "the mask", self._most_pixels, BLACK)
        except RequestError as error:
            raise _Wrong(str(error), "mask") from None
        return as_prompt(drawn, seen.size, seen.fitted, side, self.eye.image)

    def _everything(self, look: Look, seen: Seen) -> list[Mask]:
        pixels = seen.size[0] * seen.size[1]
        if pixels > MOST_EVERYTHING:
            raise _too_large(pixels)
        self._current = look

        def told(*_: int) -> None:
            if not self._hear(wait=False):
                raise BrokenPipeError
            if self._current is not look:
                raise _Left
            quick = [each for each in self._waiting if each.everything is None]
            self._waiting = deque(each for each in self._waiting if each.everything is not None)
            for each in quick:
                self._answer(each)

        try:
            return self.eye.everything(seen, from_dict(Everything, look.everything or {}, "everything"), told)
        finally:
            self._current = None
            heap.give_back()


class _Wrong(RequestError):
    """A field of the request is at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _too_large(pixels: int) -> RequestError:
    return RequestError(
        f"everything is segmented in pictures of up to {MOST_EVERYTHING} pixels, this one has {pixels}; make it smaller"
    )


def _described(masks: list[tuple[int, Mask]], look: Look) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The masks for JSON, and their blobs."""
    told: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for place, mask in masks:
        one = {"prompt": place, **replace(mask, score=round(mask.score, 6)).to_dict(rle=look.wants == "rle")}
        if look.wants == "png":
            one["png"] = len(blobs)
            blobs.append(as_png(mask))
        if look.logits and mask.logits is not None:
            one["logits"] = len(blobs)
            blobs.append(mask.logits.contiguous().numpy().astype("<f4").tobytes())
        told.append(one)
    return told, blobs
