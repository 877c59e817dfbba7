"""Small files beside the weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import Mamba2Config

from modelmill.checkpoint.side_files import read_json, read_tokenizer_files
from modelmill.core.errors import CorruptCheckpoint


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    Mamba2Config(num_heads=8, head_dim=16, hidden_size=64).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_json(tmp_path / "config.json")["time_step_limit"] == [0.0, math.inf]


def test_other_objects_with_that_key_stay(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": {"__float__": "1.5"}, "b": {"__float__": "NaN", "c": 1}}')
    assert read_json(file) == {"a": {"__float__": "1.5"}, "b": {"__float__": "NaN", "c": 1}}


@pytest.mark.parametrize("text", ["[]", '{"a": ', '{"__float__": "Infinity"}'])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_further_chat_templates_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("additional_chat_templates/tool_use.jinja", "additional_chat_templates/a.txt",
                 "elsewhere/rag.jinja"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    more = "additional_chat_templates/tool_use.jinja"
    assert read_tokenizer_files(tmp_path) == {"tokenizer.json": b"{}", more: more.encode()}
