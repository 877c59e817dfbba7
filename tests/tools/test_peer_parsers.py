"""The tool that runs vLLM's and SGLang's parser tests: adapters, counts, explanations, page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.peer_parsers import __main__ as command
from tools.peer_parsers import page, results_file
from tools.peer_parsers.counts import count_outcomes
from tools.peer_parsers.explanations import EXPLANATIONS, Difference, explain, short_name
from tools.peer_parsers.loose_text import LooseJson, LooseText
from tools.peer_parsers.plain_tokenizer import PlainTokenizer, detokenize_incrementally

ROOT = Path(__file__).resolve().parents[2]
VLLM_TEST = """
import json
import pytest
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser, MARK
from vllm.tool_parsers.hy_v4_tool_parser import HYV4ToolParser
from vllm.tool_parsers.unknown_tool_parser import UnknownToolParser
from vllm.engine import grammar
from mistral_common.tokens import Choice

CHOICE = Choice.model_validate({"a": 1}) | Choice

TEXT = MARK + '\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call> done'

def test_whole():
    answer = Hermes2ProToolParser(get_tokenizer("any")).extract_tool_calls(TEXT, None)
    assert answer.tool_calls[0].function.arguments == '{"x":1}'
    assert answer.content == " done "

def test_streamed():
    parser = ToolParserManager.get_tool_parser("hermes")(get_tokenizer("any"))
    text, arguments, content = "", "", ""
    for piece in (TEXT[:30], TEXT[30:]):
        text += piece
        delta = parser.extract_tool_calls_streaming(text[:-len(piece)], text, piece, request=None)
        for call in delta.tool_calls if delta else ():
            arguments += call.function.arguments
        content += (delta and delta.content) or ""
    assert json.loads(arguments) == {"x": 1}
    assert content == "done"

def test_name_first():
    parser = Hermes2ProToolParser(None)
    delta = parser.extract_tool_calls_streaming("", TEXT, TEXT, request=None)
    assert delta.tool_calls[0].function.arguments == ""

@pytest.mark.xfail(strict=True)
def test_that_the_peer_fails():
    assert Hermes2ProToolParser(None).extract_tool_calls(TEXT).tools_called

def test_wrong():
    assert Hermes2ProToolParser(None).extract_tool_calls(TEXT).content == "other"

def test_inner_state():
    assert Hermes2ProToolParser(None)._buffer == ""

def test_grammar():
    assert grammar.build() == ""

def test_tokenizer():
    assert get_tokenizer("any").grammar_factory

def test_state():
    parser = Hermes2ProToolParser(get_tokenizer("any"))
    parser.extract_tool_calls_streaming("", TEXT, TEXT, request=None)
    assert parser.prev_tool_call_arr == [{"name": "f", "arguments": '{"x":1}'}]
    assert parser.bot_token == "<tool_call>\\n"
    assert parser.bot_token_id == parser.vocab[parser.bot_token]

class SuffixTokenizer:
    def get_vocab(self):
        return {"<x>": 0, "<tool_call:a1>": 1}

def test_suffix():
    text = "<tool_calls:a1><tool_call:a1>f</tool_call:a1></tool_calls:a1>"
    assert HYV4ToolParser(SuffixTokenizer()).extract_tool_calls(text).tools_called

def test_no_format():
    UnknownToolParser(None)
"""
SGLANG_TEST = """
import unittest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.kimik2_detector import KimiK2Detector
from sglang.srt.parser.reasoning_parser import split
from sglang.test.test_utils import CustomTestCase

TOOLS = [Tool(type="function", function=Function(name="f", parameters={"type": "object"}))]
TEXT = "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}</tool_call>"

class TestParser(CustomTestCase):
    def test_whole(self):
        text, calls = FunctionCallParser(TOOLS, "qwen25").parse_non_stream("a " + TEXT)
        self.assertEqual((text, calls[0].name, calls[0].parameters), ("a", "f", "{}"))

    def test_streamed(self):
        detector = KimiK2Detector()
        self.assertEqual(detector.parse_streaming_increment("hi", TOOLS).normal_text, "hi")

    def test_undeclared(self):
        parser = FunctionCallParser([], "qwen25")
        self.assertEqual(parser.parse_non_stream(TEXT)[1], [])

    def test_calls_and_state(self):
        detector = KimiK2Detector()
        self.assertEqual(detector.parse_streaming_increment("hi <", TOOLS).calls, [])
        self.assertEqual(detector._buffer, "<")
        self.assertEqual(detector.flush_pending_normal_text(), "<")

    def test_thinking_and_calls(self):
        thinking, text = split("a</think>" + TEXT)
        self.assertEqual(thinking, "a")
        self.assertEqual(len(FunctionCallParser(TOOLS, "qwen25").parse_non_stream(text)[1]), 1)

    def test_thinking_only(self):
        self.assertEqual(split("a</think>b"), ("a", "b"))

    def test_that_the_peer_streams_otherwise(self):
        parser = FunctionCallParser(TOOLS, "qwen25")
        self.assertEqual(parser.parse_non_stream(TEXT.removesuffix("</tool_call>"))[1], [])

    def test_that_the_peer_streams_so(self):
        self.assertEqual(FunctionCallParser(TOOLS, "qwen25").parse_non_stream("a" + TEXT)[1], [])
"""
SGLANG_BASE = """
import orjson

class BaseFormatDetector:
    def __init__(self):
        self.text = ""
"""
SGLANG_DETECTOR = """
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem

class Qwen25Detector(BaseFormatDetector):
    def parse_streaming_increment(self, new_text, tools):
        calls = []
        for letter in new_text:
            self.text += letter
            if self.text.endswith("</tool_call>"):
                name = tools[0].function.name
                calls = [ToolCallItem(tool_index=0, name=name, parameters="{ }")]
        return StreamingParseResult(calls=calls)
"""
SGLANG_THINKING = """
from sglang.srt.parser.other import something

def split(text):
    return tuple(text.split("</think>"))
"""


def vllm_checkout(folder: Path) -> Path:
    """A checkout with two files of tests, one module with a constant, and tools of its own."""
    other = folder / "tests/tool_use"
    other.mkdir(parents=True)
    (other / "conftest.py").write_text("import a_module_that_is_not_installed")
    (other / "test_kimi_k3_tool_parser.py").write_text("def test_other():\n    pass\n")
    (folder / "tools").mkdir()
    (folder / "tools/__init__.py").touch()
    tests, module = folder / "tests/tool_parsers", folder / "vllm/tool_parsers"
    tests.mkdir(parents=True)
    module.mkdir(parents=True)
    (tests / "test_small.py").write_text(VLLM_TEST)
    (module / "hermes_tool_parser.py").write_text('MARK = "<tool_call>"\n')
    return folder


def test_tests_of_vllm_run_against_the_parsers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(vllm_checkout(tmp_path))
    assert command.main(["vllm", folder, "--commit", "abc"]) == 1, "one test has no explanation"
    output = capsys.readouterr().out
    assert "test_small.py: 1 failed, 3 internal, 1 no format, 5 passed, 1 xpassed" in output
    assert "test_small.py::test_wrong\n    no explanation" in output
    assert "test_kimi_k3_tool_parser.py: 1 internal" in output, "it asks no parser"
    assert "7 tests compared, 6 with the same calls" in output


def test_tests_of_sglang_run_against_the_parsers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "test/registered/function_call/test_small.py": SGLANG_TEST,
        "python/sglang/srt/function_call/base_format_detector.py": SGLANG_BASE,
        "python/sglang/srt/function_call/qwen25_detector.py": SGLANG_DETECTOR,
        "python/sglang/srt/parser/reasoning_parser.py": SGLANG_THINKING,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert command.main(["sglang", str(tmp_path), "--commit", "abc"]) == 1, "two differ"
    output = capsys.readouterr().out
    assert "test_small.py: 2 failed, 1 internal, 5 passed" in output
    assert "7 tests compared, 5 with the same calls" in output
    lines = output.splitlines()
    same = lines.index("    the peer streams modelmill's calls for its text")
    assert lines[same - 2].endswith("::test_that_the_peer_streams_so")
    assert "the peer streams" not in "".join(lines[same + 1 :])


def test_a_folder_without_tests_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["vllm", str(tmp_path), "--commit", "abc"]) == 2
    assert "name a checkout of vLLM" in capsys.readouterr().err


def test_the_page_of_the_repository_is_fresh() -> None:
    assert page.main(["--check"]) == 0, "run `make parser-differences` and commit what it writes"
    assert "vLLM" in (ROOT / page.PAGE).read_text(encoding="utf-8")


def test_every_difference_of_the_results_has_its_reason_and_every_reason_a_test() -> None:
    tests = [test for each in results_file.load_results() for test in each.failed]
    assert len(tests) > 10
    reasons = [explain(test) for test in tests]
    assert all(reasons)
    assert {id(each) for each in reasons} == {id(each) for each in EXPLANATIONS}
    for test in tests:
        assert sum(each.explains(test) for each in EXPLANATIONS) == 1, test


def test_counts_tell_calls_from_content() -> None:
    same = "a/test_small.py::test_a"
    content = "test_mistral_detector.py::T::test_json_array_with_invalid_json"
    outcomes = {
        same: {"outcome": "passed", "message": ""},
        f"b/{content}": {"outcome": "failed", "message": "x"},
        "b/test_hermes_tool_parser.py::x_invalid_json": {"outcome": "failed", "message": "x"},
        "b/test_small.py::other": {"outcome": "internal", "message": "no chat format stands for"},
        "b/test_small.py::none": {
            "outcome": "internal", "message": "no chat format stands for this parser"
        },
    }  # fmt: skip
    counts = count_outcomes("vllm", "abc", outcomes)
    assert (counts.compared, counts.same_calls) == (3, 2)
    assert counts.with_difference(Difference.CONTENT) == 1
    assert counts.total("no format") == 1
    assert short_name(f"b/{content}") == content
    counts.failed.append(
        "test_poolside_v1_detector.py::T::test_truncated_post_value_emits_no_calls"
    )
    counts.files["test_poolside_v1_detector.py"] = {"failed": 1}
    assert (counts.same_calls, counts.same_elsewhere) == (2, 2)
    counts.streamed.append(counts.failed[-1])
    assert (counts.same_calls, counts.same_elsewhere) == (2, 3)


def test_loose_texts_compare_what_they_mean(tmp_path: Path) -> None:
    assert LooseText(" a  b\n") == "a b"
    assert LooseText("ab") != "a b"
    assert "x" + LooseText(" y") == "x  y"
    assert LooseJson('{"a": 1}') == '{"a":1}'
    assert LooseJson('{"a": 1') != '{"a":1}'
    assert json.loads(LooseJson("[1]")) == [1]
    path = tmp_path / "results.json"
    counts = count_outcomes("vllm", "abc", {"t.py::a": {"outcome": "passed", "message": ""}})
    results_file.save_results([counts], path)
    assert results_file.load_results(path) == [counts]
    assert results_file.load_results(tmp_path / "none.json") == []


def test_the_tokenizer_keeps_control_tokens_whole_and_every_text() -> None:
    tokenizer = PlainTokenizer.from_pretrained("any")
    text = 'Hi <|tool_call|>\n{"é": 123}</s>'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert {"<|tool_call|>", "</s>"} <= set(tokenizer.convert_ids_to_tokens(ids))
    pieces, tokens = list[str](), list[str]()
    for end in range(1, len(ids) + 1):
        new, piece, *_ = detokenize_incrementally(tokenizer, ids[:end], tokens)
        pieces.append(piece)
        tokens += new
    assert "".join(pieces) == text
