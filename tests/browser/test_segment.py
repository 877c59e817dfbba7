"""Click-to-segment on the page, in a real browser; facts where MobileSAM's real weights are at
hand.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from tests.browser.conftest import Engines
from tests.browser.page_actions import WAIT, expect
from tests.conftest import shared_dir
from tests.serve.segment_service import encode_image, random_photo

pytestmark = pytest.mark.browser
FOUND = re.compile(r"^Confidence \d+ %")


@pytest.fixture
def truck(shared: Path, engines: Engines) -> Path:
    if not engines.has_real_segment:
        pytest.skip("needs MobileSAM in ../shared/data; where from: CONTRIBUTING.md, Test data")
    return shared / "data/images/truck.jpg"


def bench(opened: Any, file: Any, **options: Any) -> Any:
    """The Segment tab with a photo that has been looked at."""
    page = opened(**options)
    expect(page.locator("#banner")).to_be_hidden(timeout=WAIT)
    page.get_by_role("tab", name="Segment").click()
    page.locator("#photo-file").set_input_files(file)
    expect_status(page, re.compile("^Ready"))
    return page


def expect_status(page: Any, text: Any) -> None:
    expect(page.locator("#told")).to_have_text(text, timeout=WAIT)


def click(page: Any, x: float, y: float, **options: Any) -> None:
    """At a place in the photo's pixels."""
    spot = page_position(page, x, y)
    page.mouse.click(*spot, **options)


def page_position(page: Any, x: float, y: float) -> tuple[float, float]:
    box = page.locator("#overlay").bounding_box()
    width = page.locator("#overlay").evaluate("each => each.width")
    scale = box["width"] / width
    return box["x"] + (x + 0.5) * scale, box["y"] + (y + 0.5) * scale


def downloaded(page: Any, mask_type: str) -> PIL.Image.Image:
    page.get_by_label("What to download").select_option(mask_type)
    with page.expect_download() as coming:
        page.get_by_role("button", name="Download PNG").click()
    assert coming.value.suggested_filename.endswith(f"-{mask_type}.png")
    return PIL.Image.open(io.BytesIO(Path(coming.value.path()).read_bytes()))


def test_a_click_on_the_truck(opened: Any, truck: Path, shot: Any) -> None:
    """The original pipeline's best mask for (500, 375) is 424,318–627,446."""
    page = bench(opened, truck)
    sent: list[Any] = []
    page.on(
        "request", lambda each: sent.append(each.post_data_json) if "segment" in each.url else None
    )
    click(page, 500, 375)
    expect_status(page, FOUND)
    expect(page.locator("#told")).to_have_text(re.compile(r"204 × 129 pixels"))
    shot(page, "segment-click")
    # the embedding was made when the photo was dropped: its name is enough
    assert [set(body) for body in sent] == [{"model", "image_id", "multimask", "points", "labels"}]
    assert sent[0]["points"] == [[500, 375]]
    cutout = downloaded(page, "cutout")
    assert (cutout.size, cutout.mode) == ((1800, 1200), "RGBA")
    x0, y0, x1, y1 = cutout.getchannel("A").getbbox()
    assert (x0, y0, x1 - 1, y1 - 1) == (424, 318, 627, 446)
    mask = np.asarray(downloaded(page, "mask").convert("L"))
    assert np.array_equal(mask > 0, np.asarray(cutout.getchannel("A")) > 0)
    assert downloaded(page, "overlay").size == (1800, 1200)
    # a second point takes the other candidates away; a third choice is one key away before
    page.get_by_role("radio", name=re.compile("^C ")).check()
    expect(page.locator("#told")).not_to_have_text(re.compile("204 × 129"))
    click(page, 560, 390, button="right")
    expect(page.locator("#masks")).to_be_hidden(timeout=WAIT)
    assert sent[-1]["labels"] == [1, 0]
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#told")).to_have_text(re.compile(r"204 × 129 pixels"), timeout=WAIT)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("button", name="Download PNG")).to_be_disabled()


def test_a_box_is_drawn(opened: Any, truck: Path, shot: Any) -> None:
    page = bench(opened, truck)
    page.get_by_text("▢ Box").click()
    page.mouse.move(*page_position(page, 430, 620))
    page.mouse.down()
    page.mouse.move(*page_position(page, 600, 800))
    with page.expect_request("**/v1/segment") as request_info:
        page.mouse.move(*page_position(page, 690, 880))
        page.mouse.up()
    assert request_info.value.post_data_json["box"] == pytest.approx([430, 620, 690, 880], abs=3)
    expect_status(page, FOUND)
    shot(page, "segment-box")
    x0, y0, x1, y1 = downloaded(page, "mask").convert("L").getbbox()
    assert x0 > 380
    assert y0 > 560
    assert x1 < 740
    assert y1 < 940


def test_everything_is_found_and_one_is_chosen(opened: Any, truck: Path, shot: Any) -> None:
    page = bench(opened, _file(truck))

    def fewer(route: Any) -> None:
        """The same with 25 points in place of 1,024, for a busy machine's sake."""
        body = route.request.post_data_json
        assert body["everything"] is True
        route.continue_(post_data=json.dumps({**body, "everything": {"points_per_side": 5}}))

    page.route("**/v1/segment", fewer)
    page.get_by_role("button", name="Everything").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    expect_status(page, re.compile(r"^\d+ masks in"))
    count = int(page.locator("#told").inner_text().split()[0])
    assert count > 2
    shot(page, "segment-everything")
    click(page, 166, 125)
    expect_status(page, re.compile(rf"^Mask \d+ of {count}"))
    assert downloaded(page, "cutout").getchannel("A").getbbox() != (0, 0, 600, 400)


def _file(truck: Path) -> dict[str, Any]:
    """The truck in small, as a file that is dropped."""
    small = PIL.Image.open(truck).resize((600, 400))
    return {
        "name": "small truck.jpg",
        "mimeType": "image/jpeg",
        "buffer": encode_image(small, "JPEG", quality=95),
    }


def test_everything_is_cancelled(opened: Any, engines: Engines) -> None:
    page = bench(
        opened,
        {
            "name": "a.png",
            "mimeType": "image/png",
            "buffer": encode_image(random_photo(3, (900, 600))),
        },
    )
    page.get_by_role("button", name="Everything").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
    expect(page.get_by_role("button", name="Everything")).to_be_enabled()
    click(page, 100, 100)
    expect_status(page, FOUND)


def test_with_the_keyboard_alone(opened: Any, engines: Engines, shot: Any) -> None:
    page = bench(
        opened,
        {
            "name": "a.png",
            "mimeType": "image/png",
            "buffer": encode_image(random_photo(3, (300, 200))),
        },
    )
    sent: list[Any] = []
    page.on(
        "request", lambda each: sent.append(each.post_data_json) if "segment" in each.url else None
    )
    overlay = page.get_by_role("application")
    expect(overlay).to_be_focused()
    for key in ("ArrowRight", "Shift+ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    expect_status(page, FOUND)
    assert sent[-1]["points"] == [[168, 97]]
    shot(page, "segment-keyboard")
    page.keyboard.press("ArrowDown")
    with page.expect_request("**/v1/segment"):
        page.keyboard.press("x")
    assert (sent[-1]["points"], sent[-1]["labels"]) == ([[168, 97], [168, 100]], [1, 0])
    expect_status(page, FOUND)
    with page.expect_request("**/v1/segment"):
        page.keyboard.press("z")
    assert sent[-1]["labels"] == [1]
    page.keyboard.press("b")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
        page.keyboard.press("Shift+ArrowDown")
    with page.expect_request("**/v1/segment"):
        page.keyboard.press("b")
    assert sent[-1]["box"] == [168, 100, 213, 145]
    expect_status(page, FOUND)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(opened: Any, engines: Engines, shot: Any, scheme: str) -> None:
    folder = shared_dir()
    file = (
        folder / "data/images/dog.jpg"
        if folder
        else {"name": "a.png", "mimeType": "image/png", "buffer": encode_image(random_photo())}
    )
    page = bench(
        opened,
        file,
        viewport={"width": 360, "height": 740},
        color_scheme=scheme,
        has_touch=True,
        is_mobile=True,
    )
    box = page.locator("#overlay").bounding_box()
    page.touchscreen.tap(box["x"] + 0.35 * box["width"], box["y"] + 0.7 * box["height"])
    expect_status(page, FOUND)
    shot(page, f"segment-phone-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def test_a_turned_photo_is_upright_for_both(opened: Any, engines: Engines) -> None:
    """A camera's JPEG is sent as it is: browser and server must turn it alike."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    data = encode_image(random_photo(4, (300, 200)), "JPEG", exif=exif)
    page = bench(opened, {"name": "turned.jpg", "mimeType": "image/jpeg", "buffer": data})
    assert page.locator("#overlay").evaluate("each => [each.width, each.height]") == [200, 300]
    with page.expect_response("**/v1/segment") as answer:
        click(page, 150, 250)
    image = answer.value.json()["image"]
    assert (image["width"], image["height"]) == (200, 300)
    expect_status(page, FOUND)


def test_what_is_no_photo_is_reported(opened: Any) -> None:
    page = opened()
    expect(page.locator("#banner")).to_be_hidden(timeout=WAIT)
    page.get_by_role("tab", name="Segment").click()
    page.locator("#photo-file").set_input_files(
        {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"}
    )
    expect(page.get_by_role("alert")).to_have_text(
        re.compile("not a picture that the browser can read")
    )


def test_a_forgotten_embedding_is_made_again(opened: Any, engines: Engines) -> None:
    """Where the server does not know the picture any more, it is sent once more, and the
    user does not notice.
    """
    page = bench(
        opened,
        {
            "name": "a.png",
            "mimeType": "image/png",
            "buffer": encode_image(random_photo(5, (300, 200))),
        },
    )
    gone = '{"error": {"message": "gone", "type": "t", "param": null, "code": "image_not_found"}}'

    def forget(route: Any) -> None:
        if "image_id" in route.request.post_data_json:
            route.fulfill(status=404, body=gone)
        else:
            route.continue_()

    page.route("**/v1/segment", forget)
    click(page, 100, 100)
    expect_status(page, FOUND)
    expect(page.get_by_role("alert")).to_be_hidden()
