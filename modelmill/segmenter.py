"""Images in, masks out: the class a user imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelmill.artifact.store import is_engine, open_artifact
from modelmill.artifact.verify import verify
from modelmill.core.config import BuildConfig, from_dict
from modelmill.core.errors import RequestError, UsageError
from modelmill.runtime.device import pick_device, use_threads
from modelmill.vision.draw import as_prompt
from modelmill.vision.everything import Everything
from modelmill.vision.image import BLACK, as_image, open_image
from modelmill.vision.open import KIND, open_eye
from modelmill.vision.prompts import Prompt, check_inside, make
from modelmill.vision.segment import Mask, Seen


class Segmenter:
    """An engine that segments images, opened: ``set_image`` once, ``predict`` many times; ``everything``.

    model: an engine folder, or a checkpoint (.pth, .safetensors, folder), which is built into the cache first. device:
    "auto", "cpu", "cuda" or "cuda:N". kernels: OP → variant. threads: of a CPU. build: fields of BuildConfig, for a
    checkpoint only. An image is a path, bytes, a PIL image or an array [H, W, 3] uint8; the embeddings of the last
    eight are kept by their content. Not thread-safe.

    Raises the errors of the artifact and checkpoint rooms, UsageError for an engine of another kind or an option that
    makes no sense, RequestError (a UsageError) for an image or a prompt that is no good.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        kernels: Mapping[str, str] | None = None,
        threads: int | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **build: Any,
    ) -> None:
        engine = Path(model)
        place = pick_device(device)
        if not is_engine(engine):
            from modelmill.llm import cached_engine

            engine = cached_engine(engine, from_dict(BuildConfig, build, "Segmenter"), progress, KIND)
        elif build:
            raise UsageError(
                f"{', '.join(build)}: decided when an engine is built, and {engine} is one already; "
                "leave it out, or give the checkpoint"
            )
        artifact = open_artifact(engine)
        if place == "cpu":
            use_threads(threads)
        self.eye = open_eye(artifact, place, kernels)
        verify(artifact)
        self.path, self.device, self.manifest = engine, place, artifact.manifest
        self._seen: Seen | None = None

    def set_image(self, image: Any) -> tuple[int, int]:
        """Look at an image: its embedding is computed, or taken from the cache. Returns its (width, height)."""
        self._seen = self.eye.see(image)
        return self._seen.size

    def see(self, images: Sequence[Any]) -> list[Seen]:
        """Several images in one batch, for ``predict_all``; each is in the cache then."""
        if isinstance(images, (str, bytes, Path)):
            raise UsageError("several images are a list of them; set_image takes one")
        return self.eye.see_all(images)

    def predict(
        self,
        points: Sequence[Sequence[float]] | None = (),
        labels: Sequence[int] | None = None,
        box: Sequence[float] | None = None,
        mask: Any = None,
        multimask: bool = True,
    ) -> list[Mask]:
        """Masks of the image that was set, best first: three, or one with multimask off.

        points: (x, y) in the image's pixels; labels: 1 the object, 0 the background, default all 1; box: x0, y0, x1,
        y1; mask: logits of a former answer (``Mask.logits``), or a picture of a rough mask, white inside: a path,
        bytes, a PIL image, an array [H, W] of bools (``Mask.pixels``) or uint8.
        """
        rough = None if mask is None else self._logits(mask, self._at(None))
        return self.predict_all([make(points, labels, box, rough)], multimask=multimask)[0]

    def predict_all(
        self, prompts: Sequence[Prompt], *, seen: Seen | None = None, multimask: bool = True
    ) -> list[list[Mask]]:
        """The masks of each prompt, all in one call of the decoder; on the image that was set, or on another."""
        where = self._at(seen)
        for prompt in prompts:
            check_inside(prompt, where.size)
        return self.eye.predict_all(where, prompts, multimask)

    def _at(self, seen: Seen | None) -> Seen:
        where = seen or self._seen
        if where is None:
            raise UsageError("there is no image yet: call set_image(image) before predict")
        return where

    def _logits(self, mask: Any, where: Seen) -> torch.Tensor:
        """A mask in any of its forms as a prompt's logits [S, S] float32. Raises RequestError."""
        if isinstance(mask, np.ndarray):
            mask = torch.from_numpy(np.ascontiguousarray(mask))
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            mask = mask[0] if mask.dim() == 3 and len(mask) == 1 else mask
            if not bool(mask.isfinite().all()):
                raise RequestError("a mask's logits must be finite numbers")
            return mask.float()
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool:
            mask = mask.to(torch.uint8) * 255
        if isinstance(mask, (str, Path, bytes)):
            drawn = open_image(mask, "the mask", behind=BLACK)
        else:
            drawn = as_image(mask, "the mask")
        return as_prompt(drawn, where.size, where.fitted, self.eye.side, self.eye.image)

    def everything(
        self,
        image: Any,
        options: Everything | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **changes: Any,
    ) -> list[Mask]:
        """Masks of all that a grid of points finds, best first; changes: fields of ``Everything``."""
        if changes:
            if options is not None:
                raise UsageError("give options or single fields of them, not both")
            options = from_dict(Everything, changes, "everything")
        return self.eye.everything(image, options, progress)

    def generate_masks(self, image: Any, options: Everything | None = None, **changes: Any) -> list[Mask]:
        """``everything``, by the name that SAM's automatic generator has made known."""
        return self.everything(image, options, **changes)
