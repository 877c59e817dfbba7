"""What answers a chat in the terminal: pieces of an answer, and an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from modelmill.core.errors import UsageError
from modelmill.core.types import SamplingParams
from modelmill.text.answer_pieces import AnswerPiece

if TYPE_CHECKING:
    from modelmill.llm import LLM
    from modelmill.outputs import RequestOutput


@dataclass(frozen=True)
class ChatSettings:
    """What applies to every answer of a chat.

    Attributes:
        tools: definitions in OpenAI's form.
        thinks: whether the model thinks first; None: as its template does by itself.
        thinking_budget: maximum tokens of the thinking.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    thinks: bool | None = None
    thinking_budget: int | None = None


@dataclass(frozen=True)
class ChatDelta:
    """A streamed increment: pieces of the answer, and the request so far."""

    pieces: Sequence[AnswerPiece]
    output: RequestOutput


class ChatModel(Protocol):
    """An engine in this process, or a server."""

    def stream(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, settings: ChatSettings
    ) -> Iterator[ChatDelta]:
        """Yield the deltas of one answer; closing the iterator aborts it."""


class LocalChatModel:
    """An engine in this process."""

    def __init__(self, llm: LLM) -> None:
        """Use an opened engine with a chat template."""
        self.llm = llm

    @property
    def engine_core(self) -> Any:
        """The engine core."""
        return self.llm.engine_core

    @property
    def supports_images(self) -> bool:
        """Whether messages may have pictures."""
        return self.llm.language.supports_images

    def check_thinking(self) -> None:
        """Raise UsageError if the chat template has no thinking."""
        chat_format = self.llm.chat_format
        if chat_format is None or chat_format.thinking is None:
            raise UsageError(
                "the chat template of this engine has no thinking; /think auto answers again"
            )

    def stream(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, settings: ChatSettings
    ) -> Iterator[ChatDelta]:
        """Yield the deltas of one answer; closing the iterator aborts it.

        Raises:
            ModelmillError: the conversation or a setting is invalid for this engine.
        """
        from modelmill.text.chat_format_loader import make_chat_answer_parser
        from modelmill.text.tool_prompts import (
            add_call_stop_strings,
            prepare_tool_conversation,
            tool_schemas,
        )

        chat_format = self.llm.chat_format
        assert chat_format is not None, "a chat is opened with a template"
        history, template = prepare_tool_conversation(
            chat_format.format_name, messages, settings.tools, writes_calls=chat_format.writes_calls
        )
        if settings.thinks:
            self.check_thinking()
        if settings.thinks is not None and chat_format.thinking is not None:
            template["options"] = {"enable_thinking": settings.thinks}
        if settings.tools:
            params = add_call_stop_strings(params, chat_format.format_name)
        request = self.llm.chat_request(
            history,
            params,
            calls=bool(settings.tools),
            parses_thinking=True,
            thinking_budget=settings.thinking_budget,
            **template,
        )
        parser = make_chat_answer_parser(
            chat_format,
            tool_schemas(settings.tools),
            thinks=request.prompt_thinking == "open",
            continues=messages[-1].get("role") == "tool",
        )
        for delta in self.llm.stream_request(request):
            pieces: list[AnswerPiece] = [delta.text] if parser is None else parser.push(delta.text)
            if parser is not None and delta.finish_reason is not None:
                cut = delta.finish_reason != "stop"
                ids = delta.output.outputs[0].token_ids
                forced = cut and parser.in_reasoning and request.is_cut_in_forced_thinking_end(ids)
                pieces += parser.flush(cut, forced_mark=forced)
            yield ChatDelta([piece for piece in pieces if piece != ""], delta.output)
