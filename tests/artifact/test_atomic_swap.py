"""A finished engine takes its place in one step, also where an older one stands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from modelmill.artifact import store
from modelmill.artifact.atomic_swap import atomic_swap
from modelmill.artifact.manifest import MANIFEST_FILE
from modelmill.artifact.store import EngineStaging

linux = pytest.mark.skipif(sys.platform != "linux", reason="names are exchanged by a call of Linux")


def folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / MANIFEST_FILE).write_text(text)
    return path


def make_staging(target: Path, text: str) -> EngineStaging:
    staging = EngineStaging(target, "key")
    staging.path = folder(target.parent / f".{target.name}.staging", text)
    return staging


@linux
def test_two_folders_change_places(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", "1"), folder(tmp_path / "other ünd", "2")
    assert atomic_swap(one, other)
    assert ((one / MANIFEST_FILE).read_text(), (other / MANIFEST_FILE).read_text()) == ("2", "1")


def test_nothing_moves_where_one_is_missing(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", "1")
    assert not atomic_swap(one, tmp_path / "none")
    assert (one / MANIFEST_FILE).read_text() == "1"
    assert not (tmp_path / "none").exists()


@linux
def test_an_engine_stands_at_its_place_whenever_the_replacing_is_cut_off(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def cut_off(path: Path, **_: Any) -> None:
        if path.exists():
            raise KeyboardInterrupt

    target = folder(tmp_path / "e", "old")
    staging = make_staging(target, "new")
    monkeypatch.setattr(store.shutil, "rmtree", cut_off)
    with pytest.raises(KeyboardInterrupt):
        staging.publish()
    assert (target / MANIFEST_FILE).read_text() == "new"


@pytest.mark.parametrize("can", [True, False])
@pytest.mark.parametrize("older", [True, False])
def test_only_the_new_engine_stays(
    tmp_path: Path, monkeypatch: Any, *, can: bool, older: bool
) -> None:
    if not can:
        monkeypatch.setattr(store, "atomic_swap", lambda *_: False)
    target = tmp_path / "e"
    if older:
        folder(target, "old")
        folder(tmp_path / ".e.old", "left by a build that was cut off")
    make_staging(target, "new").publish()
    assert (target / MANIFEST_FILE).read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
