"""The ``modelmill`` command: one file a verb, imported when it is called.

A verb is a module ``cli/<verb>.py`` with ``HELP`` (one line), ``Args`` (a dataclass, see ``options``) and
``run(args) -> int``, the exit code. 0: done. 1: it did not work, or a check was not passed. 2: the command line
makes no sense. 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from modelmill.cli.streams import forgiving
from modelmill.core import disk, env, heap
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.core.find import find, names, nearest

SUPPORT = (
    *("main", "options", "output", "values", "engine", "eyes", "figures", "far", "drawn"),
    *("bench_ops", "bench_serve", "serve_ray", "streams", "lines", "help_page", "terminal"),
)
"""Modules of this folder that are no verbs."""

ORDER = (
    *("pull", "inspect", "build", "run", "chat", "segment", "serve", "export", "compare", "perplexity"),
    *("summarize", "bench", "profile", "doctor"),
)
"""The order of the help page; a verb that is not named here stands behind these."""

ABOUT = "Turns a language-model checkpoint into a verified engine, and runs, compares and evaluates it."

ELSEWHERE = {"quantize": "build -q", "quantise": "build -q", "eval": "perplexity", "generate": "run", "help": "--help"}
"""Verbs of other programs, and what does it here."""


def verbs() -> list[str]:
    """Names of all verbs: the files of this folder."""
    found = [name for name in names("modelmill.cli") if name not in SUPPORT]
    return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    env.wait_asleep()
    heap.keep_freed()
    with forgiving():
        try:
            code = execute(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        except ModelmillError as error:  # stdout, which cannot be written
            code = _fail(str(error), 1)
    sys.exit(code)


def execute(argv: list[str]) -> int:
    """Run one command line; returns the exit code. A user's mistake is one line on stderr, a bug is raised."""
    import typer

    try:
        verb = _verb(argv)
        command = typer.main.get_command(_app(verb))
        code = command.main(args=argv, prog_name="modelmill", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except ModelmillError as error:
        return _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        told = disk.told(error)
        if told is None:
            raise
        return _fail(told, 1)
    except Exception as error:
        # typer carries click inside itself in its newer versions, so click's errors are known by their shape only.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _fail(_reworded(error, argv), 2)


def _verb(argv: list[str]) -> str | None:
    """The verb that is called; None for the help page. Raises UsageError for an unknown one."""
    called = next((word for word in argv if not word.startswith("-")), None)
    if called is None or (argv and argv[0] in ("--show-completion", "--install-completion")):
        return None
    name, known = called.replace("-", "_"), verbs()
    if name not in known:
        hint = ELSEWHERE.get(name) or nearest(called, known)
        raise UsageError(
            f"there is no command {called!r}; " + (f"did you mean {hint}?" if hint else f"there are {', '.join(known)}")
        )
    return name


def _app(verb: str | None) -> Any:
    """The typer application with the flags of one verb; of the others only name and help."""
    import typer

    from modelmill.cli.help_page import command_class, group_class, top_page, verb_page

    app = typer.Typer(
        name="modelmill",
        help=ABOUT,
        cls=group_class(lambda width: top_page(ABOUT, _listed_verbs(), width)),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings=_settings(),
    )
    app.callback()(_top())
    completing = "_MODELMILL_COMPLETE" in env.child()
    for name in verbs():
        module = find("modelmill.cli", name)
        assert module is not None
        call = _call(module) if completing or name == verb else _placeholder
        page = command_class(partial(verb_page, name, module))
        app.command(name, cls=page, help=module.HELP, short_help=module.HELP, context_settings=_settings())(call)
    return app


def _settings() -> dict[str, Any]:
    return {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    }


def _call(module: ModuleType) -> Callable[..., int]:
    from modelmill.cli.options import call_of

    return call_of(module.Args, module.run)


def _listed_verbs() -> list[tuple[str, str]]:
    """Every verb with its one line."""
    modules = [(name, find("modelmill.cli", name)) for name in verbs()]
    return [(name.replace("_", "-"), module.HELP) for name, module in modules if module is not None]


def _placeholder() -> None:
    """Stands in for the verbs that are not called."""


def _top() -> Callable[..., None]:
    """The command itself: --version."""
    import typer

    def show(wanted: bool) -> None:
        if wanted:
            from modelmill import __version__

            print(f"modelmill {__version__}")
            raise typer.Exit

    option = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True, callback=show)

    def top(version: bool = option) -> None:
        """Nothing of its own to do."""

    return top


def _reworded(error: Any, argv: list[str]) -> str:
    """One line for an error of the command line's parser."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    option = getattr(error, "option_name", None)
    if option and type(error).__name__ == "NoSuchOption":
        from modelmill.cli.options import flags_of

        verb = _verb(argv)
        module = find("modelmill.cli", verb) if verb else None
        known = [f"--{n}" for f in flags_of(module.Args) if not f.positional for n in f.names] if module else []
        hint = nearest(option.replace("_", "-"), known)
        text = f"there is no flag {option}" + (f"; did you mean {hint}?" if hint else "")
    text = (text[:1].lower() + text[1:]).replace("Value error, ", "", 1)
    if type(error).__name__ == "MissingParameter":
        text += _form_of(argv)
    given = _given_by(error)
    if given:
        text = text.replace("for '--", f"in {given} for '--", 1)
    if "unexpected extra argument" in text and argv[:1] == ["run"]:
        text += "; the prompt goes behind --prompt"
    verb = next((word for word in argv if not word.startswith("-")), "")
    return f"{text} (flags: modelmill {verb + ' ' if verb else ''}--help)"


def _form_of(argv: list[str]) -> str:
    """How the verb is called, for who left something out."""
    from modelmill.cli.help_page import form

    verb = _verb(argv)
    module = find("modelmill.cli", verb) if verb else None
    return "" if verb is None or module is None else f"; the form is: {form(verb, module)}"


def _given_by(error: Any) -> str | None:
    """The environment variable that a refused value stands in; None where it was given as a flag."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or param is None:
        return None
    if getattr(context.get_parameter_source(param.name), "name", "") != "ENVIRONMENT":
        return None
    named = param.envvar if isinstance(param.envvar, (list, tuple)) else [param.envvar]
    return next((each for each in named if env.flag(each.removeprefix("MODELMILL_")) is not None), None)


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(ModelmillError):  # what went wrong first is what is told
        sys.stdout.flush()
    print(f"modelmill: {' '.join(message.split())}", file=sys.stderr)
    return code
