"""Catalogues: a folder of engines, and files in JSON and TOML."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.errors import UsageError
from modelmill.serve.catalogue.entries import (
    CatalogueEntry,
    check_entries,
    is_models_folder,
    read_catalogue_file,
    read_models_folder,
)


def make_engine(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    return path


def test_a_folder_lists_its_engines(tmp_path: Path) -> None:
    second, first = make_engine(tmp_path, "b.engine"), make_engine(tmp_path, "a")
    (tmp_path / "notes").mkdir()
    make_engine(tmp_path, ".staging")
    assert read_models_folder(tmp_path) == [CatalogueEntry("a", first), CatalogueEntry("b", second)]


def test_a_folder_without_engines_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no engine"):
        read_models_folder(tmp_path)
    with pytest.raises(UsageError, match="is not a folder"):
        read_models_folder(tmp_path / "none")


def test_a_file_in_json_or_toml(tmp_path: Path) -> None:
    path = make_engine(tmp_path, "m.engine")
    entry = {"name": "large", "engine": "m.engine", "pinned": True, "idle_timeout": "10m"}
    entry |= {"aliases": ["gpt-4o"], "kv_cache_bytes": 1000}
    (tmp_path / "c.json").write_text(json.dumps({"models": [entry, {"engine": str(path)}]}))
    (tmp_path / "c.toml").write_text(
        '[[models]]\nname = "large"\nengine = "m.engine"\npinned = true\nidle_timeout = "10m"\n'
        'aliases = ["gpt-4o"]\nkv_cache_bytes = 1000\n[[models]]\nengine = "m.engine"\n'
    )
    expected = [
        CatalogueEntry("large", path, True, 600.0, ("gpt-4o",), 1000),
        CatalogueEntry("m", path),
    ]
    assert (
        read_catalogue_file(tmp_path / "c.json")
        == read_catalogue_file(tmp_path / "c.toml")
        == expected
    )
    check_entries(expected, ["other"])


def test_sizes_may_have_a_unit(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"models": [{"engine": "m", "kv_cache_bytes": "2MiB"}]}')
    assert read_catalogue_file(tmp_path / "c.json")[0].kv_cache_bytes == 2 << 20


def test_a_folder_of_engines_is_no_model_itself(tmp_path: Path) -> None:
    path = make_engine(tmp_path, "m")
    assert is_models_folder(tmp_path)
    assert not is_models_folder(path)
    assert not is_models_folder(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    assert not is_models_folder(tmp_path)


def test_a_negative_idle_timeout_is_forever(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"models": [{"engine": "m", "idle_timeout": -1}]}')
    assert read_catalogue_file(tmp_path / "c.json")[0].idle_timeout == math.inf


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "must have a list models"),
        ({"models": []}, "must have a list models"),
        ({"models": [{}], "x": 1}, "must have a list models"),
        ({"models": [3]}, r"models\[0\] must be a table"),
        ({"models": [{"engine": "m", "pined": True}]}, "unknown key 'pined'; known are aliases"),
        ({"models": [{"name": "m"}]}, "engine is missing"),
        ({"models": [{"engine": 3}]}, "engine must be a string, not 3"),
        ({"models": [{"engine": "m", "pinned": 1}]}, "pinned must be true or false"),
        ({"models": [{"engine": "m", "aliases": [1]}]}, "name and aliases must be strings"),
        ({"models": [{"engine": "m", "kv_cache_bytes": True}]}, "kv_cache_bytes must be an int"),
        ({"models": [{"engine": "m", "kv_cache_bytes": "much"}]}, "must be bytes or a size"),
        ({"models": [{"engine": "m", "kv_cache_bytes": 0}]}, "kv_cache_bytes must be at least 1"),
        ({"models": [{"engine": "m", "idle_timeout": "soon"}]}, "idle_timeout must be seconds"),
        ({"models": [{"engine": "m", "idle_timeout": []}]}, "idle_timeout must be seconds"),
    ],
)
def test_what_a_file_must_not_hold(tmp_path: Path, raw: Any, message: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=message):
        read_catalogue_file(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("models = [")
    with pytest.raises(UsageError, match="is not valid TOML"):
        read_catalogue_file(tmp_path / "c.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_catalogue_file(tmp_path / "none.json")


def test_names_are_unique_and_engines_are_there(tmp_path: Path) -> None:
    path = make_engine(tmp_path, "m")
    with pytest.raises(UsageError, match="two engines would be served as x"):
        check_entries([CatalogueEntry("m", path, aliases=("x",))], ["x"])
    with pytest.raises(UsageError, match="is no engine folder"):
        check_entries([CatalogueEntry("n", tmp_path / "n")], [])
