"""Biases of tokens in a request: an object by token id, or llama.cpp's pairs of id and bias."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote
from modelmill.core.types import MAX_LOGIT_BIAS_ENTRIES
from modelmill.serve.strict_models import make_object_keys_validator

BANNED_TOKEN_BIAS = -100.0
"""What ``false`` means: the token does not occur."""
MAX_ID_DIGITS = 10
_VALUE_SCHEMA = {"anyOf": [{"type": "number"}, {"const": False}]}
_PAIR_SCHEMA = {
    "type": "array",
    "prefixItems": [{"type": "integer"}, _VALUE_SCHEMA],
    "minItems": 2,
    "maxItems": 2,
}


def normalize_logit_bias(value: Any) -> Any:
    """Make pairs an object by token id, and ``false`` a number; other values stay as they are.

    Raises:
        ValueError: a pair is invalid; the message names it.
    """
    if isinstance(value, list):
        return _pairs_to_object(value)
    if isinstance(value, dict):
        return {key: BANNED_TOKEN_BIAS if bias is False else bias for key, bias in value.items()}
    return value


def _pairs_to_object(pairs: list[Any]) -> dict[str, Any]:
    if len(pairs) == 2 and type(pairs[0]) is int and pairs[1] is False:
        pairs = [pairs]  # one pair by itself; with a number it could be two ids
    if len(pairs) > MAX_LOGIT_BIAS_ENTRIES:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS_ENTRIES} pairs")
    biases: dict[str, Any] = {}
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                f"number {index}, {quote(pair, 40)}, must be a pair of a token id and its bias"
            )
        id, bias = pair
        if type(id) is not int or id < 0:
            raise ValueError(f"number {index} must begin with a token id, not {quote(id, 40)}")
        if bias is not False and type(bias) not in (int, float):
            raise ValueError(
                f"the bias of token {id} must be a number, or false for never, not "
                f"{quote(bias, 40)}"
            )
        biases[str(id)] = BANNED_TOKEN_BIAS if bias is False else bias
    return biases


def parse_logit_bias(logit_bias: dict[str, float] | None) -> dict[int, float]:
    """The biases by token id.

    Raises:
        RequestError: a key is no token id.
    """
    out: dict[int, float] = {}
    for key, value in (logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise RequestError(f"logit_bias takes token ids as keys, not {key[:40]!r}")
        out[int(key)] = value
    return out


LogitBias = Annotated[
    dict[str, float],
    make_object_keys_validator(MAX_LOGIT_BIAS_ENTRIES),
    Field(max_length=MAX_LOGIT_BIAS_ENTRIES),
    BeforeValidator(normalize_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "additionalProperties": _VALUE_SCHEMA,
                    "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
                },
                {"type": "array", "items": _PAIR_SCHEMA, "maxItems": MAX_LOGIT_BIAS_ENTRIES},
            ]
        }
    ),
]
"""Biases of tokens by their ids."""
