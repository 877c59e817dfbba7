"""Lists and objects of requests, bounded: whatever is in them, few errors are made of one.

pydantic makes an error of every element that is wrong, and of every element once more for each
shape that a field may have. A list that ends at its first error, and an object whose length is
looked at before its values, make few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

MAX_ITEMS = 4096
"""Of a list that has no smaller bound of its own: messages, items, parts."""
MAX_KEYS = 65536
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
FAIL_FAST = Field(fail_fast=True)
"""Beside a list: it is read up to its first error."""


class StrictModel(BaseModel):
    """A JSON object of ours: strict kinds, no unknown keys, no NaN.

    unused: as of ``json_body.parse``.
    """

    unused: ClassVar[Mapping[str, int]] = {}

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_key(cls, raw: Any) -> Any:
        """Of the keys that are not known one is left, which is refused: a hundred thousand would be
        an error each.
        """
        if not isinstance(raw, dict) or len(raw) <= len(cls.model_fields):
            return raw
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((key for key in raw if key not in known), None)
        return {key: raw[key] for key in raw if key in known or key == unknown}


def limit_keys(max_keys: int) -> BeforeValidator:
    """An object of up to ``max_keys`` keys that UTF-8 can write."""

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
            if not key.isascii():
                _check_key(key)
        return value

    return BeforeValidator(check)


def _check_key(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        raise PydanticKnownError("string_unicode") from None


JsonObject = Annotated[dict[str, Any], limit_keys(MAX_KEYS)]
"""Any JSON object."""
JsonObjectList = Annotated[list[JsonObject], FAIL_FAST, Field(max_length=MAX_ITEMS)]
IgnoredList = Annotated[list[Any], FAIL_FAST]
"""What is taken and not used."""
_MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY)]
_MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]
Metadata = Annotated[
    dict[_MetadataKey, _MetadataValue], limit_keys(MAX_METADATA), Field(max_length=MAX_METADATA)
]
