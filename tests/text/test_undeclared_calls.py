"""Lists of calls with one of a function that is not declared: it is text, the others are calls."""

from __future__ import annotations

import json

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

TOOLS = ("grind", "weigh")
JSON_LISTS = {
    "mistral_v1": ("[TOOL_CALLS] ", ""),
    "mistral_v11": ("[TOOL_CALLS]", ""),
    "mistral_v13": ("[TOOL_CALLS] ", ""),
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "hunyuan": ("<tool_calls>", "</tool_calls>"),
    "command_a": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "command_r": ("Action: ```json\n", "```"),
    "granite3": ("<|tool_call|>", ""),
    "phi4_mini": ("functools", ""),
    "nemotron_nano": ("<TOOLCALL>", "</TOOLCALL>"),
    "json": ("", ""),
    "llama3_json": ("", ""),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "k2_horizon_json": ("<ifm|tool_call>", "</ifm|tool_call>"),
}
PYTHON_LISTS = {
    "llama_pythonic": ("[", "]", ", "),
    "gemma3": ("[", "]", ", "),
    "lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "olmo3": ("<function_calls>", "</function_calls>", "\n"),
}
OTHERS = ["between", "first", "last", "two", "two first"]


def _names(other: str) -> list[str]:
    """Names of the calls; those of sift are undeclared."""
    orders = {
        "between": ["grind", "sift", "weigh"],
        "first": ["sift", "grind", "weigh"],
        "last": ["grind", "weigh", "sift"],
        "two": ["grind", "sift", "sift", "weigh"],
        "two first": ["sift", "sift", "weigh"],
    }
    return orders[other]


def _read(name: str, text: str) -> tuple[list[tuple[str, str]], str]:
    results = []
    for size in (len(text), 1, 2, 5):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parser = make_answer_parser(load_chat_syntax(name), TOOLS)
        parsed = [each for piece in pieces for each in parser.push(piece)]
        answer = collect_answer([*parsed, *parser.flush()])
        results.append(([(call.name, call.arguments) for call in answer.calls], answer.content))
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", JSON_LISTS)
def test_objects_beside_an_undeclared_one_are_calls(name: str, other: str) -> None:
    calls_syntax = load_chat_syntax(name).calls
    opening, closing = JSON_LISTS[name]
    name_key, arguments_key = calls_syntax.name_key, calls_syntax.arguments_key
    objects = [json.dumps({name_key: each, arguments_key: {"kg": 2}}) for each in _names(other)]
    calls, content = _read(name, f"{opening}[{', '.join(objects)}]{closing}")
    assert calls == [(each, '{"kg": 2}') for each in _names(other) if each != "sift"]
    text = [each for each in objects if '"sift"' in each]
    if name == "llama3_json":  # its objects are calls anywhere in the content
        assert all(each in content for each in text)
    else:
        assert content == "\n".join(text)


@pytest.mark.parametrize("other", OTHERS)
def test_calls_in_lines_beside_an_undeclared_one_are_calls(other: str) -> None:
    lines = [json.dumps({"name": each, "arguments": {"kg": 2}}) for each in _names(other)]
    calls, content = _read("minimax_m1", "\n".join(["<tool_calls>", *lines, "</tool_calls>"]))
    assert calls == [(each, '{"kg": 2}') for each in _names(other) if each != "sift"]
    assert content == "\n".join(each for each in lines if '"sift"' in each)


def test_lines_of_undeclared_calls_alone_are_content_with_their_marks() -> None:
    text = '<tool_calls>\n{"name": "sift"}\n{"name": "sift"}\n</tool_calls> and more'
    assert _read("minimax_m1", text) == ([], text)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", PYTHON_LISTS)
def test_python_calls_beside_an_undeclared_one_are_calls(name: str, other: str) -> None:
    opening, closing, separator = PYTHON_LISTS[name]
    written = [f"{each}(note='a) \\' [b', kg=(2))" for each in _names(other)]
    written = [each if "sift" in each else f"{each[:5]}(kg=2)" for each in written]
    calls, content = _read(name, f"{opening}{separator.join(written)}{closing}")
    assert calls == [(each, '{"kg": 2}') for each in _names(other) if each != "sift"]
    assert content == "\n".join(each for each in written if "sift" in each)


@pytest.mark.parametrize("name", JSON_LISTS)
def test_a_list_without_declared_functions_is_content_with_its_marks(name: str) -> None:
    calls_syntax = load_chat_syntax(name).calls
    opening, closing = JSON_LISTS[name]
    each = json.dumps({calls_syntax.name_key: "sift", calls_syntax.arguments_key: {}})
    text = f"{opening}[{each}, {each}]{closing} and more"
    assert _read(name, text) == ([], text)


@pytest.mark.parametrize("name", PYTHON_LISTS)
def test_python_calls_of_undeclared_functions_alone_are_content(name: str) -> None:
    opening, closing, separator = PYTHON_LISTS[name]
    text = f"{opening}sift(kg=2){separator}sift(){closing} and more"
    assert _read(name, text) == ([], text)


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ('{"name": "grind", "arguments": [1]}', '{"name": "grind", "arguments": [1]}'),
        ('{"arguments": {}, "name": "sift"}', '{"arguments": {}, "name": "sift"}'),
        ('{"note": "a } b"}', '{"note": "a } b"}'),
    ],
)
def test_objects_that_are_no_calls_are_text(written: str, content: str) -> None:
    call = '{"name": "weigh", "arguments": {"kg": 2}}'
    for objects in ([written, call], [call, written], [call, written, call]):
        text = f"<tool_call>\n[{', '.join(objects)}]\n</tool_call>"
        expected = [("weigh", '{"kg": 2}')] * objects.count(call)
        assert _read("hermes", text) == (expected, content)


ITEMS = ["7", "-1.5e3", "null", "True", '"a, ] b"', "'it'", "[1, {}]", "[]"]
MARKED_LISTS = [name for name in JSON_LISTS if load_chat_syntax(name).calls.section[0][1:]]
MARKED_LISTS.remove("lfm2")  # its lists are Python's, so that items come behind an object only


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("name", MARKED_LISTS)
def test_items_that_are_no_objects_end_no_list(name: str, item: str) -> None:
    calls_syntax = load_chat_syntax(name).calls
    opening, closing = JSON_LISTS[name]
    call = json.dumps({calls_syntax.name_key: "weigh", calls_syntax.arguments_key: {"kg": 2}})
    for objects in ([item, call], [call, item], [call, item, item, call], [call, f"{item} ", call]):
        calls, content = _read(name, f"{opening}[{', '.join(objects)}]{closing}")
        assert calls == [("weigh", '{"kg": 2}')] * objects.count(call)
        assert content == "\n".join(each.strip() for each in objects if each != call)


@pytest.mark.parametrize("item", ITEMS)
def test_a_list_of_other_items_alone_is_content_with_its_marks(item: str) -> None:
    for text in (
        f"<tool_calls>[{item}, {item}]</tool_calls> and more",
        f"<tool_calls>[{item} more",
        f'[{item}, {{"name": "sift"}}]',
    ):
        assert _read("hunyuan", text) == ([], text)


def test_text_behind_a_comma_is_no_item() -> None:
    call = '{"name": "weigh", "arguments": {}}'
    for text, content in (
        (f"<tool_calls>[{call}, 7 of them", "7 of them"),
        (f"<tool_calls>[{call}], 7, so", "7, so"),
        (f'<tool_calls>[{call}, "so', '"so'),
        (f"<tool_calls>[{call}, [1, so] it", "[1, so] it"),
    ):
        assert _read("hunyuan", text) == ([("weigh", "{}")], content)


def test_an_item_before_the_first_call_needs_a_mark() -> None:
    """Content that is a list is not withheld up to its end."""
    text = '["a", {"name": "weigh", "arguments": {}}]'
    assert _read("json", text) == ([], text)
    parser = make_answer_parser(load_chat_syntax("json"), TOOLS)
    assert collect_answer(parser.push(text[:5])).content == text[:5]


def test_text_behind_the_list_follows_on_a_line_of_its_own() -> None:
    text = '[TOOL_CALLS] [{"name": "grind", "arguments": {}}, {"name": "sift"}] and more'
    assert _read("mistral_v13", text) == ([("grind", "{}")], '{"name": "sift"}\nand more')


@pytest.mark.parametrize(
    "text", ["[see (this) and that]", "[see(this", "[see('it\\", "[see](there)"]
)
def test_brackets_in_content_stay(text: str) -> None:
    assert _read("llama_pythonic", text) == ([], text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "<|tool_call_start|>[sift(<|tool_call_start|>[grind()]<|tool_call_end|>"),
        ("llama_pythonic", "[sift([grind()]"),
    ],
)
def test_a_call_behind_an_open_one_is_read_at_once(name: str, text: str) -> None:
    parser = make_answer_parser(load_chat_syntax(name), TOOLS)
    answer = collect_answer(each for piece in text for each in parser.push(piece))
    assert [call.name for call in answer.calls] == ["grind"]
    assert answer.content == text.split("[grind")[0].removesuffix("<|tool_call_start|>")


STRINGS = [
    "'[grind()]'",
    "'so [grind(kg=1), weigh()] it'",
    '"it\'s [grind()] \\" [weigh()]"',
    "'it\\'s [grind()]'",
    "'it's [grind()]'",  # an inner quote without its escape
    "'```tool_code\\n[grind()]\\n```'",
    "{'a': ['[grind()]', \"[grind()]\"]}",
]


@pytest.mark.parametrize("string", STRINGS)
@pytest.mark.parametrize("name", PYTHON_LISTS)
def test_a_call_in_a_string_of_an_undeclared_one_is_none(name: str, string: str) -> None:
    opening, closing, separator = PYTHON_LISTS[name]
    sift = f"sift(note={string}, kg=1)"
    for text in (
        f"{opening}{sift}{closing} and more",
        f"{opening}{sift}{separator}{sift}{closing}",
        f"{opening}{sift}",
        f"{opening}sift(note={string}",
        f"{opening}{sift}{separator}1",
        f"{opening}{sift[:-9].rstrip(chr(39))} and more",  # its last quote is missing
    ):
        assert _read(name, text) == ([], text)
    calls, content = _read(name, f"{opening}{sift}{separator}weigh(){closing}")
    assert (calls, content) == ([("weigh", "{}")], sift)
    for end in range(len(opening) + 1, len(opening) + len(sift)):
        parser = make_answer_parser(load_chat_syntax(name), TOOLS)
        text = f"{opening}{sift}"[:end]
        assert not collect_answer([*parser.push(text), *parser.flush(cut=True)]).calls


def test_a_call_in_a_string_of_code_in_a_block_is_none() -> None:
    for call in ("sift(note='[grind()]')", "grind(note='[grind()]')", "print(sift('[weigh()]'))"):
        text = f"```tool_code\n{call}\n```"
        assert _read("gemma3", text) == ([], text)


def test_a_call_behind_undeclared_ones_is_one() -> None:
    text = "[sift(note='[grind()]')] and [weigh()]"
    assert _read("gemma3", text) == ([("weigh", "{}")], "[sift(note='[grind()]')] and")


def test_an_open_call_ends_at_the_mark_behind_all_calls() -> None:
    text = "<|tool_call_start|>[grind(), sift('a]<|tool_call_end|>b"
    assert _read("lfm2", text) == ([("grind", "{}")], "sift('a]<|tool_call_end|>b")
