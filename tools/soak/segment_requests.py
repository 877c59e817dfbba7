"""Requests to /v1/segment: valid and invalid ones."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from typing import Any

import PIL.Image

PATH = "/v1/segment"
FAST_OPTIONS = {"points_per_side": 3, "pred_iou_thresh": 0.0, "stability_score_thresh": 0.0}


def random_image(seed: int, file_format: str = "PNG", longest: int = 200) -> bytes:
    """An image file of blurred noise, 8 to ``longest`` pixels per side."""
    rng = random.Random(seed)
    noise = PIL.Image.frombytes("RGB", (8, 6), rng.randbytes(8 * 6 * 3))
    out = io.BytesIO()
    noise.resize(
        (rng.randint(8, longest), rng.randint(8, longest)), PIL.Image.Resampling.BICUBIC
    ).save(out, file_format)
    return out.getvalue()


def decompression_bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims so many pixels, with almost no data."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(b"\x00" * 100))
        + chunk(b"IEND", b"")
    )


def to_data_url(data: bytes, mime_type: str = "image/png") -> str:
    """A data: URL."""
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def valid_request(rng: random.Random) -> dict[str, Any]:
    """A valid request: one of 24 images, so that some are cached; points, boxes or all objects."""
    image = to_data_url(random_image(rng.randrange(24)))
    prompt_type = rng.choice(("points", "points", "boxes", "everything"))
    if prompt_type == "points":
        count = rng.choice((1, 1, 3))
        points = [[rng.uniform(0, 7), rng.uniform(0, 7)] for _ in range(count)]
        return {
            "image": image,
            "points": points,
            "labels": [1] * count,
            "multimask": rng.random() < 0.5,
        }
    if prompt_type == "boxes":
        return {
            "image": image,
            "boxes": [[0, 0, rng.randint(1, 7), 7]] * rng.choice((1, 2)),
            "format": "png",
        }
    return {"image": image, "everything": FAST_OPTIONS}


def hostile_request(rng: random.Random) -> dict[str, Any]:
    """A request to be changed further: its image or prompt is often invalid."""
    data = random_image(rng.randrange(24), rng.choice(("PNG", "JPEG", "GIF", "WEBP", "BMP")))
    truncated = data[: rng.randrange(len(data))]
    position = rng.randrange(len(data))
    flipped = (
        data[:position] + bytes([data[position] ^ (1 << rng.randrange(8))]) + data[position + 1 :]
    )
    images: list[Any] = [
        to_data_url(data),
        to_data_url(truncated),
        to_data_url(flipped),
        to_data_url(decompression_bomb(2**31 - 1, 2**31 - 1)),
    ]
    images += [
        to_data_url(decompression_bomb(30000, 30000)),
        to_data_url(decompression_bomb(1, 4000)),
        to_data_url(b"<svg onload='x'/>", "image/svg+xml"),
    ]
    images += [
        "http://127.0.0.1/x.png",
        "file:///etc/passwd",
        "data:,x",
        "data:image/png;base64,",
        "A" * 20000,
        "%",
    ]
    body: dict[str, Any] = {"image": images[0] if rng.random() < 0.5 else rng.choice(images)}
    if rng.random() < 0.2:
        body = {"image_id": rng.choice(("0" * 64, "f" * 64, "../" * 21 + "a", ""))}
    corner = rng.choice((-1e6, 0, 3, 3.5, 1e5, 1e30, float("nan"), float("inf"), "3"))
    prompts: list[dict[str, Any]] = [
        {"points": [[corner, 3]] * rng.choice((1, 1, 1, 300))},
        {
            "points": [[3, 3]],
            "labels": [rng.choice((0, 1, 2, -1, True, "1"))] * rng.choice((1, 1, 2)),
        },
        {"box": [3, corner, 5, 5]},
        {"boxes": [[1, 1, 5, 5]] * rng.choice((1, 65))},
        {"mask": rng.choice(images)},
        {
            "points": [[3, 3]],
            "mask": to_data_url(
                rng.randbytes(rng.choice((1, 4 * 256 * 256))), "application/octet-stream"
            ),
        },
        {"prompts": [{"points": [[3, 3]]}, {"box": [corner, 1, 2, 2]}]},
        {"everything": {**FAST_OPTIONS, "points_per_side": rng.choice((1, 2, 0, 65, 10**9))}},
        {"everything": FAST_OPTIONS, "points": [[3, 3]]},
    ]
    return body | rng.choice(prompts)
