"""The clean room's own judgements; ``make clean-room`` runs it, for ten minutes a Python."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.clean_room import Report, Room, StepFailed, check_sdist, check_wheel

FILES = ["modelmill/__init__.py", "modelmill/ops/cpu/common/simd.h", "docs/index.md"]


def wheel(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def sdist(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"modelmill-0.1.0/{name}"), io.BytesIO())
    return path


def test_archives_that_carry_everything(tmp_path: Path) -> None:
    package = [name for name in FILES if name.startswith("modelmill/")]
    metadata = ["modelmill-0.1.0.dist-info/METADATA"]
    assert check_wheel(wheel(tmp_path / "a.whl", package + metadata), FILES) == "passed: 2 files"
    assert check_sdist(sdist(tmp_path / "a.tar.gz", [*FILES, "PKG-INFO"]), FILES) == (
        "passed: 3 files"
    )


def test_a_file_that_is_left_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"1 are missing: modelmill/ops/cpu/common/simd.h"):
        check_wheel(wheel(tmp_path / "a.whl", FILES[:1]), FILES)
    with pytest.raises(StepFailed, match=r"1 are missing: docs/index.md"):
        check_sdist(sdist(tmp_path / "a.tar.gz", FILES[:2]), FILES)


def test_a_wheel_with_other_packages_fails(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"also carries \['tests'\]"):
        check_wheel(wheel(tmp_path / "a.whl", [*FILES[:2], "tests/__init__.py"]), FILES[:2])


def test_a_failed_step_is_in_the_table_and_does_not_stop_the_next() -> None:
    def fails() -> str:
        raise StepFailed("it is\nbroken")

    report = Report()
    assert not report.run("here", "one", fails)
    assert report.run("here", "two", lambda: None)
    assert report.failed
    assert "| here | one | FAILED: it is broken |" in report.table()
    assert "| here | two | passed |" in report.table()


def test_a_room_has_its_own_home_and_no_compiler_unless_asked(tmp_path: Path) -> None:
    room = Room("Python", tmp_path)
    bare, usual = room.environment(compiler=False), room.environment()
    assert bare["PATH"] == str(tmp_path / "venv" / "bin")
    assert "/usr/bin" in usual["PATH"]
    assert bare["XDG_CACHE_HOME"] != usual["XDG_CACHE_HOME"]
    assert "PYTHONPATH" not in usual


def test_a_command_must_end_and_speak_as_expected(tmp_path: Path) -> None:
    room = Room("Python", tmp_path)
    (tmp_path / "work").mkdir()
    done = room.run(sys.executable, "-c", "import os; print(os.getcwd())", text=str(tmp_path))
    assert done.stdout.strip() == str(tmp_path / "work")
    with pytest.raises(StepFailed, match="exit code 3: no"):
        room.run(sys.executable, "-c", "import sys; print('no'); sys.exit(3)")
    with pytest.raises(StepFailed, match="'yes' is not in: no"):
        room.run(sys.executable, "-c", "print('no')", text="yes")
