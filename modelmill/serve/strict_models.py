"""Bounded lists and objects of requests: invalid ones produce few errors.

pydantic reports an error for every invalid element, once for each type that a field may have. Lists
therefore stop at their first error, and objects are checked for size before their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticKnownError

MAX_ITEMS = 4096
"""Limit of lists without a smaller limit of their own: messages, items, parts."""
MAX_OBJECT_KEYS = 65536
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
FAIL_FAST = Field(fail_fast=True)
"""Marks a list: validation stops at its first error."""


class StrictModel(BaseModel):
    """A JSON object: strict types, no unknown keys, no NaN.

    unused: as in ``gil_yielding_json_parser.parse_json``. may_omit_model: without a model, the only
    one answers.
    """

    unused: ClassVar[Mapping[str, int]] = {}
    may_omit_model: ClassVar[bool] = False

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, raw: Any) -> Any:
        """Keep one of the unknown keys, which is then rejected.

        A hundred thousand would be an error each.
        """
        if not isinstance(raw, dict) or len(raw) <= len(cls.model_fields):
            return raw
        known = accepted_field_names(cls)
        unknown = next((key for key in raw if key not in known), None)
        return {key: raw[key] for key in raw if key in known or key == unknown}


class UnknownNullTolerantModel(StrictModel):
    """Drops unknown fields that are null: clients send all that they know (functions: null)."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or None not in raw.values():
            return raw
        known = accepted_field_names(cls)
        return {key: each for key, each in raw.items() if each is not None or key in known}


def accepted_field_names(model: type[BaseModel]) -> set[str]:
    """The keys that a model takes."""
    return {field.alias or name for name, field in model.model_fields.items()}


def make_object_keys_validator(max_keys: int) -> BeforeValidator:
    """Validator of an object: up to ``max_keys`` keys, all of which UTF-8 can encode."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > max_keys:
            sizes = {
                "field_type": "Dictionary",
                "max_length": max_keys,
                "actual_length": len(value),
            }
            raise PydanticKnownError("too_long", sizes)
        for key in value:
            require_utf8_encodable(key)
        return value

    return BeforeValidator(check)


def require_utf8_encodable(text: str) -> str:
    """Return a text that UTF-8 can encode; an unpaired surrogate is pydantic's error of strings.

    pydantic itself checks only strings with a limit.
    """
    if not is_utf8_encodable(text):
        raise PydanticKnownError("string_unicode")
    return text


def is_utf8_encodable(text: str) -> bool:
    """Whether UTF-8 can encode a text: it has no unpaired surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Text = Annotated[str, AfterValidator(require_utf8_encodable)]
"""A string that the model reads."""


ModelName = Annotated[
    str,
    BeforeValidator(lambda value: "" if value is None else value),
    Field(max_length=1024),
    WithJsonSchema({"anyOf": [{"type": "string", "maxLength": 1024}, {"type": "null"}]}),
]
"""Name of a model; "": the only one that is served."""
JsonObject = Annotated[dict[str, Any], make_object_keys_validator(MAX_OBJECT_KEYS)]
"""Any JSON object."""
JsonObjectList = Annotated[list[JsonObject], FAIL_FAST, Field(max_length=MAX_ITEMS)]
IgnoredList = Annotated[list[Any], FAIL_FAST]
"""A list that is accepted and ignored."""
_MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY)]
_MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
Metadata = Annotated[
    dict[_MetadataKey, _MetadataValue],
    make_object_keys_validator(MAX_METADATA),
    Field(max_length=MAX_METADATA),
]
