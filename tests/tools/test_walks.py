"""The count of files on a walk, on a package made for it; the page that says what to read."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

import modelmill
from modelmill.llm import LLM
from tests.stories import build_stories
from tools.walks import FileRecorder, run_prompt

FILES = {
    "__init__.py": "",
    "start.py": "from made import helper\n\ndef start(x):\n    return helper.half(x)\n",
    "helper.py": "from made import unused\n\ndef half(x):\n    return str(x)\n",
    "unused.py": "class Unused:\n    pass\n\nunused = (lambda: 1)\n",
}
MAX_FILES = 36
"""Files that a reader opens to follow a prompt."""
FORMAT_FILES = 3
"""Files that an engine of another weight format may run more or less than the page's."""


def test_files_whose_functions_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    for name, text in FILES.items():
        (tmp_path / "made" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    recorder = FileRecorder(tmp_path / "made")
    with recorder.recording():
        module = importlib.import_module("made.start")
        recorder.pause_within(module.start)(1)
    assert not recorder.files
    with recorder.recording():
        module.start(1)
    assert recorder.files == {"start.py", "helper.py"}
    assert list(recorder.functions) == [("start.py", "start"), ("helper.py", "half")]
    assert not recorder.tensor_files
    with recorder.recording():
        module.start(torch.zeros(1))
    assert recorder.tensor_files == {"start.py", "helper.py"}


def test_the_page_is_the_walk_of_a_prompt(shared: Path, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/walks.md").read_text("utf-8")
    whole, page = page, page.partition("## The way of a weight")[0]
    listed = re.findall(r"^\| `([a-z_/]+\.py)` \| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(listed) == page.count("\n| ") - 1, "a row is not FILE, FUNCTION, TEXT"
    assert len({file for file, _ in listed}) <= MAX_FILES
    engine = build_stories(shared, tmp_path, check=False)
    recorder = FileRecorder(Path(modelmill.__file__).resolve().parent)
    run_prompt(engine, LLM, recorder)
    calls = list(recorder.functions)
    missing = [each for each in listed if each not in calls]
    assert not missing, "these do not run"
    assert listed == sorted(listed, key=calls.index), "the order of the first calls is another"
    counted = re.search(r"^\| a prompt: .* \| (\d+) \|$", whole, re.MULTILINE)
    assert counted is not None
    assert abs(len(recorder.files) - int(counted[1])) <= FORMAT_FILES, "measure the table anew"
