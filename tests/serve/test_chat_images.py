"""Pictures in conversations over the API, with a small MiniGPT-4 of seeded weights."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from modelmill.core.config import BuildConfig
from modelmill.core.types import SamplingParams
from modelmill.llm import LLM, build_engine
from tests.models.minigpt4_seeded import write_checkpoint
from tests.serve.segment_service import data_url, encode_image, random_photo
from tests.serve.service_thread import ServiceThread

ASK = {"model": "stories", "temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_checkpoint(folder / "files", shared)
    build_engine(
        folder / "files", folder / "mini.engine", BuildConfig(dtype="float32"), check=False
    )
    return folder / "mini.engine"


@pytest.fixture(scope="module")
def image_service(engine: Path) -> Iterator[ServiceThread]:
    service = ServiceThread(engine, template=None)
    yield service
    service.close()


@pytest.fixture(scope="module")
def local(engine: Path) -> LLM:
    return LLM(engine, device="cpu", threads=1, kv_cache_bytes=8 << 20)


def image_messages(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def test_the_same_text_as_the_class(image_service: ServiceThread, local: LLM) -> None:
    pictures = [random_photo(seed) for seed in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for count in (0, 1, 2, 3):
        data = [encode_image(picture) for picture in pictures[:count]]
        answer = image_service.post(
            "/v1/chat/completions",
            {**ASK, "messages": image_messages(*map(data_url, data), "What?")},
        )
        assert answer.status == 200, answer.json
        here = [{"type": "image", "image": each} for each in data]
        [own] = local.chat(
            [{"role": "user", "content": [*here, {"type": "text", "text": "What?"}]}], params
        )
        assert answer.json["choices"][0]["message"]["content"] == own.outputs[0].text
        assert answer.json["usage"]["prompt_tokens"] == len(own.prompt_token_ids)


def test_pictures_are_distinguished(image_service: ServiceThread) -> None:
    texts = set()
    for seed in range(4):
        body = {
            **ASK,
            "messages": image_messages(data_url(encode_image(random_photo(seed))), "What?"),
            "logprobs": True,
        }
        answer = image_service.post("/v1/chat/completions", body)
        texts.add(str(answer.json["choices"][0]["logprobs"]))
    assert len(texts) == 4


def test_streamed(image_service: ServiceThread) -> None:
    body = {**ASK, "messages": image_messages(data_url(encode_image(random_photo())), "What?")}
    content = image_service.post("/v1/chat/completions", body).json["choices"][0]["message"][
        "content"
    ]
    events = image_service.post("/v1/chat/completions", {**body, "stream": True}).events
    assert (
        "".join(
            e["choices"][0]["delta"].get("content") or "" for e in events if isinstance(e, dict)
        )
        == content
    )


def test_the_card_tells(image_service: ServiceThread) -> None:
    card = image_service.get("/v1/models/stories").json
    assert card["engine_type"] == "language"
    assert card["input_modalities"] == ["text", "image"]


def picture_file(
    mode: str, file_format: str, size: tuple[int, int] = (20, 30), **options: Any
) -> str:
    out = io.BytesIO()
    PIL.Image.new(mode, size).save(out, file_format, **options)
    return data_url(out.getvalue())


@pytest.mark.parametrize(
    ("mode", "file_format", "size"),
    [("CMYK", "JPEG", (20, 30)), ("I;16", "PNG", (20, 30)), ("P", "PNG", (20, 30)),
    ("1", "PNG", (20, 30)),
     ("RGBA", "PNG", (20, 30)), ("LA", "PNG", (20, 30)), ("L", "PNG", (1, 1)),
     ("RGB", "PNG", (1, 999)),
     ("P", "GIF", (20, 30))],
)  # fmt: skip
def test_odd_pictures_are_answered(
    image_service: ServiceThread, mode: str, file_format: str, size: tuple[int, int]
) -> None:
    body = {
        **ASK,
        "max_tokens": 2,
        "messages": image_messages(picture_file(mode, file_format, size), "What?"),
    }
    assert image_service.post("/v1/chat/completions", body).status == 200


def bomb() -> str:
    """A PNG of a few bytes that claims 60,000 × 60,000 pixels."""
    data = bytearray(encode_image(random_photo()))
    data[16:24] = (60000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return data_url(bytes(data))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (bomb(), "pixels"),
        (data_url(b""), "cannot be read"),
        (data_url(b"\x89PNG\r\n\x1a\n" + b"\0" * 50), "image"),
        ("data:image/png;base64,###", "base64"),
        ("data:text/html;base64,PGI+", "data:image"),
        ("http://169.254.169.254/latest/meta-data", "not fetched"),
        ("https://example.org/a.png", "not fetched"),
        ("file:///etc/passwd", "not fetched"),
        ("/etc/passwd", "not fetched"),
        ("", "not fetched"),
    ],
)
def test_bad_pictures_are_refused(image_service: ServiceThread, source: str, says: str) -> None:
    part = {"type": "image_url", "image_url": {"url": source}}
    answer = image_service.post(
        "/v1/chat/completions", {**ASK, "messages": [{"role": "user", "content": [part]}]}
    )
    assert answer.status == 400
    assert says in answer.json["error"]["message"]
    assert "passwd" not in answer.json["error"]["message"]


def test_an_unreadable_picture_has_the_clients_name(image_service: ServiceThread) -> None:
    """Each request has a good picture first, and a text of the system."""
    good, bad = encode_image(random_photo()), b"no picture"
    sent = [base64.b64encode(each).decode() for each in (good, bad)]
    urls = [f"data:image/png;base64,{each}" for each in sent]
    sources = [{"type": "base64", "media_type": "image/png", "data": each} for each in sent]
    blocks = [{"type": "image", "source": each} for each in sources]
    parts = [{"type": "input_image", "image_url": each} for each in urls]
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/messages",
         {"system": "a", "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]},
         "messages[0].content[1]"),
        ("/v1/responses", {"instructions": "a", "input": [{"role": "user", "content": parts}]},
         "input[0].content[1]"),
        ("/api/chat",
         {"messages": [{"role": "system", "content": "a"},
                       {"role": "user", "content": "What?", "images": sent}]},
         "messages[1].images[1]"),
        ("/api/generate", {"system": "a", "prompt": "What?", "images": sent}, "images[1]"),
    ]  # fmt: skip
    for path, body, name in bodies:
        answer = image_service.post(path, {"model": "stories", **body})
        assert answer.status == 400
        assert answer.error_message.startswith(f"{name} ")


def test_the_servers_own_limit_of_pixels(image_service: ServiceThread) -> None:
    """--max-image-pixels is 50 million; the file is one that may be read elsewhere."""
    large = data_url(encode_image(PIL.Image.new("1", (10001, 5000))))
    answer = image_service.post(
        "/v1/chat/completions", {**ASK, "messages": image_messages(large, "What?")}
    )
    assert answer.status == 400
    assert "10001 × 5000 pixels are more than 50000000" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    "part", [{"type": "image", "image": "/etc/passwd"}, {"type": "image", "image": "a.png"}]
)
def test_files_of_the_server_are_not_read(
    image_service: ServiceThread, part: dict[str, Any]
) -> None:
    answer = image_service.post(
        "/v1/chat/completions", {**ASK, "messages": [{"role": "user", "content": [part]}]}
    )
    assert answer.status == 400
    assert "data URL" in answer.json["error"]["message"]


def test_too_many_pictures(image_service: ServiceThread) -> None:
    answer = image_service.post(
        "/v1/chat/completions",
        {
            **ASK,
            "messages": image_messages(*[data_url(encode_image(random_photo()))] * 33, "What?"),
        },
    )
    assert answer.status == 400
    assert "33 pictures" in answer.json["error"]["message"]


def test_an_engine_without_a_vision_encoder_refuses_pictures(running: ServiceThread) -> None:
    answer = running.post(
        "/v1/chat/completions",
        {**ASK, "messages": image_messages(data_url(encode_image(random_photo())), "What?")},
    )
    assert answer.status == 400


def test_tokenize_counts_the_places(image_service: ServiceThread) -> None:
    with_one = image_service.post(
        "/tokenize",
        {
            "model": "stories",
            "messages": image_messages(data_url(encode_image(random_photo())), "What?"),
        },
    ).json
    without = image_service.post(
        "/tokenize", {"model": "stories", "messages": image_messages("What?")}
    ).json
    assert with_one["count"] > without["count"] + 8


def test_a_session_with_pictures_goes_on_bit_for_bit(
    image_service: ServiceThread, tmp_path: Path
) -> None:
    def messages(seed: int) -> list[dict[str, Any]]:
        picture = data_url(encode_image(random_photo(seed)))
        return image_messages(picture, "What is in the picture, and what is behind it?")

    def ask(salt: str, seed: int) -> tuple[Any, int]:
        body = {**ASK, "messages": messages(seed), "logprobs": True, "cache_salt": salt}
        answer = image_service.post("/v1/chat/completions", body).json
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"], details["cached_tokens"]

    client = image_service.limited_client(session_dir=tmp_path)
    body = {"model": "stories", "name": "photo", "messages": messages(0), "cache_salt": "before"}
    saved = image_service.run(client.post("/v1/sessions/save", body))
    assert saved.status == 200, saved.body
    expected, cached = ask("before", 0)
    assert cached == saved.json["tokens"] > 32  # more than the picture's places
    restore = {"model": "stories", "name": "photo", "cache_salt": "after"}
    restored = image_service.run(client.post("/v1/sessions/restore", restore))
    assert restored.json["tokens"] == cached
    assert ask("after", 0) == (expected, cached)
    assert ask("after", 1)[1] < cached  # another picture
