"""A build that dies at any moment leaves nothing half-written to load, and the next one ends with
the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from modelmill.artifact import store
from modelmill.artifact.store import is_engine_folder, open_artifact
from modelmill.artifact.verify import verify_file_hashes
from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import ArtifactError, UsageError
from tests.checkpoint.checkpoint_factory import llama_state, write_folder
from tests.trust.error_lines import check_one_line

ROOT = Path(__file__).resolve().parents[2]

# For each number: a child that builds, counts every call that changes the disk, and dies at the
# chosen one, as by a power cut. Children are forked from a process that has imported everything,
# so that each starts in no time.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from modelmill.artifact import store
from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig

calls = 0

def counted(holder, name, last):
    real = getattr(holder, name)
    def call(*args, **named):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)
    setattr(holder, name, call)

def build(last, out):
    for holder, names in ((os, "replace rename fsync unlink"), (Path, "unlink mkdir"), (store.shutil, "rmtree")):
        for name in names.split():
            counted(holder, name, last)
    build_engine.build(plan, out, lambda staged, plan: {"accepted": True, "reason": ""})

torch.set_num_threads(1)
plan = make_build_plan(open_checkpoint(Path(sys.argv[1])), BuildConfig(target="cpu"))
plan.checkpoint.fingerprint()
for at, out in zip(sys.argv[2::2], sys.argv[3::2]):
    child = os.fork()
    if not child:
        build(int(at), Path(out))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("killed" if os.WIFSIGNALED(status) else "finished", flush=True)
"""  # noqa: E501


def killed(checkpoint: Path, *places: tuple[int, Path]) -> list[str]:
    """Build into each folder and die at the given call; returns how each ended."""
    arguments = [str(part) for place in places for part in place]
    command = [sys.executable, "-c", KILLED, str(checkpoint), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def make(checkpoint: Path, out: Path, accept: Any = None) -> None:
    build_engine.build(
        make_build_plan(open_checkpoint(checkpoint), BuildConfig(target="cpu")), out, accept
    )


def contents(engine: Path) -> dict[str, str]:
    files = [p for p in engine.rglob("*") if p.is_file() and p.name != store.ACCEPTANCE_FILE]
    return {str(p.relative_to(engine)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf") / "hf", llama_state())


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "e"
    make(checkpoint, out)
    return contents(out)


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "over an older engine"])
def test_killed_at_any_moment(
    checkpoint: Path, expected: dict[str, str], tmp_path: Path, replacing: bool
) -> None:
    places = [(at, tmp_path / str(at) / "e") for at in range(1, 60)]
    if replacing:
        for _, out in places:
            make(checkpoint, out)
    ends = killed(checkpoint, *places)
    assert set(ends) == {"killed", "finished"}, "the numbers must reach past the last call"
    for (_, out), end in zip(places, ends):
        assert is_engine_folder(out) or end == "killed"
        if is_engine_folder(out):
            verify_file_hashes(open_artifact(out), force=True)
        staged = out.with_name(".e.staging")
        if staged.exists():
            with pytest.raises(ArtifactError):
                open_artifact(staged)
        make(checkpoint, out)
        assert contents(out) == expected
        assert [p.name for p in out.parent.iterdir()] == ["e"]


DAMAGES = [
    b"",
    b"[]",
    b"{",
    b'{"key": 1}',
    b'{"key": "x", "files": {"../../x": {}}}',
    b"[" * 10**5,
    None,
]


def test_a_journal_that_lies_is_not_believed(
    checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    """Files that an interrupted build left are taken over only with their sha256; a broken journal
    takes nothing.
    """
    places = [(12, tmp_path / str(i) / "e") for i in range(len(DAMAGES))]
    killed(checkpoint, *places)
    for damage, (_, out) in zip(DAMAGES, places):
        staging = out.with_name(".e.staging")
        assert list((staging / "weights").iterdir())
        if damage is None:
            for file in (staging / "weights").iterdir():
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
        else:
            (staging / "journal.json").write_bytes(damage)
        make(checkpoint, out)
        assert contents(out) == expected


@pytest.mark.parametrize(
    "entry", [None, 5, [], {}, {"sha256": "x"}, {"bytes": 1}, {"sha256": 1, "bytes": "x"}], ids=str
)
def test_a_journal_with_the_right_key_and_wrong_entries(
    checkpoint: Path, expected: dict[str, str], tmp_path: Path, entry: Any
) -> None:
    import json

    out = tmp_path / "e"
    plan = make_build_plan(open_checkpoint(checkpoint), BuildConfig(target="cpu"))
    staging = tmp_path / ".e.staging"
    (staging / "weights").mkdir(parents=True)
    (staging / "weights" / "embedding_and_head.safetensors").write_bytes(b"x")
    (staging / "journal.json").write_text(
        json.dumps(
            {"key": plan.resume_key(), "files": {"weights/embedding_and_head.safetensors": entry}}
        )
    )
    make(checkpoint, out)
    assert contents(out) == expected


def test_a_stranger_in_the_staging_folder_does_not_reach_the_engine(
    checkpoint: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "e"
    killed(checkpoint, (12, out))
    staging = tmp_path / ".e.staging"
    (staging / "evil.py").write_text("")
    (staging / "weights" / "more.safetensors").write_bytes(b"x")
    (staging / "weights" / "link").symlink_to("/etc/passwd")
    make(checkpoint, out)
    assert contents(out) == expected


@pytest.mark.parametrize("error", ["EROFS", "EACCES", "ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("call", ["replace", "fsync", "rename"])
def test_a_disk_that_refuses(
    checkpoint: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: str,
) -> None:
    import errno

    def refuse(*args: Any) -> None:
        raise OSError(getattr(errno, error), os.strerror(getattr(errno, error)))

    out = tmp_path / "e"
    with monkeypatch.context() as patch:
        patch.setattr(store.os, call, refuse)
        with pytest.raises(ArtifactError) as raised:
            make(checkpoint, out)
    check_one_line(raised.value)
    assert not out.exists()
    make(checkpoint, out)
    assert contents(out) == expected


def test_a_folder_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (
        tmp_path / "file" / "e",
        tmp_path / "file",
        Path("/proc/modelmill/e"),
        tmp_path / ("e" * 300),
    ):
        with pytest.raises((ArtifactError, UsageError)) as raised:
            make(checkpoint, out)
        check_one_line(raised.value)


def test_two_builders_at_once(checkpoint: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """One builds, the other gets an error; a later one finds a free folder."""
    out, inside, leave = tmp_path / "e", threading.Event(), threading.Event()

    def slow(staged: Path, plan: Any) -> dict[str, Any]:
        inside.set()
        assert leave.wait(60)
        return {"accepted": True, "reason": ""}

    first = threading.Thread(target=make, args=(checkpoint, out, slow))
    first.start()
    assert inside.wait(60)
    for _ in range(3):
        with pytest.raises(ArtifactError, match="another build") as raised:
            make(checkpoint, out)
        check_one_line(raised.value)
    leave.set()
    first.join(60)
    assert contents(out) == expected
    make(checkpoint, out)
    assert contents(out) == expected


def test_a_checkpoint_that_changes_while_it_is_built(checkpoint: Path, tmp_path: Path) -> None:
    """An interrupted build of other weights under the same path is not resumed."""
    out, source = tmp_path / "e", tmp_path / "hf"
    write_folder(source, llama_state(seed=1))
    killed(source, (12, out))
    write_folder(source, llama_state(seed=2))
    make(source, out)
    write_folder(tmp_path / "other", llama_state(seed=2))
    make(tmp_path / "other", tmp_path / "f")
    weights = {n: d for n, d in contents(out).items() if n.startswith("weights")}
    assert weights == {n: d for n, d in contents(tmp_path / "f").items() if n.startswith("weights")}
