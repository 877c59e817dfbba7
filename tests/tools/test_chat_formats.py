"""The tool that checks chat formats, and the table of docs/chat-formats.md."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from tools.chat_formats import __main__ as command
from tools.chat_formats import check_answers, page
from tools.chat_formats.random_answers import random_case, random_cuts

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_repository_is_fresh() -> None:
    assert page.main(["--check"]) == 0, "run `make chat-formats` and commit what it writes"
    text = (ROOT / page.PAGE).read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name in list_chat_formats())


def test_a_changed_table_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    passed = f"{page.BEGIN_PASSED}x\n{page.END_PASSED}"
    (tmp_path / page.PAGE).write_text(f"a\n{page.BEGIN}x\n{page.END}{passed}b\n", encoding="utf-8")
    assert page.main(["--root", str(tmp_path), "--check"]) == 1
    assert "run `make chat-formats`" in capsys.readouterr().err
    assert page.main(["--root", str(tmp_path)]) == 0
    assert (tmp_path / page.PAGE).read_text(encoding="utf-8").endswith(f"{page.END_PASSED}b\n")
    assert page.main(["--root", str(tmp_path), "--check"]) == 0


def test_cuts_lose_nothing() -> None:
    rng = random.Random(1)
    assert all("".join(random_cuts("é" * size, rng)) == "é" * size for size in range(0, 300, 7))


def test_cases_vary() -> None:
    cases = [random_case(load_chat_syntax("hermes"), random.Random(seed)) for seed in range(60)]
    assert {len(case.answer.calls) for case in cases} >= {0, 1, 2}
    assert {bool(case.answer.content) for case in cases} == {True, False}
    assert {case.thinks for case in cases} == {True, False}


def test_a_parser_that_loses_a_call_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--count", "40", "--format", "hermes"]
    monkeypatch.setattr("sys.argv", ["tools.chat_formats", *arguments])
    assert command.main() == 0
    make = check_answers.make_answer_parser

    def one_call(*args: object, **options: object) -> object:
        return make(*args, **options, max_calls=1)  # type: ignore[arg-type]

    monkeypatch.setattr(check_answers, "make_answer_parser", one_call)
    assert command.main() == 1
    assert "hermes: seed " in capsys.readouterr().err
