"""Plain data types shared by text, runtime and server: no tensors, no behavior."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol

from modelmill.core.errors import RequestError
from modelmill.core.logits_processors import LogitsProcessors
from modelmill.core.quoting import quote
from modelmill.core.unknown_keywords import refuse_unknown_fields

MAX_INT32 = 2**31 - 1
MAX_COMPLETIONS_PER_PROMPT = 128
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_BEAMS = 32
MEAN_POOLING, LAST_TOKEN_POOLING = "mean", "last"
"""How the final hidden states of a prompt become one vector."""
TOKEN_IDS_GRAMMAR = "token_ids"
"""The grammar type of a list of allowed token ids."""
GENERATION_CONFIG_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose defaults a checkpoint's generation_config may set."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # the answer cannot continue within its grammar


@dataclass(frozen=True)
class ParamRange:
    """Allowed values of a sampling parameter; integers for an integer.

    Attributes:
        low: The least value.
        high: The largest value.
        above_low: ``low`` itself is not allowed: zero would divide by zero.
    """

    low: float
    high: float
    above_low: bool = False


def _sampling_param_field(
    default: Any = None,
    help: str = "",
    low: float | None = None,
    high: float | None = None,
    *,
    above_low: bool = False,
    factory: Callable[[], Any] | None = None,
) -> Any:
    """A sampling parameter with its help text and range.

    The command line, the HTTP schema and the tensors of Triton take them from here.
    """
    limits = None if low is None or high is None else ParamRange(low, high, above_low)
    metadata = {"help": help, "range": limits}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled.

    ``None`` means unset: the engine's defaults (the checkpoint's generation_config) apply, then the
    neutral value. A field set here always takes precedence.

    Temperature 0 is greedy, and so is top_p 0. ``seed`` draws alike alone and in a batch: the same
    tokens where steps of all sizes round alike (float32 without quantization). ``n`` samples one
    prompt n times; ``num_beams`` > 1 runs beam search instead of sampling and returns the ``n``
    best. ``logits_processors``: ``LogitsProcessors()`` switches off those of the checkpoint.

    Raises:
        RequestError: if a value is outside its range.
        UnknownOption: if there is no such field; it is a TypeError too.
    """

    n: int = _sampling_param_field(1, "answers per prompt", 1, MAX_COMPLETIONS_PER_PROMPT)
    temperature: float | None = _sampling_param_field(
        None, "0 is greedy; default: the engine's own", 0.0, 100.0
    )
    top_p: float | None = _sampling_param_field(
        None,
        "keep the most likely tokens up to this total probability (0: only the most likely one)",
        0.0,
        1.0,
    )
    top_k: int | None = _sampling_param_field(
        None, "keep the K most likely tokens (0: all)", -1, MAX_INT32
    )
    min_p: float | None = _sampling_param_field(
        None, "keep tokens at least this likely, relative to the most likely one", 0.0, 1.0
    )
    max_tokens: int | None = _sampling_param_field(
        None,
        "maximum length of the answer in tokens (default: the engine's own, else 512)",
        0,
        MAX_INT32,
    )
    min_tokens: int | None = _sampling_param_field(
        None, "minimum length of the answer in tokens", 0, MAX_INT32
    )
    stop: tuple[str, ...] = _sampling_param_field((), "text that ends the answer (repeatable)")
    stop_token_ids: tuple[int, ...] = _sampling_param_field((), "token ids that end the answer")
    seed: int | None = _sampling_param_field(
        None,
        "seed of the sampling: the same random numbers alone and in a batch",
        -(2**63),
        2**64 - 1,
    )
    logprobs: int | None = _sampling_param_field(
        None, "log probabilities of this many most likely tokens", 0, MAX_LOGPROBS
    )
    prompt_logprobs: int | None = _sampling_param_field(
        None, "the same for the prompt's tokens", 0, MAX_LOGPROBS
    )
    presence_penalty: float | None = _sampling_param_field(
        None, "penalty for tokens that have occurred", -2.0, 2.0
    )
    frequency_penalty: float | None = _sampling_param_field(
        None, "penalty per occurrence of a token", -2.0, 2.0
    )
    repetition_penalty: float | None = _sampling_param_field(
        None, "divide the logits of tokens that have occurred", 0.0, 100.0, above_low=True
    )
    logit_bias: Mapping[int, float] = _sampling_param_field(
        help="ID=BIAS added to a token's logit (repeatable)", factory=dict
    )
    ignore_eos: bool = _sampling_param_field(False, "continue after the end-of-text token")
    num_beams: int = _sampling_param_field(1, "beam search with this many beams", 1, MAX_BEAMS)
    length_penalty: float = _sampling_param_field(
        1.0, "exponent of the length in a beam's score", -100.0, 100.0
    )
    early_stopping: bool = _sampling_param_field(
        False, "stop the beam search at num_beams finished answers"
    )
    skip_special_tokens: bool = _sampling_param_field(True, "omit special tokens from the text")
    include_stop: bool = _sampling_param_field(False, "keep the stop text in the answer")
    logits_processors: LogitsProcessors | None = field(default=None, metadata={"python_only": True})

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _checked_tuple("stop", stop))
        object.__setattr__(
            self, "stop_token_ids", _checked_tuple("stop_token_ids", self.stop_token_ids)
        )
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError(
                f"logit_bias must map token ids to numbers, not be {quote(self.logit_bias, 60)}"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        self._check_values()

    def _check_values(self) -> None:
        for name, limits in _INT_RANGES:
            if getattr(self, name) is not None or name in _NON_NULLABLE_PARAMS:
                _check_int(name, getattr(self, name), int(limits.low), int(limits.high))
        for name, limits in _FLOAT_RANGES:
            if getattr(self, name) is not None or name in _NON_NULLABLE_PARAMS:
                _check_number(
                    name, getattr(self, name), limits.low, limits.high, open_low=limits.above_low
                )
        for name in ("ignore_eos", "early_stopping", "skip_special_tokens", "include_stop"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be true or false, not {quote(getattr(self, name), 60)}"
                )
        if not isinstance(self.logits_processors, LogitsProcessors | None):
            raise RequestError("logits_processors must be a LogitsProcessors")
        if self.num_beams > 1 and self.n > self.num_beams:
            raise RequestError(f"n={self.n} must be at most num_beams={self.num_beams}; lower n")
        if self.num_beams > 1 and (self.logprobs is not None or self.prompt_logprobs is not None):
            raise RequestError(
                "logprobs are not available with beam search; use num_beams=1, or the score of "
                "each beam"
            )
        if (
            self.max_tokens is not None
            and self.min_tokens is not None
            and self.min_tokens > self.max_tokens
        ):
            raise RequestError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS or any(
            not isinstance(s, str) or not s for s in self.stop
        ):
            raise RequestError(f"stop takes up to {MAX_STOP_STRINGS} non-empty strings")
        if any(len(s) > MAX_STOP_CHARS for s in self.stop):
            raise RequestError(f"a stop string may have up to {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_STRINGS:
            raise RequestError(f"stop_token_ids takes up to {MAX_STOP_STRINGS} ids")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise RequestError(f"logit_bias takes up to {MAX_LOGIT_BIAS_ENTRIES} entries")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias key", token, 0, 2**31 - 1)
            _check_number(f"logit_bias: the bias of token {token}", bias, -100.0, 100.0)

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return a copy with every unset field set from ``defaults``, else to the neutral value.

        Defaults do not change the meaning of fields that are set: an explicit temperature 0 stays
        greedy.
        """
        neutral = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
        }
        known = {f.name for f in fields(self)}
        filled: dict[str, Any] = {}
        for name, value in {**neutral, **{k: v for k, v in defaults.items() if k in known}}.items():
            if getattr(self, name) is None and value is not None:
                filled[name] = value
        # where a default contradicts a value of the request, the request takes precedence
        if (
            self.min_tokens is not None
            and filled.get("max_tokens", self.min_tokens) < self.min_tokens
        ):
            filled["max_tokens"] = self.min_tokens
        limit = filled.get("max_tokens", self.max_tokens)
        if limit is not None and "min_tokens" in filled:
            filled["min_tokens"] = min(filled["min_tokens"], limit)
        if not self.stop and defaults.get("stop"):
            filled["stop"] = defaults["stop"]
        return replace(self, **filled)

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken; call on resolved parameters."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0


def sampling_param_range(name: str) -> ParamRange:
    """The range of a field of SamplingParams."""
    limits: ParamRange = SamplingParams.__dataclass_fields__[name].metadata["range"]
    return limits


@dataclass(frozen=True)
class ImageEmbeddingSpan:
    """A range of a prompt's tokens whose embeddings come from an image.

    Attributes:
        position: first token.
        length: number of tokens.
        digest: identifies the content (and its shape) in the key of the prefix cache.
        handle: opaque to the runtime; the model reads it.
    """

    position: int
    length: int
    digest: str
    handle: Any = None


@dataclass(frozen=True)
class Grammar:
    """The grammar that an answer must follow.

    grammar_type: json (text: a JSON schema), regex, choice (text: a JSON list of strings), lark,
    token_ids (text: a JSON list of ids, no others may be sampled), or calls. Text of calls:
    {"functions": [{"name", "arguments": a JSON schema}], "most"}; the answer is {"name",
    "arguments"} of one of the functions, or a list of 1 to ``most`` of them if ``most`` is not
    null.
    """

    grammar_type: str
    text: str

    def allowed_token_ids(self) -> tuple[int, ...] | None:
        """Return the ids of a list of token ids; None for another grammar."""
        if self.grammar_type != TOKEN_IDS_GRAMMAR:
            return None
        return tuple(json.loads(self.text))


class Guide(Protocol):
    """Masks the tokens that may come next in one answer.

    Attributes:
        failed: the grammar could not be followed to its end; the answer does not match it.
    """

    failed: bool

    def mask(self) -> Any:
        """Return the allowed tokens, never none.

        Returns:
            numpy [ceil(V / 8)] uint8: bit t % 8 of byte t // 8 is set if token t is allowed.
        """

    def accept(self, token: int) -> None:
        """Advance the grammar by the sampled token."""

    def copy(self) -> Guide:
        """Return a guide in the same state, for another answer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its options, in token ids.

    ``params`` are resolved. ``eos_ids`` end the answer unless ``params.ignore_eos`` is set.

    Attributes:
        pooling: MEAN_POOLING or LAST_TOKEN_POOLING: return the prompt's embedding, not an answer
            (max_tokens 0).
        penalize_prompt: whether penalties and logits processors count the prompt's tokens; False if
            the original implementation passes the prompt to the model as embeddings.
        priority: lower starts earlier, and is preempted later.
        virtual_start: of equal priority, lower starts earlier (fair queueing between keys); of
            equal ones the first to arrive.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...] = ()
    embedding_spans: tuple[ImageEmbeddingSpan, ...] = ()
    cache_salt: str = ""
    grammar: Grammar | None = None
    pooling: str | None = None
    penalize_prompt: bool = True
    priority: int = 0
    virtual_start: float = 0.0


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one token and its rank (1 = most likely) at a position."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class TokenOutput:
    """One step's output for one sequence of a request.

    Attributes:
        index: which of the n sequences.
        token_id: None if the event carries only the finish (abort) or prompt logprobs.
        logprobs: those of the sampled token and of the top ones, by id.
        finish_reason: set on the last event.
        stop_token_id: the token id that ended the sequence, if one did; it is not part of the
            answer.
        embedding: of the prompt, [H] float32, little endian.
    """

    request_id: str
    index: int
    token_id: int | None
    logprobs: Mapping[int, Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    cached_tokens: int = 0
    replayed_ids: tuple[int, ...] | None = None
    score: float | None = None
    embedding: bytes | None = None


_RANGES = tuple(
    (each.name, each.metadata["range"])
    for each in fields(SamplingParams)
    if each.metadata.get("range") is not None
)
_INT_RANGES = tuple((name, each) for name, each in _RANGES if isinstance(each.low, int))
_FLOAT_RANGES = tuple((name, each) for name, each in _RANGES if isinstance(each.low, float))
# these have no default of the engine, so None is not allowed
_NON_NULLABLE_PARAMS = {each.name for each in fields(SamplingParams) if each.default is not None}


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was opened, and current gauges.

    Attributes:
        free_pages: Pages that can be allocated, idle ones included.
        cached_pages: Pages in the prefix cache.
        cached_tokens: Prompt tokens taken from the prefix cache.
        evictable_pages: Unreferenced pages, kept for their prefixes.
        kept_pages: Most idle pages that may be kept while unused pages are available.
        touched_pages: Pages ever written; a cache in RAM takes memory for these only.
        page_bytes: Bytes of one page on all ranks together.
        pages_by_window: Pages in use of layers by what they attend to: "all" tokens, or the tokens
            of a window.
        state_bytes: Bytes of all slots of recurrent state on all ranks together.
        snapshot_slots: Snapshots of recurrent states that the prefix cache can keep.
        snapshots: Snapshots in the prefix cache.
        restored_states: Prompts that started from a snapshot.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    evictable_pages: int = 0
    kept_pages: int = 0
    touched_pages: int = 0
    page_bytes: int = 0
    pages_by_window: Mapping[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    snapshot_slots: int = 0
    snapshots: int = 0
    restored_states: int = 0


def _checked_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise RequestError(f"{name} must be a list, not {quote(value, 60)}")
    return tuple(value)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {quote(value, 60)}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, not {quote(value, 60)}")


def _check_number(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False
) -> None:
    # an integer may be too large for a float, so it is compared before it is converted
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int and not (isinstance(value, float) and math.isfinite(value)):
        raise RequestError(f"{name} must be a finite number, not {quote(value, 60)}")
    if value < low or value > high or (open_low and value == low):
        valid = f"above {low:g} and at most" if open_low else f"between {low:g} and"
        raise RequestError(f"{name} must be {valid} {high:g}, not {quote(value, 60)}")


@dataclass(frozen=True)
class SleepOrWakeReport:
    """What going to sleep, or waking up, took.

    Attributes:
        seconds: until all ranks were done.
        host_bytes: that the weights of all ranks take while the engine sleeps; 0 when it is awake.
        device_bytes: of the GPUs that are still taken: step buffers and CUDA graphs, not the CUDA
            contexts; 0 on a CPU.
    """

    seconds: float
    host_bytes: int
    device_bytes: int
