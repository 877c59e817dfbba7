"""Where an engine may be written: what stands there is only replaced where it is an engine."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from modelmill.artifact import store
from modelmill.artifact.manifest import MANIFEST_FILE
from modelmill.artifact.store import EngineStaging, open_artifact
from modelmill.core.errors import ArtifactError, UsageError

OURS = '{"schema": 1, "packing": "any", "files": {}}'


def make_artifact(target: Path, text: str = OURS) -> Path:
    """A build that was finished."""
    staging = EngineStaging(target, "key")
    staging.open()
    (staging.path / MANIFEST_FILE).write_text(text)
    staging.publish()
    staging.close()
    return target


@pytest.mark.parametrize(
    "manifest", ['{"name": "my web app"}', "[]", "{", '"files"', '{"schema": 1}', "[" * 10**5]
)
def test_the_folder_of_another_program_is_left_alone(tmp_path: Path, manifest: str) -> None:
    """Web apps and browser extensions have a manifest.json, too."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / MANIFEST_FILE).write_text(manifest)
    (folder / "main.js").write_text("work of years")
    with pytest.raises(UsageError, match="is not an engine"):
        EngineStaging(folder, "key").open()
    assert (folder / "main.js").read_text() == "work of years"
    assert [path.name for path in tmp_path.iterdir()] == ["app"]


@pytest.mark.parametrize(
    "manifest", [OURS, '{"schema": 99, "packing": "later", "files": {}, "more": 1}', "damaged"]
)
def test_an_engine_of_any_version_is_replaced(tmp_path: Path, manifest: str) -> None:
    folder = tmp_path / "e"
    (folder / "weights").mkdir(parents=True)
    (folder / MANIFEST_FILE).write_text(manifest)
    make_artifact(folder, OURS)
    assert (folder / MANIFEST_FILE).read_text() == OURS
    assert not (folder / "weights").exists()


@pytest.mark.parametrize("there", ["engine", "empty", "nothing"])
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path, there: str) -> None:
    real, link = tmp_path / "v1", tmp_path / "current"
    if there == "engine":
        make_artifact(real, '{"schema": 1, "packing": "old", "files": {}}')
    elif there == "empty":
        real.mkdir()
    link.symlink_to("v1")
    for _ in range(2):
        make_artifact(link)
        assert link.is_symlink()
        assert (real / MANIFEST_FILE).read_text() == OURS
        assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "v1"]


def test_the_folder_one_is_in(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="another -o"):
        EngineStaging(Path(), "key").open()


def test_a_disk_that_is_full_at_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    staging = EngineStaging(tmp_path / "e", "key")
    with monkeypatch.context() as patch:
        patch.setattr(
            store.Path, "mkdir", lambda self, **options: full() if self == staging.path else None
        )
        with pytest.raises(ArtifactError, match="No space left"):
            staging.open()
    # nothing holds the place
    make_artifact(tmp_path / "e")


def test_a_place_that_cannot_be_taken_is_reported_and_only_the_move_is_left(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def busy(*_: Any) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    staging = EngineStaging(tmp_path / "e", "key")
    staging.open()
    staging.write_hashed_file("weights/a.bin", b"1234")
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "rename", busy)
        with pytest.raises(ArtifactError, match="cannot be moved"):
            staging.publish()
    staging.close()
    again = EngineStaging(tmp_path / "e", "key")
    again.open()
    assert set(again.finished_files) == {"weights/a.bin"}
    again.close()


def test_only_a_build_in_the_making_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as error:
        open_artifact(make_artifact(tmp_path / "e.staging", "{}"))
    assert "unfinished" not in str(error.value)
    make_artifact(tmp_path / ".e.staging", "{}")
    with pytest.raises(ArtifactError, match="unfinished"):
        open_artifact(tmp_path / ".e.staging")
