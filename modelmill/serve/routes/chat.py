"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from modelmill.answer import Completion, Delta
from modelmill.core.errors import RequestError
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.serve import shape
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.routes.common import check_sizes, finish_of, fresh, service_of, submitted
from modelmill.serve.schema import ChatRequest, check_functions
from modelmill.serve.shape import ChatLogprobs, event
from modelmill.serve.stream import EventStream, Feed, finished
from modelmill.serve.ticket import News, Ticket
from modelmill.text import tools
from modelmill.text.calls import Part, Reader, gathered, reader

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Any:
    """Answer a conversation through the engine's chat template."""
    service = service_of(request)
    engine = service.engine(body.model)
    body.check()
    bounds, language = engine.bounds, engine.language
    engine.check_room(body.n or 1)
    _, ticket = await submitted(request, engine, dialogue_of, language, body, bounds.longest, of=lambda one: [one])
    reply = Reply(body, ticket, language)
    if body.stream:
        return EventStream(ticket, reply)
    await finished(request, ticket)
    return await service.aside(lambda: shape.Json(reply.whole()))


def dialogue_of(language: Language, body: ChatRequest, longest: int) -> Dialogue:
    """The conversation as a request to an engine that takes ``longest`` tokens. Raises RequestError."""
    if language.chat_format is None:
        raise RequestError("messages need a chat template, which this engine has not; use /v1/completions")
    check_functions(tool.function for tool in body.tools or ())
    check_sizes(language, body.messages, longest, body.offered)
    grammar = body.checked_grammar()
    style, offered, params = language.chat_format.tool_style, body.offered, body.sampling()
    messages, template = tools.prepared(style, body.messages, offered, writes_calls=language.chat_format.writes_calls)
    reads = bool(offered) and not body.forces
    if reads:
        params = replace(params, stop=tuple(dict.fromkeys((*params.stop, *tools.stops(style)))))
    salt = body.cache_salt or ""
    return language.chat_request(messages, params, cache_salt=salt, grammar=grammar, calls=reads, **template)


def reader_of(body: ChatRequest, language: Language) -> Reader | None:
    """What reads calls out of an answer; None where no tools may be called."""
    names = [tool["function"]["name"] for tool in body.offered]
    if not names or language.chat_format is None:
        return None
    style = tools.BARE if body.forces else language.chat_format.tool_style
    most = 1 if body.parallel_tool_calls is False else None
    thinking = body.messages[-1].get("role") == "tool"
    return reader(style, names, most=most, thinking=thinking, forced=body.forces)


def cut_off(output: Completion) -> bool:
    """Whether an answer that ended might have gone on: its length, or a stop string, ended it."""
    return output.finish_reason != "stop" or isinstance(output.stop_reason, str)


class Reply(Feed):
    """The response, whole or as events."""

    def __init__(self, body: ChatRequest, ticket: Ticket, language: Language) -> None:
        self._body, self._ticket = body, ticket
        self._head = {
            "id": fresh("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self._n = body.n or 1
        self._logprobs = [ChatLogprobs(language.tokenizer, body.top_logprobs or 0) for _ in range(self._n)]
        self._readers = [reader_of(body, language) for _ in range(self._n)]
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        ours = () if language.chat_format is None else tools.stops(language.chat_format.tool_style)
        self._cutting = frozenset(stops).difference(ours)  # one of the format's own stands behind a whole call
        self._called = [0] * self._n
        self._arguments = [""] * self._n
        self._given = [0] * self._n
        self._tail: dict[str, Any] = {"usage": None} if body.wants_usage else {}
        self._envelope = shape.Envelope(self._head, self._tail)

    def _read(self, output: Completion, text: str, ended: bool) -> tuple[str, list[Part]]:
        """(content, pieces of calls) of a piece of text of one choice."""
        index = output.index
        found = self._readers[index]
        if found is None:
            return text, []
        pieces = [*found.push(text), *(found.flush(cut_off(output)) if ended else ())]
        parts = [piece for piece in pieces if isinstance(piece, Part)]
        for part in parts:
            self._called[index] += part.name is not None
            self._arguments[index] = ("" if part.name is not None else self._arguments[index]) + part.arguments
        return "".join(piece for piece in pieces if isinstance(piece, str)), parts

    def _finish(self, output: Completion, reason: str | None) -> str | None:
        found, index = finish_of(reason), output.index
        if found != "stop" or not self._called[index]:
            return found
        # a stop string of the request may end a call in its middle, and a grammar that has no way on; it is none then
        ended = output.stop_reason in self._cutting or self._body.forces
        cut = ended and not _complete(self._arguments[index])
        return "stop" if cut else "tool_calls"

    def whole(self) -> dict[str, Any]:
        """Everything at once."""
        answer = self._ticket.dialogues[0].answer
        told = {
            **self._head,
            "choices": [self._choice(output) for output in answer.outputs],
            "usage": shape.usage(self._ticket.dialogues),
        }
        return {**told, "prompt_token_ids": answer.prompt_token_ids} if self._body.return_token_ids else told

    def _choice(self, output: Completion) -> dict[str, Any]:
        # the token that ended it is no part of the text
        count = len(output.token_ids) - isinstance(output.stop_reason, int)
        content, parts = self._read(output, output.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parts:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in gathered(parts)[1]
            ]
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs[output.index].take(output, count),
            "finish_reason": self._finish(output, output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        return {**choice, "token_ids": output.token_ids} if self._body.return_token_ids else choice

    def first(self) -> bytes:
        """Whose turn it is, for every choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        prompt = self._ticket.dialogues[0].answer.prompt_token_ids
        told = {"prompt_token_ids": prompt} if self._body.return_token_ids else {}
        return b"".join(self._chunk(index, role, None, None, whole=told) for index in range(self._n))

    def more(self, news: Sequence[News]) -> bytes:
        """An event for each delta that says something."""
        return b"".join(self._piece(each.delta) for each in news)

    def _piece(self, delta: Delta) -> bytes:
        output = delta.answer.outputs[delta.index]
        told = self._logprobs[delta.index].take(output, len(delta.token_ids))
        ids = self._ids(output, delta) if self._body.return_token_ids else None
        text, parts = self._read(output, delta.text, ended=delta.finish_reason is not None)
        if not (text or parts or (told and told["content"]) or delta.finish_reason or ids):
            return b""
        content: dict[str, Any] = {"content": text} if text or not (delta.finish_reason or parts) else {}
        if parts:
            content["tool_calls"] = [_piece(part) for part in parts]
        more: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if delta.finish_reason:
            more["stop_reason"] = output.stop_reason
        return self._chunk(delta.index, content, told, self._finish(output, delta.finish_reason), more)

    def _ids(self, output: Completion, delta: Delta) -> list[int]:
        """Those that a delta adds; with the last one the token that ended it, which has no text."""
        begin = self._given[output.index]
        end = len(output.token_ids) if delta.finish_reason else begin + len(delta.token_ids)
        self._given[output.index] = end
        return output.token_ids[begin:end]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None,
        more: dict[str, Any] | None = None,
        whole: dict[str, Any] | None = None,
    ) -> bytes:
        """more: of the choice; whole: of the event."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **(more or {})}
        if not whole:
            return self._envelope.around(choice)
        return event({**self._head, "choices": [choice], **whole, **self._tail})

    def last(self) -> bytes:
        """The counts where they were asked for, and the end."""
        counts = b""
        if self._body.wants_usage:
            counts = event({**self._head, "choices": [], "usage": shape.usage(self._ticket.dialogues)})
        return counts + shape.DONE


def _complete(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _piece(part: Part) -> dict[str, Any]:
    """A piece of a call as a stream tells it: the first has its id and its name."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
