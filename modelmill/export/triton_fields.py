"""What a request to an engine in Triton Inference Server holds, and what its answers hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.quote import quoted
from modelmill.core.types import SamplingParams
from modelmill.language import Messages, Prompt

MANY = -1


@dataclass(frozen=True)
class Field:
    """A tensor of one dimension. size: 1, or MANY. sampling: whether it is SamplingParams' field of that name."""

    name: str
    type: str
    size: int = 1
    sampling: bool = False


INPUTS = (
    Field("text_input", "TYPE_STRING"),
    Field("messages", "TYPE_STRING"),
    Field("input_ids", "TYPE_INT32", MANY),
    Field("stream", "TYPE_BOOL"),
    Field("cache_salt", "TYPE_STRING"),
    Field("max_tokens", "TYPE_INT32", sampling=True),
    Field("min_tokens", "TYPE_INT32", sampling=True),
    Field("temperature", "TYPE_FP32", sampling=True),
    Field("top_p", "TYPE_FP32", sampling=True),
    Field("top_k", "TYPE_INT32", sampling=True),
    Field("min_p", "TYPE_FP32", sampling=True),
    Field("seed", "TYPE_INT64", sampling=True),
    Field("stop", "TYPE_STRING", MANY, sampling=True),
    Field("stop_token_ids", "TYPE_INT32", MANY, sampling=True),
    Field("ignore_eos", "TYPE_BOOL", sampling=True),
    Field("presence_penalty", "TYPE_FP32", sampling=True),
    Field("frequency_penalty", "TYPE_FP32", sampling=True),
    Field("repetition_penalty", "TYPE_FP32", sampling=True),
)
OUTPUTS = (
    Field("text_output", "TYPE_STRING"),
    Field("output_ids", "TYPE_INT32", MANY),
    Field("finish_reason", "TYPE_STRING"),
)


@dataclass(frozen=True)
class Question:
    """A request, read: its prompt in a form that ``Language.request`` takes, how to answer it, and in pieces or not."""

    prompt: Prompt | Messages
    params: SamplingParams
    stream: bool


def question(given: Mapping[str, Any]) -> Question:
    """A request of its tensors' values, by name; a tensor that was not given is absent.

    given: arrays of numpy, of any shape; strings are bytes. Raises RequestError in one line.
    """
    values = {field.name: _value(field, given[field.name]) for field in INPUTS if field.name in given}
    sources = [name for name in ("text_input", "messages", "input_ids") if name in values]
    if len(sources) != 1:
        told = " and ".join(sources) or "none of them"
        raise RequestError(f"give one of text_input, messages and input_ids, not {told}")
    sampling = {field.name: values[field.name] for field in INPUTS if field.sampling and field.name in values}
    return Question(_prompt(values, sources[0]), SamplingParams(**sampling), values.get("stream", False))


def _prompt(values: Mapping[str, Any], source: str) -> Prompt | Messages:
    salt = values.get("cache_salt", "")
    if source == "messages":
        if salt:
            raise RequestError("cache_salt belongs to text_input or input_ids, not to messages")
        return _messages(values["messages"])
    key = "prompt" if source == "text_input" else "prompt_token_ids"
    return {key: values[source], "cache_salt": salt}


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("messages must be a JSON list of {role, content}") from None
    fine = isinstance(found, list) and found and all(isinstance(each, dict) for each in found)
    if not fine:
        raise RequestError("messages must be a JSON list of {role, content}, with at least one")
    return found


def _value(field: Field, array: Any) -> Any:
    flat = array.reshape(-1)
    if field.size != MANY and len(flat) != field.size:
        raise RequestError(f"{field.name} has {len(flat)} values; give one")
    found = [_one(field, value) for value in flat.tolist()]
    return found if field.size == MANY else found[0]


def _one(field: Field, value: Any) -> Any:
    if field.type == "TYPE_STRING":
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise RequestError(f"{field.name} is not UTF-8: {quoted(value, 60)}") from None
    # 0.7 went through 32 bits: the shortest decimal that means the same there is what was typed
    return _typed(value) if field.type == "TYPE_FP32" else value


def _typed(value: float) -> float:
    import numpy

    return float(str(numpy.float32(value)))


def described(fields: Sequence[Field], optional: bool) -> str:
    """The fields as config.pbtxt writes them."""
    more = ", optional: true" if optional else ""
    lines = (f'  {{ name: "{field.name}", data_type: {field.type}, dims: [ {field.size} ]{more} }}' for field in fields)
    return "[\n" + ",\n".join(lines) + "\n]"
