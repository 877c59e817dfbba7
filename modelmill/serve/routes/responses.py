"""POST /v1/responses: the next items of a conversation, in the newer of OpenAI's two shapes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.serve import shape
from modelmill.serve.errors import ApiError
from modelmill.serve.items import Event, Items
from modelmill.serve.responses import FlatTool, ResponsesRequest
from modelmill.serve.routes.chat import dialogue_of, reader_of
from modelmill.serve.routes.common import finish_of, fresh, service_of, submitted
from modelmill.serve.schema import ChatRequest
from modelmill.serve.shape import ChatLogprobs
from modelmill.serve.stream import EventStream, Feed, finished
from modelmill.serve.ticket import News, Ticket
from modelmill.text.calls import Part

router = APIRouter()


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Any:
    """Answer a conversation: the same text as /v1/chat/completions gives for it."""
    service = service_of(request)
    engine = service.engine(body.model)
    bounds, language = engine.bounds, engine.language
    engine.check_room(1)
    chat, dialogue = await service.aside(_meant, language, body, bounds.longest)
    ticket = submitted(request, engine, [dialogue])
    reply = Reply(body, chat, ticket, language)
    if body.stream:
        return EventStream(ticket, reply)
    await finished(request, ticket)
    return shape.Json(reply.whole())


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

    def whole(self) -> dict[str, Any]:
        """Everything at once."""
        output = self._ticket.dialogues[0].answer.outputs[0]
        # the token that ended it is no part of the text
        count = len(output.token_ids) - isinstance(output.stop_reason, int)
        for _ in self._taken(output.text, self._told(count), output.finish_reason):
            pass
        return self._response()

    def first(self) -> bytes:
        """It has begun."""
        response = self._response()
        return self._sent({"type": kind, "response": response} for kind in ("response.created", "response.in_progress"))

    def more(self, news: Sequence[News]) -> bytes:
        """Events of what has come."""
        return b"".join(self._sent(self._piece(each)) for each in news)

    def last(self) -> bytes:
        """The whole response, and the end."""
        return self._sent([{"type": f"response.{self._status}", "response": self._response()}]) + shape.DONE

    def failed(self, error: ApiError) -> bytes:
        """What went wrong, and the response as far as it came."""
        told = error.body()["error"]
        flat = {key: told[key] for key in ("code", "message", "param")}
        self._status = "failed"
        response = {**self._response(), "error": {"code": "server_error", "message": error.message}}
        return self._sent([{"type": "error", **flat, "error": told}, {"type": "response.failed", "response": response}])

    def _piece(self, news: News) -> Iterable[Event]:
        delta = news.delta
        return self._taken(delta.text, self._told(len(delta.token_ids)), delta.finish_reason)

    def _told(self, count: int) -> list[Any]:
        found = self._logprobs.take(self._ticket.dialogues[0].answer.outputs[0], count)
        return [] if found is None else found["content"]

    def _taken(self, text: str, logprobs: list[Any], finish: str | None) -> Iterable[Event]:
        """Events of a piece of text. finish: of the answer, where this is its last piece."""
        pieces: list[str | Part] = [text]
        if self._reader is not None:
            pieces = [*self._reader.push(text), *(self._reader.flush() if finish is not None else ())]
        for piece in pieces if any(isinstance(piece, str) for piece in pieces) else ["", *pieces]:
            if isinstance(piece, str):
                yield from self._items.say(piece, logprobs)
                logprobs = []
                continue
            if piece.name is not None:
                yield from self._items.call(piece.id or "", piece.name)
            yield from self._items.argue(piece.arguments)
        if finish is not None:
            self._status = "incomplete" if finish_of(finish) == "length" else "completed"
            yield from self._items.end(self._status)

    def _sent(self, events: Iterable[Event]) -> bytes:
        parts = []
        for each in events:
            kind = each["type"]
            parts.append(shape.event({"type": kind, "sequence_number": self._count, **each}, kind))
            self._count += 1
        return b"".join(parts)

    def _response(self) -> dict[str, Any]:
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
