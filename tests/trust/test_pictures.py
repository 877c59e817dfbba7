"""Hostile pictures and prompts to a served engine that segments: a correct answer or 400, and the
engine goes on.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import psutil
import pytest

from tests.serve.segment_service import SegmentService, data_url, encode_image, random_photo
from tests.trust.error_lines import check_one_line

GOOD = data_url(encode_image(random_photo()))
SIZE = (120, 80)


@pytest.fixture
def seeing(running_with_sam: SegmentService) -> SegmentService:
    return running_with_sam


@pytest.fixture(autouse=True)
def _alive_afterwards(seeing: SegmentService) -> Iterator[None]:
    """Whatever was sent: the worker is the same one, nothing waits, and the next picture is
    seen.
    """
    pid = seeing.segment_engine.pid
    yield
    assert seeing.segment_engine.pid == pid
    assert len(seeing.segment_engine.segment_client) == 0
    assert len(segment(seeing, image=GOOD, points=[[5, 5]])["masks"]) == 3


def segment(seeing: SegmentService, **body: Any) -> dict[str, Any]:
    response = seeing.post("/v1/segment", body)
    assert response.status == 200, response.body[:500]
    return response.json


def refusal(seeing: SegmentService, body: Any, status: int = 400) -> dict[str, Any]:
    response = seeing.post("/v1/segment", body)
    assert response.status == status, response.body[:500]
    error: dict[str, Any] = response.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    check_one_line(Exception(error["message"]))
    return error


def claiming(width: int, height: int) -> bytes:
    """A PNG of few bytes that claims so many pixels."""

    def chunk(chunk_type: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + chunk_type
            + data
            + struct.pack(">I", zlib.crc32(chunk_type + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 4096))
        + chunk(b"IEND", b"")
    )


def rotated_jpeg() -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    return encode_image(random_photo(), "JPEG", exif=exif)


def animated_image(file_format: str) -> bytes:
    return encode_image(
        random_photo(),
        file_format,
        save_all=True,
        append_images=[random_photo(i) for i in range(1, 4)],
    )


DEEP = PIL.Image.fromarray(np.arange(80 * 120, dtype=np.uint16).reshape(80, 120) * 6)
RIGHT = {
    "one pixel": (encode_image(PIL.Image.new("RGB", (1, 1))), (1, 1)),
    "one row": (encode_image(PIL.Image.new("RGB", (4000, 1), 9)), (4000, 1)),
    "one column": (encode_image(PIL.Image.new("RGB", (1, 4000), 9)), (1, 4000)),
    "CMYK": (encode_image(random_photo().convert("CMYK"), "JPEG"), SIZE),
    "16 bit": (encode_image(DEEP), SIZE),
    "16 bit TIFF": (encode_image(DEEP, "TIFF"), SIZE),
    "float TIFF": (encode_image(random_photo().convert("F"), "TIFF"), SIZE),
    "1 bit": (encode_image(random_photo().convert("1")), SIZE),
    "palette": (encode_image(random_photo().quantize(16)), SIZE),
    "palette with a clear colour": (
        encode_image(random_photo().quantize(16), transparency=3),
        SIZE,
    ),
    "transparent": (encode_image(random_photo().convert("RGBA")), SIZE),
    "grey with alpha": (encode_image(random_photo().convert("LA")), SIZE),
    "animated GIF": (animated_image("GIF"), SIZE),
    "animated PNG": (animated_image("PNG"), SIZE),
    "animated WebP": (animated_image("WEBP"), SIZE),
    "turned by EXIF": (rotated_jpeg(), SIZE[::-1]),
    "BMP": (encode_image(random_photo(), "BMP"), SIZE),
}
WRONG = {
    "bomb": claiming(60000, 60000),
    "bomb of a row": claiming(2**31 - 1, 1),
    "more pixels than allowed": encode_image(PIL.Image.new("L", (1025, 2048))),
    "no pixels": claiming(0, 0),
    "no height": claiming(5, 0),
    "half a PNG": encode_image(random_photo())[:200],
    "half a JPEG": encode_image(random_photo(), "JPEG")[:300],
    "only a signature": b"\x89PNG\r\n\x1a\n",
    "text": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
    "PDF": b"%PDF-1.4\n",
    "an array": b"\x93NUMPY\x01\x00",
    "zeros": bytes(1000),
    "one byte": b"\0",
}


@pytest.mark.parametrize("name", RIGHT)
def test_odd_pictures_are_seen_as_they_are(seeing: SegmentService, name: str) -> None:
    data, (width, height) = RIGHT[name]
    reply = segment(seeing, image=data_url(data), points=[[0, 0]], format="png")
    assert (reply["image"]["width"], reply["image"]["height"]) == (width, height)
    png = PIL.Image.open(io.BytesIO(base64.b64decode(reply["masks"][0]["png"].split(",")[1])))
    assert png.size == (width, height)
    # everything of it, too
    assert isinstance(
        segment(seeing, image=data_url(data), everything={"points_per_side": 2})["masks"], list
    )


def test_a_turned_picture_is_the_upright_one(seeing: SegmentService) -> None:
    upright = PIL.Image.open(io.BytesIO(rotated_jpeg())).transpose(PIL.Image.Transpose.ROTATE_270)
    assert (
        segment(seeing, image=data_url(rotated_jpeg()))["image"]["id"]
        == segment(seeing, image=data_url(encode_image(upright)))["image"]["id"]
    )


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_picture_is_refused(seeing: SegmentService, name: str) -> None:
    error = refusal(seeing, {"image": data_url(WRONG[name])})
    assert error["param"] == "image"
    assert error["message"].startswith("the image")


HOSTILE: list[dict[str, Any]] = [
    {"image": ""}, {"image": None}, {"image": 1}, {"image": []}, {"image": "AAA"}, {"image": "*"},
    {"image": "data:,"},
    {"image": "data:image/png;base64,"}, {"image": "data:image/png,abc"},
    {"image": "data:image/png;base64,A"},
    {"image": "http://localhost/a.png"}, {"image": "HTTPS://169.254.169.254/"},
    {"image": "file:///etc/passwd"},
    {"image": {"url": GOOD}}, {"image": "\0"}, {"image": "é" * 50}, {"image_id": "0" * 64},
    {"image_id": "x", "image": None},
    {"points": []}, {"points": None, "labels": [1]}, {"points": [[1, 2]], "labels": [1, 0]},
    {"points": [[1]]},
    {"points": [[1, 2, 3]]}, {"points": [1, 2]}, {"points": [["1", 2]]}, {"points": [[True, 1]]},
    {"points": [[-1, 5]]},
    {"points": [[121, 5]]}, {"points": [[1e30, 1]]}, {"points": [[1, 1]] * 300},
    {"points": [[5, 5]], "labels": [2]},
    {"points": [[5, 5]], "labels": [True]}, {"points": [[5, 5]], "labels": [1.5]},
    {"points": [[5, 5]], "labels": [-1]},
    {"box": [1, 2, 3]}, {"box": [9, 9, 1, 1]}, {"box": [0, 0, 500, 500]}, {"box": "1,2,3,4"},
    {"box": [[1, 2, 3, 4]]},
    {"boxes": []}, {"boxes": [[1, 1, 5, 5]] * 100}, {"boxes": [[9, 9, 1, 1]]},
    {"boxes": [[1, 1, 5, 5]], "box": [1, 1, 5, 5]},
    {"prompts": []}, {"prompts": [{}]}, {"prompts": [{"points": [[1, 1]], "colour": 1}]},
    {"prompts": [{"points": []}]},
    {"prompts": [{"box": [1, 1, 2, 2]}] * 65},
    {"prompts": [{"points": [[1, 1]]}], "points": [[1, 1]]},
    {"mask": ""}, {"mask": "AAAA"}, {"mask": 5}, {"mask": "http://x/"}, {"mask": data_url(b"text")},
    {"multimask": 1},
    {"everything": 1}, {"everything": "yes"}, {"everything": {"points_per_side": 0}},
    {"everything": {"colour": 1}},
    {"everything": {"points_per_side": 10**9}}, {"everything": {"pred_iou_thresh": 2}},
    {"everything": []},
    {"everything": True, "points": [[1, 1]]}, {"everything": True, "multimask": True},
    {"everything": True, "logits": True}, {"everything": {"points_per_batch": 10**9}},
    {"format": "tiff"},
    {"format": 1}, {"cache_salt": "x" * 5000}, {"cache_salt": 1}, {"model": 1}, {"user": 1},
    {"no_such_field": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    "place", range(len(HOSTILE)), ids=lambda place: f"{next(iter(HOSTILE[place]))}-{place}"
)
def test_hostile_fields(seeing: SegmentService, place: int) -> None:
    field_values = HOSTILE[place]
    status = 404 if field_values == {"image_id": "0" * 64} else 400
    if field_values in ({"points": []},):
        # as if there were none
        assert segment(seeing, image=GOOD, **field_values)["masks"] == []
        return
    body = field_values if "image_id" in field_values else {"image": GOOD, **field_values}
    assert refusal(seeing, body, status)["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity", "9" * 5000, "null", "{}", '"1"'])
def test_numbers_that_are_none(seeing: SegmentService, number: str) -> None:
    body = f'{{"image": "{GOOD}", "points": [[{number}, 1]]}}'.encode()
    refusal(seeing, body)


def test_minus_zero_is_zero(seeing: SegmentService) -> None:
    zero = segment(seeing, image=GOOD, points=[[0, 0]])
    assert segment(seeing, image=GOOD, points=[[-0.0, -0.0]])["masks"] == zero["masks"]


def test_too_much(seeing: SegmentService) -> None:
    """A body beyond the limit is 413; a picture and prompts whose masks would not fit, 400."""
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1060, 3), dtype=np.uint8)
    big = base64.b64encode(encode_image(PIL.Image.fromarray(noise), "BMP")).decode()
    assert len(big) > 4 << 20
    client = seeing.limited_client(max_body_bytes=4 << 20)
    reply = seeing.run(client.post("/v1/segment", {"image": big}))
    assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")
    large = segment(seeing, image=data_url(encode_image(PIL.Image.new("L", (1024, 2048), 9))))[
        "image"
    ]["id"]
    error = refusal(seeing, {"image_id": large, "boxes": [[1, 1, 9, 9]] * 64})
    assert error["message"].startswith(
        "192 masks of 1024 × 2048 pixels are too many for one response"
    )
    prompts = [{"points": [[1, 1]] * 200}] * 64
    assert len(segment(seeing, image=GOOD, prompts=prompts, multimask=False)["masks"]) == 64


def test_the_cache_is_bounded_in_bytes(seeing: SegmentService) -> None:
    """Sixty images do not grow it: the oldest is evicted and must be sent again."""
    first = segment(seeing, image=data_url(encode_image(random_photo(1000))))["image"]["id"]
    for seed in range(1001, 1060):
        segment(seeing, image=data_url(encode_image(random_photo(seed, (16, 16)))))
    refusal(seeing, {"image_id": first, "points": [[1, 1]]}, 404)


def test_pieces_of_pictures_at_random(seeing: SegmentService) -> None:
    """300 broken files: never a 5xx, and the worker's memory stays where it is."""
    chance = random.Random(7)
    sources = [
        encode_image(random_photo(3), file_format)
        for file_format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    ]
    worker = psutil.Process(seeing.segment_engine.pid)
    before = 0
    for round in range(300):
        data = bytearray(chance.choice(sources))
        for _ in range(chance.randint(1, 20)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        response = seeing.post(
            "/v1/segment", {"image": base64.b64encode(bytes(data) or b"x").decode()}
        )
        assert response.status in (200, 400), response.body[:300]
        if round == 100:
            before = worker.memory_info().rss
    assert worker.memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("secret", 200)])
def test_the_key_is_needed_here_too(seeing: SegmentService, key: str | None, status: int) -> None:
    client = seeing.limited_client(key, api_keys=("secret",))
    assert seeing.run(client.post("/v1/segment", {"image": GOOD})).status == status
