"""Requests and responses of /v1/segment, validated strictly."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from modelmill.core.gil_yielding_base64 import decode_base64
from modelmill.serve.segmentation_client import FieldError
from modelmill.serve.segmentation_messages import SegmentationJob
from modelmill.serve.strict_models import FAIL_FAST, StrictModel

MAX_POINTS = 256
MAX_SEGMENT_PROMPTS = 64
MAX_COORDINATE = 1e6
MAX_DATA_URL_HEADER = 1024
"""Longest header of a data: URL in characters."""
_DATA_URL_PATTERN = re.compile(
    r"data:([a-z]+/[a-z0-9.+-]+)?((?:;[a-z0-9=._+-]+)*?)(;base64)?,", re.IGNORECASE
)

Coordinate = Annotated[float, Field(ge=-MAX_COORDINATE, le=MAX_COORDINATE)]
Point = Annotated[list[Coordinate], FAIL_FAST, Field(min_length=2, max_length=2)]
BoxCorners = Annotated[list[Coordinate], FAIL_FAST, Field(min_length=4, max_length=4)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]


class SegmentPrompt(StrictModel):
    """One prompt in pixels of the upright image: points, a box, a mask, or several of them."""

    points: Annotated[list[Point], FAIL_FAST] | None = Field(
        None, max_length=MAX_POINTS, description="[x, y] of each point"
    )
    labels: Annotated[list[Annotated[int, Field(ge=0, le=1)]], FAIL_FAST] | None = Field(
        None,
        max_length=MAX_POINTS,
        description="of each point: 1 the object (default), 0 the background",
    )
    box: BoxCorners | None = Field(None, description="[x0, y0, x1, y1]")
    mask: str | None = Field(
        None,
        min_length=1,
        description="a data: URL: an image, white is the object; or logits of an earlier response",
    )

    @property
    def has_prompt(self) -> bool:
        """Whether it has points, a box or a mask."""
        return bool(self.points) or self.box is not None or self.mask is not None


class AutomaticMaskSettings(StrictModel):
    """Settings for segmenting all objects; defaults as in SAM's automatic mask generator."""

    points_per_side: int | None = Field(None, ge=1, le=64)
    pred_iou_thresh: UnitInterval | None = None
    stability_score_thresh: UnitInterval | None = None
    box_nms_thresh: UnitInterval | None = None


class SegmentRequest(SegmentPrompt):
    """An image, and prompts or ``everything``.

    Without both, only its embedding is computed, for later prompts.
    """

    model: str | None = Field(
        None, max_length=1024, description="default: the first engine that segments"
    )
    image: str | None = Field(
        None, min_length=1, description="base64 of an image file, bare or as a data: URL"
    )
    image_id: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{64}$",
        description="image.id of an earlier response, in place of the image",
    )
    boxes: Annotated[list[BoxCorners], FAIL_FAST] | None = Field(
        None, min_length=1, max_length=MAX_SEGMENT_PROMPTS, description="a prompt each"
    )
    prompts: Annotated[list[SegmentPrompt], FAIL_FAST] | None = Field(
        None, min_length=1, max_length=MAX_SEGMENT_PROMPTS
    )
    everything: bool | AutomaticMaskSettings | None = Field(
        None, description="true or false, or an object of settings"
    )
    multimask: bool | None = Field(
        None, description="three masks of each prompt, best first (default), or one"
    )
    format: Literal["rle", "png"] | None = Field(
        None, description="of the masks: COCO's run lengths (default), or PNG"
    )
    logits: bool | None = Field(
        None, description="return each mask's logits, for another prompt's mask"
    )
    cache_salt: str | None = Field(
        None, max_length=1024, description="embeddings of other salts are never shared"
    )
    user: str | None = Field(None, max_length=4096, description="accepted and ignored")

    def to_job(self, id: str) -> SegmentationJob:
        """Convert to a job for the worker: base64 is decoded.

        Raises:
            FieldError: a field is invalid.
        """
        if (self.image is None) == (self.image_id is None):
            raise FieldError("image or image_id: give one of them", "image")
        named_prompts = self._collect_prompts_with_fields()
        masks: list[bytes] = []
        prompts = [_prompt_to_job_fields(prompt, name, masks) for name, prompt in named_prompts]
        everything = self._automatic_mask_options()
        if everything is not None and prompts:
            raise FieldError("everything takes no prompts: leave them out", "everything")
        for name in ("multimask", "logits") if everything is not None else ():
            if getattr(self, name):
                raise FieldError(f"{name} is for prompts, everything has none: leave it out", name)
        return SegmentationJob(
            id,
            image_digest=self.image_id or "",
            cache_salt=self.cache_salt or "",
            prompts=prompts,
            automatic_masks=everything,
            multimask=self.multimask is not False,
            mask_format=self.format or "rle",
            return_logits=bool(self.logits),
            image=b"" if self.image is None else decode_base64_field(self.image, "image"),
            masks=masks,
        )

    def _collect_prompts_with_fields(self) -> list[tuple[str, SegmentPrompt]]:
        """The prompts, each with the name of its field."""
        direct_prompt = SegmentPrompt(
            points=self.points, labels=self.labels, box=self.box, mask=self.mask
        )
        all_groups: list[list[tuple[str, SegmentPrompt]]] = [
            [("points", direct_prompt)] if direct_prompt.has_prompt or direct_prompt.labels else [],
            [
                ("boxes", SegmentPrompt(points=None, labels=None, box=box, mask=None))
                for box in self.boxes or ()
            ],
            [("prompts", prompt) for prompt in self.prompts or ()],
        ]
        groups = [group for group in all_groups if group]
        if len(groups) > 1:
            raise FieldError("give either points, box and mask, or boxes, or prompts", "prompts")
        return groups[0] if groups else []

    def _automatic_mask_options(self) -> dict[str, Any] | None:
        if self.everything is None or self.everything is False:
            return None
        return {} if self.everything is True else self.everything.model_dump(exclude_none=True)


def _prompt_to_job_fields(prompt: SegmentPrompt, field: str, masks: list[bytes]) -> dict[str, Any]:
    points = prompt.points or []
    if not prompt.has_prompt:
        raise FieldError("a prompt needs points, a box or a mask", field)
    if prompt.labels is not None and len(prompt.labels) != len(points):
        raise FieldError(
            f"{len(points)} points have {len(prompt.labels)} labels; give one label a point",
            "labels",
        )
    box = prompt.box
    if box is not None and (box[0] > box[2] or box[1] > box[3]):
        raise FieldError(
            "a box is x0, y0, x1, y1 with x0 <= x1 and y0 <= y1",
            "box" if field == "points" else field,
        )
    mask_index = None
    if prompt.mask is not None:
        mask_index = len(masks)
        masks.append(decode_base64_field(prompt.mask, "mask"))
    return {"points": points, "labels": prompt.labels, "box": box, "mask": mask_index}


def decode_base64_field(text: str, field: str) -> bytes:
    """Decode base64, bare or in a data: URL. URLs are never fetched.

    Raises:
        FieldError: it is not base64, or empty.
    """
    begin, match = 0, _DATA_URL_PATTERN.match(text[:MAX_DATA_URL_HEADER])
    if match is not None:
        if not match[3]:
            raise FieldError(f"{field}: a data: URL has to be in base64", field)
        begin = match.end()
    elif text[:16].lstrip()[:5].lower() in ("http:", "https", "file:", "data:", "ftp:/"):
        raise FieldError(
            f"{field}: URLs are not fetched; send the file itself as base64 or as a data: URL",
            field,
        )
    try:
        # line breaks are allowed, as many tools insert them; other characters are not
        data = decode_base64(text, begin)
    except ValueError:
        raise FieldError(f"{field}: this is not base64", field) from None
    if not data:
        raise FieldError(f"{field} is empty", field)
    return data


class ImageResult(BaseModel):
    """id: for image_id. cached: whether the embedding was cached."""

    id: str
    width: int
    height: int
    cached: bool


class RunLengthMask(BaseModel):
    """COCO's compressed run lengths."""

    size: list[int]
    counts: str


class MaskResult(BaseModel):
    """prompt: its index. box: outermost pixels. stability, point, crop: of ``everything``."""

    prompt: int
    score: float
    box: list[int]
    area: int
    rle: RunLengthMask | None = None
    png: str | None = None
    logits: str | None = None
    stability: float | None = None
    point: list[float] | None = None
    crop: list[int] | None = None


class SegmentResponse(BaseModel):
    """masks: by prompt, best first."""

    id: str
    object: Literal["segmentation"]
    created: int
    model: str
    image: ImageResult
    masks: list[MaskResult]
    milliseconds: dict[str, float]


def to_data_url(blob: bytes, mime_type: str) -> str:
    """Make a data: URL."""
    return f"data:{mime_type};base64,{base64.b64encode(blob).decode()}"


def inline_blobs(masks: Sequence[dict[str, Any]], blobs: Sequence[bytes]) -> list[dict[str, Any]]:
    """The worker's masks, with their blobs as data: URLs."""
    mime_types = {"png": "image/png", "logits": "application/octet-stream"}
    return [
        {
            **mask,
            **{
                name: to_data_url(blobs[mask[name]], mime_type)
                for name, mime_type in mime_types.items()
                if name in mask
            },
        }
        for mask in masks
    ]
