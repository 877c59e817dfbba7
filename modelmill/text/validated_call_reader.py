"""Calls that are reported when they are complete and their tool takes them; else they are text."""

from __future__ import annotations

from collections.abc import Callable

from modelmill.text.answer_pieces import PieceCollector, collect_content_and_calls
from modelmill.text.chat_syntax import CallSyntax
from modelmill.text.json_normalizer import escape_json_text, split_json_object
from modelmill.text.tool_call_reader import ToolCallReader, ToolSchemas


class ValidatedCallReader(ToolCallReader):
    """Reads one call to its end by another reader, and then reports it.

    A call is taken if its end is written, each argument comes once, and none that the tool requires
    is missing. Arguments that the tool does not declare are dropped.

    Args:
        reader: class of the other reader; its blocks have one call each.
        syntax: how calls are written.
        tools: of the request.
        output: the pieces of the answer.
    """

    def __init__(
        self,
        reader: type[ToolCallReader],
        syntax: CallSyntax,
        tools: ToolSchemas,
        output: PieceCollector,
    ) -> None:
        self._call = PieceCollector(None, syntax.short_ids, as_written=True)
        self._reader = reader(syntax, tools, self._call)
        super().__init__(syntax, tools, output)

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        self._reader.begin_block()
        self._call.drain()
        self._read: list[str] = []
        return self._scan_call

    def mark_answer_end(self, cut: bool) -> None:
        """See ``ToolCallReader.mark_answer_end``."""
        super().mark_answer_end(cut)
        self._reader.mark_answer_end(cut)

    def _scan_call(self, text: str, at: int) -> int:
        end = self._reader.feed(text, at, self._final)
        self._read.append(text[at:end])
        if self._reader.closed and self._emit_if_valid("".join(self._read)):
            self._drop_pending_as_call()
            return self._mark_block_closed(end)
        self.rejected = self._reader.closed or self._reader.rejected
        return end

    def _emit_if_valid(self, text: str) -> bool:
        """Pass a call on that was read to its end; returns whether its tool takes it."""
        content, calls = collect_content_and_calls(self._call.drain())
        if not calls or not text.rstrip().endswith(self._ends):
            return False
        arguments = self._filter_declared_arguments(calls[0].name, calls[0].arguments)
        if arguments is None:
            return False
        self._output.add_text(content)
        self._emit_call_begin(calls[0].name, calls[0].id)
        self._output.add_arguments(arguments)
        return True

    def _filter_declared_arguments(self, name: str, text: str) -> str | None:
        """Return the declared arguments as JSON; None if the tool does not take them.

        Values stay as they are written: they may be nested deeper than a parser goes, or have
        numbers and surrogates that cannot be written again.
        """
        pairs = split_json_object(text)
        if pairs is None:
            return None
        values = dict(pairs)
        if len(values) < len(pairs):
            return None
        if not self._schemas.has_required_arguments(name, frozenset(values)):
            return None
        declared = self._schemas.declared_arguments(name)
        if declared is None or values.keys() <= declared:
            return text
        if self._schemas.takes_undeclared_arguments(name):
            return text
        members = (f'"{escape_json_text(key)}": {value}' for key, value in pairs if key in declared)
        return f"{{{', '.join(members)}}}"
