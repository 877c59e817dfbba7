"""``run --file``: what a line or the command line says is done or refused, and never dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TALK = {"messages": [{"role": "user", "content": "Hi"}]}
IDS = {"prompt_token_ids": [1, 403, 407]}


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        (TALK, ("--system", "be short"), "--system goes before a prompt"),
        (IDS, ("--system", "be short"), "--system goes before a prompt"),
        ({"text": "Once"}, ("--system", "be short"), "--system goes before a prompt"),
        ({"prompt": "Once", "temperature": 0.5}, (), "line 1: nothing reads 'temperature'"),
        (
            {"prompt": "Once", "system": "x", "max_tokens": 1, "id": 1},
            (),
            "nothing reads 'max_tokens', 'system'",
        ),
        ({"prompt": "Once", "text": "Twice"}, (), "line 1: has prompt and text; give only one"),
        ({"promt": "Once"}, (), "line 1: has none of"),
    ],
)
def test_nothing_is_dropped(
    cli: Any,
    engine: Path,
    tmp_path: Path,
    line: dict[str, Any],
    words: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text(json.dumps(line) + "\n")
    code, out, err = cli("run", engine, "--file", file, "--chat-template", "chatml", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_a_data_set_tells_of_its_lines_is_left_alone(
    cli: Any, engine: Path, tmp_path: Path
) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text('{"id": 7, "category": "stories", "text": "Once upon"}\n')
    assert cli("run", engine, "--file", file, "--max-tokens", 1, "--json")[0] == 0


def test_a_system_message_before_a_prompt_of_a_file(cli: Any, engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    file.write_text('{"prompt": "Hi"}\n')
    words = (
        "run",
        engine,
        "--file",
        file,
        "--chat-template",
        "chatml",
        "--max-tokens",
        1,
        "--json",
    )
    lengths = [
        len(cli(*words, *more)[1][0]["prompt_token_ids"]) for more in ((), ("--system", "be short"))
    ]
    assert lengths[0] < lengths[1]
