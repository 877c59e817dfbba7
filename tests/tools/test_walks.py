"""The count of files on a walk, on a package made for it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tools.walks import FileRecorder

FILES = {
    "__init__.py": "",
    "start.py": "from made import helper\n\ndef start(x):\n    return helper.half(x)\n",
    "helper.py": "from made import unused\n\ndef half(x):\n    return str(x)\n",
    "unused.py": "class Unused:\n    pass\n\nunused = (lambda: 1)\n",
}


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
    assert not recorder.tensor_files
    with recorder.recording():
        module.start(torch.zeros(1))
    assert recorder.tensor_files == {"start.py", "helper.py"}
