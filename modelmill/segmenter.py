"""Images in, masks out: the class a user imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelmill.artifact.store import is_engine, open_artifact
from modelmill.artifact.verify import verify
from modelmill.core.config import BuildConfig, from_dict
from modelmill.core.errors import UsageError
from modelmill.runtime.device import pick_device, use_threads
from modelmill.vision.everything import Everything
from modelmill.vision.open import KIND, open_eye
from modelmill.vision.prompts import Prompt, make
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
        return self.eye.see_all(images)

    def predict(
        self,
        points: Sequence[Sequence[float]] = (),
        labels: Sequence[int] | None = None,
        box: Sequence[float] | None = None,
        mask: torch.Tensor | None = None,
        multimask: bool = True,
    ) -> list[Mask]:
        """Masks of the image that was set, best first: three, or one with multimask off.

        points: (x, y) in the image's pixels; labels: 1 the object, 0 the background, default all 1; box: x0, y0, x1,
        y1; mask: logits of a former answer (``Mask.logits``).
        """
        return self.predict_all([make(points, labels, box, mask)], multimask=multimask)[0]

    def predict_all(
        self, prompts: Sequence[Prompt], *, seen: Seen | None = None, multimask: bool = True
    ) -> list[list[Mask]]:
        """The masks of each prompt, all in one call of the decoder; on the image that was set, or on another."""
        where = seen or self._seen
        if where is None:
            raise UsageError("there is no image yet: call set_image(image) before predict")
        return self.eye.predict_all(where, prompts, multimask)

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
