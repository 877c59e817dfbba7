"""Messages between the API process and a worker: plain dataclasses, as JSON, in frames.

A frame is four bytes (the length, big endian) and a JSON array: the name of the message and its
fields. Only ids and numbers are sent, no text of prompts and no tensors; images, masks and prompt
log-probabilities are in frames with blobs (``segmentation_messages``, ``logprob_blobs``). Both ends
belong to one program, so an invalid frame is a bug.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import (
    FinishReason,
    Grammar,
    ImageEmbeddingSpan,
    Request,
    SamplingParams,
    TokenOutput,
)
from modelmill.serve.logprob_blobs import (
    BLOBS_PER_PROMPT,
    EncodedPositionLogprobs,
    EncodedPromptLogprobs,
    encode_position_logprobs,
    encode_prompt_logprobs,
)
from modelmill.serve.segmentation_messages import (
    BINARY_FRAME_MARK,
    SegmentationFailure,
    SegmentationJob,
    SegmentationResult,
    decode_blob_frame,
    encode_blob_frame_body,
    join_blob_frame_body,
    split_blob_frame,
)
from modelmill.serve.watchdog import DEFAULT_TIMEOUT
from modelmill.text.answer_history import MAX_HISTORY_BYTES

LENGTH_PREFIX = struct.Struct(">I")


@dataclass(frozen=True)
class RequestMessage:
    """A message about one request."""

    id: str


@dataclass(frozen=True)
class NumberedMessage:
    """A message with a reply, which carries the same number."""

    number: int


@dataclass(frozen=True)
class OpenEngine:
    """Open an engine.

    Attributes:
        model: engine folder or checkpoint.
        build: BuildConfig fields, for a checkpoint.
        run: RunConfig fields.
        warm_up: capture decode graphs before the first request.
        chat_template: replaces the engine's own.
        later_weight_bytes: bytes of weights of each language engine that loads after it.
        num_loaded_before: number of language engines that loaded before it.
        segment_bytes: memory of segmentation engines beside it.
        image_cache_bytes: size of the cache of image embeddings.
        max_pixels: limit of one image.
        watchdog_seconds: without a sign of life, after which the worker counts as hung; 0: never.
        answer_history_bytes: memory for the tokens of earlier answers, in the API process.
        parse_special: special tokens in the text of a prompt are read as such, in the API process,
            unless the request says otherwise.
        cache_bytes: for KV pages and recurrent states of all ranks, unless ``run`` says both;
            None: from the free memory.
        caps_length: ``run``'s max_model_len is the most of several engines; a shorter one keeps
            its own.
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
    answer_history_bytes: int = MAX_HISTORY_BYTES
    parse_special: bool = False
    cache_bytes: int | None = None
    caps_length: bool = False


@dataclass(frozen=True)
class AddRequest:
    """Message to the worker: queue a request."""

    request: Request


@dataclass(frozen=True)
class AbortRequest(RequestMessage):
    """End a request; unknown ones are ignored."""


@dataclass(frozen=True)
class FinishSequence(RequestMessage):
    """End one sequence of a request: a stop string was found in its text.

    Attributes:
        index: which of the n sequences.
    """

    index: int


@dataclass(frozen=True)
class GetStats(NumberedMessage):
    """Request the statistics."""


@dataclass(frozen=True)
class Ping:
    """Request a sign of life between two steps; the reply is a ``Heartbeat``."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life (``watchdog_seconds``)."""


@dataclass(frozen=True)
class LoadingUpdate:
    """Progress of opening; ``done`` and ``total`` in the unit of the stage."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class EngineReady:
    """The engine accepts requests; its limits and the size of its KV cache.

    Attributes:
        path: the engine folder.
        max_prefix_pages: KV pages, of ``num_pages``, that may hold cached prefixes.
        state_cache_bytes: Bytes of recurrent state on each rank; 0 for a model without any.
        kv_tokens: Tokens of a sequence that the KV pages can hold.
        experts_by_rank: Experts of a mixture that each rank has as a whole; empty otherwise.
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
    state_cache_bytes: int = 0
    kv_tokens: int = 0
    experts_by_rank: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one step.

    Attributes:
        tokens: of all sequences.
    """

    tokens: list[TokenOutput]


@dataclass(frozen=True)
class RequestStarted(RequestMessage):
    """The first step of a request has begun.

    Attributes:
        queue_seconds: since its arrival.
    """

    queue_seconds: float


@dataclass(frozen=True)
class RequestRejected(RequestMessage):
    """A request cannot be served.

    message: one line for the client. out_of_memory: there was not enough memory for it.
    """

    message: str
    out_of_memory: bool = False


@dataclass(frozen=True)
class StatsReply(NumberedMessage):
    """The statistics.

    Attributes:
        stats: the fields of core.types.EngineStats.
    """

    stats: Mapping[str, Any]


@dataclass(frozen=True)
class OpenFailed:
    """The engine cannot be opened.

    Attributes:
        message: one line for the user.
        is_usage_error: a flag is wrong.
    """

    message: str
    is_usage_error: bool


@dataclass(frozen=True)
class SaveKvSession(NumberedMessage):
    """Write the cached KV pages of a prefix to a file.

    Attributes:
        path: of the file.
        tokens: of the prefix.
        cache_salt: of the request that computed it.
        max_bytes: that the pages may take.
        images: position, length and digest of the ranges whose embeddings come from images.
    """

    path: str
    tokens: list[int]
    cache_salt: str
    max_bytes: int
    images: list[tuple[int, int, str]]


@dataclass(frozen=True)
class RestoreKvSession(NumberedMessage):
    """Read a file of KV pages into the prefix cache, for requests with this ``cache_salt``."""

    path: str
    cache_salt: str


@dataclass(frozen=True)
class KvSessionReply(NumberedMessage):
    """A session was saved or restored.

    Attributes:
        tokens: of the prefix.
        nbytes: of the file, or of the pages.
        error: why it was not, in one line; empty if it was.
    """

    tokens: int
    nbytes: int
    error: str = ""


@dataclass(frozen=True)
class SleepEngine(NumberedMessage):
    """Give the memory of weights and KV cache back; the engine has no requests."""


@dataclass(frozen=True)
class WakeEngine(NumberedMessage):
    """Take the memory of weights and KV cache again."""


@dataclass(frozen=True)
class SleepOrWakeReply(NumberedMessage):
    """The engine sleeps, or is awake.

    Attributes:
        host_bytes: that the weights take while it sleeps.
        device_bytes: of GPUs that are still taken.
        error: why nothing has changed, in one line; empty if it has.
    """

    host_bytes: int = 0
    device_bytes: int = 0
    error: str = ""


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
    | SaveKvSession
    | RestoreKvSession
    | KvSessionReply
    | SleepEngine
    | WakeEngine
    | SleepOrWakeReply
    | SegmentationJob
    | SegmentationResult
    | SegmentationFailure
)
MESSAGE_TYPES: dict[str, type] = {cls.__name__: cls for cls in Message.__args__}


def encode_frame(message: Message) -> bytes:
    """Encode a message as a frame."""
    name = type(message).__name__
    if isinstance(message, (SegmentationJob, SegmentationResult)):
        body = encode_blob_frame_body(message)
        return LENGTH_PREFIX.pack(len(body)) + body
    if isinstance(message, StepTokens):
        tables = [
            token.prompt_logprobs for token in message.tokens if token.prompt_logprobs is not None
        ]
        blobs = [blob for each in tables for blob in encode_prompt_logprobs(each)]
        content: list[Any] = [_encode_token(token) for token in message.tokens]
        if blobs:
            return _encode_with_blobs(name, content, blobs)
    elif isinstance(message, AddRequest):
        content = [_encode_request(message.request)]
        if message.request.embedding_spans:
            return _encode_with_blobs(
                name, content, [span.handle.tobytes() for span in message.request.embedding_spans]
            )
    else:
        content = [getattr(message, each.name) for each in fields(message)]
    body = json.dumps([name, *content], separators=(",", ":")).encode()
    return LENGTH_PREFIX.pack(len(body)) + body


def _encode_with_blobs(name: str, content: list[Any], blobs: Sequence[bytes]) -> bytes:
    body = join_blob_frame_body(name, content, blobs)
    return LENGTH_PREFIX.pack(len(body)) + body


def decode_frame_body(body: bytes) -> Message:
    """Decode the body of a frame."""
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
    """Decode and remove the complete frames in ``buffer``."""
    messages: list[Message] = []
    start = 0
    while len(buffer) - start >= LENGTH_PREFIX.size:
        end = start + LENGTH_PREFIX.size + LENGTH_PREFIX.unpack_from(buffer, start)[0]
        if end > len(buffer):
            break
        with memoryview(buffer) as view:
            body = bytes(view[start + LENGTH_PREFIX.size : end])
        messages.append(decode_frame_body(body))
        start = end
    del buffer[:start]
    return messages


def _encode_request(request: Request) -> dict[str, Any]:
    params = {each.name: getattr(request.params, each.name) for each in fields(SamplingParams)}
    params = {name: value for name, value in params.items() if value != _DEFAULT_PARAM_VALUES[name]}
    if "logit_bias" in params:
        params["logit_bias"] = list(params["logit_bias"].items())  # JSON keys are strings
    if params.get("logits_processors") is not None:
        params["logits_processors"] = asdict(params["logits_processors"])
    # stop strings are matched by the API process
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
        "priority": request.priority,
        "virtual_start": request.virtual_start,
        # the pixels of images, uint8, follow as blobs
        "embedding_spans": [
            [i.position, i.length, i.digest, i.handle.shape] for i in request.embedding_spans
        ],
    }


def _decode_request(raw: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> Request:
    params = dict(raw["params"])
    if "logit_bias" in params:
        params["logit_bias"] = dict(params["logit_bias"])
    if params.get("logits_processors") is not None:
        params["logits_processors"] = LogitsProcessors.from_generation_config(
            params["logits_processors"]
        )
    return Request(
        id=raw["id"],
        prompt=tuple(raw["prompt"]),
        params=SamplingParams(**params),
        eos_ids=tuple(raw["eos_ids"]),
        cache_salt=raw["cache_salt"],
        grammar=None if raw["grammar"] is None else Grammar(*raw["grammar"]),
        pooling=raw["pooling"],
        penalize_prompt=raw["penalize_prompt"],
        priority=raw["priority"],
        virtual_start=raw["virtual_start"],
        embedding_spans=tuple(
            ImageEmbeddingSpan(
                position, length, digest, np.frombuffer(blob, np.uint8).reshape(shape)
            )
            for (position, length, digest, shape), blob in zip(
                raw["embedding_spans"], blobs, strict=True
            )
        ),
    )


def _encode_token(token: TokenOutput) -> list[Any]:
    """Encode as [request, index, id, cached], and a dict of other fields if there are any."""
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
        rest["logprobs"] = base64.b64encode(encode_position_logprobs(token.logprobs)).decode()
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
        logprobs=EncodedPositionLogprobs(base64.b64decode(rest["logprobs"]))
        if "logprobs" in rest
        else None,
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
                token,
                prompt_logprobs=EncodedPromptLogprobs(blobs[begin : begin + BLOBS_PER_PROMPT]),
            )
            begin += BLOBS_PER_PROMPT
        tokens.append(token)
    return StepTokens(tokens)


_DEFAULT_PARAMS = SamplingParams()
_DEFAULT_PARAM_VALUES = {
    each.name: getattr(_DEFAULT_PARAMS, each.name) for each in fields(SamplingParams)
}
