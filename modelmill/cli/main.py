"""The ``modelmill`` command: one file a verb, imported when it is called.

A verb is a module ``cli/<verb>.py`` with ``HELP`` (one line), ``Args`` (a dataclass, see
``options``) and
``run(args) -> int``, the exit code. 0: done. 1: it did not work, or a check was not passed. 2: the
command line
makes no sense. 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from modelmill.cli.stdio import tolerate_closed_output
from modelmill.core import disk_errors, env, malloc
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.core.registry import closest_name, find_module, module_names

NOT_VERBS = (
    *(
        "main",
        "options",
        "output",
        "option_sources",
        "engine_options",
        "vision_flags",
        "bench_report",
    ),
    *("bench_ops", "bench_serve", "serve_ray", "stdio", "log_progress", "help_page", "terminal"),
    *("remote_chat", "segment_output"),
)
"""Modules of this folder that are no verbs."""

VERB_ORDER = (
    *(
        "pull",
        "inspect",
        "build",
        "run",
        "chat",
        "segment",
        "serve",
        "export",
        "compare",
        "perplexity",
    ),
    *("summarize", "bench", "profile", "doctor"),
)
"""The order of the help page; a verb that is not named here stands behind these."""

DESCRIPTION = (
    "Turns a language-model checkpoint into a verified engine, and runs, compares and evaluates it."
)

OTHER_NAMES = {
    "quantize": "build -q",
    "quantise": "build -q",
    "eval": "perplexity",
    "generate": "run",
    "help": "--help",
}
"""Verbs of other programs, and what does it here."""


def verbs() -> list[str]:
    """Names of all verbs: the files of this folder."""
    found = [name for name in module_names("modelmill.cli") if name not in NOT_VERBS]
    return sorted(
        found,
        key=lambda name: (VERB_ORDER.index(name) if name in VERB_ORDER else len(VERB_ORDER), name),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    env.set_passive_waiting()
    malloc.set_malloc_thresholds()
    with tolerate_closed_output():
        try:
            code = execute(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        except ModelmillError as error:  # stdout, which cannot be written
            code = _fail(str(error), 1)
    sys.exit(code)


def execute(argv: list[str]) -> int:
    """Run one command line; returns the exit code.

    A user's mistake is one line on stderr, a bug is raised.
    """
    import typer

    try:
        verb = _find_verb(argv)
        command = typer.main.get_command(_make_app(verb))
        code = command.main(args=argv, prog_name="modelmill", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except ModelmillError as error:
        return _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        told = disk_errors.describe_os_error(error)
        if told is None:
            raise
        return _fail(told, 1)
    except Exception as error:
        # typer carries click inside itself in its newer versions, so click's errors are known by
        # their shape only.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _fail(_usage_error_text(error, argv), 2)


def _find_verb(argv: list[str]) -> str | None:
    """The verb that is called; None for the help page. Raises UsageError for an unknown one."""
    called = next((word for word in argv if not word.startswith("-")), None)
    if called is None or (argv and argv[0] in ("--show-completion", "--install-completion")):
        return None
    name, known = called.replace("-", "_"), verbs()
    if name not in known:
        hint = OTHER_NAMES.get(name) or closest_name(called, known)
        raise UsageError(
            f"there is no command {called!r}; "
            + (f"did you mean {hint}?" if hint else f"there are {', '.join(known)}")
        )
    return name


def _make_app(verb: str | None) -> Any:
    """The typer application with the flags of one verb; of the others only name and help."""
    import typer

    from modelmill.cli.help_page import command_class, group_class, top_page, verb_page

    app = typer.Typer(
        name="modelmill",
        help=DESCRIPTION,
        cls=group_class(lambda width: top_page(DESCRIPTION, _listed_verbs(), width)),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings=_typer_settings(),
    )
    app.callback()(_top_callback())
    completing = "_MODELMILL_COMPLETE" in env.child_env()
    for name in verbs():
        module = find_module("modelmill.cli", name)
        assert module is not None
        call = _verb_function(module) if completing or name == verb else _placeholder
        page = command_class(partial(verb_page, name, module))
        app.command(
            name,
            cls=page,
            help=module.HELP,
            short_help=module.HELP,
            context_settings=_typer_settings(),
        )(call)
    return app


def _typer_settings() -> dict[str, Any]:
    return {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    }


def _verb_function(module: ModuleType) -> Callable[..., int]:
    from modelmill.cli.options import make_command

    return make_command(module.Args, module.run)


def _listed_verbs() -> list[tuple[str, str]]:
    """Every verb with its one line."""
    modules = [(name, find_module("modelmill.cli", name)) for name in verbs()]
    return [(name.replace("_", "-"), module.HELP) for name, module in modules if module is not None]


def _placeholder() -> None:
    """Stands in for the verbs that are not called."""


def _top_callback() -> Callable[..., None]:
    """The command itself: --version."""
    import typer

    def show(wanted: bool) -> None:
        if wanted:
            from modelmill import __version__

            print(f"modelmill {__version__}")
            raise typer.Exit

    option = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=show
    )

    def top(version: bool = option) -> None:
        """Nothing of its own to do."""

    return top


def _usage_error_text(error: Any, argv: list[str]) -> str:
    """One line for an error of the command line's parser."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    option = getattr(error, "option_name", None)
    if option and type(error).__name__ == "NoSuchOption":
        from modelmill.cli.options import collect_flags

        verb = _find_verb(argv)
        module = find_module("modelmill.cli", verb) if verb else None
        known = (
            [f"--{n}" for f in collect_flags(module.Args) if not f.positional for n in f.names]
            if module
            else []
        )
        hint = closest_name(option.replace("_", "-"), known)
        text = f"there is no flag {option}" + (f"; did you mean {hint}?" if hint else "")
    text = (text[:1].lower() + text[1:]).replace("Value error, ", "", 1)
    if type(error).__name__ == "MissingParameter":
        text += _verb_usage(argv)
    given = _source_variable(error)
    if given:
        text = text.replace("for '--", f"in {given} for '--", 1)
    if "unexpected extra argument" in text and argv[:1] == ["run"]:
        text += "; the prompt goes behind --prompt"
    verb = next((word for word in argv if not word.startswith("-")), "")
    return f"{text} (flags: modelmill {verb + ' ' if verb else ''}--help)"


def _verb_usage(argv: list[str]) -> str:
    """How the verb is called, for who left something out."""
    from modelmill.cli.help_page import short_usage

    verb = _find_verb(argv)
    module = find_module("modelmill.cli", verb) if verb else None
    return "" if verb is None or module is None else f"; the form is: {short_usage(verb, module)}"


def _source_variable(error: Any) -> str | None:
    """The environment variable that a refused value stands in; None where it was given as a
    flag.
    """
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or param is None:
        return None
    if getattr(context.get_parameter_source(param.name), "name", "") != "ENVIRONMENT":
        return None
    named = param.envvar if isinstance(param.envvar, (list, tuple)) else [param.envvar]
    return next(
        (each for each in named if env.flag_value(each.removeprefix("MODELMILL_")) is not None),
        None,
    )


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(ModelmillError):  # what went wrong first is what is told
        sys.stdout.flush()
    print(f"modelmill: {' '.join(message.split())}", file=sys.stderr)
    return code
