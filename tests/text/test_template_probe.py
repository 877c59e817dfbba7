"""Which forms of a message a template gets: what was sent, wherever it reads that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.text.chat_format_loader import TemplateChatFormat
from modelmill.text.tokenizer_loader import load_tokenizer
from modelmill.text.tool_prompts import prepare_tool_conversation
from tests.text.conftest import files_of, hf_files, rendered

# as DeepSeek-R1-Distill's first template: a call is written beside null alone, its arguments as
# text
NULL_AND_TEXT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[U]{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is none %}{% for t in m['tool_calls'] %}"
    "{{ '[C]' + t['type'] + '|' + t['function']['name'] + '|' + t['function']['arguments'] }}{% "
    "endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' and m['content'] is not none %}{{ '[A]' + m['content'] }}{% "
    "endif %}"
    "{% if m['role'] == 'tool' %}{{ '[R]' + m['content'] }}{% endif %}{% endfor %}"
)
# as Qwen2.5's: any empty content, arguments are made JSON whatever they are
OBJECTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content %}{{ m.content }}{% endif %}{% for t in "
    "m.tool_calls %}"
    '{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}}{% endfor '
    "%}{% endfor %}"
)
# as Qwen3's: null fails, arguments in either form
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if '</think>' in m.content %}!{% endif %}{{ "
    "m.content }}"
    "{% for t in m.tool_calls %}{{ t.function.name }}{% if t.function.arguments is string %}{{ "
    "t.function.arguments }}"
    "{% else %}{{ t.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
)
# as GLM's: names and values of an object, a null printed as Python has it
ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for t in m.tool_calls %}{{ "
    "t.function.name }}"
    "{% for k, v in t.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}{% "
    "endfor %}"
)
# as Mistral's: parts of users alone
USERS_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% elif "
    "m.role == 'user' %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
)
ANYBODYS_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
PRINTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEXT = '{"city":  "Köln"}'


def call_messages(content: Any, arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "a1b2c3d4e",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "5"},
    ]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [TEXT, {"city": "Köln"}], ids=["text", "object"])
def test_no_template_loses_a_call(content: Any, arguments: Any) -> None:
    as_text = TEXT if isinstance(arguments, str) else '{"city": "Köln"}'
    messages = call_messages(content, arguments)
    assert rendered(NULL_AND_TEXT, messages) == f"[U]hi[C]function|weather|{as_text}[R]5"
    call_text = '{"name": "weather", "arguments": {"city": "Köln"}}'
    assert rendered(OBJECTS, messages) == f"[user]hi[assistant]{call_text}[tool]5"
    assert rendered(EITHER, messages) == f"[user]hi[assistant]weather{as_text}[tool]5"
    assert rendered(ITEMS, messages) == "[user]hi[assistant]weather<city>Köln[tool]5"


def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote() -> None:
    assert (
        rendered(NULL_AND_TEXT, call_messages(None, "{oops"))
        == "[U]hi[C]function|weather|{oops[R]5"
    )
    assert '"arguments": "{oops"' in rendered(OBJECTS, call_messages(None, "{oops"))


def test_a_template_without_calls_and_one_that_always_fails_say_what_they_did_before() -> None:
    assert rendered(PRINTS, call_messages("x", TEXT)) == "[user]hi[assistant]x[tool]5"
    with pytest.raises(Exception, match="the chat template refused these messages: never"):
        rendered("{{ raise_exception('never') }}", call_messages(None, TEXT))


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("template", "joins"),
    [
        (ANYBODYS_PARTS, {"system": "", "user": "", "assistant": ""}),
        (USERS_PARTS, {"system": "\n", "user": "", "assistant": "\n"}),
        (PRINTS, {"system": "\n", "user": "\n", "assistant": "\n"}),
        (EITHER, {"system": "\n", "user": "\n", "assistant": "\n"}),
    ],
    ids=["anybody's", "users'", "none", "none, fails"],
)
def test_lists_go_to_templates_that_read_lists(template: str, joins: dict[str, str]) -> None:
    messages = [{"role": role, "content": parts("a", "b")} for role in joins]
    want = "".join(f"[{role}]a{join}b" for role, join in joins.items())
    assert rendered(template, messages) == want
    assert rendered(template, [{"role": "user", "content": parts("one")}]) == "[user]one"


@pytest.mark.parametrize(
    ("template", "join"), [(ANYBODYS_PARTS, ""), (PRINTS, "\n")], ids=["reads", "does not"]
)
def test_any_parts_are_those_texts_in_that_order(template: str, join: str) -> None:
    chat = TemplateChatFormat({"default": template}, load_tokenizer(hf_files()))

    @settings(deadline=None, max_examples=25)
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4))
    def check(texts: list[str]) -> None:
        assert chat.render([{"role": "user", "content": parts(*texts)}]) == "[user]" + join.join(
            texts
        )

    check()
    chat.close()


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("arguments", [TEXT, {"city": "Köln"}], ids=["text", "object"])
def test_published_templates_write_what_transformers_writes(
    real: Any, load_hf_tokenizer: Any, shared: Any, name: str, arguments: Any
) -> None:
    """From the form that the template was written for; transformers leaves the choice to its
    caller.
    """
    files = files_of(shared, name)
    template = json.loads(files["tokenizer_config.json"])["chat_template"]
    chat = TemplateChatFormat({"default": template}, real(name))
    parsed_arguments = (
        json.loads(TEXT) if name == "qwen2.5" or not isinstance(arguments, str) else arguments
    )
    want = load_hf_tokenizer(name).apply_chat_template(
        call_messages("", parsed_arguments), tokenize=False, add_generation_prompt=True
    )
    for content in (None, ""):
        assert chat.render(call_messages(content, arguments)) == want
    chat.close()


def test_calls_of_a_template_that_knows_no_tools_are_its_own_where_none_are_offered() -> None:
    chat = TemplateChatFormat({"default": NULL_AND_TEXT}, load_tokenizer(hf_files()))
    assert (chat.format_name, chat.writes_calls) == ("described", True)
    messages, variables = prepare_tool_conversation(
        chat.format_name, call_messages(None, TEXT), [], writes_calls=chat.writes_calls
    )
    assert variables == {}
    assert chat.render(messages) == f"[U]hi[C]function|weather|{TEXT}[R]5"
    prepared, _ = prepare_tool_conversation(
        chat.format_name, call_messages(None, TEXT), [], writes_calls=False
    )
    assert "tool_calls" not in prepared[1]
    chat.close()


def test_parts_that_a_template_pastes_together_make_no_control_token() -> None:
    tokenizer = load_tokenizer(hf_files())
    chat = TemplateChatFormat({"default": ANYBODYS_PARTS}, tokenizer)
    ids = chat.encode([{"role": "user", "content": parts("<|e", "nd|>", "<|end|>")}])
    assert tokenizer.special["<|end|>"] not in ids
    assert tokenizer.decode(ids) == "[user]<|end|><|end|>"
    chat.close()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '.' }}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.strip() }}.{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}.{% endfor %}",
    ],
)
def test_a_template_that_writes_no_calls_reads_no_null(template: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "ho"},
    ]
    assert rendered(template, messages) == "<|user|>hi.<|assistant|>.<|user|>ho."
