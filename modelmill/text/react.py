"""Tools in Qwen v1's chat format: ReAct, as the openai_api.py beside Qwen-7B-Chat writes prompts and reads answers.

Source: github.com/QwenLM/Qwen, openai_api.py (parse_messages, parse_response). The words of the prompt are those that
the model was trained on. Beyond it: streaming, and results of calls that were made at once; calls of unknown tools are
text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.calls import Outlet, Part, overlap
from modelmill.text.tools import OBSERVATION, one_by_one, written

TOOL = (
    "{name}: Call this tool to interact with the {name} API. What is the {name} API useful for? {description} "
    "Parameters: {parameters}"
)
INSTRUCTION = """Answer the following questions as best you can. You have access to the following APIs:

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

Begin!"""
THOUGHT, ACTION, INPUT, FINAL = "Thought:", "Action:", "Action Input:", "Final Answer:"


@dataclass
class Talk:
    """turns: finished pairs of question and answer, oldest first. question: the open one.

    Without an open question the last answer is unfinished: the model goes on with it after "Thought:".
    """

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    question: str | None = None


def needed(messages: Sequence[Mapping[str, Any]], tools: object) -> bool:
    """Whether a checked conversation is about tools."""
    return bool(tools) or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def arranged(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Talk:
    """A checked conversation as Qwen v1 reads it. Raises RequestError for an order of roles that it cannot read."""
    talk, said = Talk(), list[list[str]]()
    messages = one_by_one(messages)
    for index, message in enumerate(messages):
        role, content = message["role"], _stripped(message["content"])
        if role == "system" and index == 0:
            talk.system = content
        elif role == "user":
            if said and said[-1][0] == "user":
                raise RequestError("with tools, Qwen's chat format has an assistant message after every user message")
            said.append(["user", content])
        elif role == "assistant" and said:
            text = _answer(message, content, bool(tools))
            if said[-1][0] == "user":
                said.append(["assistant", _stripped(text)])
            else:
                said[-1][1] += "\n" + text
        elif role == "tool" and said and said[-1][0] == "assistant":
            said[-1][1] += f"\n{OBSERVATION} {content}"
            if index == len(messages) - 1:
                said[-1][1] += f"\n{THOUGHT}"
        else:
            raise RequestError(
                "with tools, Qwen's chat format has one system message, the first, then a user message, then assistant "
                "messages, each with the results of its calls after it"
            )
    if said and said[-1][0] == "user":
        talk.question = said.pop()[1]
    elif messages[-1]["role"] != "tool":
        raise RequestError("with tools, Qwen's chat format ends in a user message or in the result of a call")
    texts = [_stripped(text) for _, text in said]
    talk.turns = list(zip(texts[::2], texts[1::2], strict=True))
    if tools:
        _instruct(talk, instruction(tools))
    return talk


def _stripped(text: str) -> str:
    return text.lstrip("\n").rstrip()


def _answer(message: Mapping[str, Any], content: str, tools: bool) -> str:
    if not message.get("tool_calls"):
        return f"{THOUGHT} I now know the final answer.\n{FINAL} {content}" if tools else content
    call = message["tool_calls"][0]
    thought = content if content.startswith(THOUGHT) else f"{THOUGHT} {content}"
    return f"{thought}\n{ACTION} {call['function']['name']}\n{INPUT} {written(call)}"


def instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells the model of its tools. Raises RequestError for tools that are none."""
    lines, names = [], []
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError("a tool must hold a function with a name")
        parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
        description = function.get("description") or ""
        lines.append(TOOL.format(name=function["name"], description=description, parameters=parameters))
        names.append(function["name"])
    return INSTRUCTION.format(tools="\n\n".join(lines), names=", ".join(names))


def _instruct(talk: Talk, text: str) -> None:
    """It stands before the last question that has an answer, else before the open one."""
    if talk.turns:
        question, answer = talk.turns[-1]
        talk.turns[-1] = (f"{text}\n\nQuestion: {question}", answer)
    else:
        talk.question = f"{text}\n\nQuestion: {talk.question}"


class ReactReader:
    """text/calls.Reader for ReAct: a thought before a call is content, a thought before a final answer is not."""

    def __init__(self, names: Sequence[str], outlet: Outlet, thinking: bool) -> None:
        """thinking: the prompt ended in "Thought:"."""
        self._names, self._outlet = frozenset(names), outlet
        self._buffer, self._lead = "", ""
        self._mode: Callable[[], bool] = self._thought if thinking else self._start
        self._added = 0  # characters at the head of the buffer that are ours
        self._argued = self._answered = False

    def push(self, text: str) -> list[str | Part]:
        """As Reader.push."""
        self._buffer += text
        while self._buffer and self._mode():
            pass
        return self._outlet.take()

    def flush(self, cut: bool = False) -> list[str | Part]:
        """As Reader.flush."""
        rest, self._buffer = self._buffer, ""
        if self._mode == self._input:
            begun = overlap(rest, "\n" + OBSERVATION)
            text = rest[: len(rest) - (begun if begun > 1 else 0)].rstrip()
            self._outlet.argue(text if self._argued else text.lstrip() or "{}")
        elif self._mode != self._done:
            self._outlet.say(self._lead + rest[self._added :])
        return self._outlet.last(cut)

    def _start(self) -> bool:
        """Is it a thought?"""
        text = self._buffer.lstrip()
        if any(label.startswith(text) for label in (THOUGHT, ACTION, FINAL)):
            return False
        if text.startswith(THOUGHT):
            place = self._buffer.index(THOUGHT) + len(THOUGHT)
            self._lead, self._buffer, self._mode = self._buffer[:place], self._buffer[place:], self._thought
        elif text.startswith((ACTION, FINAL)):
            self._lead = self._buffer[: len(self._buffer) - len(text)]
            self._buffer, self._mode, self._added = "\n" + text, self._thought, 1
        else:
            self._mode = self._plain
        return True

    def _thought(self) -> bool:
        """All of it is held, until it is known what it leads to."""
        action, final = self._buffer.find("\n" + ACTION), self._buffer.find("\n" + FINAL)
        if final >= 0 and not 0 <= action < final:
            return self._ended(final)
        if action < 0:
            return False
        given = self._buffer.find("\n" + INPUT, action)
        final = self._buffer.find("\n" + FINAL, action)
        if final >= 0 and not 0 <= given < final:
            return self._ended(final)
        if given < 0:
            return False
        name = self._buffer[action + 1 + len(ACTION) : given].strip()
        if name not in self._names:
            self._outlet.say(self._lead + self._buffer[self._added : given + 1])
            self._lead, self._buffer, self._mode, self._added = "", self._buffer[given + 1 :], self._plain, 0
            return True
        self._outlet.say(self._buffer[:action].strip())
        self._call(name, given)
        return True

    def _ended(self, place: int) -> bool:
        self._lead, self._mode, self._added = "", self._answer, 0
        self._buffer = self._buffer[place + 1 + len(FINAL) :]
        return True

    def _call(self, name: str, given: int) -> None:
        self._outlet.call(name)
        self._lead, self._mode, self._added = "", self._input, 0
        self._buffer = self._buffer[given + 1 + len(INPUT) :]

    def _plain(self) -> bool:
        """Content, until a call of a tool."""
        action = self._buffer.find("\n" + ACTION)
        if action < 0:
            keep = overlap(self._buffer, "\n" + ACTION)
            self._outlet.say(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._outlet.say(self._buffer[:action])
        self._buffer = self._buffer[action:]
        line = self._buffer.find("\n", 1)
        if line < 0:
            return False
        if len(self._buffer) <= line + len(INPUT) and INPUT.startswith(self._buffer[line + 1 :]):
            return False
        name = self._buffer[1 + len(ACTION) : line].strip()
        if name in self._names and self._buffer.startswith(INPUT, line + 1):
            self._call(name, line)
        else:
            self._outlet.say(self._buffer[:line])
            self._buffer = self._buffer[line:]
        return True

    def _input(self) -> bool:
        """The call's arguments, until a result is made up."""
        if not self._argued:
            self._buffer = self._buffer.lstrip()
        none = not self._argued and self._buffer.startswith(OBSERVATION)
        place = 0 if none else self._buffer.find("\n" + OBSERVATION)
        if place >= 0:
            self._pass(place)
            if not self._argued:
                self._outlet.argue("{}")
            self._buffer, self._mode = "", self._done
            return False
        self._pass(len(self._buffer) - overlap(self._buffer, "\n" + OBSERVATION))
        return False

    def _pass(self, size: int) -> None:
        """Tell so much of the arguments, without blanks at its end."""
        body = self._buffer[:size].rstrip()
        if body and not (not self._argued and OBSERVATION.startswith(body)):
            self._outlet.argue(body)
            self._argued, self._buffer = True, self._buffer[len(body) :]

    def _answer(self) -> bool:
        """The final answer; the blanks before it are none of it."""
        text = self._buffer if self._answered else self._buffer.lstrip()
        if text:
            self._answered = True
            self._outlet.say(text)
        self._buffer = ""
        return False

    def _done(self) -> bool:
        """Nothing more."""
        self._buffer = ""
        return False
