"""Where the verbs write: nothing of the user's is written over in silence, and what cannot be
written is one line.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from modelmill.checkpoint.pull import download_wheel
from modelmill.cli import main as command
from modelmill.core import disk_errors
from modelmill.core.module_lookup import import_module_if_exists
from tests.cli.checkpoint_copy import change_config, copy_checkpoint

Cli = Callable[..., tuple[int, Any, str]]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {
        str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in files
    }


@pytest.fixture
def built_engine(engine: Path, tmp_path: Path) -> Path:
    """A copy of the session's engine, which is built with --dtype float32."""
    return Path(shutil.copytree(engine, tmp_path / "mine.engine"))


def test_the_same_build_again_leaves_what_is_there(
    cli: Cli, checkpoint: Path, built_engine: Path
) -> None:
    before = contents(built_engine)
    code, out, err = cli("build", checkpoint, "-o", built_engine, "--dtype", "float32")
    assert (code, err) == (0, "")
    assert f"{built_engine} is already built from this checkpoint with these options" in out
    code, output, _ = cli("build", checkpoint, "-o", built_engine, "--dtype", "float32", "--json")
    assert code == 0
    assert output["acceptance"]["accepted"] is True
    assert output["plan"]["build"]["dtype"] == "float32"
    assert contents(built_engine) == before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-q", "int8"), "quantization none there, int8 now"),
        (("--dtype", "bfloat16"), "dtype float32 there, bfloat16 now"),
        (("--max-model-len", "64"), "max-model-len"),
        (("-q", "auto", "--max-kl", "0.1"), "is an engine already"),
    ],
)
def test_another_build_replaces_nothing_without_force(
    cli: Cli, checkpoint: Path, built_engine: Path, words: tuple[str, ...], why: str
) -> None:
    before = contents(built_engine)
    options = words if "--dtype" in words else (*words, "--dtype", "float32")
    code, _, err = cli("build", checkpoint, "-o", built_engine, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert why in err
    assert "choose another -o, or replace it with --force" in err
    assert contents(built_engine) == before
    assert cli("build", checkpoint, "-o", built_engine, *options, "--dry-run")[0] == 0, (
        "a plan writes nothing"
    )


def test_force_replaces_an_engine_and_nothing_else(
    cli: Cli, checkpoint: Path, built_engine: Path, tmp_path: Path
) -> None:
    assert (
        cli("build", checkpoint, "-o", built_engine, "-q", "int8", "--no-check", "--force")[0] == 0
    )
    assert (
        json.loads((built_engine / "manifest.json").read_text())["build"]["quantization"] == "int8"
    )
    code, _, err = cli("build", checkpoint, "-o", built_engine, "-q", "int8")
    assert code == 2
    assert "built without acceptance" in err
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    code, _, err = cli("build", checkpoint, "-o", other, "--force")
    assert (code, err.count("\n")) == (2, 1)
    assert "exists and is not an engine" in err
    assert (other / "thesis.txt").read_text() == "years of work"


def test_an_engine_of_another_checkpoint_is_another_one(
    cli: Cli, checkpoint: Path, built_engine: Path, tmp_path: Path
) -> None:
    copy = copy_checkpoint(checkpoint, tmp_path / "copy")
    assert cli("build", copy, "-o", built_engine, "--dtype", "float32")[0] == 0, (
        "a copy is the same checkpoint"
    )
    change_config(copy, rms_norm_eps=1e-4)
    code, _, err = cli("build", copy, "-o", built_engine, "--dtype", "float32")
    assert code == 2
    assert "built from another checkpoint" in err


def test_a_damaged_engine_is_replaced_only_by_force(
    cli: Cli, checkpoint: Path, built_engine: Path
) -> None:
    (built_engine / "manifest.json").write_text("{")
    code, _, err = cli("build", checkpoint, "-o", built_engine, "--no-check")
    assert code == 2
    assert "cannot be opened" in err
    assert cli("build", checkpoint, "-o", built_engine, "--no-check", "--force")[0] == 0


def test_quiet_is_one_line(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    code, out, _ = cli("build", checkpoint, "-o", tmp_path / "q.engine", "--quiet")
    assert code == 0
    assert out.count("\n") == 1
    assert "is ready" in out
    assert "accepted (rounding differences only), " in out


def test_a_dump_replaces_dumps_only(
    cli: Cli, engine: Path, checkpoint: Path, tmp_path: Path
) -> None:
    words = ("run", engine, "--prompt", "Once", "--max-tokens", 1, "--dump", "layers.0.*")
    model_file, dumped = tmp_path / "model.safetensors", tmp_path / "d.safetensors"
    model_file.write_bytes((checkpoint / "model.safetensors").read_bytes())
    code, _, err = cli(*words, model_file)
    assert (code, err.count("\n")) == (2, 1)
    assert "exists and is not a dump" in err
    assert model_file.read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    for _ in range(2):
        assert cli(*words, dumped)[0] == 0
    assert "ids" in load_file(dumped)


def test_a_trace_replaces_traces_only(cli: Cli, engine: Path, tmp_path: Path) -> None:
    words = ("profile", engine, "--phase", "decode", "--prompt", 4, "--trace")
    config_file = tmp_path / "config.json"
    config_file.write_text('{"hidden_size": 64}')
    code, _, err = cli(*words, config_file)
    assert (code, err.count("\n")) == (2, 1)
    assert "exists and is not a trace" in err
    assert config_file.read_text() == '{"hidden_size": 64}'


def test_an_export_replaces_nothing(cli: Cli, engine: Path, tmp_path: Path) -> None:
    words = ("export", "triton", engine, "-o", tmp_path, "--name", "mine")
    assert cli(*words)[0] == 0
    code, _, err = cli(*words)
    assert code == 2
    assert "exists already" in err


# -- what cannot be written


@pytest.mark.parametrize("more", [(), ("-o", "{}/deep")])
def test_pull_where_nothing_can_be_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """A file in a folder's place refuses root, too."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("MODELMILL_CACHE", str(file / "cache"))
    code, out, err = cli("pull", "smollm2", *(word.format(file) for word in more))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "Not a directory" in err
    assert ("choose another -o" in err) == bool(more)
    assert ("name a folder with -o, or another cache in MODELMILL_CACHE" in err) != bool(more)


def test_a_checkpoint_where_the_cache_cannot_be_written(
    cli: Cli, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("MODELMILL_CACHE", str(file / "cache"))
    code, out, err = cli("run", checkpoint, "--prompt", "Once")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert (
        "Not a directory; name another cache folder in MODELMILL_CACHE, or build it with -o" in last
    )
    assert "choose another -o" not in err


def test_a_full_disk_is_not_called_a_missing_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_error = (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    )
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", pip_error)
    )
    with pytest.raises(OSError, match="No space left") as caught:
        download_wheel("some==1", tmp_path)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("number", sorted(disk_errors.USER_FIXABLE_ERRNOS))
def test_every_refusal_of_the_system_is_one_line_in_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def raise_os_error(_: Any) -> int:
        raise OSError(number, os.strerror(number), "/some/file")

    module = import_module_if_exists("modelmill.cli", "doctor")
    assert module is not None
    monkeypatch.setattr(module, "run", raise_os_error)
    monkeypatch.setattr(raise_os_error, "__module__", "modelmill.cli.doctor", raising=False)
    assert command.run_command_line(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"modelmill: /some/file: {os.strerror(number)}; ")
    assert err.count("\n") == 1


def test_what_may_be_a_fault_of_ours_keeps_its_traceback() -> None:
    assert (
        disk_errors.describe_user_fixable_os_error(
            FileNotFoundError(errno.ENOENT, "No such file", "x")
        )
        is None
    )
    assert (
        disk_errors.describe_user_fixable_os_error(
            ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        )
        is None
    )
    assert "change to another" in (
        disk_errors.describe_user_fixable_os_error(FileNotFoundError(errno.ENOENT, "No such file"))
        or ""
    )
    gone = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert "TMPDIR" in (disk_errors.describe_user_fixable_os_error(gone) or "")
