"""POST /v1/segment against a small SAM with seeded weights, in a worker of its own beside a
language engine.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from modelmill.segmenter import Segmenter
from modelmill.serve.engine_state import EngineState
from modelmill.serve.segmentation_messages import SegmentationJob, SegmentationResult
from modelmill.serve.worker_messages import SegmentationFailure, decode_frame_body, encode_frame
from modelmill.vision.prompts import make_prompt
from tests.serve.asgi_client import Client, Response
from tests.serve.segment_service import SegmentService, data_url, encode_image, random_photo
from tests.vision.coco_rle import decode_rle, from_coco_rle

PICTURE = random_photo()
IMAGE = data_url(encode_image(PICTURE))
EVERYTHING = {
    "points_per_side": 3,
    "pred_iou_thresh": 0.0,
    "stability_score_thresh": 0.0,
    "box_nms_thresh": 1.0,
}


@pytest.fixture(scope="module")
def seeing(running_with_sam: SegmentService) -> SegmentService:
    return running_with_sam


@pytest.fixture(scope="module")
def segmenter(sam: Path) -> Segmenter:
    return Segmenter(sam, device="cpu", threads=1)


def segment(seeing: SegmentService, **body: Any) -> dict[str, Any]:
    response = seeing.post("/v1/segment", {"model": "sam", **body})
    assert response.status == 200, response.body
    return response.json


@contextmanager
def still(seeing: SegmentService) -> Iterator[None]:
    """Its worker computes nothing meanwhile, however late the others are."""
    os.kill(seeing.segment_engine.pid or 0, signal.SIGSTOP)
    try:
        yield
    finally:
        if seeing.segment_engine.pid is not None:
            os.kill(seeing.segment_engine.pid, signal.SIGCONT)


def pixels(mask: dict[str, Any]) -> np.ndarray:
    """Of an answer's mask, whichever form it has."""
    if "rle" in mask:
        return decode_rle(from_coco_rle(mask["rle"]), *mask["rle"]["size"]).numpy()
    head, _, data = mask["png"].partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.mark.parametrize("mask_format", ["rle", "png"])
@pytest.mark.parametrize(
    "prompt",
    [
        {"points": [[50, 40]]},
        {"points": [[50, 40], [10.5, 70]], "labels": [1, 0]},
        {"box": [10, 10, 90, 60]},
        {"points": [[50, 40]], "box": [10, 10, 90, 60]},
    ],
    ids=str,
)
def test_masks_are_the_classes(
    seeing: SegmentService, segmenter: Segmenter, prompt: dict[str, Any], mask_format: str
) -> None:
    segmenter.set_image(PICTURE)
    for multimask in (True, False):
        reply = segment(seeing, image=IMAGE, format=mask_format, multimask=multimask, **prompt)
        expected = segmenter.predict(**prompt, multimask=multimask)
        assert [mask["box"] for mask in reply["masks"]] == [list(mask.box) for mask in expected]
        for mask, one in zip(reply["masks"], expected, strict=True):
            assert mask["score"] == pytest.approx(one.score, abs=1e-5)
            assert mask["area"] == one.area
            assert np.array_equal(pixels(mask), one.pixels.numpy())
            assert mask["prompt"] == 0
            assert ("rle" in mask) != ("png" in mask)
        assert (reply["image"]["width"], reply["image"]["height"]) == PICTURE.size


def test_a_second_click_finds_the_embedding(seeing: SegmentService) -> None:
    fresh = data_url(encode_image(random_photo(7)))
    first = segment(seeing, image=fresh, points=[[5, 5]])
    again = segment(seeing, image=fresh, points=[[5, 5]])
    by_id = segment(seeing, image_id=first["image"]["id"], points=[[5, 5]])
    assert [each["image"]["cached"] for each in (first, again, by_id)] == [False, True, True]
    assert first["masks"] == again["masks"] == by_id["masks"]
    # the same pixels in another file are the same picture; another shape or salt is not
    bmp = base64.b64encode(encode_image(random_photo(7), "BMP")).decode()
    assert segment(seeing, image=bmp)["image"] == {**first["image"], "cached": True}
    salted = segment(seeing, image=fresh, cache_salt="mine")
    assert not salted["image"]["cached"]
    assert salted["image"]["id"] != first["image"]["id"]
    # an id is no key to another salt's embedding
    id = salted["image"]["id"]
    assert segment(seeing, image_id=id, cache_salt="mine")["image"]["cached"]
    for other in ({}, {"cache_salt": "yours"}):
        assert seeing.post("/v1/segment", {"image_id": id, **other}).status == 404
    turned = segment(
        seeing,
        image=data_url(
            encode_image(PIL.Image.frombytes("RGB", (80, 120), random_photo(7).tobytes()))
        ),
    )
    assert not turned["image"]["cached"]


def test_keys_share_no_embeddings_unless_they_may(seeing: SegmentService) -> None:
    """Else one key could learn whether another has looked at a picture."""

    def post_segment(client: Client, key: str, **body: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}"}
        reply = seeing.run(client.post("/v1/segment", {"model": "sam", **body}, headers=headers))
        return reply.status, reply.json.get("image")

    keys = ("one", "two")
    apart, shared = (
        seeing.limited_client(api_keys=keys, share_cache=share) for share in (False, True)
    )
    for salt in ({}, {"cache_salt": "mine"}):
        replies = [
            post_segment(apart, key, image=data_url(encode_image(random_photo(21))), **salt)[1]
            for key in ("one", "two", "one", "two")
        ]
        assert [each["cached"] for each in replies] == [False, False, True, True]
        assert replies[0]["id"] != replies[1]["id"]
        assert post_segment(apart, "one", image_id=replies[0]["id"], **salt)[0] == 200
        assert post_segment(apart, "two", image_id=replies[0]["id"], **salt)[0] == 404
    assert not post_segment(shared, "one", image=data_url(encode_image(random_photo(22))))[1][
        "cached"
    ]
    assert post_segment(shared, "two", image=data_url(encode_image(random_photo(22))))[1]["cached"]


def test_what_is_clear_in_a_drawn_mask_is_no_object(seeing: SegmentService) -> None:
    drawn = PIL.Image.new("L", PICTURE.size)
    drawn.paste(255, (20, 10, 60, 50))
    clear = PIL.Image.new("RGB", PICTURE.size, (255, 255, 255))
    clear.putalpha(drawn)
    black, white = (
        segment(seeing, image=IMAGE, mask=data_url(encode_image(mask)))["masks"]
        for mask in (drawn, clear)
    )
    assert black == white


def test_no_prompt_makes_the_embedding_ready(seeing: SegmentService) -> None:
    reply = segment(seeing, image=data_url(encode_image(random_photo(8))))
    assert reply["masks"] == []
    assert segment(seeing, image_id=reply["image"]["id"], box=[1, 1, 9, 9])["image"]["cached"]


def test_several_prompts_in_one_call(seeing: SegmentService, segmenter: Segmenter) -> None:
    segmenter.set_image(PICTURE)
    boxes = [[1, 1, 40, 40], [30, 20, 110, 70]]
    reply = segment(seeing, image=IMAGE, boxes=boxes)
    assert [mask["prompt"] for mask in reply["masks"]] == [0, 0, 0, 1, 1, 1]
    expected = segmenter.predict_all([make_prompt(box=box) for box in boxes])
    assert [m["box"] for m in reply["masks"]] == [list(m.box) for masks in expected for m in masks]
    mixed = [
        {"points": [[5, 5]]},
        {"box": boxes[0]},
        {"points": [[9, 9], [50, 50]], "labels": [0, 1]},
    ]
    reply = segment(seeing, image=IMAGE, prompts=mixed, multimask=False)
    assert [mask["prompt"] for mask in reply["masks"]] == [0, 1, 2]


def test_logits_and_drawn_masks_are_prompts(seeing: SegmentService, segmenter: Segmenter) -> None:
    segmenter.set_image(PICTURE)
    first = segment(seeing, image=IMAGE, points=[[50, 40]], logits=True)["masks"][0]
    reply = segment(seeing, image=IMAGE, points=[[50, 40]], mask=first["logits"])
    own = segmenter.predict([(50, 40)])[0]
    assert [m["box"] for m in reply["masks"]] == [
        list(m.box) for m in segmenter.predict([(50, 40)], mask=own.logits)
    ]
    drawn = PIL.Image.new("L", PICTURE.size)
    drawn.paste(255, (20, 20, 60, 60))
    assert len(segment(seeing, image=IMAGE, mask=data_url(encode_image(drawn)))["masks"]) == 3
    for wrong in (
        "AAAA",
        data_url(b"\0" * 12, "application/octet-stream"),
        "data:image/png;base64,",
    ):
        response = seeing.post("/v1/segment", {"image": IMAGE, "mask": wrong})
        assert response.status == 400
        assert response.json["error"]["param"] == "mask"
    nan = base64.b64encode(
        np.full(len(base64.b64decode(first["logits"].split(",")[1])) // 4, np.nan, "<f4").tobytes()
    )
    response = seeing.post("/v1/segment", {"image": IMAGE, "mask": nan.decode()})
    assert (response.status, response.json["error"]["param"]) == (400, "mask")


def test_everything(seeing: SegmentService, segmenter: Segmenter) -> None:
    reply = segment(seeing, image=IMAGE, everything=EVERYTHING)
    expected = segmenter.everything(PICTURE, **EVERYTHING)
    assert len(reply["masks"]) == len(expected) > 1
    for mask, one in zip(reply["masks"], expected, strict=True):
        assert np.array_equal(pixels(mask), one.pixels.numpy())
        assert mask["point"] == list(one.point)
        assert mask["stability"] == pytest.approx(one.stability, abs=1e-5)
    by_id = segment(seeing, image_id=reply["image"]["id"], everything=EVERYTHING)
    assert by_id["masks"] == reply["masks"]
    # false is as if it were not there
    assert segment(seeing, image=IMAGE, everything=False)["masks"] == []


def test_a_click_does_not_wait_for_everything(
    seeing: SegmentService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two batches of points others have their turn; who leaves is worked for no longer."""
    body = {"model": "sam", "image": IMAGE, "everything": {**EVERYTHING, "points_per_side": 24}}
    click = {"image": IMAGE, "points": [[3, 3]]}

    hear, results = seeing.segment_engine.segment_client.handle_message, []
    monkeypatch.setattr(
        seeing.segment_engine.segment_client,
        "handle_message",
        lambda message: (results.append(message.id), hear(message)),
    )

    async def wait_for_jobs(count: int) -> str:
        while len(seeing.segment_engine.segment_client) < count:
            await asyncio.sleep(0.001)
        return list(seeing.segment_engine.segment_client._waiting)[-1]

    async def main() -> tuple[list[str], Response]:
        with still(seeing):
            slow = asyncio.create_task(seeing.client.post("/v1/segment", body))
            first = await wait_for_jobs(1)
            quick = asyncio.create_task(seeing.client.post("/v1/segment", click))
            second = await wait_for_jobs(2)
            left = asyncio.create_task(anext(seeing.client.parts("POST", "/v1/segment", body)))
            await wait_for_jobs(3)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        assert (await slow).status == 200
        while len(seeing.segment_engine.segment_client):
            await asyncio.sleep(0.001)
        return [second, first], await quick

    order, quick = seeing.run(main())
    assert quick.status == 200
    assert results == order
    assert segment(seeing, image=IMAGE, points=[[3, 3]])["masks"] == quick.json["masks"]


def test_a_queue_that_is_full(seeing: SegmentService) -> None:
    body = {"image": IMAGE, "everything": {**EVERYTHING, "points_per_side": 2}}

    async def main() -> list[Response]:
        with still(seeing):
            tasks = [
                asyncio.create_task(seeing.client.post("/v1/segment", body)) for _ in range(24)
            ]
            while sum(task.done() for task in tasks) < 24 - 17:  # one is looked at, 16 wait
                await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks)

    answers = seeing.run(main())
    refused = [each for each in answers if each.status == 429]
    assert Counter(each.status for each in answers) == {200: 17, 429: 7}
    assert refused[0].headers["retry-after"]
    assert refused[0].json["error"]["code"] == "rate_limit_exceeded"


def test_verbs_of_the_other_kind(seeing: SegmentService) -> None:
    chat_body = {"messages": [{"role": "user", "content": "hi"}]}
    for path, body in (
        ("/v1/chat/completions", chat_body),
        ("/v1/completions", {"prompt": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [3]}),
    ):
        response = seeing.post(path, {"model": "sam", **body})
        assert (response.status, response.json["error"]["param"]) == (400, "model"), path
        message = response.json["error"]["message"]
        assert message == "model sam segments images: send requests to /v1/segment"
    response = seeing.post("/v1/segment", {"model": "stories", "image": IMAGE})
    assert response.status == 400
    message = response.json["error"]["message"]
    assert message == "model stories generates text; it does not segment images"
    assert seeing.post("/v1/segment", {"model": "none", "image": IMAGE}).status == 404
    # without a name each verb finds the engine that it is for
    assert seeing.post("/v1/segment", {"image": IMAGE}).json["model"] == "sam"
    assert seeing.post("/tokenize", {"prompt": "hi"}).status == 200
    cards = seeing.get("/v1/models").json["data"]
    assert all(card["kind"] == card["engine_type"] for card in cards)
    assert {card["id"]: card["engine_type"] for card in cards} == {
        "stories": "language",
        "alias": "language",
        "sam": "segmentation",
    }


def test_no_engine_that_segments(running: Any) -> None:
    response = running.post("/v1/segment", {"image": IMAGE})
    assert (response.status, response.json["error"]["param"]) == (400, "model")
    assert response.json["error"]["message"] == "no engine that segments images is served here"


def test_metrics_and_the_document(seeing: SegmentService) -> None:
    segment(seeing, image=IMAGE, points=[[1, 1]])
    page = seeing.get("/metrics").body.decode()
    for name in ("segment_latency_seconds_count", "segment_masks_total", "image_cache_hits_total"):
        (line,) = [
            line
            for line in page.splitlines()
            if line.startswith(f'modelmill:{name}{{model_name="sam"}}')
        ]
        assert float(line.split()[-1]) >= 1
    document = seeing.get("/openapi.json").json
    responses = document["paths"]["/v1/segment"]["post"]["responses"]
    assert responses["200"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "/SegmentResponse"
    )
    assert "422" not in responses
    assert "SegmentRequest" in document["components"]["schemas"]


def test_a_worker_that_dies_while_it_looks(seeing: SegmentService) -> None:
    async def main() -> Response:
        os.kill(seeing.segment_engine.pid or 0, signal.SIGSTOP)
        asking = asyncio.create_task(
            seeing.client.post(
                "/v1/segment", {"image": IMAGE, "everything": {**EVERYTHING, "points_per_side": 24}}
            )
        )
        while len(seeing.segment_engine.segment_client) == 0:
            await asyncio.sleep(0.001)
        seeing.segment_engine._worker_process.kill()  # type: ignore[union-attr]
        answer = await asking
        assert seeing.service.is_ready is False
        while seeing.segment_engine.state is not EngineState.READY:
            await asyncio.sleep(0.01)
        return answer

    answer = seeing.run(main())
    assert (answer.status, answer.json["error"]["code"]) == (503, "engine_restarted")
    assert seeing.segment_engine.restarts == 1
    # the new worker has an empty cache, and the response says so
    gone = seeing.post("/v1/segment", {"image_id": "0" * 64, "points": [[1, 1]]})
    assert (gone.status, gone.json["error"]["code"]) == (404, "image_not_found")
    assert segment(seeing, image=IMAGE, points=[[1, 1]])["masks"]


def test_frames_carry_bytes_as_they_are() -> None:
    body = bytes(range(256)) * 3
    for message in (
        SegmentationJob("a", "", "salt", [{"points": [[1.5, 2]], "labels": None, "box": None,
        "mask": 0}], None, True, "png",
             False, body, (b"", body[1:])),
        SegmentationJob("b", image_digest="f" * 64, prompts=[]),
        SegmentationResult("c", {"masks": [], "image": {"id": "x"}}, (body, b"\0")),
        SegmentationResult("d", {}),
        SegmentationFailure("e", "invalid", "no", None),
    ):  # fmt: skip
        frame = encode_frame(message)
        assert decode_frame_body(frame[4:]) == message
        assert len(frame) < 2000 + 2 * len(body)
