"""A flag that needs an extra is refused before anything is opened, measured or written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli.main import run_command_line

ABSENT = Path("no-such.engine")
PLOT = ("--plot", "x.png")


@pytest.mark.parametrize(
    ("module", "flag", "words"),
    [
        ("matplotlib", "--plot", ("bench", "latency", ABSENT, *PLOT)),
        ("matplotlib", "--plot", ("bench", "throughput", ABSENT, *PLOT)),
        ("matplotlib", "--plot", ("bench", "startup", ABSENT, *PLOT)),
        ("matplotlib", "--plot", ("bench", "ops", *PLOT)),
        ("matplotlib", "--plot", ("bench", "serve", "--url", "http://127.0.0.1:9", *PLOT)),
        ("matplotlib", "--plot", ("compare", ABSENT, ABSENT, *PLOT)),
        ("transformers", "--reference", ("bench", "latency", ABSENT, "--reference", "hf")),
        (
            "transformers",
            "--reference",
            ("perplexity", ABSENT, "--data", ABSENT, "--reference", ABSENT),
        ),
        (
            "transformers",
            "--reference",
            ("summarize", ABSENT, "--data", ABSENT, "--reference", ABSENT),
        ),
        ("rouge_score", "ROUGE", ("summarize", ABSENT, "--data", ABSENT)),
    ],
)
def test_an_absent_extra_is_said_first(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    flag: str,
    words: tuple[object, ...],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    assert run_command_line([str(word) for word in words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{flag} needs {module.replace('_', '-')}" in err
    assert "; install it with: pip install -e '" in err


@pytest.mark.parametrize("name", ["x.nope", "."])
def test_a_plot_that_cannot_be_written_is_refused_first(cli: Any, name: str) -> None:
    pytest.importorskip("matplotlib")
    for words in (("bench", "latency", ABSENT), ("compare", ABSENT, ABSENT)):
        code, out, err = cli(*words, "--plot", name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"--plot {name}" in err
