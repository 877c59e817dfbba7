"""Images in, masks out: the class a user imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch

from modelmill.artifact.store import is_engine, open_artifact
from modelmill.artifact.verify import verify
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig, from_dict
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.options import (
    SegmenterOptions,
    accept_options,
    check_option_names,
    describe_options,
)
from modelmill.progress import ProgressCallback, show_progress
from modelmill.runtime.device import compile_cpu_kernels, pick_device, use_threads
from modelmill.vision.automatic_mask_generator import AutomaticMaskOptions
from modelmill.vision.draw import mask_prompt_logits
from modelmill.vision.image import BLACK, as_image, open_image
from modelmill.vision.open_model import ENGINE_TYPE, open_sam_model
from modelmill.vision.prompts import Prompt, check_inside, make_prompt
from modelmill.vision.sam_model import ImageEmbedding, Mask, SamModel

START_OPTIONS = ("device", "kernels", "threads")
"""Fields of the configs that are parameters of their own here."""


class Segmenter:
    """An engine that segments images, opened: ``set_image`` once, ``predict`` many times;
    ``everything``.

    An image is a path, bytes, a PIL image or an array [H, W, 3] uint8; the embeddings of the last
    eight are kept by their content. ``with Segmenter(path) as segmenter:`` closes it at the end; a
    closed one refuses every call with a UsageError. Not thread-safe.

    Args:
        model: An engine folder, or a checkpoint (.pth, .safetensors, folder), which is built into
    the cache first. device: auto, cpu, cuda or cuda:N.
        kernels: OP → variant.
        threads: Of a CPU.
        progress: Called with (stage, done, total) while it is built, compiled for and opened. None:
        shown on a
            terminal and in a notebook; False: nowhere.
        build: Fields of BuildConfig, by name, for a checkpoint only. They are listed below.

    Raises:
        UnknownOption: An option that there is not; a TypeError.
        UsageError: An engine of another kind, or an option that makes no sense; RequestError, which
    is one, for an image or a prompt that is no good.
        ModelmillError: What the checkpoint, the engine and the device may have against it.
    """

    @accept_options(BuildConfig)
    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        kernels: Mapping[str, str] | None = None,
        threads: int | None = None,
        progress: Callable[[str, int, int], None] | bool | None = None,
        **build: Unpack[SegmenterOptions],
    ) -> None:
        check_option_names(build, SegmenterOptions.__annotations__, type(self).__name__)
        self.path, self.device = Path(model), pick_device(device)
        self._model: SamModel | None = None
        self._embedding: ImageEmbedding | None = None
        if callable(progress):
            self._open(kernels, threads, build, progress)
        else:
            with show_progress(f"opening {self.path.name}", enabled=progress) as report:
                self._open(kernels, threads, build, report)

    def _open(
        self,
        kernels: Mapping[str, str] | None,
        threads: int | None,
        build: SegmenterOptions,
        progress: ProgressCallback,
    ) -> None:
        engine = self.path
        compile_cpu_kernels(self.device, progress)
        if not is_engine(engine):
            from modelmill.llm import cached_engine

            engine = cached_engine(engine, BuildConfig(**build), progress, ENGINE_TYPE)
        elif build:
            raise UsageError(
                f"{', '.join(build)}: decided when an engine is built, and {engine} is one "
                "already; "
                "leave it out, or give the checkpoint"
            )
        artifact = open_artifact(engine)
        if self.device == "cpu":
            use_threads(threads)
        eye = open_sam_model(artifact, self.device, kernels)
        verify(artifact)
        self.path, self.manifest, self._model = engine, artifact.manifest, eye

    @property
    def model(self) -> SamModel:
        """The opened model. Raises UsageError once it is closed."""
        if self._model is None:
            raise UsageError(
                f"this {type(self).__name__} ({self.path}) is closed; open the engine again"
            )
        return self._model

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._model is None

    def close(self) -> None:
        """Give the weights and the kept embeddings free. Closing twice is closing once."""
        self._model = self._embedding = None

    def __enter__(self) -> Self:
        self.model  # noqa: B018 -- a closed one cannot be entered
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._model is None:
            return f"{type(self).__name__}({str(self.path)!r}, closed)"
        build, files = self.manifest.build, self.manifest.files
        weights = format_bytes(
            sum(entry["bytes"] for name, entry in files.items() if name.startswith("weights/"))
        )
        told = (
            f"dtype={build['dtype']!r}, quantization={build['quantization']!r}, "
            f"device={self.device!r}"
        )
        return f"{type(self).__name__}({str(self.path)!r}, {told}, weights={weights!r})"

    def set_image(self, image: Any) -> tuple[int, int]:
        """Look at an image: its embedding is computed, or taken from the cache.

        Returns its (width, height).
        """
        self._embedding = self.model.embed_image(image)
        return self._embedding.size

    def embed_images(self, images: Sequence[Any]) -> list[ImageEmbedding]:
        """Several images in one batch, for ``predict_all``; each is in the cache then."""
        if isinstance(images, (str, bytes, Path)):
            raise UsageError("several images are a list of them; set_image takes one")
        return self.model.embed_images(images)

    def predict(
        self,
        points: Sequence[Sequence[float]] | None = (),
        labels: Sequence[int] | None = None,
        box: Sequence[float] | None = None,
        mask: Any = None,
        multimask: bool = True,
    ) -> list[Mask]:
        """Masks of the image that was set, best first: three, or one with multimask off.

        points: (x, y) in the image's pixels; labels: 1 the object, 0 the background, default all 1;
        box: x0, y0, x1, y1; mask: logits of a former answer (``Mask.logits``), or a picture of a
        rough mask, white inside: a path, bytes, a PIL image, an array [H, W] of bools
        (``Mask.pixels``) or uint8.
        """
        rough = None if mask is None else self._mask_logits(mask, self._current_embedding(None))
        return self.predict_all([make_prompt(points, labels, box, rough)], multimask=multimask)[0]

    def predict_all(
        self,
        prompts: Sequence[Prompt],
        *,
        embedding: ImageEmbedding | None = None,
        multimask: bool = True,
    ) -> list[list[Mask]]:
        """The masks of each prompt, all in one call of the decoder; on the image that was set, or
        on another.
        """
        where = self._current_embedding(embedding)
        for prompt in prompts:
            check_inside(prompt, where.size)
        return self.model.predict_all(where, prompts, multimask)

    def _current_embedding(self, embedding: ImageEmbedding | None) -> ImageEmbedding:
        self.model  # noqa: B018 -- a closed one has no image
        where = embedding or self._embedding
        if where is None:
            raise UsageError("there is no image yet: call set_image(image) before predict")
        return where

    def _mask_logits(self, mask: Any, name: ImageEmbedding) -> torch.Tensor:
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
            drawn = open_image(mask, "the mask", background=BLACK)
        else:
            drawn = as_image(mask, "the mask")
        return mask_prompt_logits(
            drawn, name.size, name.encoder_size, self.model.mask_size, self.model.image_size
        )

    def everything(
        self,
        image: Any,
        options: AutomaticMaskOptions | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        **changes: Any,
    ) -> list[Mask]:
        """Masks of all that a grid of points finds, best first; changes: fields of
        ``AutomaticMaskOptions``.
        """
        if changes:
            if options is not None:
                raise UsageError("give options or single fields of them, not both")
            options = from_dict(AutomaticMaskOptions, changes, "everything")
        return self.model.generate_masks(image, options, progress)

    def generate_masks(
        self, image: Any, options: AutomaticMaskOptions | None = None, **changes: Any
    ) -> list[Mask]:
        """``everything``, by the name that SAM's automatic generator has made known."""
        return self.everything(image, options, **changes)


Segmenter.__doc__ = f"""{Segmenter.__doc__}
    Options of a build, where a checkpoint is given:

{describe_options(BuildConfig, exclude=START_OPTIONS)}
    """
