"""Answers keep their tokens in later prompts: the bytes that the model wrote, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modelmill.text.answer_history import (
    AnswerHistory,
    PastAnswer,
    Piece,
    make_past_answer,
)
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer, make_openai_tool_call
from modelmill.text.answer_renderer import render_answer
from modelmill.text.answer_splice import AnswerSplicer, extract_prompt_tail
from modelmill.text.chat_format_loader import TemplateChatFormat, load_chat_format
from modelmill.text.chat_format_registry import (
    list_chat_formats,
    load_chat_syntax,
    parser_marks_with_calls,
)
from modelmill.text.tokenizer_loader import Tokenizer, load_tokenizer
from tests.text.conftest import files_of, hf_files, small_hf
from tools.chat_formats.random_answers import RandomCase, random_case

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {"type": "string"}}},
    },
}
SCHEMAS = {"f": TOOL["function"]["parameters"]}  # type: ignore[index]


class Conversation:
    """A conversation of a client with one model, answer by answer."""

    def __init__(
        self,
        chat: TemplateChatFormat,
        tokenizer: Tokenizer,
        schemas: dict[str, Any],
        **options: Any,
    ) -> None:
        self.chat, self.tokenizer, self.schemas = chat, tokenizer, schemas
        self.options = options
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        self.history = AnswerHistory()
        self.splicer = AnswerSplicer(
            tokenizer,
            load_chat_syntax(chat.format_name),
            chat.thinking,
            chat.end_ids,
            frozenset(
                tokenizer.special[mark]
                for mark in parser_marks_with_calls(
                    load_chat_syntax(chat.format_name), chat.thinking
                )
                if mark in tokenizer.special
            ),
            schemas,
        )

    def prompt(self) -> list[int]:
        pieces = self.pieces()
        past = self.history.find_answers_per_message(self.messages, "")
        return self.tokenizer.encode_pieces(self.splicer.splice(pieces, past))

    def pieces(self) -> list[Piece]:
        return self.chat.render_pieces(self.messages, True, **self.options).pieces

    def answer(self, ids: Sequence[int]) -> ParsedAnswer:
        """The model answers with these tokens; the client gets what they say."""
        tail_pieces = self.pieces()
        thinking = self.chat.thinking
        text = "".join(piece for piece in tail_pieces[-2:] if isinstance(piece, str)).rstrip()
        begun = thinking is not None and text.endswith(thinking.marks)
        thinks = begun and thinking is not None and text.endswith(thinking.marks[0])
        tail = extract_prompt_tail(tail_pieces, self.tokenizer, thinking if begun else None)
        assert tail is not None
        parser = make_answer_parser(
            load_chat_syntax(self.chat.format_name), self.schemas, thinking=thinking, thinks=thinks
        )
        answer = collect_answer([*parser.push(self.splicer._decode_pieces(ids)), *parser.flush()])
        self.history.add(make_past_answer(answer, ids, tail, thinks), "")
        return answer

    def send_back(self, answer: ParsedAnswer, **changes: Any) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [
                make_openai_tool_call(call.id, call.name, call.arguments) for call in answer.calls
            ]
        self.messages.append({**message, **changes})
        for call in answer.calls:
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})


def contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    size = len(part)
    return any(list(ids[at : at + size]) == list(part) for at in range(len(ids) - size + 1))


@cache
def real_chat(shared: Path, name: str) -> tuple[TemplateChatFormat, Tokenizer]:
    """Both are the same after every conversation."""
    files = files_of(shared, name)
    tokenizer = load_tokenizer(files)
    chat = load_chat_format(files, tokenizer)
    assert isinstance(chat, TemplateChatFormat)
    return chat, tokenizer


def real_conversation(shared: Path, name: str, **options: Any) -> Conversation:
    return Conversation(*real_chat(shared, name), SCHEMAS, tools=[TOOL], **options)


ARGUMENTS = [
    '{"a":1,"b":"x"}',
    '{"b": "x", "a": 1.0}',
    '{ "a" : 1e2 , "b" : "\\u00e9\\/" }',
    '{"a": [1,\n2], "b": "é"}',
]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_keep_their_form(shared: Path, name: str, arguments: str) -> None:
    talk_to = real_conversation(shared, name)
    text = f'Well. \n<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    before = talk_to.prompt()
    ids = talk_to.tokenizer.encode(text, bos=False)
    answer = talk_to.answer(ids)
    assert [call.name for call in answer.calls] == ["f"]
    talk_to.send_back(answer)
    prompt = talk_to.prompt()
    assert prompt[: len(before) + len(ids)] == [*before, *ids]
    assert talk_to.tokenizer.encode_pieces(talk_to.pieces()) != prompt


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_a_client_may_reorder_and_rewrite_arguments(shared: Path, name: str) -> None:
    """Clients parse arguments and write them again: other blanks, numbers and orders."""
    talk_to = real_conversation(shared, name)
    before = talk_to.prompt()
    text = '<tool_call>\n{"name": "f", "arguments": {"b":"x","a":1.0}}\n</tool_call>'
    ids = talk_to.tokenizer.encode(text, bos=False)
    answer = talk_to.answer(ids)
    function = {"name": "f", "arguments": '{ "a": 1, "b": "x" }'}
    talk_to.send_back(
        answer, tool_calls=[{"id": "other", "type": "function", "function": function}]
    )
    assert talk_to.prompt()[: len(before) + len(ids)] == [*before, *ids]
    talk_to.messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": "x"}'
    assert not contains(talk_to.prompt(), ids)


def test_tokens_are_kept_and_not_only_bytes(shared: Path) -> None:
    """A model may write a word in other tokens than the tokenizer does."""
    talk_to = real_conversation(shared, "qwen3")
    ids = [talk_to.tokenizer.encode(char, bos=False)[0] for char in "hello there"]
    talk_to.send_back(talk_to.answer(ids))
    assert contains(talk_to.prompt(), ids)


def test_thinking_stays_where_the_template_keeps_it(shared: Path) -> None:
    """Qwen3 keeps the thinking of a turn with calls until the user speaks again."""
    talk_to = real_conversation(shared, "qwen3")
    before = talk_to.prompt()
    call = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
    text = f"<think>\n\nWell,  then. \n\n</think>\n{call}"
    ids = talk_to.tokenizer.encode(text, bos=False)
    talk_to.send_back(talk_to.answer(ids))
    assert talk_to.prompt()[: len(before) + len(ids)] == [*before, *ids]
    talk_to.messages.append({"role": "user", "content": "And?"})
    prompt = talk_to.prompt()
    assert "Well" not in talk_to.tokenizer.decode(prompt, skip_special=False)
    assert contains(prompt, talk_to.tokenizer.encode(call, bos=False))


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_an_answer_after_thinking_that_the_template_drops(
    shared: Path, enable_thinking: bool
) -> None:
    talk_to = real_conversation(shared, "qwen3", options={"enable_thinking": enable_thinking})
    content = "It  is\tfine.\n"
    thinking = "<think>\nHm.\n</think>\n\n" if enable_thinking else ""
    talk_to.send_back(talk_to.answer(talk_to.tokenizer.encode(thinking + content, bos=False)))
    talk_to.messages.append({"role": "user", "content": "And?"})
    prompt = talk_to.prompt()
    assert contains(prompt, talk_to.tokenizer.encode(content, bos=False))
    assert "Hm." not in talk_to.tokenizer.decode(prompt, skip_special=False)


def test_an_edited_answer_is_written_by_the_template(shared: Path) -> None:
    talk_to = real_conversation(shared, "qwen3")
    ids = talk_to.tokenizer.encode("It is fine.", bos=False)
    talk_to.send_back(talk_to.answer(ids), content="It is wet.")
    assert talk_to.prompt() == talk_to.tokenizer.encode_pieces(talk_to.pieces())


def test_a_user_who_repeats_an_answer_is_not_changed(shared: Path) -> None:
    talk_to = real_conversation(shared, "qwen2.5")
    spelled = [talk_to.tokenizer.encode(char, bos=False)[0] for char in "okay"]
    answer = talk_to.answer(spelled)
    talk_to.messages.append({"role": "user", "content": "okay"})
    talk_to.messages.append({"role": "user", "content": "<|im_start|>assistant\nokay<|im_end|>"})
    assert talk_to.prompt() == talk_to.tokenizer.encode_pieces(talk_to.pieces())
    talk_to.send_back(answer)
    assert contains(talk_to.prompt(), spelled)


def test_an_answer_with_a_dropped_call_is_not_repeated(shared: Path) -> None:
    """parallel_tool_calls: false drops the second call; the next prompt must not have it."""
    talk_to = real_conversation(shared, "qwen3")
    call = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
    ids = talk_to.tokenizer.encode(f"{call}\n{call}", bos=False)
    answer = talk_to.answer(ids)
    first = ParsedAnswer("", answer.calls[:1])
    tail = extract_prompt_tail(talk_to.pieces(), talk_to.tokenizer, None)
    assert tail is not None
    talk_to.history = AnswerHistory()
    talk_to.history.add(make_past_answer(first, ids, tail, thinks=False), "")
    talk_to.send_back(first)
    assert talk_to.prompt() == talk_to.tokenizer.encode_pieces(talk_to.pieces())


@pytest.mark.parametrize(
    "arguments", ['{"a":1e999}', '{"a":NaN}', '{"b":"\\ud83d end"}', f'{{"a":{"7" * 400}}}']
)
def test_arguments_that_json_cannot_express_keep_their_tokens(shared: Path, arguments: str) -> None:
    talk_to = real_conversation(shared, "qwen3")
    before = talk_to.prompt()
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    ids = talk_to.tokenizer.encode(text, bos=False)
    talk_to.send_back(talk_to.answer(ids))
    assert talk_to.prompt()[: len(before) + len(ids)] == [*before, *ids]


@pytest.mark.parametrize("arguments", ['{"a": 1', '{"a": 1, "b": nix}}'])
def test_a_broken_call_is_written_by_the_template(shared: Path, arguments: str) -> None:
    """Its rest was dropped: the next prompt has the call that the client got."""
    talk_to = real_conversation(shared, "qwen3")
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}\n</tool_call>'
    answer = talk_to.answer(talk_to.tokenizer.encode(text, bos=False))
    assert [call.arguments for call in answer.calls] == ['{"a": 1}']
    talk_to.send_back(answer)
    prompt = talk_to.prompt()
    assert prompt == talk_to.tokenizer.encode_pieces(talk_to.pieces())
    assert '"arguments": {"a": 1}}' in talk_to.tokenizer.decode(prompt, skip_special=False)


def test_the_oldest_answers_are_forgotten_and_salts_are_separate() -> None:
    tail = extract_prompt_tail([1], load_tokenizer(hf_files()), None)
    assert tail is not None

    def record(text: str, size: int = 1) -> PastAnswer:
        return make_past_answer(ParsedAnswer(text), [7] * size, tail, thinks=False)

    def answered(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    history = AnswerHistory(max_bytes=3 * record("a").size_bytes)
    for text in "abc":
        history.add(record(text), "salt")
    assert len(history.find_answers_per_message(answered("a"), "salt")) == 1
    assert not history.find_answers_per_message(answered("a"), "")
    history.add(record("d"), "salt")  # b is the one that was used least recently
    assert [len(history.find_answers_per_message(answered(text), "salt")) for text in "abcd"] == [
        1,
        0,
        1,
        1,
    ]
    history.add(record("e", size=10_000), "salt")
    assert not history.find_answers_per_message(answered("e"), "salt")


MARKED = "<|im_start|>{role}\n{text}<|im_end|>\n"


def format_conversation(name: str, case: RandomCase) -> Conversation:
    """A conversation whose template writes answers in a format, but not as the model did."""
    syntax = load_chat_syntax(name)
    control = [
        "<|im_start|>",
        "<|im_end|>",
        *sorted(parser_marks_with_calls(syntax, case.thinking)),
    ]
    spec = small_hf()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] += [
        {"id": 262 + number, "content": text, "special": True, **flags}
        for number, text in enumerate(dict.fromkeys(control))
        if text and text[:2] in ("<|", "<｜", "[T", "<t", "<s")
    ]
    files = hf_files(spec, chat_template="{{ messages }}", eos_token="<|im_end|>")
    tokenizer = load_tokenizer(files)
    chat = load_chat_format(files, tokenizer)
    assert isinstance(chat, TemplateChatFormat)
    chat.format_name, chat.thinking = name, case.thinking
    return Conversation(chat, tokenizer, case.tools)


def rewritten(answer: ParsedAnswer, rng: random.Random) -> ParsedAnswer:
    """The same answer with arguments as a template writes them."""
    calls = tuple(
        type(call)(
            call.id,
            call.name,
            json.dumps(
                json.loads(call.arguments),
                ensure_ascii=rng.random() < 0.5,
                separators=rng.choice([(",", ":"), (", ", ": ")]),
            ),
        )
        for call in answer.calls
    )
    return ParsedAnswer(answer.content, calls, answer.reasoning)


@pytest.mark.parametrize("name", [name for name in list_chat_formats() if name != "qwen_react"])
def test_random_answers_come_back_in_every_format(name: str) -> None:
    """qwen_react has no template."""
    for seed in range(12):
        rng = random.Random(f"{name} {seed}")
        case = random_case(load_chat_syntax(name), rng)
        check_random_answer(name, case, rng)


def check_random_answer(name: str, case: RandomCase, rng: random.Random) -> None:
    syntax, talk_to = load_chat_syntax(name), format_conversation(name, case)
    tokenizer = talk_to.tokenizer
    begun = case.thinking.open if case.thinks and case.thinking is not None else ""
    head = MARKED.format(role="user", text="Hi") + "<|im_start|>assistant\n"
    text = render_answer(syntax, case.answer, thinking=case.thinking, thinks=case.thinks)
    ids = tokenizer.encode(text, bos=False, special=True)
    head_pieces = tokenizer.split_control_tokens(head + begun)
    tail = extract_prompt_tail(head_pieces, tokenizer, case.thinking if begun else None)
    assert tail is not None
    parser = make_answer_parser(syntax, case.tools, thinking=case.thinking, thinks=case.thinks)
    answer = collect_answer([*parser.push(talk_to.splicer._decode_pieces(ids)), *parser.flush()])
    past = make_past_answer(answer, ids, tail, case.thinks)
    drops = rng.random() < 0.5 or not answer.reasoning
    shown = rewritten(answer, rng)
    rendered = render_answer(
        syntax,
        ParsedAnswer(shown.content, shown.calls, "" if drops else shown.reasoning),
        thinking=None if drops else case.thinking,
    )
    later = f"{head}{rendered}<|im_end|>\n" + MARKED.format(role="user", text="And?")
    pieces = talk_to.splicer.splice(tokenizer.split_control_tokens(later), [[past]])
    prompt = tokenizer.decode(tokenizer.encode_pieces(pieces), skip_special=False)
    written = text if not drops else after_thinking(name, case, text)
    assert prompt == f"{head}{'' if drops else begun}{written}<|im_end|>\n" + MARKED.format(
        role="user", text="And?"
    ), (text, rendered)


def after_thinking(name: str, case: RandomCase, text: str) -> str:
    """What a model wrote after its thinking."""
    if not case.answer.reasoning and not case.thinks:
        return text
    if load_chat_syntax(name).calls.style == "harmony":
        return text.partition("<|end|><|start|>assistant")[2] or text
    assert case.thinking is not None
    return text.partition(case.thinking.marks[1])[2].lstrip()
