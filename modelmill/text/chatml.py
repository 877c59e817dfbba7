"""Qwen v1's own chat format: ChatML put together from token ids, with the history cut to a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.messages import checked
from modelmill.text.tokens import Tokenizer
from modelmill.text.tools import TOLD

START, END = "<|im_start|>", "<|im_end|>"
SYSTEM = "You are a helpful assistant."
WINDOW = 6144


class QwenChat:
    """Role, newline and content are tokenized apart, as Qwen v1 was trained; user text is always plain."""

    def __init__(self, tokenizer: Tokenizer, *, window: int = WINDOW, system: str = SYSTEM) -> None:
        """window: history is kept, newest first, while it and the system prompt stay below so many tokens."""
        self._tokenizer = tokenizer
        self._window = window
        self._system = system
        self._start, self._end = tokenizer.special[START], tokenizer.special[END]
        self._newline = tokenizer.encode("\n", bos=False)
        self.stop_ids: tuple[int, ...] = (self._end, self._start)
        self.stop_strings: tuple[str, ...] = ()
        self.tool_style = TOLD

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Prompt ids; raises RequestError for roles this format has not (tool) or for tools."""
        _refuse(tools, options)
        system, history, query = self._parts(messages)
        ids = self._block("system", system)
        for turn in self._kept(system, history):
            ids += self._turn(turn)
        for role, content in query:
            ids += self._newline + self._block(role, content)
        if add_generation_prompt:
            opening = self._tokenizer.encode("assistant", bos=False)
            ids += [*self._newline, self._start, *opening, *self._newline]
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The same prompt as text, for people to read. Raises RequestError as encode does."""
        _refuse(tools, options)
        system, history, query = self._parts(messages)
        blocks = [("system", system)]
        for turn in self._kept(system, history):
            blocks += turn
        text = "\n".join(f"{START}{role}\n{content}{END}" for role, content in [*blocks, *query])
        return f"{text}\n{START}assistant\n" if add_generation_prompt else text

    def close(self) -> None:
        """Nothing to end: this format needs no template process."""

    def _parts(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[list[tuple[str, str]]], list[tuple[str, str]]]:
        """(system prompt, finished turns oldest first, the open question)."""
        system = self._system
        turns: list[list[tuple[str, str]]] = []
        for index, message in enumerate(checked(messages)):
            role, content = message["role"], message["content"]
            if role == "system" and index == 0:
                system = content
            elif role not in ("user", "assistant") or "tool_calls" in message:
                raise RequestError(
                    f"messages[{index}]: Qwen's chat format has one system message, the first, then user and "
                    "assistant texts"
                )
            elif role == "user" or not turns:
                turns.append([(role, content)])
            else:
                turns[-1].append((role, content))
        open_question = bool(turns) and turns[-1][-1][0] == "user"
        return (system, turns[:-1], turns[-1]) if open_question else (system, turns, [])

    def _kept(self, system: str, history: list[list[tuple[str, str]]]) -> list[list[tuple[str, str]]]:
        size = len(self._block("system", system))
        for count, turn in enumerate(reversed(history)):
            size += len(self._turn(turn))
            if size >= self._window:
                return history[len(history) - count :]
        return history

    def _turn(self, turn: list[tuple[str, str]]) -> list[int]:
        return [id for role, content in turn for id in self._newline + self._block(role, content)]

    def _block(self, role: str, content: str) -> list[int]:
        encode = self._tokenizer.encode
        words = encode(role, bos=False) + self._newline + encode(content, bos=False)
        return [self._start, *words, self._end]


def _refuse(tools: object, options: object) -> None:
    if tools:
        raise RequestError("Qwen's chat format has no tools; describe them in the system prompt (ReAct)")
    if options:
        raise RequestError("Qwen's chat format has no template options")
