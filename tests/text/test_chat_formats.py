"""Every file of chat_formats: random answers come back, and templates show their format."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_format_loader import ChatFormat, load_chat_format, make_chat_answer_parser
from modelmill.text.chat_format_registry import (
    detect_chat_format,
    detect_thinking_marks,
    list_chat_formats,
    load_chat_syntax,
    parser_marks_with_calls,
    parser_marks_without_calls,
)
from modelmill.text.chat_syntax import ChatSyntax
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import hf_files, small_hf
from tools.chat_formats.check_answers import check_answer


@pytest.mark.parametrize("name", list_chat_formats())
def test_streamed_is_whole_is_written_back(name: str) -> None:
    """More of them: ``python -m tools.chat_formats --count N``."""
    for seed in range(60):
        check_answer(load_chat_syntax(name), random.Random(f"{name} {seed}"))


@pytest.mark.parametrize("name", list_chat_formats())
def test_a_file_describes_one_format(name: str) -> None:
    syntax = load_chat_syntax(name)
    assert isinstance(syntax, ChatSyntax)
    assert syntax.title
    assert (syntax.calls.style == "parameters") == (syntax.calls.parameter is not None)
    marks = set(parser_marks_with_calls(syntax, syntax.thinking))
    assert marks
    assert marks.issuperset(syntax.control_tokens)


def test_a_name_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no chat format 'herms'; there are apertus, command_a, "):
        load_chat_syntax("herms")


# what published templates write of a call, and the format that it is; {% if tools %} stands in all
CALL_TEXTS = [
    ("<tool_call>\n{\"name\": \"' + name", "hermes"),  # Qwen 2.5, Qwen3, Hermes 2 and 3
    ("<|start_of_role|> <tool_call>\n{ </tool_call>", "hermes"),  # Granite 4
    ("<tool_call>\n<function=' + name + '>\n' <parameter=' + key", "qwen3_coder"),
    ("<|start_of_role|> <tool_call>\n<function=f>\n<parameter=x>\nv\n</parameter>\n</function>\n"
     "</tool_call>", "qwen3_coder"),  # Granite 4.2
    ("<seed:tool_call>\n<function=' + name + '>\n' <parameter=' + key", "seed_oss"),
    ("<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>", "glm45"),
    ("<tool_call>{function-name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>", "glm47"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython {\"name\": \"' + name + '\", ' \"parameters\": ", "llama3_json"),
    ("[func_name1(params_name1=params_value1)]", "llama_pythonic"),
    ("[TOOL_CALLS][", "mistral_v1"),
    ("[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]'", "mistral_v11"),
    ("[TOOL_CALLS]' + name + '[ARGS]'", "mistral_v13"),
    ("<｜tool▁calls▁begin｜> type + '<｜tool▁sep｜>' ```json", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
    ("dsml_token = '｜DSML｜' '<' + dsml_token + 'function_calls>", "deepseek_v32"),
    ("dsml_token = '｜DSML｜' '<' + dsml_token + 'tool_calls>", "deepseek_v4"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss"),
    ("<|tool_call>call:' + name + '{' '}<tool_call|>", "gemma4"),
    ("<start_function_call>call:<escape>", "function_gemma"),
    ("<start_of_turn> [func_name1(params", "gemma3"),
    ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite3"),
    ("<function_call> ", "granite_20b"),
    ("<|action_start|><|plugin|>\n{", "internlm2"),
    ("<|tool_calls_section_begin|><|tool_call_begin|> <|tool_call_argument_begin|>", "kimi_k2"),
    ("<tool_calls>\n{\"name\": ", "minimax_m1"),
    ("<minimax:tool_call> <invoke name=", "minimax_m2"),
    ("ns_token = ']<]minimax[>[' ns_token ~ '<tool_call>' '<invoke name=\"'", "minimax_m3"),
    ("functools[{", "phi4_mini"),
    ("<TOOLCALL>[", "nemotron_nano"),
    ("<dots_function_call>\n<invoke name=", "dots"),
    ("<tool_calls>[{", "hunyuan"),
    ("List of tools: <|tool_list_start|>[", "lfm2"),
    ("<function_calls>' + name + '('", "olmo3"),
    ("<|START_ACTION|>[ {\"tool_call_id\": ', \"tool_name\": ", "command_a"),
    ("Action: ```json\n[ {\"tool_name\": ", "command_r"),
    ("<｜tool_calls_begin｜> <steptml:invoke name=", "step3"),
    ("<function name=\"' + name + '\"><param name=\"", "minicpm5"),
    ("<longcat_tool_call>\n{", "longcat"),
    ("<tool_calls>\n<tool_call>' + name + '<tool_sep>\n<arg_key>k</arg_key>\n<arg_value>", "hy_v3"),
    ("<tool_calls><tool_call>{function-name}<arg_key>k</arg_key><arg_value>v</arg_value>", "hy_v4"),
    ("<tool_calls:a><tool_call:a>' + name + '<arg_key:a>k</arg_key:a><arg_value:a>", "hy_v4:a"),
    ("xLAM make calls in a single JSON array: [{\"name\": ipython message.tool_calls", "xlam"),
    ("function call' + '<|role_sep|>\n' + '{\"name\": \"", "gigachat3"),
    ("<|function_call|>{\"name\": \"", "gigachat3"),
    ("'<|tools_prefix|>' '[' '{\"' ~ name ~ '\": ' ']' '<|tools_suffix|>'", "apertus"),
    ("'<|reserved_special_token_249|>' + name + '\n' + arguments", "functionary_v2"),
    ("this format:\n>>>${recipient}\n${content}\n", "functionary_v32"),
    ("'>>>all\n' + content '>>>' + name + '\n' + arguments", "functionary_v32"),
    ("<function=' + name + '>' + arguments + '</function>'", "functionary_v31"),
    ("'<|open|>' + tag '<|sep|>' '<|close|>' + tag + '<|sep|>'", "kimi_k3"),
    ("{", "json"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name"), CALL_TEXTS)
def test_a_template_shows_its_format(text: str, name: str) -> None:
    assert detect_chat_format("{% if tools %}" + text + "{% endif %}") == name


@pytest.mark.parametrize(
    ("template", "stops"),
    [("{{ messages[0].content }}<|end|>", (259,)), ("<|start|><|channel|><|message|><|end|>", ())],
)
def test_the_end_of_a_harmony_message_ends_no_turn(template: str, stops: tuple[int, ...]) -> None:
    chat = load_chat_format(
        hf_files(small_hf(), chat_template=template), load_tokenizer(hf_files())
    )
    assert chat is not None
    assert chat.stop_ids == stops


def test_a_template_without_tools_has_them_described() -> None:
    assert detect_chat_format("{{ messages }}", ["[TOOL_CALLS]"]) == "described"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (["<s>", "[TOOL_CALLS]"], "mistral_v1"),
        (["[TOOL_CALLS]", "[ARGS]"], "mistral_v13"),
        (["<|python_tag|>"], "llama3_json"),
        (["<s>"], "json"),
    ],
)
def test_control_tokens_show_what_the_template_does_not(tokens: list[str], name: str) -> None:
    assert detect_chat_format("{% if tools %}{{ tools }}{% endif %}", tokens) == name


def test_marks_around_content_are_read_without_tools_and_thinking() -> None:
    """Kimi K3 writes its marks by macros, and encloses every answer."""
    syntax = load_chat_syntax("kimi_k3")
    assert detect_thinking_marks(syntax, "{{ open_tag('think') }}") == syntax.thinking
    assert detect_thinking_marks(syntax, "{{ open_tag('response') }}") is None
    assert {"<|open|>", "<|close|>", "<|sep|>"} <= set(parser_marks_without_calls(syntax, None))
    assert not parser_marks_without_calls(load_chat_syntax("kimi_k2"), None)
    syntax = load_chat_syntax("hermes")
    assert set(parser_marks_without_calls(syntax, syntax.thinking)) == {
        "<think>", "</think>"
    }  # fmt: skip
    texts = {"kimi_k3": "<|open|>response<|sep|>hi<|close|>response<|sep|>", "hermes": "hi"}
    for name, text in texts.items():
        chat = cast(ChatFormat, SimpleNamespace(format_name=name, thinking=None))
        parser = make_chat_answer_parser(chat, {}, thinks=False, continues=False)
        assert (parser is None) == (name == "hermes")
        if parser is not None:
            assert collect_answer([*parser.push(text), *parser.flush()]).content == "hi"


def test_thinking_is_what_the_template_writes() -> None:
    hermes, mistral = load_chat_syntax("hermes"), load_chat_syntax("mistral_v13")
    assert detect_thinking_marks(hermes, "no thinking") is None
    assert detect_thinking_marks(hermes, "<think>\n</think>") == hermes.thinking
    magistral = detect_thinking_marks(mistral, "[THINK][/THINK]")
    assert magistral is not None
    assert magistral.marks == ("[THINK]", "[/THINK]")
    # Mistral's calls with other marks of the thinking
    other = detect_thinking_marks(mistral, "<think></think>")
    assert other is not None
    assert other.marks == ("<think>", "</think>")


def test_more_marks_of_a_format_are_a_better_sign() -> None:
    """Qwen3-Coder's template has all of Functionary's marks, and one more."""
    example = "<tool_call>\n<function=example_function_name>\n<parameter=a>\n</function>"
    assert detect_chat_format("{% if tools %}" + example + "{% endif %}") == "qwen3_coder"
