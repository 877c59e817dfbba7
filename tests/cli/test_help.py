"""Help pages at every width: names are whole, examples can be copied, and a
missing argument shows the usage.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from modelmill.cli import main as command
from modelmill.cli.help_page import usage_line
from modelmill.cli.options import collect_cli_parameters
from modelmill.core.module_lookup import import_module_if_exists

WIDTHS = (40, 60, 80, 100, 120)
VERBS = command.list_subcommands()
MISSING = {
    "build": "CHECKPOINT",
    "compare": "ENGINE",
    "export": "FORM",
    "inspect": "PATH",
    "perplexity": "ENGINE",
    "profile": "ENGINE",
    "pull": "NAME",
    "run": "ENGINE",
    "segment": "ENGINE",
    "summarize": "ENGINE",
    "bench": "WHAT",
}


def page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, *words: str
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert command.run_command_line([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_name_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, width: int
) -> None:
    help_text = page(monkeypatch, capsys, width, verb)
    words = {word.rstrip(",") for word in help_text.split()}
    module = import_module_if_exists("modelmill.cli", verb)
    assert module is not None
    for flag in collect_cli_parameters(module.Args):
        if flag.hidden:
            continue
        names = [flag.label] if flag.positional else [f"--{name}" for name in flag.names]
        names += [name for name in flag.short if name.startswith("-")]
        names += [f"--no-{flag.long}"] if flag.negatable else []
        missing = [name for name in names if name not in words]
        assert not missing, f"{missing} of {verb} at {width} columns"
        assert all(str(choice) in help_text for choice in flag.choices), flag.name
    assert {"--help", "-h"} <= words


@pytest.mark.parametrize("verb", VERBS)
def test_lines_keep_to_the_width_but_for_what_is_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    help_text = page(monkeypatch, capsys, 80, verb)
    module = import_module_if_exists("modelmill.cli", verb)
    epilog_lines = {line.strip() for line in getattr(module, "EPILOG", "").splitlines()}
    for line in help_text.splitlines():
        assert len(line) <= 80 or line.strip() in epilog_lines or line.startswith("Usage: "), line


@pytest.mark.parametrize("verb", VERBS)
def test_examples_are_there_as_they_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    module = import_module_if_exists("modelmill.cli", verb)
    assert module is not None
    examples = [
        line.strip()
        for line in getattr(module, "EPILOG", "").partition("Examples:")[2].splitlines()
        if line
    ]
    assert verb in ("inspect", "doctor") or examples
    help_lines = page(monkeypatch, capsys, 60, verb).splitlines()
    assert all(f"  {example}" in help_lines for example in examples if example)
    assert help_lines[0] == f"Usage: {usage_line(verb, module)}"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_top_page_names_every_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    help_text = page(monkeypatch, capsys, width)
    assert all(re.search(rf"^  {verb}\b", help_text, re.MULTILINE) for verb in VERBS)
    assert all(
        name in help_text
        for name in ("--version", "--install-completion", "--show-completion", "--help")
    )


@pytest.mark.parametrize("verb", MISSING)
def test_a_missing_argument_shows_the_usage(
    cli: Callable[..., tuple[int, Any, str]], verb: str
) -> None:
    code, out, err = cli(verb)
    assert (code, out, err.count("\n")) == (2, "", 1)
    module = import_module_if_exists("modelmill.cli", verb)
    assert module is not None
    assert MISSING[verb] in err.partition(";")[0]
    assert f"the form is: {usage_line(verb, module)}" in err
    if "Examples:" in getattr(module, "EPILOG", ""):
        assert f"for example: modelmill {verb} " in err


def test_a_flag_that_cannot_be_left_out_is_named_with_the_usage(
    cli: Callable[..., tuple[int, Any, str]],
) -> None:
    for verb in ("perplexity", "summarize"):
        code, _, err = cli(verb, "an.engine")
        assert code == 2
        assert "--data is missing" in err
        assert f"the form is: modelmill {verb} ENGINE --data " in err


def test_help_as_a_word_is_understood(cli: Callable[..., tuple[int, Any, str]]) -> None:
    assert "did you mean --help?" in cli("help")[2]


def test_pages_are_coloured_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from modelmill.cli import help_page

    assert "\x1b" not in page(monkeypatch, capsys, 80, "run")
    monkeypatch.setattr(help_page, "_use_color", lambda: True)
    module = import_module_if_exists("modelmill.cli", "run")
    assert module is not None
    help_text = help_page.subcommand_help_page("run", module, 80)
    assert "\x1b[36m--raw\x1b[0m" in help_text
    assert re.sub(r"\x1b\[\d+m", "", help_text) == page(monkeypatch, capsys, 80, "run")
