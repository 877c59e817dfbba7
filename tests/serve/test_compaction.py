"""/v1/responses/compact: never longer than before, limited, a cut one says so, full contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.serve.compaction import (
    compacted_items,
    fill_message_item_defaults,
    join_successive_user_messages,
    summary_prompt,
)
from modelmill.serve.compaction_plan import UNCHANGED_WARNING, Compactor
from modelmill.serve.encrypted_content_codec import TextDecompressor
from modelmill.serve.message_fitting import fit_messages
from modelmill.serve.responses_schema import CompactRequest
from modelmill.serve.routes import compaction
from tests.serve.service_thread import ServiceThread

MODEL = {"model": "stories"}
CONTEXT = 512
STORY = "One day, Tom saw a big red ball in the park and ran to it. "
TALK = [
    {"role": "user", "content": "Tom has a red ball."},
    {"role": "assistant", "content": STORY * 8},
]


def compact(running: ServiceThread, status: int = 200, **more: Any) -> Any:
    response = running.post("/v1/responses/compact", {**MODEL, **more})
    assert response.status == status, response.body
    return response.json


def count_tokens(running: ServiceThread, items: Any) -> int:
    response = running.post("/v1/responses/input_tokens", {**MODEL, "input": items})
    assert response.status == 200, response.body
    return int(response.json["input_tokens"])


def summary_of(answer: Any) -> str:
    return TextDecompressor().decompress(answer["output"][-1]["encrypted_content"])


def test_the_users_messages_stay(running: ServiceThread) -> None:
    answer = compact(running, input=TALK, max_output_tokens=6)
    output = answer["output"]
    assert (answer["object"], answer["compacted"]) == ("response.compaction", True)
    assert [item["type"] for item in output] == ["message", "compaction"]
    assert output[0]["content"] == [{"type": "input_text", "text": "Tom has a red ball."}]
    assert output[0]["id"].startswith("msg_")
    assert summary_of(answer)
    body = {**MODEL, "input": [*output, {"role": "user", "content": "And?"}]}
    assert running.post("/v1/responses", {**body, "max_output_tokens": 2}).status == 200
    assert running.post("/v1/responses/compact", MODEL).status == 400


def test_a_summary_has_a_limit_and_a_cut_one_says_so(running: ServiceThread) -> None:
    """The model of the tests never ends by itself."""
    before = count_tokens(running, TALK)
    answer = compact(running, input=TALK)
    assert answer["usage"]["output_tokens"] <= before / 2
    assert answer["usage"]["output_tokens"] <= CONTEXT / 4
    assert count_tokens(running, answer["output"]) < before
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    limit = answer["usage"]["output_tokens"]
    assert f"the summary was cut at {limit} tokens and may lack its end" in answer["warnings"]
    most = compact(running, input=TALK, max_output_tokens=100_000)
    assert most["usage"]["output_tokens"] <= CONTEXT / 2
    assert count_tokens(running, most["output"]) <= before


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        [{"role": "user", "content": STORY * 3}],
        [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Hi"}],
    ],
)
@pytest.mark.parametrize("limit", [None, 400])
def test_what_a_summary_would_not_shorten_comes_back(
    running: ServiceThread, items: list[Any], limit: int | None
) -> None:
    answer = compact(running, input=items, max_output_tokens=limit)
    assert [item["content"][0]["text"] for item in answer["output"]] == [
        item["content"] for item in items
    ]
    assert answer["warnings"] == [UNCHANGED_WARNING]
    assert (answer["compacted"], answer["status"]) == (False, "completed")
    assert answer["usage"]["total_tokens"] == 0
    assert count_tokens(running, answer["output"]) == count_tokens(running, items)


def test_a_summary_that_became_too_long_is_not_used(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "strip_thinking", lambda *_: STORY * 9)
    answer = compact(running, input=TALK, max_output_tokens=4)
    assert answer["warnings"] == [UNCHANGED_WARNING]
    assert answer["output"][1]["content"][0]["text"] == TALK[1]["content"]
    assert answer["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_context_that_is_nearly_full_is_compacted(running: ServiceThread, role: str) -> None:
    text = STORY
    while count_tokens(running, [{"role": role, "content": text + STORY}]) < CONTEXT:
        text += STORY
    items = [{"role": role, "content": text}]
    before = count_tokens(running, items)
    assert before > CONTEXT * 0.85
    answer = compact(running, input=items)
    assert answer["compacted"]
    assert count_tokens(running, answer["output"]) < before / 2
    assert any("0 messages are left out and 1 cut" in line for line in answer["warnings"])
    in_summary_alone = any("messages of the user are in the summary" in each
                           for each in answer["warnings"])  # fmt: skip
    assert in_summary_alone == (role == "user")


def test_a_conversation_that_is_longer_than_the_context(running: ServiceThread) -> None:
    turns = [
        [{"role": "user", "content": f"Story {index}?"}, {"role": "assistant", "content": STORY}]
        for index in range(12)
    ]
    items = [item for turn in turns for item in turn]
    assert count_tokens(running, items) > CONTEXT
    answer = compact(running, input=items, instructions="Be kind.")
    assert count_tokens(running, answer["output"]) < CONTEXT * 0.9
    messages = [item["content"][0]["text"] for item in answer["output"][:-1]]
    assert messages == [f"Story {index}?" for index in range(12)][-len(messages) :]
    assert any(line.startswith("input: of what is summarized, the oldest ")
               for line in answer["warnings"])  # fmt: skip
    long = {"input": TALK, "instructions": STORY * 30}
    assert "shorten the instructions" in compact(running, 400, **long)["error"]["message"]


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_templates_that_want_roles_to_alternate(running: ServiceThread) -> None:
    items = [*TALK, {"role": "user", "content": "And then?"}, *TALK[1:], TALK[0]]
    with running.other_template(ALTERNATING):
        output = compact(running, input=items)["output"]
        assert [item["type"] for item in output] == ["message"] * 3 + ["compaction"]
        body = {**MODEL, "input": [*output, {"role": "user", "content": "Go on."}]}
        assert running.post("/v1/responses", {**body, "max_output_tokens": 2}).status == 200


def test_what_codex_begins_with_reaches_templates_that_want_roles_to_alternate(
    running: ServiceThread,
) -> None:
    items = [{"role": role, "content": role} for role in ("developer", "user", "user")]
    whole = [{"role": "user", "content": "Be kind.\n\ndeveloper\n\nuser\n\nuser"}]
    with running.other_template(ALTERNATING):
        body = {**MODEL, "input": items, "instructions": "Be kind."}
        answer = running.post("/v1/responses", {**body, "max_output_tokens": 2})
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["input_tokens"] == count_tokens(running, whole)


def test_successive_messages_of_the_user_are_joined() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "x"}}]
    messages = [
        {"role": "user", "content": "a"}, {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
        {"role": "user", "content": "e"},
    ]  # fmt: skip
    assert [message["content"] for message in join_successive_user_messages(messages)] == [
        [{"type": "text", "text": "a"}, *parts], "c", "d\n\ne",
    ]  # fmt: skip
    assert messages[0]["content"] == "a"


def test_an_empty_summary_does_not_replace_a_conversation(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "strip_thinking", lambda *_: " \n")
    error = compact(running, 400, input=TALK, max_output_tokens=2)["error"]
    assert "wrote no summary" in error["message"]


def test_compaction_takes_what_a_request_of_the_conversation_has(running: ServiceThread) -> None:
    fields = {
        "tools": [{"type": "function", "name": "f"}], "parallel_tool_calls": True,
        "text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "service_tier": None,
    }  # fmt: skip
    compact(running, input="Hi", max_output_tokens=2, **fields)


def test_calls_and_earlier_summaries_are_returned_as_they_can_be_sent(
    running: ServiceThread,
) -> None:
    items = [
        *compacted_items([{"role": "user", "content": "a"}], "cmp_1", "s"),
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    assert [item.get("role") for item in items[:2]] == ["user", None]
    returned = fill_message_item_defaults([{"role": "user", "content": "a"}, *items[1:]], "cmp_1")
    assert (returned[0]["id"], returned[1:]) == ("msg_1_0", items[1:])
    assert count_tokens(running, returned) == count_tokens(running, items)


def words(messages: Sequence[Any]) -> int:
    """Tokens of a template that writes nothing of its own."""
    return sum(len(str(message.get("content") or "").split()) for message in messages)


def fit(messages: Sequence[Any], limit: int) -> Any:
    return fit_messages(messages, limit, words, lambda text: len(text.split()))


def text_message(role: str, count: int, word: str = "w") -> dict[str, Any]:
    return {"role": role, "content": " ".join([word] * count)}


def test_the_oldest_messages_are_left_out_and_the_next_is_cut() -> None:
    system = text_message("system", 5)
    messages = [
        system, text_message("user", 10, "old"), text_message("assistant", 10, "older"),
        text_message("user", 40, "new"), text_message("assistant", 10, "newest"),
    ]  # fmt: skip
    same = fit(messages, 75)
    assert (same.messages, same.num_dropped, same.num_cut) == (messages, 0, 0)
    fitted = fit(messages, 45)
    assert words(fitted.messages) <= 45
    assert (fitted.num_dropped, fitted.num_cut) == (2, 1)
    assert fitted.messages[0] == system
    assert fitted.messages[1]["content"].startswith("…")
    assert fitted.messages[2] == messages[-1]
    with pytest.raises(RequestError, match="shorten the instructions"):
        fit(messages, 5)


def test_a_call_goes_with_its_result_and_the_first_message_is_the_users() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        text_message("user", 10),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "one two"},
        text_message("assistant", 10),
    ]
    fitted = fit(messages, 11)
    assert [message["role"] for message in fitted.messages] == ["user", "assistant"]
    assert fitted.messages[0]["content"] == "…"
    assert fitted.num_dropped == 3


def test_parts_and_thinking_are_cut() -> None:
    parts = [{"type": "text", "text": "a b c d"}, {"type": "image_url", "image_url": {"url": "x"}}]
    message = {"role": "user", "content": parts, "reasoning_content": "h h h h h h"}

    def count(messages: Sequence[Any]) -> int:
        return sum(
            len(text.split())
            for message in messages
            for text in (message["content"][0]["text"], message["reasoning_content"])
        )

    fitted = fit_messages([message], 6, count, lambda text: len(text.split()))
    (cut,) = fitted.messages
    assert count([cut]) <= 6
    assert cut["content"][1] == parts[1]


def test_the_words_asked_for_follow_the_limit() -> None:
    assert "at most 64 words" in summary_prompt(128)
    assert "at most 1 words" in summary_prompt(1)


def test_the_limit_is_a_share_of_what_is_replaced(running: ServiceThread) -> None:
    compactor = Compactor(running.engine.text_processor, CompactRequest(**MODEL), 100_000)
    for count in (4, 8, 16):
        plan = compactor.plan([TALK[0], {"role": "assistant", "content": STORY * count}])
        assert 0 < plan.max_summary_tokens <= plan.num_tokens / 2
