"""Messages between the API process and a segmentation worker: images and masks, in binary frames.

The body of such a frame is a zero byte (JSON begins with another), the length of a JSON array in
four bytes, that array, and the blobs one after another; the array ends with their lengths. Blobs
are neither encoded as text nor pickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

SEGMENTATION_ENGINE_TYPE = "segmentation"
BINARY_FRAME_MARK = b"\0"
_LENGTH = struct.Struct(">I")
SegmentationErrorCode = Literal["invalid", "unknown", "memory"]


@dataclass(frozen=True)
class SegmentationJob:
    """Segment an image.

    Attributes:
        image: bytes of a file; empty if ``image_digest`` names a cached embedding.
        prompts: {"points", "labels", "box", "mask"}; the mask's value is the index of its blob in
            ``masks``: float32 logits (little endian) or an image file.
        automatic_masks: options of a grid of points, in place of prompts.
        mask_format: "rle" or "png".
        return_logits: whether each mask's logits are returned, for another prompt.
    """

    id: str
    image_digest: str = ""
    cache_salt: str = ""
    prompts: Sequence[Mapping[str, Any]] = ()
    automatic_masks: Mapping[str, Any] | None = None
    multimask: bool = True
    mask_format: str = "rle"
    return_logits: bool = False
    image: bytes = field(default=b"", repr=False)
    masks: Sequence[bytes] = field(default=(), repr=False)


@dataclass(frozen=True)
class SegmentationResult:
    """The result of a job.

    Attributes:
        payload: {"image": {…}, "masks": [{…}], "milliseconds": {…}}; "png" and "logits" in a mask
            are indices of ``blobs``.
        blobs: PNG files and float32 logits.
    """

    id: str
    payload: Mapping[str, Any]
    blobs: Sequence[bytes] = field(default=(), repr=False)


@dataclass(frozen=True)
class SegmentationFailure:
    """The error of a job.

    Attributes:
        code: the request is invalid, its digest is not cached (any more), or memory ran out.
        param: the field of the request that is invalid, if one is.
    """

    id: str
    code: SegmentationErrorCode
    message: str
    param: str | None = None


def encode_blob_frame_body(message: SegmentationJob | SegmentationResult) -> bytes:
    """Encode a message as the body of a frame."""
    if isinstance(message, SegmentationJob):
        blobs = [message.image, *message.masks]
        content = [getattr(message, each.name) for each in fields(message)[:-2]]
    else:
        blobs = list(message.blobs)
        content = [message.id, message.payload]
    return join_blob_frame_body(type(message).__name__, content, blobs)


def decode_blob_frame(body: bytes) -> SegmentationJob | SegmentationResult:
    """Decode the body of a frame."""
    name, content, blobs = split_blob_frame(body)
    if name == SegmentationJob.__name__:
        return SegmentationJob(*[*content, blobs[0], tuple(blobs[1:])])
    return SegmentationResult(*[*content, tuple(blobs)])


def join_blob_frame_body(name: str, content: Sequence[Any], blobs: Sequence[bytes]) -> bytes:
    """Make the body of a frame with blobs."""
    head = json.dumps([name, *content, [len(b) for b in blobs]], separators=(",", ":")).encode()
    return b"".join((BINARY_FRAME_MARK, _LENGTH.pack(len(head)), head, *blobs))


def split_blob_frame(body: bytes) -> tuple[str, list[Any], list[bytes]]:
    """Split a body into (name of the message, its other fields, its blobs)."""
    start = 1 + _LENGTH.size
    end = start + _LENGTH.unpack_from(body, 1)[0]
    name, *content, sizes = json.loads(body[start:end])
    blobs: list[bytes] = []
    for size in sizes:
        blobs.append(body[end : end + size])
        end += size
    assert end == len(body), "the frame's length does not match its header"
    return name, content, blobs
