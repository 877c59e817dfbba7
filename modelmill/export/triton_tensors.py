"""Input and output tensors of a request to an engine in Triton Inference Server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote
from modelmill.core.types import MAX_INT32, SamplingParams, sampling_param_range
from modelmill.text_processor import Messages, Prompt

VARIABLE_LENGTH = -1


@dataclass(frozen=True)
class TritonTensorField:
    """A tensor of one dimension.

    Attributes:
        size: 1, or VARIABLE_LENGTH.
        is_sampling_param: whether it is a field of SamplingParams.
    """

    name: str
    type: str
    size: int = 1
    is_sampling_param: bool = False


_SAMPLING_INPUT_NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields of SamplingParams that a request may set."""


def _sampling_param_field(name: str, hint: Any) -> TritonTensorField:
    """The tensor of a field of SamplingParams, by the field's type and range."""
    inner = [each for each in get_args(hint) if each not in (NoneType, ...)]
    size = VARIABLE_LENGTH if get_origin(hint) is tuple else 1
    (kind,) = inner or [hint]
    types = {int: "TYPE_INT32", float: "TYPE_FP32", bool: "TYPE_BOOL", str: "TYPE_STRING"}
    large = kind is int and size == 1 and sampling_param_range(name).high > MAX_INT32
    return TritonTensorField(
        name, "TYPE_INT64" if large else types[kind], size, is_sampling_param=True
    )


_SAMPLING_PARAM_TYPE_HINTS = get_type_hints(SamplingParams)
INPUT_TENSORS = (
    TritonTensorField("text_input", "TYPE_STRING"),
    TritonTensorField("messages", "TYPE_STRING"),
    TritonTensorField("input_ids", "TYPE_INT32", VARIABLE_LENGTH),
    TritonTensorField("stream", "TYPE_BOOL"),
    TritonTensorField("cache_salt", "TYPE_STRING"),
    *(
        _sampling_param_field(name, _SAMPLING_PARAM_TYPE_HINTS[name])
        for name in _SAMPLING_INPUT_NAMES
    ),
)
OUTPUT_TENSORS = (
    TritonTensorField("text_output", "TYPE_STRING"),
    TritonTensorField("output_ids", "TYPE_INT32", VARIABLE_LENGTH),
    TritonTensorField("finish_reason", "TYPE_STRING"),
)


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request.

    Attributes:
        prompt: as ``TextProcessor.request`` takes it.
        params: how to sample.
        stream: whether deltas are sent.
    """

    prompt: Prompt | Messages
    params: SamplingParams
    stream: bool


def parse_request(tensors: Mapping[str, Any]) -> ParsedRequest:
    """Parse a request.

    Args:
        tensors: numpy arrays by name, of any shape; strings are bytes; optional ones may be absent.

    Raises:
        RequestError: a value is invalid; one line.
    """
    values = {
        field.name: _parse_tensor(field, tensors[field.name])
        for field in INPUT_TENSORS
        if field.name in tensors
    }
    sources = [name for name in ("text_input", "messages", "input_ids") if name in values]
    if len(sources) != 1:
        names = " and ".join(sources) or "none of them"
        raise RequestError(f"give one of text_input, messages and input_ids, not {names}")
    sampling = {
        field.name: values[field.name]
        for field in INPUT_TENSORS
        if field.is_sampling_param and field.name in values
    }
    return ParsedRequest(
        _select_prompt(values, sources[0]), SamplingParams(**sampling), values.get("stream", False)
    )


def _select_prompt(values: Mapping[str, Any], source: str) -> Prompt | Messages:
    salt = values.get("cache_salt", "")
    if source == "messages":
        if salt:
            raise RequestError("cache_salt belongs to text_input or input_ids, not to messages")
        return _parse_messages(values["messages"])
    key = "prompt" if source == "text_input" else "prompt_token_ids"
    return {key: values[source], "cache_salt": salt}


def _parse_messages(text: str) -> list[dict[str, Any]]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError("messages must be a JSON list of {role, content}") from None
    is_valid = (
        isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
    )
    if not is_valid:
        raise RequestError("messages must be a JSON list of {role, content}, with at least one")
    return messages


def _parse_tensor(field: TritonTensorField, array: Any) -> Any:
    values = array.reshape(-1)
    if field.size != VARIABLE_LENGTH and len(values) != field.size:
        raise RequestError(f"{field.name} has {len(values)} values; give one")
    elements = [_parse_element(field, value) for value in values.tolist()]
    return elements if field.size == VARIABLE_LENGTH else elements[0]


def _parse_element(field: TritonTensorField, value: Any) -> Any:
    if field.type == "TYPE_STRING":
        try:
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError:
            raise RequestError(f"{field.name} is not UTF-8: {quote(value, 60)}") from None
    # 0.7 was rounded to float32: its shortest decimal is the client's number
    return _shortest_decimal_float(value) if field.type == "TYPE_FP32" else value


def _shortest_decimal_float(value: float) -> float:
    import numpy

    return float(str(numpy.float32(value)))


def format_pbtxt_fields(fields: Sequence[TritonTensorField], optional: bool) -> str:
    """Format fields for config.pbtxt."""
    suffix = ", optional: true" if optional else ""
    lines = (
        f'  {{ name: "{field.name}", data_type: {field.type}, dims: [ {field.size} ]{suffix} }}'
        for field in fields
    )
    return "[\n" + ",\n".join(lines) + "\n]"
