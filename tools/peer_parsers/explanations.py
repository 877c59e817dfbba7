"""Why a peer's test does not pass: each difference by the tests that show it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase


class Difference(Enum):
    """What differs."""

    DELIVERY = "none in calls or content"
    CONTENT = "content"
    CALLS = "calls"


@dataclass(frozen=True)
class Explanation:
    """One reason.

    Attributes:
        difference: what differs.
        reason: what the peer does, what modelmill does, and why.
        tests: patterns of tests' ends, "file::test".
        elsewhere: which other test of the peer asks for modelmill's calls; "": none. What its
            parser streams is no matter of words: a run finds out.
    """

    difference: Difference
    reason: str
    tests: tuple[str, ...]
    elsewhere: str = ""

    def explains(self, test: str) -> bool:
        """Whether a test shows this difference."""
        return any(fnmatchcase(short_name(test), pattern) for pattern in self.tests)


def short_name(test: str) -> str:
    """Return "file::test" of a test's path and name."""
    path, _, name = test.partition("::")
    return f"{path.rpartition('/')[2]}::{name}"


_DELIVERY, _CONTENT, _CALLS = Difference
EXPLANATIONS = (
    Explanation(
        _DELIVERY,
        "the test compares blanks of the content or the thinking letter by letter; blanks beside "
        "calls and thinking are no content in modelmill",
        (
            "test_minimax_tool_parser.py::test_extract_tool_calls_with_thinking_tags",
            "test_seed_oss_tool_parser.py::*_thinking_budget[]]",
            "test_jamba_tool_parser.py::test_extract_tool_calls_streaming[[]*",
            "test_minimax_m2_tool_parser.py::*::test_content_before_tool_call",
            "test_minimax_m3_tool_parser.py::test_streaming_nested_tool_call",
            "test_apertus_tool_parser.py::*::test_mtp_streaming_massive_chunk",
        ),
    ),
    Explanation(
        _DELIVERY,
        "the test asks in which piece a name, an argument or thinking comes, for an empty piece, "
        "or for the parser's own state; what the pieces join to is the same",
        (
            "*::test_extract_tool_calls_streaming_incremental*",
            "test_glm47_moe_tool_parser.py::TestGlm47Streaming::test_with_args",
            "*::test_eos_after_tool_calls",
            "test_deepseekv4_tool_parser.py::test_registered",
            "test_dots_tool_parser.py::test_streaming_emits_complete_json_before_end_marker_*",
            "test_dots_detector.py::*::test_streaming_emits_complete_json_body_before_end_marker_*",
            "test_minimax_tool_parser.py::test_streaming_openai_compatibility",
            "test_minimax_tool_parser.py::test_streaming_thinking_tag_buffering",
            "test_xlam_tool_parser.py::test_streaming_with_list_structure",
            "test_function_call_parser.py::TestJsonArrayParser::test_braces_in_strings",
            "test_function_call_parser.py::TestMistralDetector::"
            "test_streaming_compact_args_format_emits_tool_calls",
            "test_function_call_parser.py::TestPythonicDetector::"
            "test_parse_streaming_multiple_tool_calls",
        ),
    ),
    Explanation(
        _DELIVERY,
        "SGLang numbers the calls of a whole answer by the tool's place in the request; modelmill "
        "by their order, as OpenAI does",
        ("test_hunyuan_detector.py::*::test_three_parallel_tool_calls",),
    ),
    Explanation(
        _DELIVERY,
        "the test asks for a line in SGLang's log",
        ("test_kimik3_detector.py::test_stream_end_reports_truncated_tools_section",),
    ),
    Explanation(
        _DELIVERY,
        "5.0 for a number stays 5.0; vLLM makes it 5",
        ("test_deepseekv32_tool_parser.py::*::test_number_param",),
    ),
    Explanation(
        _DELIVERY,
        "the test calls a name that it does not declare, in formats where the peer takes any name; "
        "modelmill takes declared names for calls only, so that a client never gets a call of "
        "a function that it did not offer",
        (
            "test_kimi_k2_tool_parser.py::*::test_invalid_funcall_id_skipped",
            "test_kimik3_detector.py::test_attr_unescaping_and_raw_string_args",
            "test_function_call_parser.py::TestGemma4Detector::"
            "test_detect_and_parse_unknown_tool_index",
        ),
    ),
    Explanation(
        _CONTENT,
        "text after or between calls is content; the peer's parser drops it. A user would miss "
        "what the model wrote",
        (
            "test_deepseekv31_tool_parser.py::test_extract_tool_calls_with_multiple_tools",
            "test_jamba_tool_parser.py::test_extract_tool_calls[[]*",
            "test_hunyuan_a13b_tool_parser.py::*Thank you!*",
            "test_mistral_tool_parser.py::*[[]trailing_data_after_json[]]",
            "test_kimi_k2_tool_parser.py::*::test_noise_between_markers_suppressed",
            "test_kimi_k2_tool_parser.py::*::test_content_after_tool_section",
            "test_llama3_json_tool_parser.py::test_extract_tool_calls_simple",
            "test_glm4_moe_tool_parser.py::test_extract_tool_calls_mixed_content",
            "test_step3p5_tool_parser.py::"
            "test_extract_tool_calls_non_streaming_mixed_content_and_multiple_tool_calls",
            "test_minicpm5xml_tool_parser.py::test_single_call_with_surrounding_text",
            "test_minicpm5xml_tool_parser.py::test_multiple_calls_interleaved_text",
            "test_function_call_parser.py::TestGemma4Detector::"
            "test_detect_and_parse_multiple_calls",
            "test_function_call_parser.py::TestPythonicDetector::"
            "test_parse_streaming_text_after_tool_call",
        ),
    ),
    Explanation(
        _CONTENT,
        "what is no call stays as content with its mark; the peer's parser drops it",
        (
            "test_kimik3_detector.py::test_stream_end_drops_truncated_marker",
            "test_mistral_detector.py::*::test_json_array_with_invalid_json",
            "test_mistral_tool_parser.py::test_extract_tool_calls_pre_v11_regex_fallback_fails",
            "test_mistral_tool_parser.py::test_extract_tool_calls_v11_without_args_skipped",
            "test_kimi_k3_tool_parser.py::test_streaming_call_boundaries[[]truncated-call-*",
            "test_kimi_k3_tool_parser.py::test_streaming_call_boundaries[[]invalid-opener-*",
            "test_kimi_k3_tool_parser.py::test_streaming_call_boundaries[[]close-in-attributes-*",
            "test_kimi_k3_tool_parser.py::test_streaming_call_boundaries[[]missing-name-*",
        ),
    ),
    Explanation(
        _CONTENT,
        "DeepSeek V4 with the section mark of V3.2: the mark of a call that is read is no content; "
        "vLLM shows it to the user",
        ("test_deepseekv4_tool_parser.py::test_function_calls_wrapper_is_not_recognized",),
    ),
    Explanation(
        _CONTENT,
        "control tokens of Kimi K2 are no content; SGLang drops them in some tests and keeps them "
        "in this one",
        ("test_function_call_parser.py::TestKimiK2Detector::test_invalid_tool_call",),
    ),
    Explanation(
        _CONTENT,
        "Kimi K3's marks with blanks inside, which no decoding of modelmill writes, are text",
        (
            "test_kimi_k3_tool_parser.py::test_extract_content_from_whitespace_degraded_markers",
            "test_kimi_k3_tool_parser.py::test_streaming_call_boundaries[[]spaced-tools-*",
        ),
    ),
    Explanation(
        _CONTENT,
        "the parser of vLLM replaces the byte-level BPE's letters Ġ and Ċ, which no decoded text "
        "has; modelmill's tokenizers decode them",
        (
            "test_minicpm5xml_tool_parser.py::test_thinking_only_sentencepiece_normalized_in_content",
        ),
    ),
    Explanation(
        _CALLS,
        "vLLM's parser renames functions and arguments of one benchmark; modelmill never changes "
        "a name",
        ("test_minicpm5xml_tool_parser.py::test_alias_*",),
    ),
    Explanation(
        _CALLS,
        "a call whose outer brace, section or end is missing is a call, since its arguments were "
        "streamed already; a streamed call cannot be taken back, and a whole answer is the same "
        "as a streamed one. The peer returns text",
        (
            "test_hermes_tool_parser.py::*_invalid_json*",
            "test_glm4_moe_tool_parser.py::test_extract_tool_calls_incomplete_tool_call",
            "test_k2_horizon_tool_parser.py::test_malformed_*ping</ifm|tool_call>]",
        ),
    ),
    Explanation(
        _CALLS,
        "Poolside and MiniMax M3: a call whose closing tags are missing is a call; SGLang returns "
        "a whole answer of this sort as text. The tests' comments suppose a limit on tokens: then "
        "modelmill returns the begun call with the finish reason `length`",
        (
            "test_poolside_v1_detector.py::*::test_truncated_post_value_emits_no_calls",
            "test_minimax_m3_detector.py::*::test_truncated_no_closing_tags",
        ),
    ),
    Explanation(
        _CALLS,
        "Poolside: the same inside a value. In a stream SGLang has sent the call's name, too, but "
        "no argument, since it holds back a value until its end; modelmill streams the value as "
        "it comes",
        ("test_poolside_v1_detector.py::*::test_truncated_pre_value_emits_no_calls",),
    ),
    Explanation(
        _CALLS,
        "MiniMax M3: a closing tag of a wrong name ends the innermost value, as MiniMax asks of "
        "providers. SGLang 0.5.23 returns text, and streams the call with all further tags as part "
        "of the value. A later version of the file of tests, which is in no release yet, asks for "
        "modelmill's call (TestMinimaxM3LenientClosingTags::test_wrong_name_closes_innermost)",
        ("test_minimax_m3_detector.py::*::test_mismatched_closing_tag",),
    ),
    Explanation(
        _CALLS,
        "Mistral's two marks of lists, at which vLLM's older parser raises an error, are two; "
        "a client would get neither call",
        ("test_mistral_tool_parser.py::*_multiple_bot_tokens_raises",),
    ),
    Explanation(
        _CALLS,
        "DeepSeek V3.2 writes a declared integer as a string: modelmill takes the declared type",
        ("test_deepseekv32_tool_parser.py::*::test_string_attr_true_preserves_literal_*",),
        elsewhere="vLLM's tests of August ask for it, and contradict these of May",
    ),
    Explanation(
        _CALLS,
        "an object over several lines is a call; vLLM reads one line each, and its test calls this "
        "not supported",
        ("test_minimax_tool_parser.py::test_extract_tool_calls_multiline_json_not_supported",),
    ),
    Explanation(
        _CALLS,
        "GigaChat 3: an object with the name of a tool that requires no argument, and without "
        "arguments, is a call with {}; SGLang returns an empty answer, so that a user gets "
        "neither call nor text. In a stream it sends the name, and no arguments. Its detectors of "
        "Hermes and Qwen 2.5 return such a call with {}; a proposed test (pull request 37921, "
        "test_zero_argument_tool_call.py) asks for {} in streams, too",
        (
            "test_function_call_parser.py::TestGigaChat3Detector::"
            "test_detect_and_parse_missing_arguments",
        ),
    ),
    Explanation(
        _CALLS,
        "DeepSeek V4 with the section mark of V3.2: a call in modelmill, since its inner marks "
        "are; as text a client would lose it",
        ("test_deepseekv4_tool_parser.py::test_function_calls_block_is_not_accepted",),
    ),
    Explanation(
        _CALLS,
        "K2 Horizon: where no variable of the template names the form of calls, all three are "
        "read, as SGLang's detector (K2V3) does; as text a client would lose the call",
        ("test_k2_horizon_tool_parser.py::test_mismatched_formats_fail_closed[[]tool_request0-*",),
    ),
    Explanation(
        _CALLS,
        "Gemma 4 ends inside a string: modelmill completes arguments that the model ends; this "
        "test asks for text. What a limit cut off stays cut",
        ("test_gemma4_tool_parser.py::*::test_incomplete_tool_call",),
        elsewhere="vLLM's test of August asks for the completed call",
    ),
    Explanation(
        _CALLS,
        "GLM writes strings without quotes; quotes that it writes are part of the value in "
        "modelmill, and removed by SGLang, so that a quoted phrase could not be searched for",
        ("test_function_call_parser.py::*::test_quoted_string_invalid_python_escape_no_warning",),
    ),
)


def explain(test: str) -> Explanation | None:
    """Return why a test does not pass; None if no reason is known."""
    return next((each for each in EXPLANATIONS if each.explains(test)), None)
