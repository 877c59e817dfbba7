"""What POST /v1/segment takes and answers, as strictly as the rest."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from modelmill.core.base64_text import decoded
from modelmill.serve.bounded import STOPS, Shape
from modelmill.serve.pictures import Look
from modelmill.serve.sight import FieldError

MOST_POINTS = 256
MOST_PROMPTS = 64
FAR = 1e6
HEAD = 1024
"""Characters in which a data: URL says what it is."""
_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?((?:;[a-z0-9=._+-]+)*?)(;base64)?,", re.IGNORECASE)

Number = Annotated[float, Field(ge=-FAR, le=FAR)]
Point = Annotated[list[Number], STOPS, Field(min_length=2, max_length=2)]
Corners = Annotated[list[Number], STOPS, Field(min_length=4, max_length=4)]
Share = Annotated[float, Field(ge=0, le=1)]


class PromptBody(Shape):
    """One prompt, in the upright picture's pixels: points, a box, a mask, or several of them together."""

    points: Annotated[list[Point], STOPS] | None = Field(
        None, max_length=MOST_POINTS, description="[x, y] of each point"
    )
    labels: Annotated[list[Annotated[int, Field(ge=0, le=1)]], STOPS] | None = Field(
        None, max_length=MOST_POINTS, description="of each point: 1 the object (default), 0 the background"
    )
    box: Corners | None = Field(None, description="[x0, y0, x1, y1]")
    mask: str | None = Field(
        None, min_length=1, description="a data: URL: a picture, white is the object; or a former answer's logits"
    )

    @property
    def given(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.points) or self.box is not None or self.mask is not None


class EverythingBody(Shape):
    """How all of a picture is segmented; what is not given is as in SAM's automatic mask generator."""

    points_per_side: int | None = Field(None, ge=1, le=64)
    pred_iou_thresh: Share | None = None
    stability_score_thresh: Share | None = None
    box_nms_thresh: Share | None = None


class SegmentRequest(PromptBody):
    """A picture, and prompts or everything; with neither, its embedding is only made ready for later prompts."""

    model: str | None = Field(None, max_length=1024, description="default: the first engine that segments")
    image: str | None = Field(None, min_length=1, description="base64 of an image file, bare or as a data: URL")
    image_id: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="a former answer's image.id, in place of the image"
    )
    boxes: Annotated[list[Corners], STOPS] | None = Field(
        None, min_length=1, max_length=MOST_PROMPTS, description="a prompt each"
    )
    prompts: Annotated[list[PromptBody], STOPS] | None = Field(None, min_length=1, max_length=MOST_PROMPTS)
    everything: bool | EverythingBody | None = Field(None, description="true or false, or an object of settings")
    multimask: bool | None = Field(None, description="three masks of each prompt, best first (default), or one")
    format: Literal["rle", "png"] | None = Field(None, description="of the masks: COCO's run lengths (default), or PNG")
    logits: bool | None = Field(None, description="tell each mask's logits, for another prompt's mask")
    cache_salt: str | None = Field(None, max_length=1024, description="embeddings of other salts are never shared")
    user: str | None = Field(None, max_length=4096, description="taken, not used")

    def look(self, id: str) -> Look:
        """As the worker's message: base64 becomes bytes. Raises FieldError."""
        if (self.image is None) == (self.image_id is None):
            raise FieldError("image or image_id: give one of them", "image")
        asked = self._prompts()
        masks: list[bytes] = []
        told = [_told(prompt, name, masks) for name, prompt in asked]
        everything = self._everything()
        if everything is not None and told:
            raise FieldError("everything takes no prompts: leave them out", "everything")
        for name in ("multimask", "logits") if everything is not None else ():
            if getattr(self, name):
                raise FieldError(f"{name} is for prompts, everything has none: leave it out", name)
        return Look(
            id,
            digest=self.image_id or "",
            salt=self.cache_salt or "",
            prompts=told,
            everything=everything,
            multimask=self.multimask is not False,
            wants=self.format or "rle",
            logits=bool(self.logits),
            image=b"" if self.image is None else bytes_of(self.image, "image"),
            masks=masks,
        )

    def _prompts(self) -> list[tuple[str, PromptBody]]:
        """Each with the field that it came in."""
        own = PromptBody(points=self.points, labels=self.labels, box=self.box, mask=self.mask)
        ways: list[list[tuple[str, PromptBody]]] = [
            [("points", own)] if own.given or own.labels else [],
            [("boxes", PromptBody(points=None, labels=None, box=box, mask=None)) for box in self.boxes or ()],
            [("prompts", prompt) for prompt in self.prompts or ()],
        ]
        given = [way for way in ways if way]
        if len(given) > 1:
            raise FieldError("prompts come one way: as points, box and mask, as boxes, or as prompts", "prompts")
        return given[0] if given else []

    def _everything(self) -> dict[str, Any] | None:
        if self.everything is None or self.everything is False:
            return None
        return {} if self.everything is True else self.everything.model_dump(exclude_none=True)


def _told(prompt: PromptBody, field: str, masks: list[bytes]) -> dict[str, Any]:
    points = prompt.points or []
    if not prompt.given:
        raise FieldError("a prompt needs points, a box or a mask", field)
    if prompt.labels is not None and len(prompt.labels) != len(points):
        raise FieldError(f"{len(points)} points have {len(prompt.labels)} labels; give one label a point", "labels")
    box = prompt.box
    if box is not None and (box[0] > box[2] or box[1] > box[3]):
        raise FieldError("a box is x0, y0, x1, y1 with x0 <= x1 and y0 <= y1", "box" if field == "points" else field)
    place = None
    if prompt.mask is not None:
        place = len(masks)
        masks.append(bytes_of(prompt.mask, "mask"))
    return {"points": points, "labels": prompt.labels, "box": box, "mask": place}


def bytes_of(text: str, field: str) -> bytes:
    """What base64, bare or in a data: URL, stands for. Raises FieldError; nothing is ever fetched."""
    begin, found = 0, _URL.match(text[:HEAD])
    if found is not None:
        if not found[3]:
            raise FieldError(f"{field}: a data: URL has to be in base64", field)
        begin = found.end()
    elif text[:16].lstrip()[:5].lower() in ("http:", "https", "file:", "data:", "ftp:/"):
        raise FieldError(f"{field}: nothing is fetched; send the file itself as base64 or as a data: URL", field)
    try:
        # tools break lines; everything else has to be right
        data = decoded(text, begin)
    except ValueError:
        raise FieldError(f"{field}: this is not base64", field) from None
    if not data:
        raise FieldError(f"{field} is empty", field)
    return data


class ImageTold(BaseModel):
    """id: for image_id. cached: the embedding was there already."""

    id: str
    width: int
    height: int
    cached: bool


class Rle(BaseModel):
    """COCO's compressed run lengths."""

    size: list[int]
    counts: str


class MaskTold(BaseModel):
    """prompt: its index. box: outermost pixels. stability, point, crop: of everything."""

    prompt: int
    score: float
    box: list[int]
    area: int
    rle: Rle | None = None
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
    image: ImageTold
    masks: list[MaskTold]
    milliseconds: dict[str, float]


def as_url(blob: bytes, kind: str) -> str:
    """A data: URL."""
    return f"data:{kind};base64,{base64.b64encode(blob).decode()}"


def with_blobs(masks: Sequence[dict[str, Any]], blobs: Sequence[bytes]) -> list[dict[str, Any]]:
    """The worker's masks with the blobs that they name, as data: URLs."""
    kinds = {"png": "image/png", "logits": "application/octet-stream"}
    return [
        {**mask, **{name: as_url(blobs[mask[name]], kind) for name, kind in kinds.items() if name in mask}}
        for mask in masks
    ]
