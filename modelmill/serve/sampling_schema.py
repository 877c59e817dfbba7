"""Sampling fields of requests in OpenAI's format.

Requests are validated strictly: unknown fields and wrong types are errors. Fields that some clients
send and that do not change the output (metadata, user, …) are accepted and ignored; unsupported
fields that would change it are rejected by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from modelmill.core.types import MAX_STOP_STRINGS, sampling_param_range
from modelmill.serve.compatibility_fields import AccountFields
from modelmill.serve.engine_request_fields import EngineRequestFields
from modelmill.serve.logit_bias import LogitBias
from modelmill.serve.strict_models import (
    FAIL_FAST,
    ModelName,
    StrictModel,
    UnknownNullTolerantModel,
)
from modelmill.serve.structured_outputs_schema import StructuredOutputs


def sampling_field(name: str, most: float | None = None) -> Any:
    """An optional field with the range of that field of SamplingParams.

    Args:
        name: The field of SamplingParams.
        most: A lower upper bound, where OpenAI's API has one.
    """
    limits = sampling_param_range(name)
    low, high = (
        int(value) if value == int(value) else value for value in (limits.low, limits.high)
    )
    le = high if most is None else most
    return Field(None, gt=low, le=le) if limits.above_low else Field(None, ge=low, le=le)


class UnlimitedTemperature(StrictModel):
    """The temperature of APIs that have no limit of it, as OpenAI's has: that of the sampler."""

    temperature: float | None = sampling_field("temperature")


class SamplingFields(AccountFields, EngineRequestFields, UnknownNullTolerantModel):
    """Sampling fields of completions, chat completions and responses."""

    may_omit_model: ClassVar[bool] = True

    model: ModelName = ""
    temperature: float | None = sampling_field("temperature", most=2)
    top_p: float | None = sampling_field("top_p")
    stop: str | Annotated[list[str], FAIL_FAST] | None = Field(
        None, max_length=4096, description="a string, or a list of strings"
    )
    stream: bool | None = None
    seed: int | None = sampling_field("seed", most=2**63 - 1)
    presence_penalty: float | None = sampling_field("presence_penalty")
    frequency_penalty: float | None = sampling_field("frequency_penalty")
    logit_bias: LogitBias | None = Field(
        None, description="biases by token id, or a list of pairs of a token id and its bias"
    )
    # extensions, also of other engines
    top_k: int | None = sampling_field("top_k")
    min_p: float | None = sampling_field("min_p")
    repetition_penalty: float | None = sampling_field("repetition_penalty")
    min_tokens: int | None = sampling_field("min_tokens")
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = Field(
        None, max_length=MAX_STOP_STRINGS
    )
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("stop")
    @classmethod
    def _check_stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOP_STRINGS or not all(stops):
            raise ValueError(f"must have up to {MAX_STOP_STRINGS} strings that are not empty")
        return value
