"""previous_response_id, stored responses by id and owner, and compaction."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.serve.encrypted_content_codec import (
    MAX_UNPACKED_BYTES,
    TextDecompressor,
    compress_text,
)
from modelmill.serve.errors import ApiError
from modelmill.serve.response_input_items import list_input_items
from modelmill.serve.response_store import (
    ResponseStore,
    StoredResponse,
    estimate_stored_bytes,
    make_stored_response,
)
from tests.serve.service_thread import ServiceThread

ASK = {"model": "stories", "temperature": 0, "max_output_tokens": 8}


def respond(running: ServiceThread, status: int = 200, **more: Any) -> Any:
    response = running.post("/v1/responses", {**ASK, **more})
    assert response.status == status, response.body
    return response.json


def output_text(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_a_response_goes_on_as_if_its_items_were_sent_again(running: ServiceThread) -> None:
    first = respond(running, input="Hi", instructions="Be kind")
    second = respond(running, input="And then?", previous_response_id=first["id"])
    items = [
        {"role": "user", "content": "Hi"},
        *first["output"],
        {"role": "user", "content": "And then?"},
    ]
    same = respond(running, input=items, store=False)
    assert output_text(second) == output_text(same)
    assert second["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    assert (second["previous_response_id"], second["store"]) == (first["id"], True)
    third = respond(running, input="Go on", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert same["store"] is False
    respond(running, 400, input="x", previous_response_id=same["id"])


def test_a_streamed_response_is_stored_too(running: ServiceThread) -> None:
    response = running.post("/v1/responses", {**ASK, "input": "Hi", "stream": True})
    id = next(
        part.split('"id":"')[1].split('"')[0]
        for part in response.body.decode().split("\n")
        if '"resp_' in part
    )
    respond(running, input="x", previous_response_id=id)


def test_routes_by_id(running: ServiceThread) -> None:
    made = respond(running, input="Hi", reasoning={"effort": "low"})
    assert made["reasoning"] == {"effort": "low", "summary": None}
    assert running.get(f"/v1/responses/{made['id']}").json == made
    listed = running.get(f"/v1/responses/{made['id']}/input_items").json
    (item,) = listed["data"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message", "role": "user", "status": "completed",
        "content": [{"type": "input_text", "text": "Hi"}],
    }  # fmt: skip
    deleted = running.run(running.client.call("DELETE", f"/v1/responses/{made['id']}"))
    assert deleted.json == {"id": made["id"], "object": "response", "deleted": True}
    missing = running.get(f"/v1/responses/{made['id']}")
    assert (missing.status, missing.json["error"]["code"]) == (404, "not_found")
    error = respond(running, 400, input="x", previous_response_id=made["id"])["error"]
    assert (error["param"], error["code"]) == (
        "previous_response_id", "previous_response_not_found",
    )  # fmt: skip


def test_pages_of_the_input_of_a_response() -> None:
    """As a client of OpenAI's asks for them, oldest and newest first."""
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "message", "id": "msg_answer", "role": "assistant", "content": "b"},
    ]
    stored = StoredResponse([*items, {"id": "msg_output"}], 4, {"id": "resp_1"})
    oldest = list_input_items(stored, "asc", 3, None)
    assert [item["id"] for item in oldest["data"]] == ["msg_1_0", "fc_1", "item_1_2"]
    assert (oldest["first_id"], oldest["last_id"], oldest["has_more"]) == (
        "msg_1_0", "item_1_2", True,
    )  # fmt: skip
    rest = list_input_items(stored, "asc", 3, oldest["last_id"])
    assert rest["data"][0]["content"][0]["type"] == "output_text"
    assert (rest["first_id"], rest["has_more"]) == ("msg_answer", False)
    newest = list_input_items(stored, "desc", 1, "fc_1")
    assert (newest["last_id"], newest["has_more"]) == ("msg_1_0", False)
    with pytest.raises(ApiError, match="no item 'fc_2'") as refused:
        list_input_items(stored, "asc", 3, "fc_2")
    assert (refused.value.status, refused.value.param) == (400, "after")


def test_pages_end_where_a_client_has_named_two_items_alike() -> None:
    stored = StoredResponse([{"id": "a"}, {"id": "b"}, {"id": "a"}], 3, {"id": "resp_1"})
    last = list_input_items(stored, "asc", 2, "a")
    assert (last["data"], last["has_more"]) == ([], False)


@pytest.mark.parametrize("share_cache", [False, True])
def test_no_key_continues_the_response_of_another(
    running: ServiceThread, share_cache: bool
) -> None:
    client = running.limited_client(api_keys=("one", "two"), share_cache=share_cache)

    def post(key: str, path: str = "", **body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return running.run(client.post(f"/v1/responses{path}", body, headers=headers))

    made = post("one", **ASK, input="Hi").json
    id, item = made["id"], {"type": "item_reference", "id": made["output"][0]["id"]}
    brief: dict[str, Any] = {"model": "stories", "max_output_tokens": 1}
    for continued in ({"input": "x", "previous_response_id": id}, {"input": [item]}):
        assert post("one", **brief, **continued).status == 200
        for path in ("", "/compact", "/input_tokens"):
            assert post("two", path, **brief, **continued).status == 400


def test_a_server_without_room_says_so(running: ServiceThread) -> None:
    client = running.limited_client(response_store_bytes=0)
    made = running.run(client.post("/v1/responses", {**ASK, "input": "Hi"}))
    assert made.json["store"] is False
    body = {**ASK, "input": "x", "previous_response_id": made.json["id"]}
    refused = running.run(client.post("/v1/responses", body))
    assert refused.status == 400
    assert "not stored" in refused.json["error"]["message"]


def stored(id: str, text: str = "x" * 100) -> StoredResponse:
    return make_stored_response([{"role": "user", "content": text}], {"id": id, "output": []})


def test_the_store_drops_the_least_recently_used() -> None:
    size = estimate_stored_bytes(stored("r0"))
    store = ResponseStore(3 * size)
    for number in range(3):
        store.add("me", stored(f"r{number}"), size)
    store.get("me", "r0")
    store.add("me", stored("r3"), size)
    assert store.used_bytes == 3 * size
    with pytest.raises(ApiError):
        store.get("me", "r1")
    assert store.get("me", "r0").input_length == 1
    store.add("me", stored("large"), 4 * size)
    with pytest.raises(ApiError):
        store.get("me", "large")
    store.delete("me", "r0")
    assert store.used_bytes == 2 * size


def test_log_probabilities_are_not_kept() -> None:
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [{"token": "x"}]}
    item = {"type": "message", "role": "assistant", "content": [part]}
    first_item = make_stored_response([], {"id": "r", "output": [item]}).items[0]
    assert first_item["content"] == [{**part, "logprobs": []}]


def test_packed_texts_of_other_servers_are_refused() -> None:
    assert TextDecompressor().decompress(compress_text("Ünder \ud800 way")) == "Ünder ? way"
    # a client that cuts long fields: base64 of four characters is three bytes
    cut = compress_text("".join(map(str, range(200))))[:-8]
    for content in ("", "gAAAA", "mm1:", "mm1:!", "mm1:QUJD", cut):
        with pytest.raises(RequestError, match="not of this server"):
            TextDecompressor().decompress(content)


def test_packed_texts_of_a_request_are_limited_together() -> None:
    half = compress_text("x" * (MAX_UNPACKED_BYTES // 2))
    unpacker = TextDecompressor()
    assert len(half) < MAX_UNPACKED_BYTES // 500
    assert [len(unpacker.decompress(half)) for _ in range(2)] == [MAX_UNPACKED_BYTES // 2] * 2
    assert unpacker.decompress(compress_text("")) == ""
    for text in ("x", "€"):
        with pytest.raises(RequestError, match="more than 4 MiB"):
            unpacker.decompress(compress_text(text))


def test_an_item_is_named_by_its_id(running: ServiceThread) -> None:
    """As Vercel's AI SDK does unless the client says store: false."""
    first = respond(running, input="Hi")
    (item,) = first["output"]
    ask = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "And then?"}]
    reference = {"type": "item_reference", "id": item["id"]}
    named = respond(running, input=[ask[0], reference, ask[1]])
    written = respond(running, input=[ask[0], item, ask[1]])
    assert output_text(named) == output_text(written)
    assert named["usage"]["input_tokens"] == written["usage"]["input_tokens"]
    short = respond(running, input=[ask[0], {"id": item["id"]}, ask[1]])  # as OpenAI allows
    assert output_text(short) == output_text(written)
    wrong = respond(running, 400, input=[ask[0], {"type": "item_reference"}])["error"]
    assert wrong["message"] == "input[1].id: field required"
    listed = running.get(f"/v1/responses/{named['id']}/input_items").json["data"]
    assert [each["id"] for each in listed][1] == item["id"]
    assert running.run(running.client.call("DELETE", f"/v1/responses/{first['id']}")).status == 200
    gone = respond(running, 400, input=[ask[0], reference, ask[1]])["error"]
    assert gone["message"].startswith(f"input[1]: there is no item {item['id']!r}")
    assert gone["param"] == "input"


def test_items_go_with_their_response() -> None:
    def made(number: int) -> StoredResponse:
        return make_stored_response([], {"id": f"r{number}", "output": [{"id": f"m{number}"}]})

    size = estimate_stored_bytes(made(0))
    store = ResponseStore(2 * size)
    for number in range(3):
        store.add("me", made(number), size)
    assert store.get_item("me", "m2", "input[0]")["id"] == "m2"
    for owner, id in (("me", "m0"), ("other", "m2")):
        with pytest.raises(ApiError, match=r"input\[0\]: there is no item"):
            store.get_item(owner, id, "input[0]")
    assert len(store._items) == 2
    store.get_item("me", "m1", "input[0]")  # is a use of r1
    store.add("me", made(3), size)
    assert store.get_item("me", "m1", "input[0]")["id"] == "m1"


def test_the_prompt_of_a_response_is_counted(running: ServiceThread) -> None:
    first = respond(running, input="Hi", instructions="Be kind")
    count = running.post(
        "/v1/responses/input_tokens",
        {"model": "stories", "input": "Hi", "instructions": "Be kind"},
    )
    expected = {
        "object": "response.input_tokens",
        "input_tokens": first["usage"]["input_tokens"],
    }
    assert count.json == expected
    long = running.post("/v1/responses/input_tokens", {"model": "stories", "input": "a b " * 3000})
    assert long.json["input_tokens"] > 512, "clients ask before they shorten it"
    more = {"model": "stories", "input": "And?", "previous_response_id": first["id"]}
    assert (
        running.post("/v1/responses/input_tokens", more).json["input_tokens"]
        > count.json["input_tokens"]
    )
