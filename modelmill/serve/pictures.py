"""What the API and the worker of a segmentation engine say to each other: pictures and masks, in binary frames.

The body of such a frame is a zero byte (JSON begins with another), the length of a JSON array in four bytes, that
array, and the blobs one after another; the array ends with their lengths. Nothing is turned into text or pickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

KIND = "segmentation"
MARK = b"\0"
_LENGTH = struct.Struct(">I")
Why = Literal["invalid", "unknown", "memory"]


@dataclass(frozen=True)
class Look:
    """Segment a picture. image: a file's bytes; empty where ``digest`` names a picture that was seen.

    prompts: {"points", "labels", "box", "mask"}, the mask's value being the index of its blob in ``masks``: float32
    logits (little endian) or a picture's file. everything: options of a grid of points, in place of prompts. wants:
    "rle" or "png". logits: whether each mask's logits are told, for another prompt.
    """

    id: str
    digest: str = ""
    salt: str = ""
    prompts: Sequence[Mapping[str, Any]] = ()
    everything: Mapping[str, Any] | None = None
    multimask: bool = True
    wants: str = "rle"
    logits: bool = False
    image: bytes = field(default=b"", repr=False)
    masks: Sequence[bytes] = field(default=(), repr=False)


@dataclass(frozen=True)
class Found:
    """The answer. told: {"image": {…}, "masks": [{…}], "milliseconds": {…}}; "png" and "logits" in it are indices.

    blobs: those PNG files and float32 logits.
    """

    id: str
    told: Mapping[str, Any]
    blobs: Sequence[bytes] = field(default=(), repr=False)


@dataclass(frozen=True)
class Missed:
    """No answer. why: the request is at fault, its digest is not known (any more), or memory ran out.

    param: the request's field that is at fault, where one is.
    """

    id: str
    why: Why
    message: str
    param: str | None = None


def framed(message: Look | Found) -> bytes:
    """The body of a frame."""
    if isinstance(message, Look):
        blobs = [message.image, *message.masks]
        content = [getattr(message, each.name) for each in fields(message)[:-2]]
    else:
        blobs = list(message.blobs)
        content = [message.id, message.told]
    return joined(type(message).__name__, content, blobs)


def unframed(body: bytes) -> Look | Found:
    """The message of such a body."""
    name, content, blobs = split(body)
    if name == "Look":
        return Look(*[*content, blobs[0], tuple(blobs[1:])])
    return Found(*[*content, tuple(blobs)])


def joined(name: str, content: Sequence[Any], blobs: Sequence[bytes]) -> bytes:
    """The body of a frame with blobs."""
    head = json.dumps([name, *content, [len(b) for b in blobs]], separators=(",", ":")).encode()
    return b"".join((MARK, _LENGTH.pack(len(head)), head, *blobs))


def split(body: bytes) -> tuple[str, list[Any], list[bytes]]:
    """(the message's name, its other fields, its blobs) of such a body."""
    start = 1 + _LENGTH.size
    end = start + _LENGTH.unpack_from(body, 1)[0]
    name, *content, sizes = json.loads(body[start:end])
    blobs: list[bytes] = []
    for size in sizes:
        blobs.append(body[end : end + size])
        end += size
    assert end == len(body), "a frame of other lengths than it tells"
    return name, content, blobs
