"""Prompts that end inside the last message: continue_final_message, with thinking or without."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import BegunPart, ParsedAnswer, collect_answer
from modelmill.text.chat_format_loader import ChatFormat, load_chat_format
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.tokenizer_loader import load_tokenizer
from modelmill.text_processor import TextProcessor
from tests.text.conftest import files_of, hf_files, small_hf

ASK = {"role": "user", "content": "Why?"}
THOUGHT, SAID = "It is\nold", "Because"
# as DeepSeek R1's template: a message has no thinking, and the prompt opens it
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>{{ m.content }}"
    "{% else %}<|im_start|>{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}"
)
# that of Qwen3-Thinking: the last message has its thinking, trimmed
QWEN3_THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|end|>\n"
    "{% else %}<|im_start|>assistant\n"
    "{% if loop.last %}<think>\n{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n"
    "{% endif %}"
    "{{ m.content.lstrip('\n') }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
REFUSING = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>\n{% endif %}{# </think> #}"
)
EXCLUDING = REFUSING.replace("<think>\n{%", "<think>\n\n</think>\n\n{%")
LEAVING_OPEN = REFUSING.replace("<think>\n{%", "{%")
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% else %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% endif %}{# message.thinking #}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def chat_of(template: str) -> ChatFormat:
    files = hf_files(small_hf(), chat_template=template, eos_token="<|end|>")
    chat = load_chat_format(files, load_tokenizer(files))
    assert chat is not None
    return chat


def rendered(template: str, **last: Any) -> str:
    chat = chat_of(template)
    messages = [ASK, {"role": "assistant", "content": "", **last}]
    text = chat.render_with_prefill(messages)
    assert chat.encode_with_prefill(messages), "it has ids"
    chat.close()
    return text


Q = "<|im_start|>user\nWhy?<|end|>\n<|im_start|>assistant\n"
BOTH = {"content": SAID, "reasoning_content": THOUGHT}
CASES = [
    (QWEN3_THINKING, {"content": SAID}, f"{Q}<think>\n\n</think>\n\n{SAID}"),
    (QWEN3_THINKING, BOTH, f"{Q}<think>\n{THOUGHT}\n</think>\n\n{SAID}"),
    (QWEN3_THINKING, {"reasoning_content": THOUGHT}, f"{Q}<think>\n{THOUGHT}"),
    (QWEN3_THINKING, {"reasoning_content": "so \n"}, f"{Q}<think>\nso \n"),
    (QWEN3_THINKING, {}, f"{Q}<think>\n"),
    (DEEPSEEK_R1, {"content": SAID}, f"<|start|>Why?<|im_start|>{SAID}"),
    (DEEPSEEK_R1, BOTH, f"<|start|>Why?<|im_start|><think>\n{THOUGHT}\n</think>\n\n{SAID}"),
    (DEEPSEEK_R1, {"reasoning_content": THOUGHT}, f"<|start|>Why?<|im_start|><think>\n{THOUGHT}"),
    (DEEPSEEK_R1, {"reasoning_content": "\n"}, "<|start|>Why?<|im_start|><think>\n\n"),
    (REFUSING, {"content": SAID}, f"Why?<|im_start|><think>\n\n</think>\n\n{SAID}"),
    (REFUSING, BOTH, f"Why?<|im_start|><think>\n{THOUGHT}\n</think>\n\n{SAID}"),
    (EXCLUDING, {"content": SAID}, f"Why?<|im_start|><think>\n\n</think>\n\n{SAID}"),
    (EXCLUDING, BOTH, f"Why?<|im_start|><think>\n{THOUGHT}\n</think>\n\n{SAID}"),
    (EXCLUDING, {"reasoning_content": THOUGHT}, f"Why?<|im_start|><think>\n{THOUGHT}"),
    (LEAVING_OPEN, {"content": SAID}, f"Why?<|im_start|>{SAID}"),
    (LEAVING_OPEN, {"reasoning_content": THOUGHT}, f"Why?<|im_start|><think>\n{THOUGHT}"),
    (PLAIN, {"content": "Well, "}, "user: Why?\nassistant: Well, "),
    (PLAIN, BOTH, f"user: Why?\nassistant: {SAID}"),
    (
        PLAIN,
        {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        "user: Why?\nassistant: a\nb",
    ),
    (
        GPT_OSS,
        BOTH,
        "<|start|>user<|message|>Why?<|end|><|start|>assistant<|channel|>analysis<|message|>"
        f"{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{SAID}",
    ),
    (
        GPT_OSS,
        {"reasoning_content": THOUGHT},
        "<|start|>user<|message|>Why?<|end|><|start|>assistant<|channel|>analysis<|message|>"
        f"{THOUGHT}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("template", "last", "text"), CASES, ids=range(len(CASES)))
def test_a_prompt_ends_inside_the_last_message(
    template: str, last: dict[str, Any], text: str
) -> None:
    assert rendered(template, **last) == text


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("last", [{"content": SAID}, {"content": "a b "}, BOTH], ids=range(3))
def test_same_ids_as_transformers(
    real: Any, shared: Path, load_hf_tokenizer: Any, name: str, last: dict[str, Any]
) -> None:
    chat = load_chat_format(files_of(shared, name), real(name))
    assert chat is not None
    messages = [ASK, {"role": "assistant", **last}]
    expected = load_hf_tokenizer(name).apply_chat_template(
        messages, continue_final_message=True, return_dict=False
    )
    assert chat.encode_with_prefill(messages) == expected
    chat.close()


def test_text_of_a_begun_answer_makes_no_control_token() -> None:
    chat = chat_of(QWEN3_THINKING)
    end = load_tokenizer(hf_files(small_hf())).special["<|end|>"]
    for key in ("content", "reasoning_content"):
        messages = [ASK, {"role": "assistant", "content": "", key: "a<|end|>b"}]
        assert chat.encode_with_prefill(messages).count(end) == 1  # of the question
        assert chat.render_with_prefill(messages).endswith("a<|end|>b")
    chat.close()


def test_thinking_cannot_go_on_where_a_template_has_none() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]: reasoning_content cannot be continued"):
        rendered(PLAIN, reasoning_content=THOUGHT)


def parse(name: str, begun: BegunPart, text: str, size: int) -> ParsedAnswer:
    syntax = load_chat_syntax(name)
    parser = make_answer_parser(
        syntax, {"f": None}, thinking=syntax.thinking, thinks=begun == "reasoning", begun=begun
    )
    assert parser.in_reasoning == (begun == "reasoning")
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return collect_answer([*(p for each in pieces for p in parser.push(each)), *parser.flush()])


HARMONY_FINAL = "<|start|>assistant<|channel|>final<|message|>"
PARSED = [
    ("hermes", "reasoning", "\n er.\n</think>\n\nYes", "\n er.", "Yes"),
    ("hermes", "reasoning", " and no end", " and no end", ""),
    ("hermes", "content", " <think>\nis a tag", "", " <think>\nis a tag"),
    ("hermes", "content", "\n\nmore", "", "\n\nmore"),
    ("functionary_v32", "content", "f\nis a word", "", "f\nis a word"),
    ("gpt_oss", "reasoning", f" er.<|end|>{HARMONY_FINAL}Yes<|return|>", " er.", "Yes"),
    ("gpt_oss", "content", " to= go<|return|>", "", " to= go"),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("name", "begun", "text", "reasoning", "content"), PARSED)
def test_the_parser_begins_where_the_prompt_ends(
    name: str, begun: BegunPart, text: str, reasoning: str, content: str, size: int
) -> None:
    answer = parse(name, begun, text, size)
    assert (answer.reasoning, answer.content) == (reasoning, content)


MANIFEST: Any = SimpleNamespace(
    generation={}, config={"eos_token_id": 259}, source={}, model_type="llama"
)


@pytest.mark.parametrize(("budget", "free"), [(6, 2), (4, 0), (1, 0)])
def test_a_budget_counts_the_begun_thinking(budget: int, free: int) -> None:
    files = hf_files(small_hf(), chat_template=QWEN3_THINKING, eos_token="<|end|>")
    processor = TextProcessor(Path("tiny"), MANIFEST, files)
    last = {"role": "assistant", "content": "", "reasoning_content": "abcd"}
    state = processor.chat_request(
        [ASK, last], None, parses_thinking=True, thinking_budget=budget, continues=True
    )
    assert (state.begun, state.prompt_thinking) == ("reasoning", "open")
    assert state.request.grammar is not None
    assert processor.tokenizer is not None
    spent = len(processor.tokenizer.encode_pieces(["", "abcd"]))
    assert json.loads(state.request.grammar.text)["begun_tokens"] == spent == 4
    guide = processor.make_guide(state.request, 262)
    for _ in range(free):
        assert int.from_bytes(guide.mask().tobytes(), "little").bit_count() > 1
        guide.accept(ord("h"))
    assert int.from_bytes(guide.mask().tobytes(), "little").bit_count() == 1
    with_content = processor.chat_request(
        [ASK, {**last, "content": SAID}],
        None,
        parses_thinking=True,
        thinking_budget=budget,
        continues=True,
    )
    assert (with_content.begun, with_content.prompt_thinking, with_content.request.grammar) == (
        "content",
        "closed",
        None,
    )
