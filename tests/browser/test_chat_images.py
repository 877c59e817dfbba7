"""Pictures in a conversation on the page, with a small MiniGPT-4 of seeded weights: what it gets
and says.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from tests.browser.page_actions import STATS_PATTERN, expect, last_answer, send_message, wait_ready
from tests.models.minigpt4_seeded import write_checkpoint
from tests.serve.segment_service import data_url, encode_image, random_photo
from tests.serve.server_process import ServerProcess

pytestmark = pytest.mark.browser
FLAGS = ("--device", "cpu", "--threads", "1", "--kv-cache-bytes", "8000000", "--port", "0")
SAMPLING = '{"temperature": 0, "max_tokens": 8}'
DROP = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const moved = new DataTransfer();
  moved.items.add(new File([bytes], name, { type }));
  return moved;
}"""

PASTE = """(field, moved) => field.dispatchEvent(
  new ClipboardEvent("paste", { clipboardData: moved, bubbles: true, cancelable: true }),
)"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("pictures")
    write_checkpoint(folder / "files", shared)
    build_engine(
        folder / "files",
        folder / "mini.engine",
        BuildConfig(dtype="float32"),
        check=False,
        tune=False,
    )
    with ServerProcess(
        folder / "mini.engine", "--served-model-name", "mini", template="", flags=FLAGS
    ) as serving:
        yield serving


def put(
    page: Any, event: str, data: bytes, name: str = "photo.png", media_type: str = "image/png"
) -> None:
    """Drop a file onto the chat, or paste it into the message."""
    moved = page.evaluate_handle(DROP, [name, media_type, base64.b64encode(data).decode()])
    if event == "drop":
        page.dispatch_event("#chat", "dragover", {"dataTransfer": moved})
        page.dispatch_event("#chat", "drop", {"dataTransfer": moved})
    else:
        page.locator("#message").evaluate(PASTE, moved)


@pytest.mark.parametrize("way", ["drop", "paste", "button"])
def test_a_picture_goes_with_the_message(
    opened: Any, reader: ServerProcess, shot: Any, way: str
) -> None:
    """What the page sends is the picture, the answer is the API's own for it, and both stay in the
    talk.
    """
    page = opened(SAMPLING, reader.url)
    wait_ready(page)
    data = encode_image(random_photo(3, (64, 48)))
    sent: list[Any] = []
    page.on(
        "request",
        lambda each: sent.append(each.post_data_json) if "chat/completions" in each.url else None,
    )
    if way == "button":
        page.locator("#attachment-file").set_input_files(
            {"name": "photo.png", "mimeType": "image/png", "buffer": data}
        )
    else:
        put(page, way, data)
    waiting = page.get_by_alt_text("Picture 1 to send")
    expect(waiting).to_be_visible()
    shot(page, f"picture-{way}")
    send_message(page, "What is this?")
    last = last_answer(page)
    expect(last.locator(".figures")).to_have_text(STATS_PATTERN)
    expect(waiting).to_be_hidden()
    expect(page.get_by_alt_text("Picture 1", exact=True)).to_be_visible()
    shot(page, f"picture-{way}-answered")
    picture, words = sent[0]["messages"][-1]["content"]
    assert words == {"type": "text", "text": "What is this?"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    own = {"model": "mini", "temperature": 0, "max_tokens": 8}
    messages = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": data_url(data)}}, words],
        }
    ]
    status, answer, _ = reader.request("/v1/chat/completions", {**own, "messages": messages})
    assert status == 200
    content = answer["choices"][0]["message"]["content"]
    assert last.locator(".said").inner_text().split() == content.split()
    # it is kept, and goes along with the next question
    page.reload()
    expect(page.get_by_alt_text("Picture 1", exact=True)).to_be_visible()
    page.get_by_label("Message", exact=True).fill("And now?")
    # the page requests the list of models again
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")
    last_answer(page, 2)
    part_types = [
        part["type"] for message in sent[1]["messages"] if isinstance(message["content"], list)
             for part in message["content"]]  # fmt: skip
    assert part_types == ["image_url", "text"]


def test_text_and_pictures_in_one_message(opened: Any, reader: ServerProcess) -> None:
    page = opened(SAMPLING, reader.url)
    wait_ready(page)
    put(page, "drop", encode_image(random_photo(1, (32, 32))))
    put(page, "drop", b"some words", "notes.txt", "text/plain")
    expect(page.get_by_role("list", name="Files to send").locator("li")).to_have_count(2)
    with page.expect_request("**/v1/chat/completions") as request_info:
        send_message(page, "What is this?")
    picture, words = request_info.value.post_data_json["messages"][-1]["content"]
    assert picture["type"] == "image_url"
    assert words["text"] == "notes.txt\n```\nsome words\n```\n\nWhat is this?"
    last_answer(page)


def test_pictures_are_taken_back_and_bounded(opened: Any, reader: ServerProcess) -> None:
    page = opened(SAMPLING, reader.url)
    wait_ready(page)
    for seed in range(2):
        put(page, "drop", encode_image(random_photo(seed, (32, 32))))
        expect(page.get_by_alt_text(re.compile("to send$"))).to_have_count(seed + 1)
    page.get_by_role("button", name="Remove picture 1").click()
    expect(page.get_by_alt_text(re.compile("to send$"))).to_have_count(1)
    put(page, "drop", b"\x00\x01", "notes.bin", "application/octet-stream")
    expect(page.locator("#trouble-text")).to_have_text("notes.bin is not a text or a picture.")
    put(page, "drop", b"\x89PNG nothing behind it")
    expect(page.locator("#trouble-text")).to_have_text(
        "This file is not a picture that the browser can read."
    )
    expect(page.get_by_alt_text(re.compile("to send$"))).to_have_count(1)


def test_a_model_without_a_vision_encoder_says_so(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    put(page, "drop", encode_image(random_photo(0, (32, 32))))
    expect(page.locator("#trouble-text")).to_have_text("This model does not read pictures.")
    expect(page.get_by_alt_text(re.compile("to send$"))).to_have_count(0)
