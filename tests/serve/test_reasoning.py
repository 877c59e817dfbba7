"""Thinking is separated from content, whole and in streams; its switches reach the template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.outputs import CompletionOutput, OutputDelta, RequestOutput
from modelmill.serve.chat_answer import ChatAnswerSplitter
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compaction_plan import Compactor
from modelmill.serve.dialects.anthropic_answer import AnthropicMessageBuilder
from modelmill.serve.dialects.anthropic_models import MessageUsage
from modelmill.serve.dialects.anthropic_schema import MessagesRequest
from modelmill.serve.dialects.ollama_schema import OllamaChatRequest
from modelmill.serve.encrypted_content_codec import compress_text
from modelmill.serve.response_body_models import OutputReasoning
from modelmill.serve.response_items import ResponseItemsBuilder
from modelmill.serve.responses_schema import CompactRequest, ResponsesRequest, items_to_messages
from modelmill.serve.routes.chat import (
    AnswerRecordingParser,
    ChatResponseBuilder,
    _template_kwargs,
    chat_request_state,
    make_request_answer_parser,
)
from modelmill.serve.routes.compaction import strip_thinking
from modelmill.serve.routes.messages import prepare_chat
from modelmill.serve.routes.ollama import _prepare_chat
from modelmill.serve.routes.responses import ResponsesBuilder
from modelmill.serve.routes.tokenize import chat_format_and_render_arguments
from modelmill.serve.tokenize_schema import ApplyTemplateRequest
from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_syntax import ThinkingSyntax
from modelmill.text_processor import TextProcessor
from tests.serve.dialect_calls import events
from tests.text.conftest import hf_files, small_hf

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
THINKS = SimpleNamespace(
    system_fingerprint="",
    tokenizer=None,
    chat_format=SimpleNamespace(format_name="hermes", thinking=ThinkingSyntax()),
    remember_answer=lambda *_: None,
)
EFFORT = {"effort": "low"}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("effort", "kwargs", "reads_reasoning_effort", "options"),
    [
        (None, None, False, {}),
        ("none", None, False, {"enable_thinking": False}),
        ("high", None, False, {"enable_thinking": True}),
        ("high", {"enable_thinking": False}, False, {"enable_thinking": False}),
        ("none", {"thinking": True}, False, {"thinking": True}),
        ("low", None, True, {"reasoning_effort": "low"}),
        ("none", None, True, {"reasoning_effort": "none", "enable_thinking": False}),
    ],
)
def test_what_an_effort_means_to_a_template(
    effort: str | None, kwargs: Any, reads_reasoning_effort: bool, options: Any
) -> None:
    chat_format = SimpleNamespace(
        thinking=ThinkingSyntax(), reads_reasoning_effort=reads_reasoning_effort
    )
    body = ChatRequest(**ASK, reasoning_effort=effort, chat_template_kwargs=kwargs)
    processor: Any = SimpleNamespace(chat_format=chat_format)
    assert _template_kwargs(processor, body) == options
    plain: Any = SimpleNamespace(
        chat_format=SimpleNamespace(thinking=None, reads_reasoning_effort=False)
    )
    assert _template_kwargs(plain, body) == (kwargs or {})


def handle_of(
    output: CompletionOutput, prompt_thinking: str = "free", texts: list[str] | None = None
) -> Any:
    """A handle of one answer; texts: of its token ids."""
    result = RequestOutput("r", None, [1], [output])
    state = SimpleNamespace(
        is_prompt_computed=True,
        output=result,
        prompt_thinking=prompt_thinking,
        begun="",
        request=SimpleNamespace(
            params=SimpleNamespace(
                top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0, temperature=1.0
            )
        ),
        token_counts=lambda index: (1, 1, 0),
        is_cut_in_forced_thinking_end=lambda ids: False,
        make_answer_detokenizer=lambda: texts and SimpleNamespace(push=texts.__getitem__),
    )
    return SimpleNamespace(request_states=[state])


@pytest.mark.parametrize("tools", [None, [F]], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    ("text", "state", "reasoning", "content"),
    [
        ("<think>\nWell.\n</think>\n\nHi.", "free", "Well.", "Hi."),
        ("Well.\n</think>\n\nHi.", "open", "Well.", "Hi."),
        ("Hi.", "closed", None, "Hi."),
        ("Hi.", "free", None, "Hi."),
        ("Well, 1 <", "open", "Well, 1 <", ""),
    ],
)
def test_thinking_is_no_content(
    text: str, state: str, reasoning: str | None, content: str, tools: Any
) -> None:
    body = ChatRequest(**ASK, tools=tools)
    output = CompletionOutput(0, text, [1], "stop")
    builder = ChatResponseBuilder(body, handle_of(output, state), THINKS)  # type: ignore[arg-type]
    message = builder._format_choice(output)["message"]
    assert message["content"] == content
    assert message.get("reasoning_content") == message.get("reasoning") == reasoning
    builder = ChatResponseBuilder(body, handle_of(output, state), THINKS)  # type: ignore[arg-type]
    deltas: list[dict[str, Any]] = []
    for place, char in enumerate(text):
        last = place == len(text) - 1
        part = CompletionOutput(0, text, [1], "stop" if last else None)
        delta = OutputDelta(
            0, char, (1,), "stop" if last else None, RequestOutput("r", None, [], [part])
        )
        event = builder._delta_event(delta)
        if event:
            deltas.append(json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"])
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content", "") for delta in deltas) == content


@pytest.mark.parametrize("text", ["<think>\nWell.\n</think>\n\nHi.", "Hi."])
def test_thinking_is_left_out_where_the_request_says_so(text: str) -> None:
    body = ChatRequest(**ASK, include_reasoning=False)
    output = CompletionOutput(0, text, [1], "stop")
    builder = ChatResponseBuilder(body, handle_of(output), THINKS)  # type: ignore[arg-type]
    message = builder._format_choice(output)["message"]
    assert message == {"role": "assistant", "content": "Hi.", "refusal": None}
    builder = ChatResponseBuilder(body, handle_of(output), THINKS)  # type: ignore[arg-type]
    sent = b""
    for place, char in enumerate(text):
        ended = "stop" if place == len(text) - 1 else None
        part = CompletionOutput(0, text, [1], ended)
        result = RequestOutput("r", None, [], [part])
        sent += builder._delta_event(OutputDelta(0, char, (1,), ended, result))
    assert b"Well" not in sent
    assert b"reasoning" not in sent


def test_thinking_comes_before_a_call() -> None:
    body = ChatRequest(**ASK, tools=[F])
    output = CompletionOutput(0, f"<think>\nI call.\n</think>\n\n{CALL}", [1], "stop")
    choice = ChatResponseBuilder(body, handle_of(output), THINKS)._format_choice(output)  # type: ignore[arg-type]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "I call."
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def streamed_response(body: ResponsesRequest) -> tuple[ResponsesBuilder, list[Any]]:
    """The response to an answer with thinking, and the events of its stream."""
    output = CompletionOutput(0, "", [1], "stop")
    builder = ResponsesBuilder(body, ChatRequest(**ASK), handle_of(output), THINKS)  # type: ignore[arg-type]
    events: list[Any] = []
    for text in ("<think>\nWe", "ll.\n</think>", "\n\nHi."):
        events += builder._emit_text_and_store_when_ended(text, None, 1)
    events += builder._emit_text_and_store_when_ended("", output, 0)
    return builder, events


def test_thinking_is_an_item_of_a_response() -> None:
    builder, events = streamed_response(ResponsesRequest(model="m", input="x"))
    types = [event["type"] for event in events]
    assert types[:3] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Well."
    reasoning, message = builder.response()["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Well."}]
    assert reasoning["status"] == "completed"
    assert message["content"][0]["text"] == "Hi."
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [e["output_index"] for e in added] == [0, 1]


def test_a_response_has_no_thinking_where_the_request_says_so() -> None:
    body = ResponsesRequest(model="m", input="x", include_reasoning=False)
    builder, sent = streamed_response(body)
    assert "reasoning" not in json.dumps(sent)
    (message,) = builder.response()["output"]
    assert message["content"][0]["text"] == "Hi."


def test_tokens_of_the_thinking_are_counted() -> None:
    body = ResponsesRequest(model="m", input="x")
    output = CompletionOutput(0, "", [1], None)
    builder = ResponsesBuilder(body, ChatRequest(**ASK), handle_of(output, "open"), THINKS)  # type: ignore[arg-type]
    result = RequestOutput("r", None, [], [output])
    texts = (("We", 2), ("ll.\n</think>", 3), ("Hi.", 4))
    builder.add_stream_items(
        [
            SimpleNamespace(delta=OutputDelta(0, text, (1,) * count, None, result))
            for text, count in texts
        ]
    )  # type: ignore[arg-type]
    assert builder._usage()["output_tokens_details"] == {"reasoning_tokens": 5}


@pytest.mark.parametrize(("state", "counted"), [("open", 5), ("closed", 0)])
def test_tokens_of_the_thinking_are_in_the_usage_of_messages(state: str, counted: int) -> None:
    """The whole message and the last event of a stream have them."""
    texts = (("We", 2), ("ll.\n</think>", 3), ("Hi.", 4)) if counted else (("Hi.", 9),)
    output = CompletionOutput(0, "", [1] * 9, "stop")
    handle = handle_of(output, state)
    handle.request_states[0].output.cached_tokens = 0
    splitter = ChatAnswerSplitter(ChatRequest(**ASK), THINKS, handle.request_states[0])  # type: ignore[arg-type]
    builder = AnthropicMessageBuilder("m", 9, splitter, handle)
    for text, count in texts:
        delta = OutputDelta(0, text, (1,) * count, None, handle.request_states[0].output)
        builder.add_stream_items([SimpleNamespace(delta=delta)])  # type: ignore[list-item]
    usage = builder.response()["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": counted}
    MessageUsage.model_validate(usage)
    (message_delta,) = [
        event for name, event in events(builder.terminal_events()) if name == "message_delta"
    ]
    assert message_delta["usage"] == usage


@pytest.mark.parametrize(
    ("texts", "state", "counted"),
    [
        (["<think>", "\nWe", "ll.", "\n", "</think>", "\n\n", "Hi", "."], "free", 5),
        (["We", "ll", ".\n</think>", "\n\nHi."], "open", 3),
        (["Well", ", no"], "open", 2),
        (["<think>", "", "W", "</think>Hi"], "free", 4),
        (["<think>", "\n\n", "</think>", "\n\n", "Hi"], "free", 3),
        (["<think></think>", "Hi"], "free", 1),
        (["<think>", "\n"], "free", 2),
        (["\n", "\n"], "open", 2),
        (["Hi", "."], "closed", 0),
        (["Hi", "."], "free", 0),
    ],
)
@pytest.mark.parametrize("ending", ["stop", "length", 9], ids=["stop", "length", "stop token"])
def test_usage_counts_the_tokens_of_the_thinking(
    texts: list[str], state: str, counted: int, ending: str | int
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = ChatRequest(**ASK, stream_options=options, stream=True)
    ids = [*range(len(texts)), *([9] if isinstance(ending, int) else [])]
    reason = "length" if ending == "length" else "stop"
    stop = ending if isinstance(ending, int) else None
    output = CompletionOutput(0, "".join(texts), ids, reason, stop)
    details = {"reasoning_tokens": counted}
    whole = ChatResponseBuilder(body, handle_of(output, state, texts), THINKS)  # type: ignore[arg-type]
    whole._format_choice(output)
    assert whole._usage()["completion_tokens_details"] == details
    builder = ChatResponseBuilder(body, handle_of(output, state, texts), THINKS)  # type: ignore[arg-type]
    running = []
    for index, text in enumerate(texts):
        ended = reason if index == len(texts) - 1 else None
        part = CompletionOutput(0, "".join(texts), ids, ended, stop)
        result = RequestOutput("r", None, [], [part])
        event = builder._delta_event(OutputDelta(0, text, (index,), ended, result))
        if event:
            usage = json.loads(event.removeprefix(b"data: "))["usage"]
            running.append(usage["completion_tokens_details"]["reasoning_tokens"])
    assert running == sorted(running)
    assert running[-1] == counted
    last = json.loads(builder.terminal_events().split(b"\n\n")[0].removeprefix(b"data: "))
    assert last["usage"]["completion_tokens_details"] == details


def test_thinking_that_is_cut_is_an_incomplete_item() -> None:
    items = ResponseItemsBuilder(hold_spaces=False)
    list(items.add_reasoning("Well"))
    list(items.finish_items("incomplete"))
    (item,) = items.output
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


def test_thinking_comes_back_as_its_content_or_packed() -> None:
    """Clients that pass on encrypted_content drop the content."""
    for packs in (True, False):
        items = ResponseItemsBuilder(hold_spaces=False, adds_encrypted_reasoning=packs)
        list(items.add_reasoning("Well."))
        list(items.add_text("Hi."))
        list(items.finish_items("completed"))
        reasoning, message = items.output
        sent = {**reasoning, "content": None} if packs else reasoning
        assert ("encrypted_content" in reasoning) is packs
        OutputReasoning.model_validate(reasoning)
        user = {"role": "user", "content": "x"}
        messages = items_to_messages([user, sent, message, user], None)
        assert messages[1]["reasoning_content"] == "Well."
    part = {"type": "reasoning_text", "text": "Well."}
    for content, packed, thinking in (
        (None, "gAAAAA of another server", None),
        ([part], "gAAAAA of another server", "Well."),
        ([part], compress_text("Not this."), "Well."),
    ):
        item = {**reasoning, "content": content, "encrypted_content": packed}
        messages = items_to_messages([user, item, message, user], None)
        assert messages[1].get("reasoning_content") == thinking
    body = ResponsesRequest(model="m", input="x", include=["reasoning.encrypted_content"])
    assert body.wants_encrypted_reasoning


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}<|end|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif enable_thinking is defined %}<think>\n{% endif %}"
)


MANIFEST: Any = SimpleNamespace(
    generation={}, config={"eos_token_id": 259}, source={}, model_type="llama"
)


@pytest.fixture(scope="module")
def processor() -> TextProcessor:
    files = hf_files(small_hf(), chat_template=TEMPLATE, eos_token="<|end|>")
    return TextProcessor(Path("tiny"), MANIFEST, files)


def test_a_prompt_is_shown_with_the_variables_of_its_template(processor: TextProcessor) -> None:
    messages = [{"role": "user", "content": "x"}]
    for kwargs, end in (({"enable_thinking": True}, "<think>\n"), (None, "<|end|>")):
        fields = {"messages": messages, "chat_template_kwargs": kwargs}
        chat_format, rendered, template = chat_format_and_render_arguments(
            processor, ApplyTemplateRequest.model_validate(fields), 512
        )
        assert chat_format.render(rendered, True, **template).endswith(end)


def test_the_effort_of_other_apis_is_in_the_prompt() -> None:
    template = "{{ messages[0].content }}{{ reasoning_effort }}<|end|>"
    files = hf_files(small_hf(), chat_template=template, eos_token="<|end|>")
    processor = TextProcessor(Path("tiny"), MANIFEST, files)
    assert processor.tokenizer is not None
    for prepare, body in (
        (
            prepare_chat,
            MessagesRequest.model_validate({**ASK, "max_tokens": 1, "output_config": EFFORT}),
        ),
        (_prepare_chat, OllamaChatRequest.model_validate({**ASK, "think": "low"})),
    ):
        _, state = prepare(processor, body, 512)  # type: ignore[arg-type]
        assert processor.tokenizer.decode(state.request.prompt) == "xlow"


def test_a_summary_is_written_without_thinking(processor: TextProcessor) -> None:
    compactor = Compactor(processor, CompactRequest(model="m"), 4096)
    plan = compactor.plan([{"role": "assistant", "content": "Tom has a ball. " * 50}])
    chat, state = compactor.make_summary_request_and_state(plan)
    assert state.prompt_thinking == "closed"
    assert chat.thinking_token_budget == 0, "where a template cannot switch it off"
    thought = "<think>\nHm.\n</think>\n\nTom has a ball."
    assert strip_thinking(chat, processor, state, thought).strip() == "Tom has a ball."
    assert strip_thinking(chat, processor, state, "Tom.") == "Tom."


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}


@pytest.mark.parametrize(
    ("options", "state", "grammar_type"),
    [
        ({"enable_thinking": False}, "closed", "json"),
        ({"enable_thinking": True}, "open", "answer"),
        ({}, "free", "answer"),
        (None, "free", "answer"),
    ],
)
def test_the_switch_reaches_the_template_and_the_constraint(
    processor: TextProcessor, options: Any, state: str, grammar_type: str
) -> None:
    body = ChatRequest(**ASK, chat_template_kwargs=options, response_format=SCHEMA)
    request = chat_request_state(processor, body, 512)
    assert request.prompt_thinking == state
    assert request.request.grammar is not None
    assert request.request.grammar.grammar_type == grammar_type


def test_a_budget_is_part_of_the_constraint(processor: TextProcessor) -> None:
    body = ChatRequest(
        **ASK, thinking_token_budget=3, chat_template_kwargs={"enable_thinking": True}
    )
    request = chat_request_state(processor, body, 512).request
    assert request.grammar is not None
    assert json.loads(request.grammar.text)["budget"] == 3
    guide = processor.make_guide(request, 262)
    for _ in range(3):
        guide.accept(104)
    assert int.from_bytes(guide.mask().tobytes(), "little").bit_count() == 1


def test_the_effort_reaches_a_template_that_reads_it() -> None:
    template = "{{ messages[0].content }}{{ reasoning_effort | default('he') }}"
    files = hf_files(small_hf(), chat_template=template, eos_token="<|end|>")
    processor = TextProcessor(Path("tiny"), MANIFEST, files)
    low = chat_request_state(processor, ChatRequest(**ASK, reasoning_effort="llo"), 512)
    unset = chat_request_state(processor, ChatRequest(**ASK), 512)
    assert processor.tokenizer is not None
    assert processor.tokenizer.decode(list(low.request.prompt)).endswith("xllo")
    assert processor.tokenizer.decode(list(unset.request.prompt)).endswith("xhe")


def test_variables_of_the_template_select_the_format_of_the_answer() -> None:
    template = (
        "<ifm|tool_calls>{{ messages[0].content }}{{ tool_call_format }}"
        "<ifm|think{{ {'low': '_faster'}.get(reasoning_effort, '') }}>{# </ifm|think> #}"
    )
    files = hf_files(small_hf(), chat_template=template, eos_token="<|end|>")
    processor = TextProcessor(Path("tiny"), MANIFEST, files)
    call = '<ifm|tool_calls><ifm|tool_call>{"name": "f", "arguments": {}}</ifm|tool_call>'
    for options, read in (
        ({"reasoning_effort": "low", "tool_call_format": "json"}, True),
        ({"reasoning_effort": "low", "tool_call_format": "xml"}, False),
        ({"reasoning_effort": "high", "tool_call_format": "json"}, True),
    ):
        body = ChatRequest(**ASK, tools=[F], chat_template_kwargs=options)
        state = chat_request_state(processor, body, 512)
        assert state.prompt_thinking == "open"
        parser = make_request_answer_parser(body, processor, state)
        assert parser is not None
        close = "</ifm|think_faster>" if options["reasoning_effort"] == "low" else "</ifm|think>"
        pieces = parser.push(f"Hm.\n{close}\n{call}</ifm|tool_calls>")
        answer = collect_answer([*pieces, *parser.flush()])
        assert answer.reasoning == "Hm."
        assert [each.name for each in answer.calls] == (["f"] if read else [])
    assert processor.chat_format is not None
    assert processor.chat_format.format_name == "k2_horizon"


def test_a_template_option_of_the_engine_is_refused(processor: TextProcessor) -> None:
    body = ChatRequest(**ASK, chat_template_kwargs={"messages": []})
    with pytest.raises(RequestError, match="'messages' is set by the engine"):
        chat_request_state(processor, body, 512)


def test_a_strict_function_is_constrained_without_being_forced(processor: TextProcessor) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    state = chat_request_state(processor, ChatRequest(**ASK, tools=[strict]), 512)
    assert state.request.grammar is not None
    assert json.loads(json.loads(state.request.grammar.text)["answer"]["text"])["optional"]
    assert chat_request_state(processor, ChatRequest(**ASK, tools=[F]), 512).request.grammar is None


def forced_mark_ids(processor: TextProcessor, state: Any, thinking: list[int]) -> list[int]:
    """The tokens that alone are allowed behind this thinking."""
    guide, ids = processor.make_guide(state.request, 262), list[int]()
    for id in thinking:
        guide.accept(id)
    while True:
        bits = int.from_bytes(guide.mask().tobytes(), "little")
        if bits.bit_count() != 1:
            return ids
        ids.append(bits.bit_length() - 1)
        guide.accept(ids[-1])


def test_nothing_of_a_forced_mark_is_thinking(processor: TextProcessor) -> None:
    """Wherever the answer is cut; the first characters of a mark that the model writes stay."""
    tokenizer = processor.tokenizer
    assert tokenizer is not None
    thinking = [id for text in "a<b" for id in tokenizer.encode_pieces(["", text])]
    options = {"enable_thinking": True}
    body = ChatRequest(**ASK, thinking_token_budget=len(thinking), chat_template_kwargs=options)
    free_body = ChatRequest(**ASK, chat_template_kwargs=options)
    state = chat_request_state(processor, body, 512)
    free_state = chat_request_state(processor, free_body, 512)

    def reasoning(request: ChatRequest, state: Any, ids: list[int]) -> str:
        output = CompletionOutput(0, tokenizer.decode(ids), ids, "length")
        pieces = AnswerRecordingParser(request, processor, state).parse_whole_text(output)
        return collect_answer(pieces).reasoning

    mark = forced_mark_ids(processor, state, thinking)
    assert tokenizer.decode(mark).startswith("\n</think>")
    assert len(mark) > len("</think>"), "the mark has a token for each character"
    for size in range(len(mark) + 1):
        assert reasoning(body, state, thinking + mark[:size]) == "a<b"
    assert reasoning(free_body, free_state, thinking + mark[:3]) == "a<b\n</"
    assert reasoning(body, state, thinking[:2]) == "a<"


def test_a_budget_for_a_model_that_does_not_think_is_refused() -> None:
    files = hf_files(small_hf(), chat_template="{{ messages[0].content }}", eos_token="<|end|>")
    body = ChatRequest(**ASK, thinking_token_budget=5)
    with pytest.raises(
        RequestError, match="thinking_token_budget: the chat template of this model"
    ):
        chat_request_state(TextProcessor(Path("tiny"), MANIFEST, files), body, 512)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_thinking_that_a_client_sends_back_reaches_the_template(key: str) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    files = hf_files(small_hf(), chat_template=template, eos_token="<|end|>")
    processor = TextProcessor(Path("tiny"), MANIFEST, files)
    assert processor.chat_format is not None
    messages = [{"role": "assistant", "content": "hello", key: "llo"}]
    assert processor.chat_format.render(messages) == "[llo]hello"


def test_a_response_takes_the_same_switches() -> None:
    body = ResponsesRequest(
        model="m",
        input="x",
        reasoning={"effort": "low"},  # type: ignore[arg-type]
        chat_template_kwargs={"enable_thinking": False},
        thinking_token_budget=7,
    )
    chat = body.to_chat_request()
    assert (chat.reasoning_effort, chat.thinking_token_budget) == ("low", 7)
    assert chat.chat_template_kwargs == {"enable_thinking": False}


def test_a_strict_function_with_a_bad_schema_is_refused_by_its_field(
    processor: TextProcessor,
) -> None:
    function = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"type": "y"}}}}
    body = ChatRequest(**ASK, tools=[{"type": "function", "function": function}])
    with pytest.raises(RequestError, match=r"^tools: the parameters of f: "):
        chat_request_state(processor, body, 512)
