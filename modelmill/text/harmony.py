"""Parser of gpt-oss's answers: messages on the channels analysis, commentary and final.

Source: github.com/openai/harmony, docs/format.md. A message is a header with the channel and
perhaps a recipient, ``<|message|>``, and the text up to ``<|end|>``, ``<|call|>`` or
``<|return|>``.
"""

from __future__ import annotations

import re

from modelmill.text.answer_parser import AnswerParser
from modelmill.text.answer_pieces import AnswerPiece, BegunPart, PieceCollector
from modelmill.text.json_normalizer import StreamingJsonNormalizer
from modelmill.text.tool_call_reader import (
    ToolSchemas,
    find_first_mark,
    longest_suffix_overlap_length,
)

START_TOKEN, CHANNEL_TOKEN, MESSAGE_TOKEN = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN_TOKEN, END_TOKEN, CALL_TOKEN, RETURN_TOKEN = (
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
CONTROL_TOKENS = (
    START_TOKEN,
    CHANNEL_TOKEN,
    MESSAGE_TOKEN,
    CONSTRAIN_TOKEN,
    END_TOKEN,
    CALL_TOKEN,
    RETURN_TOKEN,
)
MAX_HEADER_CHARS = 512
_ENDS = (END_TOKEN, CALL_TOKEN, RETURN_TOKEN, START_TOKEN, CHANNEL_TOKEN)
_CHANNEL = re.compile(rf"{re.escape(CHANNEL_TOKEN)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER_STARTS = (
    START_TOKEN,
    CHANNEL_TOKEN,
    "to=",
    "assistant" + CHANNEL_TOKEN,
    "assistant to=",
    MESSAGE_TOKEN,
)


class HarmonyAnswerParser(AnswerParser):
    """Analysis is thinking, a call is a message to functions.NAME, everything else content."""

    def __init__(self, tools: ToolSchemas, output: PieceCollector, begun: BegunPart = "") -> None:
        super().__init__(tools, output)
        self.in_reasoning = begun == "reasoning"
        self._mode = self._scan_header
        if begun:
            self._mode = self._scan_reasoning if self.in_reasoning else self._scan_content
        self._header = ""
        self._arguments = StreamingJsonNormalizer()
        self._has_arguments = False

    def _flush_buffer(self, cut: bool) -> list[AnswerPiece]:
        """See ``AnswerParser``."""
        rest, self._buffer = self._buffer, ""
        if self._mode in (self._scan_call_arguments, self._scan_discarded_call_rest):
            if self._mode == self._scan_call_arguments:
                self._feed_arguments(rest, final=True)
            if not self._has_arguments and not cut:
                self._output.add_arguments("{}")
        elif self._mode == self._scan_reasoning:
            self._output.add_reasoning(rest)
        elif self._mode == self._scan_content or not _may_be_header(rest):
            self._output.add_text(rest)
        return self._output.finish(cut)

    def _scan_header(self) -> bool:
        text = self._buffer.lstrip()
        if not _may_be_header(text):
            self._mode = self._scan_content
            return True
        place = self._buffer.find(MESSAGE_TOKEN, 0, MAX_HEADER_CHARS)
        if place < 0:
            if len(self._buffer) >= MAX_HEADER_CHARS:
                # no header is that long: its first mark is no content, the rest is
                mark = next(
                    (each for each in (START_TOKEN, CHANNEL_TOKEN) if text.startswith(each)), ""
                )
                self._buffer = text.removeprefix(mark)
                self._mode = self._scan_content
                return True
            return False
        header = self._header = self._buffer[: place + len(MESSAGE_TOKEN)]
        self._buffer = self._buffer[len(header) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        self._mode = self._scan_content
        if name in self._tools:
            self._output.begin_call(name)
            self._arguments, self._has_arguments = StreamingJsonNormalizer(), False
            self._mode = self._scan_call_arguments
        elif channel and channel[1] == "analysis":
            self.in_reasoning = True
            self._mode = self._scan_reasoning
        elif name:
            self._output.add_text(header)  # a call of a tool that does not exist is content
        return True

    def _scan_reasoning(self) -> bool:
        text, ended = self._take_message_text()
        self._output.add_reasoning(text)
        if ended:
            self._output.end_reasoning()
            self.in_reasoning = False
        return ended

    def _scan_content(self) -> bool:
        text, ended = self._take_message_text()
        self._output.add_text(text)
        return ended

    def _scan_call_arguments(self) -> bool:
        """Arguments; a mark inside a string of them is text."""
        if not self._has_arguments:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            if self._buffer[0] != "{":
                self._mode = self._scan_discarded_call_rest
                return True
        self._buffer = self._buffer[self._feed_arguments(self._buffer, final=False) :]
        if not (self._arguments.done or self._arguments.failed):
            return False
        if self._arguments.failed:
            self._output.end_broken_call()
        self._mode = self._scan_discarded_call_rest
        return True

    def _scan_discarded_call_rest(self) -> bool:
        """What follows the arguments is discarded up to the end of the message."""
        _, ended = self._take_message_text()
        if ended:
            self._output.end_call()
        return ended

    def _feed_arguments(self, text: str, final: bool) -> int:
        if not self._has_arguments and not text.lstrip().startswith("{"):
            return 0
        self._has_arguments = True
        at = self._arguments.feed(text, 0, final)
        self._output.add_arguments(self._arguments.drain_json())
        return at

    def _take_message_text(self) -> tuple[str, bool]:
        """Take the text of a message up to its end, and whether it ended."""
        place, mark = find_first_mark(self._buffer, _ENDS)
        if place < 0:
            stop = len(self._buffer) - longest_suffix_overlap_length(self._buffer, _ENDS)
            text, self._buffer = self._buffer[:stop], self._buffer[stop:]
            return text, False
        text, self._buffer = self._buffer[:place], self._buffer[place:]
        if mark not in (START_TOKEN, CHANNEL_TOKEN):
            self._buffer = self._buffer[len(mark) :]
        self._mode = self._scan_header
        return text, True


def _may_be_header(text: str) -> bool:
    """Whether a text is the begin of a header, or may become one."""
    text = text.lstrip()
    return any(text.startswith(start) or start.startswith(text) for start in _HEADER_STARTS)
