"""What the API and an engine's worker say to each other: plain dataclasses, as JSON, in frames.

A frame is four bytes (the length, big endian) and a JSON array: the message's name and its fields.
Only ids and numbers travel, no text of prompts and no tensors; pictures, masks and a prompt's
log-probabilities in frames with blobs (``segment_messages``, ``logprob_blobs``). Both ends belong
to one program, so a frame that makes no sense is a bug.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import (
    EmbeddingSpan,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
    TokenOutput,
)
from modelmill.serve.logprob_blobs import (
    BLOBS_PER_PROMPT,
    LogprobTable,
    PromptLogprobTables,
    encode_logprobs,
    encode_prompt_logprobs,
)
from modelmill.serve.segment_messages import (
    BINARY_FRAME_MARK,
    SegmentFailure,
    SegmentJob,
    SegmentResult,
    decode_blob_frame,
    encode_blob_frame,
    join_blob_frame,
    split_blob_frame,
)
from modelmill.serve.watchdog import DEFAULT_TIMEOUT

LENGTH_PREFIX = struct.Struct(">I")


@dataclass(frozen=True)
class OpenEngine:
    """Open an engine. model: engine folder or checkpoint. build: BuildConfig fields for a
    checkpoint; run: RunConfig's.

    warm_up: capture decode graphs before the first request. later_weight_bytes: bytes of weights of
    the language engines that load after it; num_loaded_before: how many loaded before it;
    segment_bytes: what segmentation engines take beside it. chat_template: in place of the engine's
    own. image_cache_bytes: for embeddings of images; max_pixels: of an image. watchdog_seconds:
    without a heartbeat, after which its worker hangs; 0: never.
    """

    model: str
    build: Mapping[str, Any]
    run: Mapping[str, Any]
    warm_up: bool = True
    chat_template: str | None = None
    later_weight_bytes: tuple[int, ...] = ()
    num_loaded_before: int = 0
    segment_bytes: int = 0
    image_cache_bytes: int = 64 << 20
    max_pixels: int = 50_000_000
    watchdog_seconds: float = DEFAULT_TIMEOUT


@dataclass(frozen=True)
class AddRequest:
    """Queue a request."""

    request: Request


@dataclass(frozen=True)
class AbortRequest:
    """End a request; unknown ones are ignored."""

    id: str


@dataclass(frozen=True)
class FinishSequence:
    """End one sequence of a request quietly: a stop string was found in its text."""

    id: str
    index: int


@dataclass(frozen=True)
class GetStats:
    """Ask for the statistics; the reply carries the same number."""

    number: int


@dataclass(frozen=True)
class Ping:
    """Give a sign of life, between two steps; the answer is a ``Heartbeat``."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life (``watchdog_seconds``)."""


@dataclass(frozen=True)
class LoadingUpdate:
    """How far opening has come. done, total: in the stage's own unit."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class EngineReady:
    """The engine takes requests. path: its folder. The rest: what requests are checked against, and
    pages of KV.

    max_prefix_pages: of ``num_pages``, those that may be taken for kept prefixes.
    """

    path: str
    device: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    page_bytes: int
    max_num_seqs: int
    engine_type: str = "language"
    max_prefix_pages: int = 0


@dataclass(frozen=True)
class StepTokens:
    """What one step produced."""

    tokens: list[TokenOutput]


@dataclass(frozen=True)
class RequestStarted:
    """A request's first step has begun, so many seconds after it came."""

    id: str
    queue_seconds: float


@dataclass(frozen=True)
class RequestRejected:
    """A request cannot be served; one line for its sender.

    out_of_memory: no memory was left for it.
    """

    id: str
    message: str
    out_of_memory: bool = False


@dataclass(frozen=True)
class StatsReply:
    """Where the engine stands: the fields of runtime.stats.Stats."""

    number: int
    stats: Mapping[str, int]


@dataclass(frozen=True)
class OpenFailed:
    """The engine cannot be opened; one line for whoever started it.

    is_usage_error: a flag is at fault.
    """

    message: str
    is_usage_error: bool


Message = (
    OpenEngine
    | AddRequest
    | AbortRequest
    | FinishSequence
    | GetStats
    | Ping
    | Heartbeat
    | LoadingUpdate
    | EngineReady
    | StepTokens
    | RequestStarted
    | RequestRejected
    | StatsReply
    | OpenFailed
    | SegmentJob
    | SegmentResult
    | SegmentFailure
)
MESSAGE_TYPES: dict[str, type] = {cls.__name__: cls for cls in Message.__args__}


def encode(message: Message) -> bytes:
    """The message as a frame."""
    name = type(message).__name__
    if isinstance(message, (SegmentJob, SegmentResult)):
        body = encode_blob_frame(message)
        return LENGTH_PREFIX.pack(len(body)) + body
    if isinstance(message, StepTokens):
        tables = [
            token.prompt_logprobs for token in message.tokens if token.prompt_logprobs is not None
        ]
        blobs = [blob for each in tables for blob in encode_prompt_logprobs(each)]
        content: list[Any] = [_encode_token(token) for token in message.tokens]
        if blobs:
            return _with_blobs(name, content, blobs)
    elif isinstance(message, AddRequest):
        content = [_encode_request(message.request)]
        if message.request.embedding_spans:
            return _with_blobs(
                name, content, [span.handle.tobytes() for span in message.request.embedding_spans]
            )
    else:
        content = [getattr(message, each.name) for each in fields(message)]
    body = json.dumps([name, *content], separators=(",", ":")).encode()
    return LENGTH_PREFIX.pack(len(body)) + body


def _with_blobs(name: str, content: list[Any], blobs: Sequence[bytes]) -> bytes:
    body = join_blob_frame(name, content, blobs)
    return LENGTH_PREFIX.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message of a frame's body."""
    if body.startswith(BINARY_FRAME_MARK):
        name, content, blobs = split_blob_frame(body)
        if name == StepTokens.__name__:
            return _decode_step_tokens(content, blobs)
        if name == AddRequest.__name__:
            return AddRequest(_decode_request(content[0], blobs))
        return decode_blob_frame(body)
    name, *content = json.loads(body)
    if name == StepTokens.__name__:
        return StepTokens([_decode_token(each) for each in content])
    if name == AddRequest.__name__:
        return AddRequest(_decode_request(content[0]))
    message: Message = MESSAGE_TYPES[name](*content)
    return message


def decode_frames(buffer: bytearray) -> list[Message]:
    """The messages of the whole frames in ``buffer``, which are taken out of it."""
    found: list[Message] = []
    start = 0
    while len(buffer) - start >= LENGTH_PREFIX.size:
        end = start + LENGTH_PREFIX.size + LENGTH_PREFIX.unpack_from(buffer, start)[0]
        if end > len(buffer):
            break
        with memoryview(buffer) as view:
            body = bytes(view[start + LENGTH_PREFIX.size : end])
        found.append(decode(body))
        start = end
    del buffer[:start]
    return found


def _encode_request(request: Request) -> dict[str, Any]:
    params = {each.name: getattr(request.params, each.name) for each in fields(SamplingParams)}
    params = {name: value for name, value in params.items() if value != _DEFAULT_VALUES[name]}
    if "logit_bias" in params:
        params["logit_bias"] = list(params["logit_bias"].items())  # JSON's keys are texts
    if params.get("logits_processors") is not None:
        params["logits_processors"] = asdict(params["logits_processors"])
    # text is matched by the API: the engine need not see it
    params.pop("stop", None)
    return {
        "id": request.id,
        "prompt": request.prompt,
        "params": params,
        "eos_ids": request.eos_ids,
        "cache_salt": request.cache_salt,
        "grammar": None
        if request.grammar is None
        else [request.grammar.grammar_type, request.grammar.text],
        "pooling": request.pooling,
        "penalize_prompt": request.penalize_prompt,
        # the pixels of pictures, uint8, follow as blobs
        "embedding_spans": [
            [i.position, i.length, i.digest, i.handle.shape] for i in request.embedding_spans
        ],
    }


def _decode_request(raw: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> Request:
    params = dict(raw["params"])
    if "logit_bias" in params:
        params["logit_bias"] = dict(params["logit_bias"])
    if params.get("logits_processors") is not None:
        params["logits_processors"] = LogitsProcessors.from_config(params["logits_processors"])
    return Request(
        id=raw["id"],
        prompt=tuple(raw["prompt"]),
        params=SamplingParams(**params),
        eos_ids=tuple(raw["eos_ids"]),
        cache_salt=raw["cache_salt"],
        grammar=None if raw["grammar"] is None else Grammar(*raw["grammar"]),
        pooling=raw["pooling"],
        penalize_prompt=raw["penalize_prompt"],
        embedding_spans=tuple(
            EmbeddingSpan(position, length, digest, np.frombuffer(blob, np.uint8).reshape(shape))
            for (position, length, digest, shape), blob in zip(
                raw["embedding_spans"], blobs, strict=True
            )
        ),
    )


def _encode_token(token: TokenOutput) -> list[Any]:
    """[request, index, id, cached], and the rest where there is one."""
    short: list[Any] = [token.request_id, token.index, token.token_id, token.cached_tokens]
    rest: dict[str, Any] = {}
    if token.finish_reason is not None:
        rest["finish"] = token.finish_reason.value
    if token.stop_token_id is not None:
        rest["stop"] = token.stop_token_id
    if token.replayed_ids is not None:
        rest["replay"] = token.replayed_ids
    if token.score is not None:
        rest["score"] = token.score
    if token.logprobs is not None:
        rest["logprobs"] = base64.b64encode(encode_logprobs(token.logprobs)).decode()
    if token.embedding is not None:
        rest["embedding"] = base64.b64encode(token.embedding).decode()
    if token.prompt_logprobs is not None:
        rest["prompt"] = True  # in blobs
    return [*short, rest] if rest else short


def _decode_token(raw: list[Any]) -> TokenOutput:
    request, index, id, cached = raw[:4]
    if len(raw) == 4:
        return TokenOutput(request, index, id, cached_tokens=cached)
    rest = raw[4]
    return TokenOutput(
        request,
        index,
        id,
        logprobs=LogprobTable(base64.b64decode(rest["logprobs"])) if "logprobs" in rest else None,
        finish_reason=FinishReason(rest["finish"]) if "finish" in rest else None,
        stop_token_id=rest.get("stop"),
        cached_tokens=cached,
        replayed_ids=tuple(rest["replay"]) if "replay" in rest else None,
        score=rest.get("score"),
        embedding=base64.b64decode(rest["embedding"]) if "embedding" in rest else None,
    )


def _decode_step_tokens(content: list[Any], blobs: Sequence[bytes]) -> StepTokens:
    tokens, begin = [], 0
    for raw in content:
        token = _decode_token(raw)
        if len(raw) > 4 and "prompt" in raw[4]:
            token = replace(
                token, prompt_logprobs=PromptLogprobTables(blobs[begin : begin + BLOBS_PER_PROMPT])
            )
            begin += BLOBS_PER_PROMPT
        tokens.append(token)
    return StepTokens(tokens)


_DEFAULT_PARAMS = SamplingParams()
_DEFAULT_VALUES = {
    each.name: getattr(_DEFAULT_PARAMS, each.name) for each in fields(SamplingParams)
}
