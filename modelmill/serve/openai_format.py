"""Converts outputs to OpenAI's JSON: choices, log-probabilities, usage, chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from modelmill.core.types import Logprob
from modelmill.outputs import CompletionOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.gil_yielding_json_serializer import EncodedJson, dump_json, dump_small_json
from modelmill.text.detokenizer import Detokenizer
from modelmill.text.tokenizer_loader import Tokenizer

MIN_LOGPROB = -9999.0
"""Smallest value sent: JSON has no minus infinity."""
DONE_EVENT = b"data: [DONE]\n\n"
SEND_CHUNK_BYTES = 1 << 20
"""Bytes of a response sent at once."""


def sse_event(value: Mapping[str, Any], name: str = "") -> bytes:
    """Format a server-sent event, with a name if given."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dump_json(value) + b"\n\n"


def format_stream_end(head: Mapping[str, Any], usage: Mapping[str, Any] | None) -> bytes:
    """Format the end of a stream, after an event with the usage if given."""
    if usage is None:
        return DONE_EVENT
    return sse_event({**head, "choices": [], "usage": usage}) + DONE_EVENT


class ChunkTemplate:
    """Formats events that differ only in their choice: the rest is serialized once."""

    def __init__(self, head: Mapping[str, Any], tail: Mapping[str, Any]) -> None:
        """Serialize the shared keys.

        Args:
            head: keys before ``choices``.
            tail: keys after ``choices``; none of them in ``head``.
        """
        self._prefix = sse_event({**head, "choices": []}).removesuffix(b"]}\n\n")
        self._suffix = b"]" + (b"," + dump_json(tail)[1:] if tail else b"}") + b"\n\n"

    def render_chunk(self, choice: Mapping[str, Any]) -> bytes:
        """Same as ``sse_event({**head, "choices": [choice], **tail})``."""
        # nearly always one token
        data = dump_small_json(choice) if choice.get("logprobs") is None else dump_json(choice)
        return self._prefix + data + self._suffix


class SurrogateSafeJsonResponse(JSONResponse):
    """A JSON response that allows unpaired surrogates; a large one is sent in chunks."""

    def render(self, content: Any) -> bytes:
        """As ``dump_json``; bytes are already JSON."""
        return content if isinstance(content, bytes) else dump_json(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body in chunks; other tasks run between two of them."""
        if len(self.body) <= SEND_CHUNK_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for begin in range(0, len(self.body), SEND_CHUNK_BYTES):
            last = begin + SEND_CHUNK_BYTES >= len(self.body)
            await send(
                {
                    "type": "http.response.body",
                    "body": self.body[begin : begin + SEND_CHUNK_BYTES],
                    "more_body": not last,
                }
            )
            await asyncio.sleep(0)


def token_usage(request_states: Iterable[RequestOutputState]) -> dict[str, Any]:
    """The usage of the requests of one response."""
    prompt = completion = cached = 0
    for state in request_states:
        output = state.output
        prompt += len(output.prompt_token_ids)
        completion += sum(len(each.token_ids) for each in output.outputs)
        cached += output.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def running_token_usage(request_states: Sequence[RequestOutputState]) -> dict[str, Any]:
    """The usage so far; cached tokens are left out until they are known of every prompt."""
    usage = token_usage(request_states)
    if not all(state.is_prompt_computed for state in request_states):
        del usage["prompt_tokens_details"]
    return usage


class ChatLogprobsFormatter:
    """Formats logprobs of one choice of a chat completion incrementally."""

    def __init__(self, tokenizer: Tokenizer | None, num_top: int, *, as_ids: bool = False) -> None:
        """Start at the first token.

        Args:
            tokenizer: None: token ids are shown as text.
            num_top: number of top_logprobs.
            as_ids: write tokens as ``token_id:7``.
        """
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._num_formatted = 0

    def format_next(self, output: CompletionOutput, count: int) -> dict[str, Any] | None:
        """Format the next ``count`` tokens; None if logprobs are not requested."""
        if output.logprobs is None:
            return None
        begin, self._num_formatted = self._num_formatted, self._num_formatted + count
        pairs = zip(
            output.token_ids[begin : self._num_formatted],
            output.logprobs[begin : self._num_formatted],
        )
        return {
            "content": [self._format_entry(id, entries) for id, entries in pairs],
            "refusal": None,
        }

    def _format_entry(self, id: int, entries: Mapping[int, Logprob]) -> EncodedJson:
        top = list(entries.items())[: self._num_top]
        entry = {
            **self._format_token(id, entries[id]),
            "top_logprobs": [self._format_token(other, value) for other, value in top],
        }
        return EncodedJson(dump_small_json(entry))

    def _format_token(self, id: int, value: Logprob) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, id)
        return {
            "token": format_token_id(id) if self._as_ids else data.decode("utf-8", "replace"),
            "logprob": clamp_logprob(value.logprob),
            "bytes": list(data),
        }


class TextLogprobsFormatter:
    """Formats logprobs of one choice of a text completion incrementally.

    Offsets are in characters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        num_top: int,
        *,
        continues_prompt: bool = False,
        skip_special: bool = True,
        as_ids: bool = False,
    ) -> None:
        """Start at the beginning of the text.

        Args:
            tokenizer: None: token ids are shown as text.
            num_top: number of top_logprobs.
            continues_prompt: as in the request.
            skip_special: as in the request.
            as_ids: write tokens as ``token_id:7``.
        """
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._num_formatted = 0
        self._offset = 0
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(
                tokenizer, skip_special=skip_special, continues_prompt=continues_prompt
            )
        )

    def format_prompt(self, request_state: RequestOutputState) -> dict[str, Any]:
        """Format the prompt's tokens; the first one has no logprob."""
        output = request_state.output
        entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        return self._format_logprob_table(
            output.prompt_token_ids,
            entries,
            None if self._detokenizer is None else self._detokenizer.push_prompt_token,
        )

    def format_next(self, output: CompletionOutput, count: int) -> dict[str, Any] | None:
        """Format the next ``count`` tokens; None if logprobs are not requested."""
        if output.logprobs is None:
            return None
        begin, self._num_formatted = self._num_formatted, self._num_formatted + count
        ids, entries = (
            output.token_ids[begin : self._num_formatted],
            output.logprobs[begin : self._num_formatted],
        )
        return self._format_logprob_table(
            ids, entries, None if self._detokenizer is None else self._detokenizer.push
        )

    def _format_logprob_table(
        self,
        ids: Sequence[int],
        entries: Sequence[Mapping[int, Logprob] | None],
        text: Callable[[int], str] | None,
    ) -> dict[str, Any]:
        """Format tokens; ``text`` returns what an id adds to the text, for the offsets."""
        out: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for id, entry in zip(ids, entries):
            out["tokens"].append(self._format_token_text(id))
            out["token_logprobs"].append(
                None if entry is None else clamp_logprob(entry[id].logprob)
            )
            out["top_logprobs"].append(None if entry is None else self._top_entries(id, entry))
            out["text_offset"].append(self._offset)
            if text is not None:
                self._offset += len(text(id))
        return out

    def _top_entries(self, id: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """The most likely tokens and the sampled one.

        Of tokens with equal text the more likely one counts.
        """
        best: dict[str, float] = {}
        for other, value in [*list(entry.items())[: self._num_top], (id, entry[id])]:
            best.setdefault(self._format_token_text(other), clamp_logprob(value.logprob))
        return best

    def _format_token_text(self, id: int) -> str:
        return format_token_id(id) if self._as_ids else token_text(self._tokenizer, id)


def concat_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate tables of a text completion."""
    return {key: [value for part in parts for value in part[key]] for key in parts[0]}


def token_bytes(tokenizer: Tokenizer | None, id: int) -> bytes:
    """Bytes of a token; without a tokenizer the decimal digits of the id."""
    return str(id).encode() if tokenizer is None else tokenizer.token_bytes(id)


def token_text(tokenizer: Tokenizer | None, id: int) -> str:
    """Text of a token in text completions; its bytes if it is a part of a character."""
    data = token_bytes(tokenizer, id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def format_token_id(id: int) -> str:
    """A token as clients name it that need ids instead of text (return_tokens_as_token_ids)."""
    return f"token_id:{id}"


def clamp_logprob(value: float) -> float:
    """``value``, but at least MIN_LOGPROB."""
    return max(value, MIN_LOGPROB)
