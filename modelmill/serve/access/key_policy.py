"""API keys with a name, a priority, a share and limits, from a file in JSON or TOML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelmill.core.errors import UsageError
from modelmill.core.quoting import quote
from modelmill.core.types import MAX_INT32
from modelmill.serve.config_table_file import check_table, read_config_tables

_LIMIT_FIELDS = ("requests_per_minute", "tokens_per_minute", "max_parallel_requests")
_ENTRY_FIELDS = {"name", "key", "priority", "weight", *_LIMIT_FIELDS}


@dataclass(frozen=True)
class KeyPolicy:
    """An API key and what its requests may do.

    Attributes:
        name: in errors and metrics.
        key: the key itself.
        priority: added to the priority of its requests; lower is earlier.
        weight: its share of the tokens, relative to the other keys with waiting requests.
        requests_per_minute: limit of requests in any minute; None: none.
        tokens_per_minute: limit of prompt and output tokens in any minute.
        max_parallel_requests: limit of requests that run or wait at once.
        may_raise_priority: whether a request may send a negative priority.
    """

    name: str
    key: str = field(repr=False)
    priority: int = 0
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel_requests: int | None = None
    may_raise_priority: bool = False


def read_key_file(file: Path) -> tuple[KeyPolicy, ...]:
    """Read a list ``keys`` of tables.

    Raises:
        UsageError: it cannot be read, or an entry is invalid; no message contains a key.
    """
    entries = read_config_tables("--keys", file, "keys")
    policies = [_parse_policy(f"--keys {file}: keys[{i}]", each) for i, each in enumerate(entries)]
    for what in ("name", "key"):
        values = [getattr(each, what) for each in policies]
        if len(set(values)) < len(values):
            raise UsageError(f"--keys {file}: two entries have the same {what}")
    return tuple(policies)


def _parse_policy(where: str, raw: Any) -> KeyPolicy:
    raw = check_table(where, raw, _ENTRY_FIELDS)
    name, key = raw.get("name"), raw.get("key")
    if not isinstance(name, str) or not name.strip() or len(name) > 128:
        raise UsageError(f"{where}: name must be a string of 1 to 128 characters")
    if not isinstance(key, str) or not is_header_safe_key(key):
        raise UsageError(f"{where}: key must be printable ASCII and not empty")
    priority, weight = raw.get("priority", 0), raw.get("weight", 1.0)
    if not _is_int(priority) or abs(priority) > MAX_INT32:
        raise UsageError(f"{where}: priority must be an integer, not {quote(priority, 60)}")
    is_number = _is_int(weight) or isinstance(weight, float)
    if not is_number or not 0.001 <= weight <= 1000:
        raise UsageError(
            f"{where}: weight must be a number from 0.001 to 1000, not {quote(weight, 60)}"
        )
    limits = {limit: raw[limit] for limit in _LIMIT_FIELDS if limit in raw}
    for limit, value in limits.items():
        if not _is_int(value) or value < 1:
            raise UsageError(f"{where}: {limit} must be at least 1, not {quote(value, 60)}")
    return KeyPolicy(name, key.strip(), priority, float(weight), **limits)


def is_header_safe_key(key: str) -> bool:
    """Whether a key can be sent in a header."""
    return bool(key.strip()) and key.isascii() and key.isprintable()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
