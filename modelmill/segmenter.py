"""Segmenter: the Python API for image segmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from modelmill.artifact.store import open_artifact
from modelmill.artifact.verify import verify_file_hashes
from modelmill.core.api_options import (
    SegmenterOptions,
    describe_options,
    show_options_in_signature,
)
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig, config_from_dict
from modelmill.core.errors import RequestError, UsageError
from modelmill.core.progress_callback import Progress
from modelmill.core.unknown_keywords import check_option_names, refuse_unknown_keywords
from modelmill.loader.device import ensure_cpu_kernels_compiled, resolve_device, set_cpu_threads
from modelmill.opened_engine import (
    OpenedEngine,
    check_model_argument,
    show_opening_progress,
)
from modelmill.vision.automatic_mask_options import AutomaticMaskOptions
from modelmill.vision.draw import mask_prompt_logits
from modelmill.vision.image import BLACK_BACKGROUND, open_image, to_rgb_image
from modelmill.vision.prompts import Prompt, check_prompt_inside_image, make_prompt
from modelmill.vision.sam_loader import ENGINE_TYPE, open_sam_model
from modelmill.vision.sam_model import ImageEmbedding, Mask, SamModel

EXPLICIT_PARAMETERS = ("device", "kernels", "threads")
"""Config fields that are separate parameters of Segmenter."""


class Segmenter(OpenedEngine[SamModel]):
    """An opened segmentation engine: ``set_image`` once, ``predict`` many times; ``everything``.

    An image is a path, bytes, a PIL image or an array [H, W, 3] uint8. The embeddings of the last
    eight images are cached by content. ``with Segmenter(path) as segmenter:`` closes the engine at
    the end of the block. Every call on a closed Segmenter raises UsageError. Not thread-safe.

    Args:
        model: An engine folder, or a checkpoint (.pth, .safetensors, folder), which is first built
            into the cache.
        device: auto, cpu, cuda or cuda:N.
        kernels: Backend per op: {op: backend}.
        threads: CPU threads.
        progress: Called with (stage, done, total) while the engine is built, compiled and opened.
            None: shown on a terminal and in a notebook; False: never shown.
        build: Fields of BuildConfig, by name, for a checkpoint only. They are listed below.

    Raises:
        UnknownOption: An option does not exist; it is a TypeError too.
        UsageError: The engine has another type, or an option does not apply; its subclass
            RequestError: an image or a prompt is invalid.
        ModelmillError: The checkpoint, the engine or the device cannot be used.
    """

    @show_options_in_signature(BuildConfig)
    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        kernels: Mapping[str, str] | None = None,
        threads: int | None = None,
        progress: Progress | bool | None = None,
        **build: Unpack[SegmenterOptions],
    ) -> None:
        check_option_names(build, SegmenterOptions.__annotations__, type(self).__name__)
        self.path, self.device = check_model_argument(model), resolve_device(device)
        self._opened: SamModel | None = None
        self._embedding: ImageEmbedding | None = None
        with show_opening_progress(self.path, progress) as report:
            self._open(kernels, threads, build, report)

    def _open(
        self,
        kernels: Mapping[str, str] | None,
        threads: int | None,
        build: SegmenterOptions,
        progress: Progress,
    ) -> None:
        from modelmill.llm import resolve_or_build_engine

        ensure_cpu_kernels_compiled(self.device, progress)
        engine = resolve_or_build_engine(self.path, build, progress, ENGINE_TYPE)
        artifact = open_artifact(engine)
        if self.device == "cpu":
            set_cpu_threads(threads)
        model = open_sam_model(artifact, self.device, kernels)
        verify_file_hashes(artifact)
        self.path = engine
        self.manifest = artifact.manifest
        self._opened = model

    @property
    def model(self) -> SamModel:
        """The opened model. Raises UsageError once it is closed."""
        return self.opened_or_raise

    def close(self) -> None:
        """Free the weights and the cached embeddings; calling it again does nothing."""
        self._opened = self._embedding = None

    def __repr__(self) -> str:
        if self._opened is None:
            return f"{type(self).__name__}({str(self.path)!r}, closed)"
        build, weights = self.manifest.build, format_bytes(self.manifest.weight_bytes)
        fields = (
            f"dtype={build['dtype']!r}, quantization={build['quantization']!r}, "
            f"device={self.device!r}"
        )
        return f"{type(self).__name__}({str(self.path)!r}, {fields}, weights={weights!r})"

    def set_image(self, image: Any) -> tuple[int, int]:
        """Compute an image's embedding, or take it from the cache; returns (width, height)."""
        self._embedding = self.model.embed_image(image)
        return self._embedding.size

    def embed_images(self, images: Sequence[Any]) -> list[ImageEmbedding]:
        """Embed several images in one batch, for ``predict_all``; each is cached."""
        if isinstance(images, (str, bytes, Path)):
            raise UsageError("images must be a list; for one image use set_image")
        return self.model.embed_images(images)

    @refuse_unknown_keywords("predict")
    def predict(
        self,
        points: Sequence[Sequence[float]] | None = (),
        labels: Sequence[int] | None = None,
        box: Sequence[float] | None = None,
        mask: Any = None,
        multimask: bool = True,
    ) -> list[Mask]:
        """Segment the image that was set by one prompt.

        Args:
            points: (x, y) in pixels of the image.
            labels: Per point: 1 object, 0 background; default all 1.
            box: x0, y0, x1, y1.
            mask: Logits of an earlier result (``Mask.logits``), or an image of a rough mask, white
                inside: a path, bytes, a PIL image, an array [H, W] bool (``Mask.pixels``) or uint8.
            multimask: Whether to return three masks instead of one.

        Returns:
            Masks, best first.
        """
        rough = (
            None
            if mask is None
            else self._to_mask_prompt_logits(mask, self._require_embedding(None))
        )
        return self.predict_all([make_prompt(points, labels, box, rough)], multimask=multimask)[0]

    @refuse_unknown_keywords("predict_all")
    def predict_all(
        self,
        prompts: Sequence[Prompt],
        *,
        embedding: ImageEmbedding | None = None,
        multimask: bool = True,
    ) -> list[list[Mask]]:
        """Segment by several prompts in one call of the mask decoder.

        Args:
            prompts: Each gets a list of masks.
            embedding: Of the image; None: the image that was set.
            multimask: As for ``predict``.
        """
        current = self._require_embedding(embedding)
        for prompt in prompts:
            check_prompt_inside_image(prompt, current.size)
        return self.model.predict_all(current, prompts, multimask)

    def _require_embedding(self, embedding: ImageEmbedding | None) -> ImageEmbedding:
        self.opened_or_raise  # noqa: B018 -- raises UsageError if closed
        current = embedding or self._embedding
        if current is None:
            raise UsageError("there is no image yet: call set_image(image) before predict")
        return current

    def _to_mask_prompt_logits(self, mask: Any, embedding: ImageEmbedding) -> torch.Tensor:
        """Convert a mask in any form to prompt logits [S, S] float32. Raises RequestError."""
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
            image = open_image(mask, "the mask", background=BLACK_BACKGROUND)
        else:
            image = to_rgb_image(mask, "the mask")
        return mask_prompt_logits(
            image,
            embedding.size,
            embedding.encoder_size,
            self.model.mask_size,
            self.model.image_size,
        )

    def everything(
        self,
        image: Any,
        options: AutomaticMaskOptions | None = None,
        *,
        progress: Progress | None = None,
        **changes: Any,
    ) -> list[Mask]:
        """Segment everything in an image with a grid of point prompts; masks are best first.

        Args:
            image: As for ``set_image``.
            options: None uses the defaults.
            progress: Called with ("points", done, total).
            changes: Fields of ``AutomaticMaskOptions``, instead of ``options``.
        """
        if changes:
            if options is not None:
                raise UsageError("give options, or single fields of it, not both")
            options = config_from_dict(AutomaticMaskOptions, changes, "everything")
        return self.model.generate_masks(image, options, progress)

    def generate_masks(
        self, image: Any, options: AutomaticMaskOptions | None = None, **changes: Any
    ) -> list[Mask]:
        """``everything``, by the name of its counterpart in SAM's automatic mask generator."""
        return self.everything(image, options, **changes)


Segmenter.__doc__ = f"""{Segmenter.__doc__}
    Build options, if ``model`` is a checkpoint:

{describe_options(BuildConfig, exclude=EXPLICIT_PARAMETERS)}
    """
