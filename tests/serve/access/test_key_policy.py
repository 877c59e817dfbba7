"""The file of API keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.errors import UsageError
from modelmill.serve.access.key_policy import KeyPolicy, read_key_file


def test_a_file_in_json_or_toml(tmp_path: Path) -> None:
    entry = {"name": "team", "key": "secret-1", "priority": 5, "weight": 2}
    entry |= {"requests_per_minute": 60, "tokens_per_minute": 9000, "max_parallel_requests": 4}
    plain = {"name": "other", "key": "secret-2"}
    (tmp_path / "k.json").write_text(json.dumps({"keys": [entry, plain]}))
    (tmp_path / "k.toml").write_text(
        '[[keys]]\nname = "team"\nkey = "secret-1"\npriority = 5\nweight = 2\n'
        "requests_per_minute = 60\ntokens_per_minute = 9000\nmax_parallel_requests = 4\n"
        '[[keys]]\nname = "other"\nkey = "secret-2"\n'
    )
    expected = (KeyPolicy("team", "secret-1", 5, 2.0, 60, 9000, 4), KeyPolicy("other", "secret-2"))
    assert read_key_file(tmp_path / "k.json") == read_key_file(tmp_path / "k.toml") == expected
    assert "secret" not in repr(expected)


GOOD = {"name": "a", "key": "k"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"keys": []}, "must have a list keys"),
        ({"keys": ["a"]}, r"keys\[0\] must be a table"),
        ({"keys": [{**GOOD, "rpm": 3}]}, "unknown key 'rpm'; known are key"),
        ({"keys": [{"key": "k"}]}, "name must be a string"),
        ({"keys": [{"name": "a", "key": "\u00e4"}]}, "key must be printable ASCII"),
        ({"keys": [{**GOOD, "priority": 1.5}]}, "priority must be an integer, not 1.5"),
        ({"keys": [{**GOOD, "weight": 0}]}, "weight must be a number from 0.001 to 1000, not 0"),
        ({"keys": [{**GOOD, "requests_per_minute": 0}]}, "requests_per_minute must be at least 1"),
        ({"keys": [GOOD, {"name": "a", "key": "x"}]}, "two entries have the same name"),
        ({"keys": [GOOD, {"name": "b", "key": "k"}]}, "two entries have the same key"),
    ],
)
def test_what_a_file_must_not_hold(tmp_path: Path, raw: Any, message: str) -> None:
    file = tmp_path / "k.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=message):
        read_key_file(file)
    file.write_text("{")
    with pytest.raises(UsageError, match="is not valid JSON"):
        read_key_file(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_key_file(tmp_path / "none.toml")
