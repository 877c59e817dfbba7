"""Text that begins as calls do, and marks without a call: what is content, and with which marks."""

from __future__ import annotations

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.text.tool_schemas import object_schema

TOOLS = {"mill": object_schema(grain="string", kg="integer")}
DEEPSEEK_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>mill\n```json\n{}\n```<｜tool▁call▁end｜>"
DEEPSEEK_V31 = "<｜tool▁call▁begin｜>mill<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
M2 = "<minimax:tool_call>\n{}</minimax:tool_call>"
M2_CALL = '<invoke name="{}">\n{}<parameter name="grain">rye</parameter>\n</invoke>\n'
M3 = "]<]minimax[>["
DOTS = "<dots_function_call>{}</dots_function_call>"
K3 = "<|open|>tools<|sep|>{}<|close|>tools<|sep|>"
RYE = ("mill", '{"grain": "rye"}')

# format, text, calls, content
CASES: list[tuple[str, str, list[tuple[str, str]], str]] = [
    # behind a broken call: another one, or the end of the section
    *(
        (name, DEEPSEEK_SECTION.format(call.replace("{}", each) + more) + " so", calls, "so")
        for name, call in (("deepseek_v3", DEEPSEEK_V3), ("deepseek_v31", DEEPSEEK_V31))
        for each, read in (("{broken", "{}"), ('{"kg":2, rye}', '{"kg":2}'))
        for more, calls in (
            ("", [("mill", read)]),
            (call.replace("{}", '{"kg":1}'), [("mill", read), ("mill", '{"kg":1}')]),
        )
    ),
    ("minimax_m2", M2.format('<invoke name="mill">\n<parameter name="kg">1</parameter>\nrye\n'
     "</invoke>\n" + M2_CALL.format("mill", "")), [("mill", '{"kg": 1}'), RYE], ""),
    # text between the name and the first argument
    ("minimax_m2", M2.format(M2_CALL.format("mill", "Fine flour, please.\n")), [RYE],
     "Fine flour, please."),
    ("minimax_m2", "Now:\n" + M2.format(M2_CALL.format("mill", "") + M2_CALL.format("mill", "so")),
     [RYE, RYE], "Now:\nso"),
    ("qwen3_coder", "<tool_call>\n<function=mill>\nfine\n<parameter=grain>\nrye\n</parameter>\n"
     "</function>\n</tool_call> end", [RYE], "fine\n end"),
    ("minicpm5", '<function name="mill">fine<param name="grain">rye</param></function>', [RYE],
     "fine"),
    ("minimax_m2", M2.format('<invoke name="mill">\nfine</invoke>'), [],
     M2.format('<invoke name="mill">\nfine</invoke>')),
    ("minimax_m2", M2.format(M2_CALL.format("mill", "so " * 100)), [],
     M2.format(M2_CALL.format("mill", "so " * 100))),
    # an empty section
    *(
        (name, f"a{opening}{blank}{closing}b", [], "ab")
        for name, opening, closing in (
            ("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>"),
            ("k2_horizon", "<ifm|tool_calls>", "</ifm|tool_calls>"),
            ("dots", "<dots_function_call>", "</dots_function_call>"),
            ("kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ("kimi_k3", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            ("minimax_m3", f"{M3}<tool_call>", f"{M3}</tool_call>"),
            ("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        )
        for blank in ("", "\n")
    ),
    # a section with a text: its marks stay, or both are control tokens that are no content
    ("minimax_m2", M2.format("rye"), [], M2.format("rye")),
    ("k2_horizon", "<ifm|tool_calls>rye</ifm|tool_calls>", [],
     "<ifm|tool_calls>rye</ifm|tool_calls>"),
    ("dots", DOTS.format("rye"), [], "rye"),
    ("kimi_k2", KIMI_SECTION.format("rye"), [], "rye"),
    # calls that are none stay with all their marks
    *(
        (name, section.format(M2_CALL.format("sift", "")), [],
         section.format(M2_CALL.format("sift", "")))
        for name, section in (("minimax_m2", M2), ("dots", DOTS))
    ),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("functions.sift:0", "{}")), [],
     KIMI_SECTION.format(KIMI.format("functions.sift:0", "{}"))),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("7", '{"sand": 1}')) + "a<|tool_call_end|>b", [],
     KIMI_SECTION.format(KIMI.format("7", '{"sand": 1}')) + "ab"),
    ("kimi_k2", KIMI_SECTION.format(KIMI.format("functions.sift:0", "{}") + KIMI.format(
        "functions.mill:1", '{"kg":1}')), [("mill", '{"kg":1}')],
     "<|tool_calls_section_begin|>" + KIMI.format("functions.sift:0", "{}")),
    ("kimi_k3", K3.format('<|open|>call tool="sift"<|sep|><|close|>call<|sep|>'), [],
     K3.format('<|open|>call tool="sift"<|sep|><|close|>call<|sep|>')),
    ("kimi_k2", "a<|tool_call_end|>b<|tool_calls_section_end|>", [], "ab"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "content"), CASES)
def test_text_and_marks_beside_calls(
    name: str, text: str, calls: list[tuple[str, str]], content: str
) -> None:
    for size in (len(text), 1, 2, 7):
        parser = make_answer_parser(load_chat_syntax(name), TOOLS)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parsed = [each for piece in pieces for each in parser.push(piece)]
        answer = collect_answer([*parsed, *parser.flush()])
        assert [(call.name, call.arguments) for call in answer.calls] == calls
        assert answer.content == content


@pytest.mark.parametrize(("name", "text", "calls", "content"), CASES)
def test_of_an_answer_that_is_cut_all_is_a_beginning(
    name: str, text: str, calls: list[tuple[str, str]], content: str
) -> None:
    for end in range(len(text)):
        parser = make_answer_parser(load_chat_syntax(name), TOOLS)
        answer = collect_answer([*parser.push(text[:end]), *parser.flush(cut=True)])
        pairs = zip(calls, [(call.name, call.arguments) for call in answer.calls], strict=False)
        assert all(whole[1].startswith(part[1]) for whole, part in pairs)
