"""Incremental parsing of answers: text becomes thinking, content and deltas of tool calls.

Nothing that was emitted changes later. A call is emitted once its name is that of a tool and its
arguments have begun; from then on its arguments are emitted as the model writes them, and are a
prefix of valid JSON at every point. Text that turns out not to be a call is content. The result
does not depend on how the text was cut into pieces, so a whole answer and a streamed one are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelmill.text.answer_pieces import AnswerPiece, BegunPart, PieceCollector
from modelmill.text.call_starts import CallStartTexts, list_call_starts, match_call_start
from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax
from modelmill.text.json_call_reader import JsonCallReader
from modelmill.text.named_call_reader import NamedCallReader
from modelmill.text.nested_tag_call_reader import NestedTagCallReader
from modelmill.text.parameter_call_reader import ParameterCallReader
from modelmill.text.pythonic_call_reader import PythonicCallReader
from modelmill.text.tool_call_reader import (
    ToolCallReader,
    ToolSchemas,
    find_first_mark,
    is_whitespace,
    longest_suffix_overlap_length,
)
from modelmill.text.validated_call_reader import ValidatedCallReader

MIN_TRUNCATED_MARK_CHARS = 3
"""Where a limit cut an answer off, that many characters of a mark at its end are not content.

Directly behind a call, and where a budget of thinking forced the mark, one character is enough.
"""
TOOL_CALL_READERS: dict[str, type[ToolCallReader]] = {
    "json": JsonCallReader,
    "named": NamedCallReader,
    "parameters": ParameterCallReader,
    "pythonic": PythonicCallReader,
    "tags": NestedTagCallReader,
}


class AnswerParser(ABC):
    """Splits an answer: a state machine over what is still open.

    A state (``_mode``) reads from the buffer and returns whether the next one can go on. Blanks
    behind a blank decide nothing, so they are kept until other text or the end comes: a state that
    waits for it would else skip all of them again for each piece.

    Attributes:
        num_thoughts: pieces of thinking that have begun, those without a text among them.
    """

    _mode: Callable[[], bool]

    def __init__(self, tools: ToolSchemas, output: PieceCollector) -> None:
        self._tools, self._output = tools, output
        self._buffer = ""
        self._blanks: list[str] = []
        self._follows_blank = False
        self._in_reasoning = False
        self._ends_in_forced_mark = False
        self.num_thoughts = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the thinking."""
        return self._in_reasoning

    @in_reasoning.setter
    def in_reasoning(self, value: bool) -> None:
        self.num_thoughts += value and not self._in_reasoning
        self._in_reasoning = value

    @property
    def has_broken_call(self) -> bool:
        """Whether the model broke a call so far, whose rest is in no piece."""
        return self._output.has_broken_call

    def push(self, text: str) -> list[AnswerPiece]:
        """Add text; return the pieces that are now certain, in order."""
        if self._follows_blank and is_whitespace(text):
            self._blanks.append(text)
            return []
        self._consume_text(text)
        return self._output.drain()

    def _consume_text(self, text: str) -> None:
        """Read text, and the blanks before it."""
        text = "".join((*self._blanks, text))
        self._blanks = []
        self._follows_blank = is_whitespace(text[-1:])
        self._buffer += text
        while self._buffer and self._mode():
            pass

    def flush(self, cut: bool = False, *, forced_mark: bool = False) -> list[AnswerPiece]:
        """Return what is still buffered.

        Args:
            cut: the answer was cut off by a limit.
            forced_mark: that was inside the mark after the thinking, which a budget had forced.
        """
        self._ends_in_forced_mark = forced_mark
        self._consume_text("")
        return self._flush_buffer(cut)

    @abstractmethod
    def _flush_buffer(self, cut: bool) -> list[AnswerPiece]:
        """Return what is still in the buffer."""


def make_answer_parser(
    syntax: ChatSyntax,
    tools: ToolSchemas | Sequence[str] = (),
    *,
    thinking: ThinkingSyntax | None = None,
    thinks: bool = False,
    continues: bool = False,
    max_calls: int | None = None,
    forced: bool = False,
    begun: BegunPart = "",
    schema: bool = False,
) -> AnswerParser:
    """Make the parser of one answer.

    Args:
        syntax: how the answer is written.
        tools: names of the tools, with the JSON schemas of their parameters if those are known; a
            call of another name is content.
        thinking: marks of the thinking; None if the model does not think.
        thinks: whether the prompt began the thinking.
        continues: whether the prompt began the answer otherwise (ReAct's "Thought:").
        max_calls: further calls are dropped.
        forced: whether a grammar forces calls; the text of a call that was cut off is then not
            content.
        begun: what the prompt has begun of the answer, which then has no marks before it.
        schema: whether a grammar holds content to a schema: the answer is then calls from its
            begin on, or content in which nothing is read as a call.
    """
    from modelmill.text.harmony import HarmonyAnswerParser
    from modelmill.text.react_tools import ReactAnswerParser

    schemas: Mapping[str, Mapping[str, Any] | None] = (
        tools if isinstance(tools, Mapping) else dict.fromkeys(tools)
    )
    output = PieceCollector(max_calls, short_ids=syntax.calls.short_ids, silent=forced)
    output.set_prefilled_part(begun)
    if syntax.calls.style == "react":
        return ReactAnswerParser(schemas, output, continues, schema)
    if syntax.calls.style == "harmony":
        return HarmonyAnswerParser(schemas, output, begun)
    starts = list_call_starts(syntax, schemas) if schema and schemas else ()
    return MarkedAnswerParser(syntax, schemas, output, thinking, thinks, begun, starts)


class MarkedAnswerParser(AnswerParser):
    """Parser of formats that mark thinking and calls in the text."""

    def __init__(
        self,
        syntax: ChatSyntax,
        tools: ToolSchemas,
        output: PieceCollector,
        thinking: ThinkingSyntax | None,
        thinks: bool,
        begun: BegunPart = "",
        starts: Sequence[CallStartTexts] = (),
    ) -> None:
        """Start an answer; starts: how calls begin where anything else is content of a schema."""
        super().__init__(tools, output)
        self._starts = starts
        self._reader = _make_call_reader(syntax.calls, tools, output) if tools else None
        self._bare = syntax.calls.bare
        self._begun = syntax.begun
        self._prompt_begun_marks = _prompt_begun_marks(syntax, tools)
        self._content_marks = tuple(filter(None, (*syntax.content, *syntax.dropped)))
        opening, closing = syntax.content
        self._marks_before_schema = tuple(
            filter(None, (opening.removeprefix(syntax.begun), closing))
        )
        if self._reader is not None and syntax.begun:
            # text may end with a part of the mark, so that only mark and name together are certain
            self._reader.restrict_opening_marks(self._prompt_begun_marks[1:])
        self._openers = self._reader.openers if self._reader is not None else ()
        self._thinking_open, self._thinking_close = ("", "") if thinking is None else thinking.marks
        ends_at_calls = thinking is not None and thinking.ends_at_calls and self._reader is not None
        self._thinking_ends = (
            self._thinking_close,
            *(self._openers if ends_at_calls else ()),
        )
        self.in_reasoning = thinks
        self._marked = False
        self._has_unread_call = False  # text that begins as a call does, with its marks
        calls = syntax.calls
        self._section_end = calls.section[1].strip()
        self._call_marks = (self._section_end, calls.call[1].strip(), calls.name_end.strip())
        if begun == "content":
            self._mode = self._scan_content
        elif begun == "reasoning":
            self._mode = self._scan_thinking
        elif thinking is not None:
            self._mode = self._detect_thinking_start
        else:
            self._mode = self._choose_content_mode()

    def _flush_buffer(self, cut: bool) -> list[AnswerPiece]:
        """See ``AnswerParser``."""
        reader = self._reader
        if reader is not None and self._mode == self._scan_call_block:
            reader.mark_answer_end(cut)
        while self._mode == self._scan_call_block:
            self._read_call_block(final=True)
            while self._buffer and self._mode != self._scan_call_block and self._mode():
                pass
        rest, self._buffer = self._buffer, ""
        if cut:
            # the begin of a mark is no text
            marks = self._thinking_ends if self.in_reasoning else self._content_end_marks()
            undecided = (self._detect_thinking_start, self._detect_calls_or_schema)
            if self._starts and not self.in_reasoning and self._mode in undecided:
                rest = ""
            if self._mode == self._match_mark_begun_in_prompt:
                rest = ""
            if self._mode == self._detect_thinking_start and not self.in_reasoning:
                marks = (*marks, self._thinking_open)
            size = longest_suffix_overlap_length(rest, marks)
            is_mark = (
                size >= MIN_TRUNCATED_MARK_CHARS
                or self._output.follows_call
                or self._ends_in_forced_mark
            )
            rest = rest[: len(rest) - size] if is_mark else rest
        if self.in_reasoning:
            self._output.add_reasoning(rest)
        elif self._mode != self._scan_call_block:
            self._output.add_text(rest)
        return self._output.finish(cut)

    def _choose_content_mode(self) -> Callable[[], bool]:
        """The mode at the begin of the content."""
        return (
            self._detect_calls_or_schema if self._starts else self._choose_content_or_calls_mode()
        )

    def _detect_calls_or_schema(self) -> bool:
        """Detect whether the answer is calls, or content that a schema holds."""
        text = self._buffer = self._buffer.lstrip()
        marks = self._marks_before_schema
        mark = next(filter(text.startswith, marks), "")
        if mark:
            self._buffer = text[len(mark) :]
            return True
        found = [match_call_start(text, start) for start in self._starts]
        if True in found:
            self._output.withhold_text()
            self._mode = self._choose_content_or_calls_mode()
            return True
        if None in found or any(each.startswith(text) for each in marks):
            return False
        self._reader, self._openers = None, ()
        self._mode = self._scan_content
        return True

    def _choose_content_or_calls_mode(self) -> Callable[[], bool]:
        """The mode at the begin of the content, where calls may stand in it."""
        self._marked = False
        if self._begun:
            return self._match_mark_begun_in_prompt
        if self._reader is None or not self._bare:
            return self._scan_content
        self._reader.begin_block()
        return self._scan_call_block

    def _detect_thinking_start(self) -> bool:
        """Detect whether the answer begins with thinking."""
        text = self._buffer.lstrip()
        mark = self._thinking_open
        if not text or (len(text) < len(mark) and mark.startswith(text)):
            return False
        if text.startswith(mark):
            self._buffer = text[len(mark) :]
            self.in_reasoning = True
        self._mode = self._scan_thinking if self.in_reasoning else self._choose_content_mode()
        return True

    def _scan_thinking(self) -> bool:
        """Emit the thinking up to its end."""
        place, mark = find_first_mark(self._buffer, self._thinking_ends)
        if place < 0:
            stop = len(self._buffer) - longest_suffix_overlap_length(
                self._buffer, self._thinking_ends
            )
            self._output.add_reasoning(self._buffer[:stop])
            self._buffer = self._buffer[stop:]
            return False
        self._output.add_reasoning(self._buffer[:place])
        self._output.end_reasoning()
        if mark == self._thinking_close:
            place += len(mark)
        self._buffer = self._buffer[place:]
        self.in_reasoning = False
        self._mode = self._choose_content_mode()
        return True

    def _match_mark_begun_in_prompt(self) -> bool:
        """Detect what continues the mark that the prompt begins."""
        marks = tuple(mark.removeprefix(self._begun) for mark in self._prompt_begun_marks)
        if self._buffer.startswith(marks):
            self._buffer = self._begun + self._buffer
        elif any(mark.startswith(self._buffer) for mark in marks):
            return False
        self._mode = self._scan_content
        return True

    def _scan_content(self) -> bool:
        """Scan content up to an opening mark."""
        ends = self._content_end_marks()
        place, mark = find_first_mark(self._buffer, ends)
        if not mark:
            place = len(self._buffer) - longest_suffix_overlap_length(self._buffer, ends)
        self._output.add_text(self._buffer[:place])
        self._buffer = self._buffer[place:]
        if mark in self._content_marks:
            self._drop_content_mark(mark)
        elif not mark or any(each.startswith(self._buffer) for each in self._content_marks):
            return False  # it may become a mark
        else:
            self._enter_call_block()
        return True

    def _drop_content_mark(self, mark: str) -> None:
        """A mark is no content, unless it belongs to a call that is none."""
        self._buffer = self._buffer[len(mark) :]
        if self._has_unread_call and mark in self._call_marks:
            self._output.add_text(mark)
            self._has_unread_call = mark != self._section_end

    def _content_end_marks(self) -> tuple[str, ...]:
        """What ends a piece of content: marks around it, or the begin of calls."""
        return (*self._content_marks, *self._openers)

    def _enter_call_block(self) -> None:
        assert self._reader is not None, "a mark begins calls"
        self._reader.begin_block()
        self._marked = True
        self._mode = self._scan_call_block

    def _scan_call_block(self) -> bool:
        """Read calls."""
        return self._read_call_block(final=False)

    def _read_call_block(self, final: bool) -> bool:
        reader = self._reader
        assert reader is not None, "a block is read by the reader"
        at = reader.feed(self._buffer, 0, final)
        self._buffer = self._buffer[at:]
        if not (reader.closed or reader.rejected or final):
            return False
        text = reader.take_non_call_text()
        marked = self._marked or reader.num_calls or text.lstrip().startswith(reader.openers)
        self._mode = self._scan_content
        self._has_unread_call = self._has_unread_call and not reader.num_calls
        if reader.closed:
            self._output.add_text(text)
        elif final and reader.cut and marked:
            # a call that was cut off before it was reported
            self._output.add_text(text[: len(text) - len(text.lstrip())])
            self._buffer = ""
        else:
            self._buffer = text + self._buffer
            self._read_again(reader)
        return True

    def _read_again(self, reader: ToolCallReader) -> None:
        """Text that begins as calls do is content with its mark; behind it may be a call."""
        size = next((len(m) for m in reader.openers if self._buffer.startswith(m)), 0)
        # marks around a text that is no call, where that of the section's end is no content
        if size and not (reader.lacks_call and self._section_end in self._content_marks):
            self._output.add_text(self._buffer[:size])
            self._has_unread_call = True
        self._buffer = self._buffer[size:]


def _make_call_reader(
    calls: CallSyntax, tools: ToolSchemas, output: PieceCollector
) -> ToolCallReader:
    reader = TOOL_CALL_READERS[calls.style]
    if calls.checked:
        return ValidatedCallReader(reader, calls, tools, output)
    return reader(calls, tools, output)


def _prompt_begun_marks(syntax: ChatSyntax, tools: ToolSchemas) -> tuple[str, ...]:
    """The marks of content and calls whose begin the prompt writes."""
    if not syntax.begun:
        return ()
    opening, ending = syntax.calls.call[0], syntax.calls.name_end
    return (syntax.content[0], *(f"{opening}{name}{ending}" for name in tools))
