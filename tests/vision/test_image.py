"""Pictures of every kind become upright RGB of 8 bits, or one line that says why not."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageOps

from modelmill.core.errors import RequestError
from modelmill.vision import image

RED = (200, 30, 10)


def saved(picture: PIL.Image.Image, image_format: str, **options) -> bytes:
    out = io.BytesIO()
    picture.save(out, image_format, **options)
    return out.getvalue()


def solid(mode: str, colour) -> PIL.Image.Image:
    return PIL.Image.new(mode, (6, 4), colour)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(solid("RGB", RED), "PNG"), RED),
        (saved(solid("RGB", RED).quantize(4), "PNG"), RED),
        (saved(solid("L", 77), "PNG"), (77, 77, 77)),
        (saved(solid("1", 1), "PNG"), (255, 255, 255)),
        (saved(solid("RGBA", (*RED, 255)), "PNG"), RED),
        (saved(solid("RGBA", (0, 0, 0, 0)), "PNG"), (255, 255, 255)),
        (saved(solid("LA", (10, 255)), "PNG"), (10, 10, 10)),
        (saved(PIL.Image.fromarray(np.full((4, 6), 65535, np.uint16)), "PNG"), (255, 255, 255)),
        (saved(PIL.Image.fromarray(np.full((4, 6), 257 * 40, np.uint16)), "PNG"), (40, 40, 40)),
        (saved(solid("CMYK", (0, 0, 0, 0)), "JPEG"), (255, 255, 255)),
        (saved(solid("RGB", RED), "BMP"), RED),
        (
            saved(
                solid("RGB", RED), "GIF", save_all=True, append_images=[solid("RGB", (0, 9, 200))]
            ),
            RED,
        ),
    ],
)
def test_every_mode_becomes_rgb(data: bytes, expected: tuple[int, int, int]) -> None:
    actual = image.open_image(data)
    assert actual.mode == "RGB"
    assert actual.size == (6, 4)
    assert max(abs(a - b) for a, b in zip(actual.getpixel((2, 2)), expected, strict=True)) <= 2


def test_orientation_notes_are_followed() -> None:
    picture = PIL.Image.new("RGB", (6, 4))
    picture.putpixel((0, 0), (255, 255, 255))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turn right
    actual = image.open_image(saved(picture, "PNG", exif=exif))
    assert actual.size == (4, 6)
    assert actual.getpixel((3, 0)) == (255, 255, 255)
    # once: what has been turned is turned no more
    assert np.array_equal(image.to_rgb_image(actual), actual)


def test_every_orientation_is_undone() -> None:
    """Against PIL's own, for each note and each format that carries it."""
    picture = PIL.Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    )
    for file_format in ("PNG", "TIFF", "JPEG", "WEBP"):
        for note in range(10):
            exif = PIL.Image.Exif()
            exif[0x0112] = note
            data = saved(picture, file_format, exif=exif)
            expected = ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))).convert("RGB")
            assert np.array_equal(image.open_image(data), expected), (file_format, note)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cannot be read as an image"),
        (b"\x00" * 100, "cannot be read as an image"),
        (saved(solid("RGB", RED), "PNG")[:45], "broken image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "cannot be read"),
    ],
)
def test_what_is_no_image_is_one_line(data: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        image.open_image(data, "photo")
    assert "\n" not in str(caught.value)


def test_limits_come_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_PIXELS", 20)
    with pytest.raises(RequestError, match="6 × 4 pixels"):
        image.open_image(saved(solid("RGB", RED), "PNG"))
    monkeypatch.setattr(image, "MAX_BYTES", 10)
    with pytest.raises(RequestError, match="bytes are more"):
        image.open_image(saved(solid("RGB", RED), "PNG"))


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = bytearray(saved(solid("L", 0), "PNG"))
    # width and height in the header chunk, its checksum made right again
    import zlib

    bomb[16:24] = (60000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bytes(bomb[12:29])).to_bytes(4, "big")
    with pytest.raises(RequestError, match="pixels; make it smaller"):
        image.open_image(bytes(bomb))


def test_what_a_caller_holds_is_read_as_carefully_as_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PIL decodes when it is asked for pixels: what is broken, too large or closed shows there, in
    one line.
    """
    noise = PIL.Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)
    )
    closed = solid("RGB", RED)
    closed.close()
    wrong = {
        "is a broken image": PIL.Image.open(io.BytesIO(saved(noise, "PNG")[:2000])),
        "is empty": PIL.Image.new("RGB", (0, 5)),
        "not 'BytesIO'": io.BytesIO(saved(noise, "PNG")),
        "torch.bfloat16": torch.zeros(4, 6, 3, dtype=torch.bfloat16),
    }
    for says, source in [*wrong.items(), ("broken", closed)]:
        with pytest.raises(RequestError, match=says) as caught:
            image.to_rgb_image(source)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(image, "MAX_PIXELS", 20)
    for large in (solid("RGB", RED), np.zeros((4, 6), np.uint8)):
        with pytest.raises(RequestError, match="pixels are more than 20"):
            image.to_rgb_image(large)
    for premultiplied in ("La", "RGBa"):
        half = solid("LA", (0, 128)) if premultiplied == "La" else solid("RGBA", (0, 0, 0, 128))
        monkeypatch.setattr(image, "MAX_PIXELS", 24)
        assert image.to_rgb_image(half.convert(premultiplied)).getpixel((1, 1)) == (127, 127, 127)


def test_a_callers_frame_is_the_picture_and_stays_where_it_is() -> None:
    frames = saved(
        solid("RGB", RED), "GIF", save_all=True, append_images=[solid("RGB", (0, 9, 200))]
    )
    moving = PIL.Image.open(io.BytesIO(frames))
    moving.seek(1)
    assert image.to_rgb_image(moving).getpixel((2, 2)) == (0, 9, 200)
    assert moving.tell() == 1
    assert image.open_image(frames).getpixel((2, 2)) == RED


def test_a_broken_orientation_note_is_no_broken_picture() -> None:
    """Bytes of EXIF changed at random: the picture is read, upright where the note can still be."""
    chance = np.random.default_rng(0)
    picture = PIL.Image.fromarray(chance.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    note = PIL.Image.Exif()
    note[0x0112], note[0x010F], note[0x8769], note[0x8825] = (
        6,
        "Maker",
        {0x829A: (1, 3)},
        {1: "N", 2: (1.0, 2.0, 3.0)},
    )
    for _ in range(300):
        broken = bytearray(note.tobytes())
        for place in chance.integers(6, len(broken), 4):
            broken[place] = chance.integers(256)
        actual = image.open_image(saved(picture, "PNG", exif=bytes(broken)))
        assert sorted(actual.size) == [4, 6]


def test_what_stands_behind_transparency() -> None:
    data = saved(solid("RGBA", (0, 0, 0, 0)), "PNG")
    assert image.open_image(data).getpixel((1, 1)) == (255, 255, 255)
    assert image.open_image(data, background=image.BLACK_BACKGROUND).getpixel((1, 1)) == (0, 0, 0)


def test_every_depth_is_rounded_to_the_nearest() -> None:
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.rint(deep.astype(np.float64) / 257)
    for actual in (
        image.to_rgb_image(PIL.Image.fromarray(deep)),
        image.to_rgb_image(PIL.Image.fromarray(deep.astype(np.int32))),
    ):
        assert np.array_equal(np.asarray(actual)[..., 0], expected)
    beyond = PIL.Image.fromarray(np.array([[-5, 70000]], np.int32))
    assert [image.to_rgb_image(beyond).getpixel((x, 0))[0] for x in (0, 1)] == [0, 255]
    shares = PIL.Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan, -1.0]], np.float32))
    assert [image.to_rgb_image(shares).getpixel((x, 0))[0] for x in range(5)] == [0, 128, 255, 0, 0]


def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_BYTES", 1000)
    with pytest.raises(RequestError, match="bytes are more than the 1000 allowed"):
        image.open_image("/dev/zero")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no\.png: there is no such file; give the path of"):
        image.open_image(tmp_path / "no.png")
    with pytest.raises(RequestError, match="cannot be read: Is a directory"):
        image.open_image(tmp_path)
    for name in ("a\0b", "\ud800.png"):
        with pytest.raises(RequestError, match="is no path"):
            image.to_rgb_image(name)


def test_arrays_and_tensors() -> None:
    grey = np.arange(24, dtype=np.uint8).reshape(4, 6)
    assert image.to_rgb_image(grey).getpixel((5, 3)) == (23, 23, 23)
    assert image.to_rgb_image(torch.zeros(4, 6, 3, dtype=torch.uint8)).size == (6, 4)
    for wrong in (grey.astype(np.float32), grey[None, None], np.zeros((0, 3), np.uint8), 7):
        with pytest.raises(RequestError):
            image.to_rgb_image(wrong)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 9000), st.integers(1, 9000))
def test_the_longer_side_fits(width: int, height: int) -> None:
    size = image.fit_longest_side((width, height), 1024)
    assert max(size) == 1024
    assert min(size) >= 1
    # halves are rounded up, as the original does
    short, long = sorted((width, height))
    assert min(size) == max(1, int(short * (1024 / long) + 0.5))


def test_resizing_is_pils_own(shared: Path) -> None:
    photo = image.open_image(shared / "data/images/truck.jpg")
    size = image.fit_longest_side(photo.size, 1024)
    actual = image.resize_to_tensor(photo, size)
    expected = np.array(
        PIL.Image.open(shared / "data/images/truck.jpg")
        .convert("RGB")
        .resize(size, PIL.Image.Resampling.BILINEAR)
    )
    assert np.array_equal(actual.permute(1, 2, 0).numpy(), expected)
