"""What the API and an engine's worker say to each other: plain dataclasses, as JSON, in frames.

A frame is four bytes (the length, big endian) and a JSON array: the message's name and its fields. Only ids and numbers
travel, no text of prompts and no tensors; pictures and masks in frames of their own (``pictures``). Both ends belong
to one program, so a frame that makes no sense is a bug.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.types import Finish, Grammar, Insert, Logprob, Request, SamplingParams, Token
from modelmill.serve.pictures import MARK, Found, Look, Missed, framed, joined, split, unframed
from modelmill.serve.watchdog import LIMIT

HEAD = struct.Struct(">I")


@dataclass(frozen=True)
class Open:
    """Open an engine. model: engine folder or checkpoint. build: BuildConfig fields for a checkpoint; run: RunConfig's.

    warm: record decode graphs before the first request. others: bytes of weights of the language engines that load
    after it; earlier: how many loaded before it; aside: what segmentation engines take beside it. template: a chat
    template in place of the engine's own. image_cache: bytes for embeddings of pictures; most_pixels: of a picture.
    watchdog: seconds without a sign of life after which its worker hangs; 0: never.
    """

    model: str
    build: Mapping[str, Any]
    run: Mapping[str, Any]
    warm: bool = True
    template: str | None = None
    others: tuple[int, ...] = ()
    earlier: int = 0
    aside: int = 0
    image_cache: int = 64 << 20
    most_pixels: int = 50_000_000
    watchdog: float = LIMIT


@dataclass(frozen=True)
class Add:
    """Queue a request."""

    request: Request


@dataclass(frozen=True)
class Abort:
    """End a request; unknown ones are ignored."""

    id: str


@dataclass(frozen=True)
class End:
    """End one sequence of a request quietly: a stop string was found in its text."""

    id: str
    index: int


@dataclass(frozen=True)
class Ask:
    """Tell the statistics; the answer carries the same number."""

    number: int


@dataclass(frozen=True)
class Ping:
    """Give a sign of life, between two steps; the answer is a ``Heartbeat``."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life (``watchdog``)."""


@dataclass(frozen=True)
class Loading:
    """How far opening has come. done, total: in the stage's own unit."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """The engine takes requests. path: its folder. The rest: what requests are checked against, and pages of KV.

    kept_pages: of ``pages``, those that may be taken for kept prefixes.
    """

    path: str
    device: str
    vocab: int
    max_model_len: int
    pages: int
    page_size: int
    page_bytes: int
    seqs: int
    kind: str = "language"
    kept_pages: int = 0


@dataclass(frozen=True)
class Told:
    """What one step produced."""

    tokens: list[Token]


@dataclass(frozen=True)
class Begun:
    """A request's first step has begun, so many seconds after it came."""

    id: str
    seconds: float


@dataclass(frozen=True)
class Refused:
    """A request cannot be served; one line for its sender. memory: there was none left for it."""

    id: str
    message: str
    memory: bool = False


@dataclass(frozen=True)
class Count:
    """Where the engine stands: the fields of runtime.stats.Stats."""

    number: int
    stats: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """The engine cannot be opened; one line for whoever started it. usage: a flag is at fault."""

    message: str
    usage: bool


Message = (
    Open
    | Add
    | Abort
    | End
    | Ask
    | Ping
    | Heartbeat
    | Loading
    | Ready
    | Told
    | Begun
    | Refused
    | Count
    | Failed
    | Look
    | Found
    | Missed
)
KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}


def encode(message: Message) -> bytes:
    """The message as a frame."""
    kind = type(message)
    if isinstance(message, (Look, Found)):
        body = framed(message)
        return HEAD.pack(len(body)) + body
    if isinstance(message, Told):
        content: list[Any] = [_token(token) for token in message.tokens]
    elif isinstance(message, Add):
        content = [_request(message.request)]
        if message.request.inserts:
            blobs = [insert.handle.tobytes() for insert in message.request.inserts]
            body = joined("Add", content, blobs)
            return HEAD.pack(len(body)) + body
    else:
        content = [getattr(message, each.name) for each in fields(message)]
    body = json.dumps([kind.__name__, *content], separators=(",", ":")).encode()
    return HEAD.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message of a frame's body."""
    if body.startswith(MARK):
        name, content, blobs = split(body)
        return Add(_request_of(content[0], blobs)) if name == "Add" else unframed(body)
    name, *content = json.loads(body)
    if name == "Told":
        return Told([_token_of(each) for each in content])
    if name == "Add":
        return Add(_request_of(content[0]))
    message: Message = KINDS[name](*content)
    return message


def unpacked(held: bytearray) -> list[Message]:
    """The messages of the whole frames in ``held``, which are taken out of it."""
    found: list[Message] = []
    start = 0
    while len(held) - start >= HEAD.size:
        end = start + HEAD.size + HEAD.unpack_from(held, start)[0]
        if end > len(held):
            break
        found.append(decode(bytes(held[start + HEAD.size : end])))
        start = end
    del held[:start]
    return found


def _request(request: Request) -> dict[str, Any]:
    params = {each.name: getattr(request.params, each.name) for each in fields(SamplingParams)}
    params = {name: value for name, value in params.items() if value != _DEFAULT[name]}
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
        "eos": request.eos_ids,
        "salt": request.cache_salt,
        "grammar": None if request.grammar is None else [request.grammar.kind, request.grammar.text],
        "pooling": request.pooling,
        "counts": request.prompt_counts,
        # the pixels of pictures, uint8, follow as blobs
        "inserts": [[i.position, i.length, i.digest, i.handle.shape] for i in request.inserts],
    }


def _request_of(raw: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> Request:
    params = dict(raw["params"])
    if "logit_bias" in params:
        params["logit_bias"] = dict(params["logit_bias"])
    if params.get("logits_processors") is not None:
        params["logits_processors"] = LogitsProcessors.read(params["logits_processors"])
    return Request(
        id=raw["id"],
        prompt=tuple(raw["prompt"]),
        params=SamplingParams(**params),
        eos_ids=tuple(raw["eos"]),
        cache_salt=raw["salt"],
        grammar=None if raw["grammar"] is None else Grammar(*raw["grammar"]),
        pooling=raw["pooling"],
        prompt_counts=raw["counts"],
        inserts=tuple(
            Insert(position, length, digest, np.frombuffer(blob, np.uint8).reshape(shape))
            for (position, length, digest, shape), blob in zip(raw["inserts"], blobs, strict=True)
        ),
    )


def _token(token: Token) -> list[Any]:
    """[request, index, id, cached], and the rest where there is one."""
    short: list[Any] = [token.request, token.index, token.id, token.cached_tokens]
    rest: dict[str, Any] = {}
    if token.finish is not None:
        rest["finish"] = token.finish.value
    if token.stop is not None:
        rest["stop"] = token.stop
    if token.replay is not None:
        rest["replay"] = token.replay
    if token.score is not None:
        rest["score"] = token.score
    if token.logprobs is not None:
        rest["logprobs"] = _table(token.logprobs)
    if token.embedding is not None:
        rest["embedding"] = base64.b64encode(token.embedding).decode()
    if token.prompt_logprobs is not None:
        rest["prompt"] = [None if each is None else _table(each) for each in token.prompt_logprobs]
    return [*short, rest] if rest else short


def _token_of(raw: list[Any]) -> Token:
    request, index, id, cached = raw[:4]
    if len(raw) == 4:
        return Token(request, index, id, cached_tokens=cached)
    rest = raw[4]
    prompt = rest.get("prompt")
    return Token(
        request,
        index,
        id,
        logprobs=_table_of(rest["logprobs"]) if "logprobs" in rest else None,
        finish=Finish(rest["finish"]) if "finish" in rest else None,
        stop=rest.get("stop"),
        prompt_logprobs=None if prompt is None else [None if each is None else _table_of(each) for each in prompt],
        cached_tokens=cached,
        replay=tuple(rest["replay"]) if "replay" in rest else None,
        score=rest.get("score"),
        embedding=base64.b64decode(rest["embedding"]) if "embedding" in rest else None,
    )


def _table(entries: Mapping[int, Logprob]) -> list[tuple[int, float, int]]:
    return [(id, each.logprob, each.rank) for id, each in entries.items()]


def _table_of(raw: list[list[Any]]) -> dict[int, Logprob]:
    return {id: Logprob(logprob, rank) for id, logprob, rank in raw}


_NEUTRAL = SamplingParams()
_DEFAULT = {each.name: getattr(_NEUTRAL, each.name) for each in fields(SamplingParams)}
