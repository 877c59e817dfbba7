"""Puts the tokens of earlier answers into a prompt, in place of what a chat template wrote of them.

An answer is replaced only where it is certain: the prompt has the end of the answer's own prompt,
then text that says the same as the answer, then a token that ends a turn. Everything else stays as
the template wrote it; thinking that a template leaves out stays out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from modelmill.text import harmony
from modelmill.text.answer_history import (
    PastAnswer,
    Piece,
    PromptTail,
    content_and_calls_digest,
    stripped_text_digest,
)
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import THINK_TAGS
from modelmill.text.chat_syntax import NO_MARKS, ChatSyntax, ThinkingSyntax
from modelmill.text.tokenizer_base import Tokenizer
from modelmill.text.tool_call_reader import ToolSchemas

NUM_PROMPT_TAIL_CONTROL_TOKENS = 2
"""Control tokens in the end of a prompt that marks the place of an answer."""
MAX_TAIL_TEXT_CHARS = 256
MAX_MESSAGE_ENDS_PER_ANSWER = 3
"""Ends of messages inside one answer: harmony ends each of its messages."""


def extract_prompt_tail(
    pieces: Sequence[Piece], tokenizer: Tokenizer, thinking: ThinkingSyntax | None
) -> PromptTail | None:
    """Return the end of a prompt; None if no control token is there.

    Args:
        pieces: the prompt, its control tokens as ids.
        tokenizer: of the engine.
        thinking: marks of the thinking that the prompt began or excluded at its end; None if it
            did neither.
    """
    base, begun = list(pieces), tuple[Piece, ...]()
    if thinking is not None:
        base, begun = _split_trailing_thinking(base, tokenizer, thinking.marks[0])
    places = [place for place, piece in enumerate(base) if isinstance(piece, int)]
    if not places or (isinstance(base[-1], str) and len(base[-1]) > MAX_TAIL_TEXT_CHARS):
        return None
    first = places[-NUM_PROMPT_TAIL_CONTROL_TOKENS:][0]
    return PromptTail(tuple(_digest_long_text(piece) for piece in base[first:]), begun)


def _split_trailing_thinking(
    pieces: list[Piece], tokenizer: Tokenizer, mark: str
) -> tuple[list[Piece], tuple[Piece, ...]]:
    """Split a prompt at the mark that begins the thinking at its end."""
    id = tokenizer.special.get(mark)
    for place in range(len(pieces) - 1, max(len(pieces) - 6, -1), -1):
        piece = pieces[place]
        if piece == id:
            return pieces[:place], tuple(pieces[place:])
        if isinstance(piece, str) and mark in piece:
            at = piece.rfind(mark)
            before = [piece[:at]] if at else []
            return [*pieces[:place], *before], (piece[at:], *pieces[place + 1 :])
    return pieces, ()


def _digest_long_text(piece: Piece) -> Piece | bytes:
    if isinstance(piece, int) or len(piece) <= MAX_TAIL_TEXT_CHARS:
        return piece
    return hashlib.sha256(piece.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True)
class AnswerSplicer:
    """Replaces answers in the prompts of one chat format.

    Attributes:
        tokenizer: of the engine.
        syntax: how answers are written.
        thinking: marks of the thinking; None if the model does not think.
        end_ids: tokens that end a turn or a message.
        shown: control tokens that the parser reads.
        tools: the tools of the request.
    """

    tokenizer: Tokenizer
    syntax: ChatSyntax
    thinking: ThinkingSyntax | None
    end_ids: Collection[int]
    shown: Collection[int]
    tools: ToolSchemas

    def splice(
        self, pieces: Sequence[Piece], answers: Sequence[Sequence[PastAnswer]]
    ) -> list[Piece]:
        """Return a prompt with the tokens of earlier answers.

        Args:
            pieces: the prompt as the template wrote it, its control tokens as ids.
            answers: what each message of the assistant may be, in order; messages may be missing.
        """
        out: list[Piece] = []
        rest, places = list(pieces), _control_token_indices_by_id(pieces)
        begin, offset = 0, 0  # of what was not copied yet
        for candidates in answers:
            match = next(
                (
                    match
                    for answer in candidates
                    if (match := self._find_answer_match(rest, places, begin, answer)) is not None
                ),
                None,
            )
            if match is None:
                continue
            out += _pieces_between(rest, (begin, offset), match.begin)
            out += match.replacement
            begin, offset = match.end, 0
        return [*out, *_pieces_between(rest, (begin, offset), (len(rest), 0))]

    def _find_answer_match(
        self,
        pieces: Sequence[Piece],
        places: dict[int, list[int]],
        begin: int,
        answer: PastAnswer,
    ) -> _AnswerMatch | None:
        """Find an answer behind a position of the prompt."""
        if answer.usable is None:
            answer.set_usable(self._reparses_to_sent_answer(answer))
        if not answer.usable:
            return None
        last = next(each for each in reversed(answer.tail.base) if isinstance(each, int))
        for place in places.get(last, ()):
            if place < begin:
                continue
            base = _position_after_prompt_tail(pieces, place, answer.tail.base)
            match = None if base is None else self._match_after_prompt_tail(pieces, base, answer)
            if match is not None:
                return match
        return None

    def _match_after_prompt_tail(
        self, pieces: Sequence[Piece], base: _PiecePosition, answer: PastAnswer
    ) -> _AnswerMatch | None:
        """Compare what a template wrote behind the end of an answer's prompt with the answer.

        Templates leave out thinking with its marks, or all but its closing mark.
        """
        full = _position_after_thinking_pieces(pieces, base, answer.tail.thinking)
        starts = [(base, False), (base, True)]
        if full is not None:
            starts.insert(0, (full, answer.thinks))
        for start, thinks in starts:
            fits = start == full or not answer.thinks
            match = self._match_rendered_answer(pieces, start, answer, thinks, fits)
            if match is not None:
                return match
        return None

    def _match_rendered_answer(
        self,
        pieces: Sequence[Piece],
        start: _PiecePosition,
        answer: PastAnswer,
        thinks: bool,
        fits: bool,
    ) -> _AnswerMatch | None:
        """Replace what follows a position if it says the same as an answer.

        Args:
            pieces: the prompt.
            start: the position.
            answer: the answer.
            thinks: whether the thinking has begun there.
            fits: whether all tokens of the answer can stand there.
        """
        ends = (
            place
            for place in range(start[0], len(pieces))
            if isinstance(pieces[place], int) and pieces[place] in self.end_ids
        )
        for end in itertools.islice(ends, MAX_MESSAGE_ENDS_PER_ANSWER):
            segment = list(_pieces_between(pieces, start, (end, 0)))
            written = self._parse_pieces(segment, thinks)
            if not self._is_same_answer(written, answer):
                continue
            if fits and stripped_text_digest(written.reasoning) == answer.reasoning:
                return _AnswerMatch(start, end, list(answer.ids))
            rest = None if written.reasoning.strip() else self._tokens_after_thinking(answer)
            if rest is not None:
                return _AnswerMatch(start, end, [*self._pieces_before_content(segment), *rest])
        return None

    def _is_same_answer(self, written: ParsedAnswer, answer: PastAnswer) -> bool:
        """Whether a template wrote an answer, with its thinking or without."""
        in_head = self.syntax.calls.id_from_head or "{id}" in self.syntax.calls.head
        if in_head and tuple(call.id for call in written.calls) != answer.call_ids:
            return False
        if content_and_calls_digest(written, strips=True) != answer.stripped_message:
            return False
        return stripped_text_digest(written.reasoning) in (answer.reasoning, b"")

    def _reparses_to_sent_answer(self, answer: PastAnswer) -> bool:
        """Whether nothing was dropped from an answer, such as a call's rest, or a call too many."""
        parsed, is_broken = self._parse_and_detect_broken_call(answer.ids, answer.thinks)
        return (
            not is_broken
            and content_and_calls_digest(parsed) == answer.message
            and stripped_text_digest(parsed.reasoning) == answer.reasoning
        )

    def _parse_pieces(self, pieces: Sequence[Piece], thinks: bool) -> ParsedAnswer:
        return self._parse_and_detect_broken_call(pieces, thinks)[0]

    def _parse_and_detect_broken_call(
        self, pieces: Sequence[Piece], thinks: bool
    ) -> tuple[ParsedAnswer, bool]:
        """Return the answer, and whether it has a broken call."""
        text = self._decode_pieces(pieces)
        if not (self.tools or self.thinking or self.syntax.content != NO_MARKS):
            return ParsedAnswer(text), False
        parser = make_answer_parser(self.syntax, self.tools, thinking=self.thinking, thinks=thinks)
        answer = collect_answer([*parser.push(text), *parser.flush()])
        return answer, parser.has_broken_call

    def _decode_pieces(self, pieces: Sequence[Piece]) -> str:
        """The text of an answer as its parser gets it."""
        parts: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, str):
                parts.append(piece.encode("utf-8", "replace"))
            elif piece in self.shown or not self.tokenizer.is_skipped_in_decode(piece):
                token = self.tokenizer.token_bytes(piece)
                parts.append(token if parts else self.tokenizer.token_bytes_at_text_start(piece))
        return b"".join(parts).decode("utf-8", "replace")

    def _tokens_after_thinking(self, answer: PastAnswer) -> list[Piece] | None:
        """The tokens after the thinking; None if its end is not marked."""
        tokens = [self.tokenizer.token_bytes(id) for id in answer.ids]
        data = b"".join(tokens)
        mark = self._thinking_end_mark().encode()
        place = data.find(mark)
        if place < 0:
            return None
        at = place + len(mark)
        at += len(data) - at - len(data[at:].lstrip())
        end = 0
        for index, token in enumerate(tokens):
            if end >= at:
                return list(answer.ids[index:])
            end += len(token)
            if end > at:
                try:
                    return [data[at:end].decode(), *answer.ids[index + 1 :]]
                except UnicodeDecodeError:
                    return None
        return None

    def _pieces_before_content(self, segment: Sequence[Piece]) -> list[Piece]:
        """What a template writes before the content in place of the thinking: blanks, marks."""
        close = self._thinking_end_mark()
        id = self.tokenizer.special.get(close)
        at = 0
        for place, piece in enumerate(segment):
            if piece == id:
                at = place + 1
            elif isinstance(piece, str) and close in piece:
                end = piece.find(close) + len(close)
                end += _leading_blank_size(piece[end:])
                return [*segment[:place], piece[:end]]
        first = segment[at] if at < len(segment) else ""
        blank = first[: _leading_blank_size(first)] if isinstance(first, str) else ""
        return [*segment[:at], *([blank] if blank else [])]

    def _thinking_end_mark(self) -> str:
        if self.syntax.calls.style == "harmony":
            return f"{harmony.END_TOKEN}{harmony.START_TOKEN}assistant"
        return THINK_TAGS.marks[1] if self.thinking is None else self.thinking.marks[1]


_PiecePosition = tuple[int, int]
"""Index of a piece, and of a character in it."""


@dataclass(frozen=True)
class _AnswerMatch:
    begin: _PiecePosition
    end: int
    replacement: list[Piece]


def _control_token_indices_by_id(pieces: Sequence[Piece]) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, piece in enumerate(pieces):
        if isinstance(piece, int):
            places.setdefault(piece, []).append(place)
    return places


def _position_after_prompt_tail(
    pieces: Sequence[Piece], place: int, base: Sequence[Piece | bytes]
) -> _PiecePosition | None:
    """Match the end of a prompt whose last control token is at a place; returns what follows."""
    text = base[-1] if isinstance(base[-1], str) else ""
    head = base[:-1] if text else base
    first = place - len(head) + 1
    if first < 0 or tuple(map(_digest_long_text, pieces[first : place + 1])) != tuple(head):
        return None
    return _position_after_text(pieces, (place + 1, 0), text)


def _position_after_thinking_pieces(
    pieces: Sequence[Piece], start: _PiecePosition, thinking: Sequence[Piece]
) -> _PiecePosition | None:
    for piece in thinking:
        if isinstance(piece, int):
            if start[1] or start[0] >= len(pieces) or pieces[start[0]] != piece:
                return None
            start = start[0] + 1, 0
            continue
        after = _position_after_text(pieces, start, piece)
        if after is None:
            return None
        start = after
    return start


def _position_after_text(
    pieces: Sequence[Piece], start: _PiecePosition, text: str
) -> _PiecePosition | None:
    """Match text at a position; the position after it."""
    if not text:
        return start
    index, offset = start
    piece = pieces[index] if index < len(pieces) else None
    if not isinstance(piece, str) or not piece.startswith(text, offset):
        return None
    offset += len(text)
    return (index + 1, 0) if offset == len(piece) else (index, offset)


def _pieces_between(
    pieces: Sequence[Piece], begin: _PiecePosition, end: _PiecePosition
) -> Iterator[Piece]:
    """The pieces from one position to another."""
    for index in range(begin[0], min(end[0] + 1, len(pieces))):
        piece = pieces[index]
        if isinstance(piece, int):
            if index < end[0]:
                yield piece
            continue
        first = begin[1] if index == begin[0] else 0
        text = piece[first : end[1]] if index == end[0] else piece[first:]
        if text:
            yield text


def _leading_blank_size(text: str) -> int:
    """The size of the blanks at the begin of a text."""
    return len(text) - len(text.lstrip())
