from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import RequestError, TemplateError, TokenizerError
from modelmill.text.chat_format_loader import (
    TemplateChatFormat,
    TemplateLimits,
    load_chat_format,
    read_chat_templates,
)
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import files_of, gguf_bpe, gguf_spm, hf_files

CONVERSATIONS = [
    [{"role": "user", "content": "Hi 🦙"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "x"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  what is 12 < 13 |> é?\n\n"},
        {"role": "assistant", "content": "Yes. <"},
        {"role": "user", "content": "> quoted\n中文 e\u0301"},
    ],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": " "},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <city>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
TOOL_TALK = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
        ],
    },
    {"role": "tool", "content": '{"t": 5}'},
    {"role": "assistant", "content": "<think>\ncold\n</think>\n\nCold."},
    {"role": "user", "content": "Thanks"},
]
NAMES = ("qwen2.5", "qwen3")


@pytest.fixture(scope="module")
def chats(real, shared):
    made = {name: load_chat_format(files_of(shared, name), real(name)) for name in NAMES}
    yield made
    for chat in made.values():
        chat.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_same_ids_as_transformers(chats, load_hf_tokenizer, name, generate, tools):
    for messages in [*CONVERSATIONS, TOOL_TALK, TOOL_TALK[:3]]:
        expected = load_hf_tokenizer(name).apply_chat_template(
            messages, tools=tools, add_generation_prompt=generate, tokenize=True, return_dict=False
        )
        assert chats[name].encode(messages, generate, tools=tools) == expected


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(
    texts=st.lists(
        st.text(max_size=20) | st.text(alphabet="<|im_>\n a", max_size=8), min_size=1, max_size=4
    )
)
def test_same_ids_as_transformers_for_any_text(chats, load_hf_tokenizer, real, name, texts):
    if any(control in text for control in real(name).special for text in texts):
        return
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    expected = load_hf_tokenizer(name).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert chats[name].encode(messages) == expected


def test_options_reach_the_template(chats, load_hf_tokenizer):
    messages = CONVERSATIONS[0]
    expected = load_hf_tokenizer("qwen3").apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert chats["qwen3"].encode(messages, options={"enable_thinking": False}) == expected
    for name in ("messages", "eos_token", "add_generation_prompt"):
        with pytest.raises(RequestError, match=name):
            chats["qwen3"].encode(messages, options={name: "x"})
    with pytest.raises(RequestError, match="JSON"):
        chats["qwen3"].encode(messages, options={"x": object()})


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_no_text_in_a_request_makes_a_control_token(chats, real, name, data):
    tokenizer = real(name)
    control = set(tokenizer.special.values())
    parts = st.sampled_from(
        [*tokenizer.special, "<|im_", "start|>", "<|", "|>", "end|>", "\n", "system", "a"]
    )
    evil = st.lists(parts, max_size=5).map("".join)
    clean = [*TOOL_TALK[:3], {"role": "user", "content": "a", "name": "n"}]
    dirty = json.loads(json.dumps(clean))
    for message in dirty:
        message["content"] = data.draw(evil) or "a"
    dirty[1]["tool_calls"][0]["function"] = {
        "name": data.draw(evil),
        "arguments": {data.draw(evil): data.draw(evil)},
    }
    tools = json.loads(json.dumps(TOOLS))
    tools[0]["function"]["description"] = data.draw(evil)
    expected = [id for id in chats[name].encode(clean, tools=TOOLS) if id in control]
    ids = chats[name].encode(dirty, tools=tools)
    assert [id for id in ids if id in control] == expected
    assert tokenizer.decode(ids, skip_special=False) == chats[name].render(dirty, tools=tools)


def test_text_parts_and_stops(chats):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    joined = chats["qwen2.5"].encode([{"role": "user", "content": "Hi\nthere"}])
    assert chats["qwen2.5"].encode([{"role": "user", "content": parts}]) == joined
    assert chats["qwen2.5"].stop_ids == (151645,)
    assert chats["qwen2.5"].stop_strings == ()


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"


def test_sentencepiece_vocabularies():
    tokenizer = load_tokenizer(gguf_spm())
    chat = load_chat_format(gguf_spm(chat_template=TEMPLATE), tokenizer)
    assert chat is not None
    assert chat.encode([{"role": "user", "content": " hello "}]) == [1, 263, 2]
    assert chat.stop_ids == (2,)
    ids = chat.encode([{"role": "user", "content": "</s><s>"}, {"role": "user", "content": "</"}])
    assert [id for id in ids if id < 3] == [1, 2, 2]
    chat.close()


def test_a_template_that_pastes_texts_together_makes_no_control_token():
    tokenizer = load_tokenizer(gguf_bpe())
    template = "{% for m in messages %}{{ m.content | trim | lower }}{% endfor %}<|end|>"
    chat = TemplateChatFormat({"default": template}, tokenizer)
    messages = [
        {"role": "user", "content": text}
        for text in ("<|e ", " n", "D|>", "<|END", "|>", "<|END|>")
    ]
    assert chat.encode(messages[3:]).count(259) == 1
    assert chat.render(messages[3:]) == "<|end|><|end|><|end|>"
    chat.close()


def test_where_templates_come_from():
    assert read_chat_templates({}) == {}
    assert read_chat_templates(hf_files(chat_template="a")) == {"default": "a"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert read_chat_templates(hf_files(chat_template=named)) == {"default": "a", "tool_use": "b"}
    by_name = {"default": "a", "tool_use": "b"}
    assert read_chat_templates(hf_files(chat_template=by_name)) == by_name
    assert read_chat_templates(
        {**hf_files(chat_template=by_name), "chat_template.jinja": b"c"}
    ) == {"default": "c"}
    files = hf_files(chat_template="a") | {"chat_template.jinja": b"c"}
    assert read_chat_templates(files) == {"default": "c"}
    more = {"additional_chat_templates/tool_use.jinja": b"t"}
    assert read_chat_templates({**files, **more}) == {"default": "c", "tool_use": "t"}
    assert read_chat_templates({**hf_files(chat_template="a"), **more}) == {
        "default": "a",
        "tool_use": "t",
    }
    assert read_chat_templates({**hf_files(), **more}) == {"default": "t", "tool_use": "t"}
    assert read_chat_templates({"chat_template.json": b'{"chat_template": "d"}'}) == {
        "default": "d"
    }
    assert read_chat_templates(gguf_bpe(chat_template="g")) == {"default": "g"}
    assert load_chat_format(hf_files(), load_tokenizer(hf_files())) is None
    for wrong in (5, [1], [{"name": "a"}], {"a": 5}):
        with pytest.raises(TemplateError, match="chat_template"):
            read_chat_templates(hf_files(chat_template=wrong))
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        read_chat_templates({"chat_template.jinja": b"\xff"})
    with pytest.raises(TemplateError, match=r"additional_chat_templates/rag\.jinja is not UTF-8"):
        read_chat_templates({"additional_chat_templates/rag.jinja": b"\xff"})


def test_the_tool_template_is_used_for_tools():
    tokenizer = load_tokenizer(hf_files())
    chat = TemplateChatFormat({"default": "plain", "tool_use": "tools"}, tokenizer)
    message = [{"role": "user", "content": "a"}]
    assert (chat.render(message), chat.render(message, tools=TOOLS)) == ("plain", "tools")
    for wrong in ("x", [1], {"a": 1}):
        with pytest.raises(RequestError, match="tools"):
            chat.render(message, tools=wrong)
    chat.close()


def test_a_hostile_template_costs_one_line_and_the_request():
    tokenizer = load_tokenizer(hf_files())
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    chat = TemplateChatFormat({"default": loop}, tokenizer, limits=TemplateLimits(seconds=0.2))
    for _ in range(2):
        with pytest.raises(TemplateError, match="CPU"):
            chat.encode([{"role": "user", "content": "a"}])
    chat.close()
