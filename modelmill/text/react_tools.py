"""Tools in Qwen v1's chat format: ReAct, as in Qwen-7B-Chat's openai_api.py.

Source: github.com/QwenLM/Qwen, openai_api.py (parse_messages, parse_response). The words of the
prompt are those of the model's training. Added here: streaming, and results of parallel calls;
calls of unknown tools are text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.answer_parser import AnswerParser
from modelmill.text.answer_pieces import AnswerPiece, PieceCollector
from modelmill.text.call_starts import JSON_CONTENT_FIRST_CHARS
from modelmill.text.json_normalizer import StreamingJsonNormalizer, escape_json_text, suffix_overlap
from modelmill.text.tool_call_reader import ToolSchemas
from modelmill.text.tool_prompts import OBSERVATION_LABEL, call_arguments_json, split_parallel_calls

TOOL_DESCRIPTION_TEMPLATE = (
    "{name}: Call this tool to interact with the {name} API. What is the {name} API useful for? "
    "{description} "
    "Parameters: {parameters}"
)
REACT_INSTRUCTION = """Answer the following questions as best you can. You have access to the following APIs:

{tools}

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [{names}]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can be repeated zero or more times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!"""  # noqa: E501
THOUGHT_LABEL = "Thought:"
ACTION_LABEL = "Action:"
ACTION_INPUT_LABEL = "Action Input:"
FINAL_ANSWER_LABEL = "Final Answer:"


@dataclass
class ReactConversation:
    """A conversation as turns of a question and an answer.

    Attributes:
        system: the system message.
        turns: pairs of a question and its answer, oldest first.
        question: the question without an answer; None: the model continues the last answer after
            "Thought:".
    """

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    question: str | None = None


def conversation_uses_tools(messages: Sequence[Mapping[str, Any]], tools: object) -> bool:
    """Return whether a validated conversation has tools, calls or results."""
    return bool(tools) or any(
        message["role"] == "tool" or message.get("tool_calls") for message in messages
    )


def to_react_conversation(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> ReactConversation:
    """Convert a validated conversation to Qwen v1's turns.

    Raises:
        RequestError: if the order of the roles does not fit the format.
    """
    conversation, entries = ReactConversation(), list[list[str]]()
    messages = split_parallel_calls(messages)
    for index, message in enumerate(messages):
        role, content = message["role"], _strip_turn_text(message["content"])
        if role == "system" and index == 0:
            conversation.system = content
        elif role == "user":
            if entries and entries[-1][0] == "user":
                raise RequestError(
                    "with tools, Qwen's chat format has an assistant message after every user "
                    "message"
                )
            entries.append(["user", content])
        elif role == "assistant" and entries:
            text = _format_assistant_turn(message, content, bool(tools))
            if entries[-1][0] == "user":
                entries.append(["assistant", _strip_turn_text(text)])
            else:
                entries[-1][1] += "\n" + text
        elif role == "tool" and entries and entries[-1][0] == "assistant":
            entries[-1][1] += f"\n{OBSERVATION_LABEL} {content}"
            if index == len(messages) - 1:
                entries[-1][1] += f"\n{THOUGHT_LABEL}"
        else:
            raise RequestError(
                "with tools, Qwen's chat format has one system message, the first, then a user "
                "message, then assistant "
                "messages, each with the results of its calls after it"
            )
    if entries and entries[-1][0] == "user":
        conversation.question = entries.pop()[1]
    elif messages[-1]["role"] != "tool":
        raise RequestError(
            "with tools, Qwen's chat format ends in a user message or in the result of a call"
        )
    texts = [_strip_turn_text(text) for _, text in entries]
    conversation.turns = list(zip(texts[::2], texts[1::2], strict=True))
    if tools:
        _insert_tool_instruction(conversation, format_tool_instruction(tools))
    return conversation


def _strip_turn_text(text: str) -> str:
    return text.lstrip("\n").rstrip()


def _format_assistant_turn(message: Mapping[str, Any], content: str, tools: bool) -> str:
    if not message.get("tool_calls"):
        return (
            f"{THOUGHT_LABEL} I now know the final answer.\n{FINAL_ANSWER_LABEL} {content}"
            if tools
            else content
        )
    call = message["tool_calls"][0]
    thought = content if content.startswith(THOUGHT_LABEL) else f"{THOUGHT_LABEL} {content}"
    name, arguments = call["function"]["name"], call_arguments_json(call)
    return f"{thought}\n{ACTION_LABEL} {name}\n{ACTION_INPUT_LABEL} {arguments}"


def format_tool_instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the instruction that describes the tools to the model.

    Raises:
        RequestError: if a tool has no function with a name.
    """
    lines, names = [], []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("a tool must have a function with a name")
        parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
        description = function.get("description") or ""
        lines.append(
            TOOL_DESCRIPTION_TEMPLATE.format(
                name=function["name"], description=description, parameters=parameters
            )
        )
        names.append(function["name"])
    return REACT_INSTRUCTION.format(tools="\n\n".join(lines), names=", ".join(names))


def _insert_tool_instruction(conversation: ReactConversation, text: str) -> None:
    """Insert it before the last question that has an answer, else before the open question."""
    if conversation.turns:
        question, answer = conversation.turns[-1]
        conversation.turns[-1] = (f"{text}\n\nQuestion: {question}", answer)
    else:
        conversation.question = f"{text}\n\nQuestion: {conversation.question}"


class ReactAnswerParser(AnswerParser):
    """Tool parser of ReAct; a thought before a call is content, before a final answer it is not."""

    def __init__(
        self, tools: ToolSchemas, output: PieceCollector, thinking: bool, schema: bool = False
    ) -> None:
        """Start an answer.

        Args:
            tools: see ``AnswerParser``.
            output: takes the pieces.
            thinking: the prompt ended in "Thought:".
            schema: a grammar holds the content to a schema.
        """
        super().__init__(tools, output)
        self._lead = ""
        self._thinks = thinking
        self._mode = self._detect_thought_start
        if schema and tools:
            self._mode = self._detect_json_schema_content
        self._added_chars = 0  # characters at the head of the buffer that the model did not write
        self._has_answer = False
        self._arguments: StreamingJsonNormalizer | None = None
        self._is_text = False  # the arguments are no JSON object: they become a JSON string

    def _flush_buffer(self, cut: bool) -> list[AnswerPiece]:
        """See ``AnswerParser``."""
        if self._mode == self._scan_arguments:
            begun = suffix_overlap(self._buffer, "\n" + OBSERVATION_LABEL)
            kept = self._buffer[: len(self._buffer) - (begun if begun > 1 else 0)]
            self._end_arguments("" if OBSERVATION_LABEL.startswith(kept.strip()) else kept, cut)
        elif self._mode != self._scan_discarded_rest:
            self._output.add_text(self._lead + self._buffer[self._added_chars :])
        self._buffer = ""
        return self._output.finish(cut)

    def _detect_json_schema_content(self) -> bool:
        """Detect whether the answer is content of a schema; else it begins with a thought."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] in JSON_CONTENT_FIRST_CHARS:
            self._mode = self._scan_final_answer
        else:
            self._buffer, self._added_chars = "\n" + text, 1
            self._mode = self._scan_thought
        return True

    def _detect_thought_start(self) -> bool:
        """Detect whether the answer begins with a thought, or with what follows an empty one."""
        text = self._buffer.lstrip()
        after_thought = (ACTION_LABEL, FINAL_ANSWER_LABEL)
        labels = after_thought if self._thinks else (THOUGHT_LABEL, *after_thought)
        if any(label.startswith(text) for label in labels):
            return False
        if text.startswith(after_thought):
            self._lead = self._buffer[: len(self._buffer) - len(text)]
            self._buffer = "\n" + text
            self._mode = self._scan_thought
            self._added_chars = 1
        elif self._thinks:
            self._mode = self._scan_thought
        elif text.startswith(THOUGHT_LABEL):
            place = self._buffer.index(THOUGHT_LABEL) + len(THOUGHT_LABEL)
            self._lead = self._buffer[:place]
            self._buffer = self._buffer[place:]
            self._mode = self._scan_thought
        else:
            self._mode = self._scan_content
        return True

    def _scan_thought(self) -> bool:
        """Buffer all of it until it is known whether a call follows."""
        action, final = (
            self._buffer.find("\n" + ACTION_LABEL),
            self._buffer.find("\n" + FINAL_ANSWER_LABEL),
        )
        if final >= 0 and not 0 <= action < final:
            return self._enter_final_answer(final)
        if action < 0:
            return False
        input_start = self._buffer.find("\n" + ACTION_INPUT_LABEL, action)
        final = self._buffer.find("\n" + FINAL_ANSWER_LABEL, action)
        if final >= 0 and not 0 <= input_start < final:
            return self._enter_final_answer(final)
        if input_start < 0:
            return False
        name = self._buffer[action + 1 + len(ACTION_LABEL) : input_start].strip()
        if name not in self._tools:
            self._output.add_text(self._lead + self._buffer[self._added_chars : input_start + 1])
            self._lead = ""
            self._buffer = self._buffer[input_start + 1 :]
            self._mode = self._scan_content
            self._added_chars = 0
            return True
        self._output.add_text(self._buffer[:action].strip())
        self._enter_arguments(name, input_start)
        return True

    def _enter_final_answer(self, position: int) -> bool:
        self._lead = ""
        self._mode = self._scan_final_answer
        self._added_chars = 0
        self._buffer = self._buffer[position + 1 + len(FINAL_ANSWER_LABEL) :]
        return True

    def _enter_arguments(self, name: str, input_start: int) -> None:
        self._output.begin_call(name)
        self._lead = ""
        self._mode = self._scan_arguments
        self._added_chars = 0
        self._buffer = self._buffer[input_start + 1 + len(ACTION_INPUT_LABEL) :]

    def _scan_content(self) -> bool:
        """Scan content up to a call of a tool."""
        action = self._buffer.find("\n" + ACTION_LABEL)
        if action < 0:
            keep = suffix_overlap(self._buffer, "\n" + ACTION_LABEL)
            self._output.add_text(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._output.add_text(self._buffer[:action])
        self._buffer = self._buffer[action:]
        line = self._buffer.find("\n", 1)
        if line < 0:
            return False
        if len(self._buffer) <= line + len(ACTION_INPUT_LABEL) and ACTION_INPUT_LABEL.startswith(
            self._buffer[line + 1 :]
        ):
            return False
        name = self._buffer[1 + len(ACTION_LABEL) : line].strip()
        if name in self._tools and self._buffer.startswith(ACTION_INPUT_LABEL, line + 1):
            self._enter_arguments(name, line)
        else:
            self._output.add_text(self._buffer[:line])
            self._buffer = self._buffer[line:]
        return True

    def _scan_arguments(self) -> bool:
        """Scan a call's arguments, until they are complete or the model invents a result."""
        if self._arguments is None:
            self._buffer = self._buffer.lstrip()
            if not self._buffer or OBSERVATION_LABEL.startswith(self._buffer):
                return False
            if self._buffer.startswith(OBSERVATION_LABEL):
                self._end_arguments("")
                return False
            self._is_text = not self._buffer.startswith("{")
            self._arguments = StreamingJsonNormalizer()
            if self._is_text:
                self._output.add_arguments('"')
        place = self._buffer.find("\n" + OBSERVATION_LABEL)
        if place >= 0:
            self._end_arguments(self._buffer[:place])
            return False
        stop = len(self._buffer) - suffix_overlap(self._buffer, "\n" + OBSERVATION_LABEL)
        if self._is_text:
            stop = len(self._buffer[:stop].rstrip())
            self._output.add_arguments(escape_json_text(self._buffer[:stop]))
        else:
            stop = self._feed_arguments(self._buffer[:stop])
        self._buffer = self._buffer[stop:]
        return False

    def _feed_arguments(self, text: str, final: bool = False) -> int:
        stream = self._arguments
        assert stream is not None, "arguments have begun"
        at = stream.feed(text, 0, final)
        self._output.add_arguments(stream.drain_json())
        if stream.failed:
            self._output.end_broken_call()
        if stream.done or stream.failed:
            self._mode = self._scan_discarded_rest
        return at

    def _end_arguments(self, rest: str, cut: bool = False) -> None:
        """End the arguments with the rest of their text; what a limit cut off stays open."""
        if self._arguments is None and not rest.strip():
            self._output.add_arguments("" if cut else "{}")
        elif self._is_text:
            self._output.add_arguments(escape_json_text(rest.rstrip()) + ("" if cut else '"'))
        elif self._arguments is not None:
            self._feed_arguments(rest, final=True)
        self._buffer, self._mode = "", self._scan_discarded_rest

    def _scan_final_answer(self) -> bool:
        """Emit the final answer without leading whitespace."""
        text = self._buffer if self._has_answer else self._buffer.lstrip()
        if text:
            self._has_answer = True
            self._output.add_text(text)
        self._buffer = ""
        return False

    def _scan_discarded_rest(self) -> bool:
        """Discard the rest of the answer."""
        self._buffer = ""
        return False
