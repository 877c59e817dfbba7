"""POST /v1/responses: the next items of a conversation, in the newer of OpenAI's two shapes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.answer import Completion
from modelmill.core.errors import RequestError
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.serve import shape
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.errors import ApiError
from modelmill.serve.items import Event, Items
from modelmill.serve.responses import FlatTool, ResponsesRequest
from modelmill.serve.routes.chat import cut_off, dialogue_of, reader_of
from modelmill.serve.routes.common import finish_of, fresh, service_of, submitted
from modelmill.serve.schema import ChatRequest
from modelmill.serve.shape import ChatLogprobs
from modelmill.serve.stream import EventStream, Feed, finished
from modelmill.serve.ticket import News, Ticket
from modelmill.text.calls import Part

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Any:
    """Answer a conversation: the same text as /v1/chat/completions gives for it."""
    service = service_of(request)
    engine = service.engine(body.model)
    bounds, language = engine.bounds, engine.language
    engine.check_room(1)
    made = await submitted(request, engine, _meant, language, body, bounds.longest, of=lambda meant: [meant[1]])
    (chat, _), ticket = made
    reply = Reply(body, chat, ticket, language)
    if body.stream:
        return EventStream(ticket, reply)
    whole = await finished(request, _Whole(ticket, reply))
    return await service.aside(shape.Json, whole)


def _meant(language: Language, body: ResponsesRequest, longest: int) -> tuple[ChatRequest, Dialogue]:
    chat = body.as_chat()
    chat.check()
    try:
        return chat, dialogue_of(language, chat, longest)
    except RequestError as error:
        raise RequestError(_in_our_words(str(error))) from None


def _in_our_words(text: str) -> str:
    """A complaint about the chat request, in terms of the fields that were sent."""
    for theirs, ours in (("messages[", "input, as messages["), ("response_format", "text.format")):
        if text.startswith(theirs):
            return ours + text[len(theirs) :]
    return text


class _Whole:
    """The response at its end, out of the same pieces of news as its events: what a token belongs to is told once."""

    def __init__(self, ticket: Ticket, reply: Reply) -> None:
        self._ticket, self._reply = ticket, reply

    async def finish(self) -> dict[str, Any]:
        """Wait until everything has ended. Raises what went wrong."""
        while news := await self._ticket.fetch():
            self._reply.hear(news)
        return self._reply.response()

    def close(self) -> None:
        """Give up what has not ended."""
        self._ticket.close()


class Reply(Feed):
    """The response, whole or as events."""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, ticket: Ticket, language: Language) -> None:
        self._body, self._ticket = body, ticket
        self._head = {"id": fresh("resp", "_"), "object": "response", "created_at": int(time.time())}
        self._logprobs = ChatLogprobs(language.tokenizer, body.top_logprobs or 0)
        self._reader = reader_of(chat, language)
        self._items = Items(holds=self._reader is not None)
        self._count = 0
        self._status = "in_progress"

    def hear(self, news: Sequence[News]) -> None:
        """Take what has come, of which no events are wanted."""
        for each in news:
            deque(self._piece(each), maxlen=0)

    def first(self) -> bytes:
        """It has begun."""
        response = self.response()
        return self._sent({"type": kind, "response": response} for kind in ("response.created", "response.in_progress"))

    def more(self, news: Sequence[News]) -> bytes:
        """Events of what has come."""
        return b"".join(self._sent(self._piece(each)) for each in news)

    def last(self) -> bytes:
        """The whole response, and the end."""
        return self._sent([{"type": f"response.{self._status}", "response": self.response()}]) + shape.DONE

    def failed(self, error: ApiError) -> bytes:
        """What went wrong, and the response as far as it came."""
        told = error.body()["error"]
        flat = {key: told[key] for key in ("code", "message", "param")}
        self._status = "failed"
        response = {**self.response(), "error": {"code": "server_error", "message": error.message}}
        return self._sent([{"type": "error", **flat, "error": told}, {"type": "response.failed", "response": response}])

    def _piece(self, news: News) -> Iterable[Event]:
        delta = news.delta
        output = delta.answer.outputs[0]
        told = self._logprobs.take(output, len(delta.token_ids))
        if told is not None:
            self._items.hear(delta.text, told["content"])
        return self._taken(delta.text, output if delta.finish_reason is not None else None)

    def _taken(self, text: str, ended: Completion | None) -> Iterable[Event]:
        """Events of a piece of text. ended: the answer, where this is its last piece."""
        pieces: list[str | Part] = [text]
        if self._reader is not None:
            pieces = [*self._reader.push(text), *(() if ended is None else self._reader.flush(cut_off(ended)))]
        for piece in pieces:
            if isinstance(piece, str):
                yield from self._items.say(piece)
                continue
            if piece.name is not None:
                yield from self._items.call(piece.id or "", piece.name)
            yield from self._items.argue(piece.arguments)
        if ended is not None:
            self._status = "incomplete" if finish_of(ended.finish_reason) == "length" else "completed"
            yield from self._items.end(self._status)

    def _sent(self, events: Iterable[Event]) -> bytes:
        parts = []
        for each in events:
            kind = each["type"]
            parts.append(shape.event({"type": kind, "sequence_number": self._count, **each}, kind))
            self._count += 1
        return b"".join(parts)

    def response(self) -> dict[str, Any]:
        """The response as it stands."""
        body, params = self._body, self._ticket.dialogues[0].request.params
        ended = self._status in ("completed", "incomplete")
        return {
            **self._head,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": body.model,
            "previous_response_id": None,
            "instructions": body.instructions,
            "output": list(self._items.output),
            "error": None,
            "tools": [_tool(tool) for tool in body.tools or ()],
            "tool_choice": _plain(body.tool_choice) or "auto",
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": _text(body),
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "temperature": params.temperature,
            "reasoning": {"effort": None, "summary": None},
            "usage": self._usage() if ended else None,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        counts = shape.usage(self._ticket.dialogues)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }


def _tool(tool: FlatTool) -> dict[str, Any]:
    told = tool.model_dump()
    return {key: told[key] for key in ("type", "name", "description", "parameters", "strict")}


def _text(body: ResponsesRequest) -> dict[str, Any]:
    """The text options as they were taken; verbosity only where it was given."""
    given = body.text
    format: dict[str, Any] = {"type": "text"}
    if given is not None and given.format is not None:
        format = given.format.model_dump(by_alias=True)
        if format["type"] != "json_schema":
            format = {"type": format["type"]}
    more = {"verbosity": given.verbosity} if given is not None and given.verbosity is not None else {}
    return {"format": format, **more}


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
