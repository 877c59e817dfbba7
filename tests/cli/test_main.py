"""The command itself: help, exit codes, one line for a mistake and a traceback for a bug."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest

from modelmill.cli import main as command
from modelmill.cli.options import CommonArgs
from modelmill.core.errors import AcceptanceError, RequestError
from tests.run_code import run_code


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Nothing of its own."""


def install(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    module = types.ModuleType("modelmill.cli.probe")
    module.HELP, module.Args, module.run = "a probe", Args, run  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "list_subcommands", lambda: ["probe", "other"])
    monkeypatch.setattr(command, "import_module_if_exists", lambda package, name: module)


def raising(error: BaseException) -> Any:
    def run(args: Args) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            AcceptanceError("bug at layer 3,\n module o_proj"),
            1,
            "modelmill: bug at layer 3, module o_proj\n",
        ),
        (RequestError("too long; cut it"), 2, "modelmill: too long; cut it\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    install(monkeypatch, raising(error))
    assert command.run_command_line(["probe"]) == code
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", message)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        command.run_command_line(["probe"])


def test_the_exit_code_is_the_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda args: 7)
    assert command.run_command_line(["probe"]) == 7
    assert command.run_command_line(["probe", "--json"]) == 7
    with pytest.raises(SystemExit) as caught:
        command.main(["probe"])
    assert caught.value.code == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prob"], "did you mean probe?"),
        (["quantize", "model.gguf"], "did you mean build -q?"),
        (["xyzzy"], "there are probe, other"),
        (["probe", "--jsn"], "did you mean --json?"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_unknown_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    install(monkeypatch, lambda args: 0)
    assert command.run_command_line(words) == 2
    out = capsys.readouterr()
    assert message in out.err
    assert out.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build", "m", "-q", "gptq"], "modelmill build -q int4 --method gptq (flags: "),
        (["serve", "m", "-q", "awq"], "modelmill build -q int4 --method awq (flags: "),
        (["run", "m", "-q", "int3"], "'auto' (flags: modelmill run --help)"),
        (["build", "m", "--gptq"], "there is no flag --gptq (flags: "),
        (["build", "m", "--copys", "2"], "did you mean --copies?"),
    ],
)
def test_words_of_other_programs(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert command.run_command_line(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_command_line(["--help"]) == 0
    out = capsys.readouterr().out
    for name in command.list_subcommands():
        assert name in out
        assert command.run_command_line([name, "--help"]) == 0
        page = capsys.readouterr().out
        assert "--json" in page
        assert "--config" in page
    assert {
        "pull",
        "inspect",
        "build",
        "run",
        "chat",
        "compare",
        "perplexity",
        "summarize",
        "bench",
        "doctor",
    } <= set(command.list_subcommands())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from modelmill import __version__

    assert command.run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"modelmill {__version__}\n"


def modelmill(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "modelmill", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **more,
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom modelmill.cli.main import "
        "run_command_line\nrun_command_line(['--help'])\nrun_command_line(['bench', '--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'matplotlib', 'pydantic'} & "
        "set(sys.modules)\n"
        "assert heavy <= {'pydantic'}, heavy\n"
    )
    run_code(code)


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "modelmill", "--help"],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
            timeout=120,
        )
    finally:
        os.close(write)
    assert done.stderr == b""


def test_python_m_modelmill() -> None:
    done = modelmill("buidl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "modelmill: there is no command 'buidl'; did you mean build?\n"
    assert modelmill("--help").returncode == 0


def test_completion() -> None:
    words = {
        "_MODELMILL_COMPLETE": "complete_bash",
        "COMP_WORDS": "modelmill bench --input",
        "COMP_CWORD": "2",
    }
    done = modelmill(env={**os.environ, **words})
    assert "--input-len" in done.stdout


def test_alone_it_shows_the_help_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_command_line([]) == 2
    out, err = capsys.readouterr()
    assert "Commands" in out + err
    assert "(flags:" not in err


def test_a_prompt_without_its_flag(cli: Any) -> None:
    code, _, err = cli("run", "some.engine", "Hello there")
    assert code == 2
    assert "--prompt" in err


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MODELMILL_MAX_NUM_SEQS", "abc"), ("MODELMILL_KV_CACHE_DTYPE", "float7")],
)
def test_a_refused_value_of_the_environment_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    flag = "--" + variable.removeprefix("MODELMILL_").lower().replace("_", "-")
    monkeypatch.setenv(variable, value)
    assert command.run_command_line(["run", "an.engine", "--prompt", "hi"]) == 2
    assert f"invalid value in {variable} for '{flag}'" in capsys.readouterr().err
    assert command.run_command_line(["run", "an.engine", "--prompt", "hi", flag, value]) == 2
    err = capsys.readouterr().err
    assert f"invalid value for '{flag}'" in err
    assert variable not in err
    assert "Value error" not in err


@pytest.mark.parametrize(
    ("variable", "note"),
    [
        ("MODELMILL_MAX_TOKEN", "did you mean MODELMILL_MAX_TOKENS?"),
        ("MODELMILL_CACHES", "did you mean MODELMILL_CACHE?"),
        ("MODELMILL_MAX_TOKENS", None),  # another verb's flag
        ("MODELMILL_CPU_KERNELS", None),
        ("MODELMILL_SERVICE_HOST", None),  # another program's
        ("MODELMILL_TEST_MODEL", None),
        ("MODELMILL_HOME", None),
        ("MODELMILL_TOKEN", None),
    ],
)
def test_a_misspelt_variable_is_reported(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    note: str | None,
) -> None:
    monkeypatch.setenv(variable, "auto")
    command._note_misspelt_env_variables("doctor")
    err = capsys.readouterr().err
    assert err == "" if note is None else f"is called {variable};" in err and note in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("perplexity", "e", "text.txt"), "name the text file with --data"),
        (("run", "e", "text"), "pass the prompt with --prompt"),
        (("bench", "model.engine"), "the form is: modelmill bench WHAT"),
        (("inspect", "a", "b"), "the form is: modelmill inspect"),
        (("run", "e", "--temperature", "hot"), "'--temperature'"),
    ],
)
def test_a_misplaced_argument_is_answered_with_the_form(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], hint: str
) -> None:
    assert command.run_command_line(list(words)) == 2
    err = capsys.readouterr().err
    assert hint in err
    assert err.count("\n") == 1
    assert "Input should be" not in err
