"""POST /v1/completions: a text goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.answer import Completion
from modelmill.core.errors import RequestError
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.runtime.check import Bounds, check
from modelmill.serve import shape
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.routes.common import finish_of, fresh, service_of, submitted
from modelmill.serve.schema import CompletionRequest
from modelmill.serve.shape import TextLogprobs, event
from modelmill.serve.stream import EventStream, Feed, finished
from modelmill.serve.ticket import News, Ticket

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Any:
    """Continue a text, several texts, or token ids."""
    service = service_of(request)
    engine = service.engine(body.model)
    body.check()
    bounds, language = engine.bounds, engine.language
    engine.check_room(len(body.prompts()) * (body.n or 1))
    _, ticket = await submitted(request, engine, _dialogues, language, body, bounds, of=list)
    reply = Reply(body, ticket, language)
    if body.stream:
        return EventStream(ticket, reply)
    await finished(request, ticket)
    return await service.aside(lambda: shape.Json(reply.whole()))


def _dialogues(language: Language, body: CompletionRequest, bounds: Bounds) -> list[Dialogue]:
    """Each is checked before the next is read: one that is impossible ends the work on all of them."""
    prompts = body.prompts()
    if language.tokenizer is None and (body.stop or any(isinstance(prompt, str) for prompt in prompts)):
        raise RequestError("this engine has no tokenizer: give token ids as the prompt, and stop_token_ids")
    params, grammar = body.sampling(), body.checked_grammar()
    dialogues = []
    for prompt in prompts:
        language.check_size(prompt, bounds.longest)
        key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        dialogues.append(language.request({key: prompt, "cache_salt": body.cache_salt}, params, grammar=grammar))
        if body.echo:
            dialogues[-1].echo()
        check(dialogues[-1].request, bounds)
    return dialogues


class Reply(Feed):
    """The response, whole or as events."""

    def __init__(self, body: CompletionRequest, ticket: Ticket, language: Language) -> None:
        self._body, self._ticket = body, ticket
        self._n = body.n or 1
        self._head = {
            "id": fresh("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self._envelope = shape.Envelope(self._head, {"usage": None} if body.wants_usage else {})
        count = len(ticket.dialogues) * self._n
        self._logprobs = [
            TextLogprobs(
                language.tokenizer,
                body.logprobs or 0,
                follows=each.follows,
                skip_special=each.request.params.skip_special_tokens,
            )
            for each in ticket.dialogues
            for _ in range(self._n)
        ]
        self._begun: set[int] = set()
        self._given = [0] * count

    def whole(self) -> dict[str, Any]:
        """Everything at once."""
        choices = [
            self._choice(place, output)
            for place, each in enumerate(self._ticket.dialogues)
            for output in each.answer.outputs
        ]
        return {**self._head, "choices": choices, "usage": shape.usage(self._ticket.dialogues)}

    def _choice(self, place: int, output: Completion) -> dict[str, Any]:
        dialogue, body = self._ticket.dialogues[place], self._body
        at = place * self._n + output.index
        text, tables = output.text, []
        if body.echo:
            text = dialogue.echoed + text
            if body.logprobs is not None:
                tables.append(self._logprobs[at].prompt(dialogue))
        count = len(output.token_ids) - isinstance(output.stop_reason, int) + self._end(output)
        told = self._logprobs[at].take(output, count)
        if told is not None:
            tables.append(told)
        choice = {
            "index": at,
            "text": text,
            "logprobs": shape.joined(tables) if tables else None,
            "finish_reason": finish_of(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            choice |= {"token_ids": output.token_ids, "prompt_token_ids": dialogue.answer.prompt_token_ids}
        return choice

    def first(self) -> bytes:
        """Nothing: choices begin with their text."""
        return b""

    def more(self, news: Sequence[News]) -> bytes:
        """An event for each delta that says something."""
        return b"".join(self._piece(place, delta) for place, delta in news)

    def _piece(self, place: int, delta: Any) -> bytes:
        dialogue, body = self._ticket.dialogues[place], self._body
        at = place * self._n + delta.index
        output = dialogue.answer.outputs[delta.index]
        text, tables = delta.text, []
        begins = at not in self._begun
        if begins:
            self._begun.add(at)
            if body.echo:
                text = dialogue.echoed + text
                if body.logprobs is not None:
                    tables.append(self._logprobs[at].prompt(dialogue))
        told = self._logprobs[at].take(output, len(delta.token_ids) + (self._end(output) if delta.finish_reason else 0))
        if told is not None and told["tokens"]:
            tables.append(told)
        if not (text or tables or delta.finish_reason or (body.return_token_ids and delta.token_ids)):
            return b""
        choice = {
            "index": at,
            "text": text,
            "logprobs": shape.joined(tables) if tables else None,
            "finish_reason": finish_of(delta.finish_reason),
            "stop_reason": output.stop_reason if delta.finish_reason else None,
        }
        if body.return_token_ids:
            # with the last piece comes the token that ended it, which has no text
            end = len(output.token_ids) if delta.finish_reason else self._given[at] + len(delta.token_ids)
            choice["token_ids"], self._given[at] = output.token_ids[self._given[at] : end], end
            if begins:
                choice["prompt_token_ids"] = dialogue.answer.prompt_token_ids
        return self._envelope.around(choice)

    def _end(self, output: Completion) -> int:
        """How many tokens that ended it are told besides those of the text.

        One is no part of the text; who scores a text (echo) counts on an entry for each token that was drawn.
        """
        return int(bool(self._body.echo) and isinstance(output.stop_reason, int))

    def last(self) -> bytes:
        """The counts where they were asked for, and the end."""
        counts = b""
        if self._body.wants_usage:
            counts = event({**self._head, "choices": [], "usage": shape.usage(self._ticket.dialogues)})
        return counts + shape.DONE
