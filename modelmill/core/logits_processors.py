"""Settings of transformers' logits processors beyond the fields of SamplingParams.

A checkpoint sets them in its generation_config; ``runtime.logits_processors`` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote

MAX_LISTED_TOKEN_IDS = 1 << 16
"""Maximum number of token ids in one list, over all words. Real lists have up to a few hundred."""
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class LogitsProcessors:
    """Logits processors of one request; the default object changes nothing.

    Fields have the names and meaning of transformers' GenerationConfig.

    Attributes:
        sequence_bias: (token ids, number added to the logit of the last id if the other ids
            precede it).
        encoder_repetition_penalty: for tokens of the prompt.
        encoder_no_repeat_ngram_size: for n-grams of the prompt.
        forced_eos_token_id: at the maximum length.
        exponential_decay_length_penalty: (tokens of the answer before it starts, factor).
        renormalize_logits: only for beam search.
    """

    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    renormalize_logits: bool = False

    def __bool__(self) -> bool:
        return self != _NEUTRAL

    @property
    def depends_on_past_tokens(self) -> bool:
        """Whether the next logits depend on the preceding tokens, not only on their number."""
        words = (*self.bad_words_ids, *(ids for ids, _ in self.sequence_bias))
        sizes = (self.no_repeat_ngram_size, self.encoder_no_repeat_ngram_size)
        return any(sizes) or any(len(word) > 1 for word in words)

    def iter_token_ids(self) -> Iterator[int]:
        """Yield every token id of the settings."""
        for word in (*self.bad_words_ids, *(ids for ids, _ in self.sequence_bias)):
            yield from word
        yield from (*self.suppress_tokens, *self.begin_suppress_tokens, *self.forced_eos_token_id)
        if self.forced_bos_token_id is not None:
            yield self.forced_bos_token_id

    def non_default(self) -> dict[str, Any]:
        """Return the fields that differ from the default, for JSON."""
        return {
            name: value for name, value in asdict(self).items() if value != getattr(_NEUTRAL, name)
        }

    @staticmethod
    def from_generation_config(raw: Mapping[str, Any]) -> LogitsProcessors:
        """Read a generation_config; other keys and null are ignored.

        Raises:
            RequestError: if a value is invalid; the message names the key.
        """
        values = {
            name: _FIELD_PARSERS[name](name, raw[name])
            for name in PROCESSOR_FIELDS
            if raw.get(name) is not None
        }
        processors = LogitsProcessors(**values)
        forced_bos = processors.forced_bos_token_id
        for name, ids in (
            ("forced_bos_token_id", () if forced_bos is None else (forced_bos,)),
            ("forced_eos_token_id", processors.forced_eos_token_id),
        ):
            if ids and set(ids) <= set(processors.suppress_tokens):
                raise RequestError(
                    f"{name} names only tokens that suppress_tokens forbids; leave one of them out"
                )
        return processors


PROCESSOR_FIELDS = tuple(each.name for each in fields(LogitsProcessors))
_NEUTRAL = LogitsProcessors()


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {quote(value, 60)}")
    return value


def _checked_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKEN_ID:
        raise RequestError(
            f"{name} must be an integer between 0 and {MAX_TOKEN_ID}, not {quote(value, 60)}"
        )
    return value


def _checked_number(name: str, value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or abs(value) > 1e9 or math.isnan(value):
        raise RequestError(f"{name} must be a finite number, not {quote(value, 60)}")
    return float(value)


def _checked_positive_number(name: str, value: Any) -> float:
    number = _checked_number(name, value)
    if number <= 0:
        raise RequestError(f"{name} must be above 0, not {quote(value, 60)}")
    return number


def _checked_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Read a list of token ids; a single id is accepted, as in transformers."""
    listed = value if isinstance(value, list | tuple) else [value]
    if len(listed) > MAX_LISTED_TOKEN_IDS:
        raise RequestError(f"{name} names more than {MAX_LISTED_TOKEN_IDS} token ids")
    return tuple(_checked_integer(name, id) for id in listed)


def _checked_token_sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    good = isinstance(value, list | tuple) and all(
        isinstance(word, list | tuple) and word for word in value
    )
    if not good:
        raise RequestError(f"{name} must be a list of lists of token ids, not {quote(value, 60)}")
    if sum(map(len, value)) > MAX_LISTED_TOKEN_IDS:
        raise RequestError(f"{name} names more than {MAX_LISTED_TOKEN_IDS} token ids")
    return tuple(_checked_token_ids(name, word) for word in value)


def _checked_sequence_bias(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    good = isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    )
    if not good:
        raise RequestError(f"{name} must be a list of [token ids, number], not {quote(value, 60)}")
    words = _checked_token_sequences(name, [pair[0] for pair in value])
    # as in transformers, a later entry with the same ids replaces an earlier one
    return tuple(
        {
            word: _checked_number(name, pair[1]) for word, pair in zip(words, value, strict=True)
        }.items()
    )


def _checked_length_decay(name: str, value: Any) -> tuple[int, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise RequestError(f"{name} must be [tokens, factor], not {quote(value, 60)}")
    return _checked_integer(name, value[0]), _checked_positive_number(name, value[1])


_FIELD_PARSERS: dict[str, Any] = {
    "sequence_bias": _checked_sequence_bias,
    "encoder_repetition_penalty": _checked_positive_number,
    "no_repeat_ngram_size": _checked_integer,
    "encoder_no_repeat_ngram_size": _checked_integer,
    "bad_words_ids": _checked_token_sequences,
    "forced_bos_token_id": _checked_integer,
    "forced_eos_token_id": _checked_token_ids,
    "exponential_decay_length_penalty": _checked_length_decay,
    "suppress_tokens": _checked_token_ids,
    "begin_suppress_tokens": _checked_token_ids,
    "renormalize_logits": _checked_flag,
}
