"""The ``modelmill`` command: one file per verb, imported when the verb is called.

A verb is a module ``cli/<verb>.py`` with ``HELP`` (one line), ``Args`` (a dataclass, see
``options``) and ``run(args) -> int``, the exit code. 0: success. 1: failure, or a check did not
pass. 2: the command line is invalid. 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from modelmill.cli.output import print_note, tolerate_closed_output
from modelmill.core import disk_errors, env, malloc
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.core.module_lookup import (
    import_module_if_exists,
    list_module_names,
    most_similar_name,
)

NON_VERB_MODULES = (
    *(
        "main",
        "options",
        "output",
        "engine_options",
        "evaluation_options",
        "vision_flags",
        "acceptance_tables",
        "plan_tables",
        "bench_report",
    ),
    *(
        "bench_ops",
        "bench_serve",
        "serve_catalogue",
        "serve_keys",
        "serve_ray",
        "help_page",
        "terminal_chat",
        "chat_input",
    ),
    *("chat_model", "chat_tools", "chat_writer"),
    *("remote_chat", "segment_output"),
)
"""Modules of this folder that are not verbs."""

VERB_ORDER = (
    *(
        "pull",
        "inspect",
        "build",
        "run",
        "chat",
        "segment",
        "serve",
        "ps",
        "stop",
        "launch",
        "export",
        "compare",
        "perplexity",
    ),
    *("summarize", "bench", "profile", "doctor"),
)
"""The order of the help page; other verbs follow."""

DESCRIPTION = (
    "Turns a language-model checkpoint into a verified engine, and runs, compares and evaluates it."
)

SUGGESTED_VERBS = {
    "quantize": "build -q",
    "quantise": "build -q",
    "eval": "perplexity",
    "generate": "run",
    "help": "--help",
    "kill": "stop",
    "list": "ps",
}
"""Verbs of other programs, and the modelmill verb to suggest instead."""


EXTRA_ARGUMENT_HINTS = {
    "run": "pass the prompt with --prompt",
    "perplexity": "name the text file with --data",
    "summarize": "name the file of articles with --data",
}
"""Verb: the flag of what people give as a second argument."""


def list_subcommands() -> list[str]:
    """Return the names of all verbs: the files of this folder."""
    names = [name for name in list_module_names("modelmill.cli") if name not in NON_VERB_MODULES]
    return sorted(
        names,
        key=lambda name: (VERB_ORDER.index(name) if name in VERB_ORDER else len(VERB_ORDER), name),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its exit code."""
    env.set_openmp_passive_waiting()
    malloc.set_malloc_thresholds()
    with tolerate_closed_output():
        try:
            code = run_command_line(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()
        except ModelmillError as error:  # stdout cannot be written
            code = _print_error(str(error), 1)
    sys.exit(code)


def run_command_line(argv: list[str]) -> int:
    """Run one command line and return its exit code.

    A user's mistake is printed as one line on stderr; a bug is raised.
    """
    import typer

    try:
        verb = _parse_subcommand(argv)
        if verb is not None:
            _note_misspelt_env_variables(verb)
        command = typer.main.get_command(_make_app(verb))
        code = command.main(args=argv, prog_name="modelmill", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except ModelmillError as error:
        return _print_error(str(error), 2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        description = disk_errors.describe_user_fixable_os_error(error)
        if description is None:
            raise
        return _print_error(description, 1)
    except Exception as error:
        # newer versions of typer contain their own click, so its errors are recognized by their
        # attributes
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _print_error(_usage_error_text(error, argv), 2)


def _parse_subcommand(argv: list[str]) -> str | None:
    """Return the verb of the command line; None for the help page.

    Raises:
        UsageError: if the verb is unknown.
    """
    called = next((word for word in argv if not word.startswith("-")), None)
    if called is None or (argv and argv[0] in ("--show-completion", "--install-completion")):
        return None
    name, known = called.replace("-", "_"), list_subcommands()
    if name not in known:
        hint = SUGGESTED_VERBS.get(name) or most_similar_name(called, known)
        raise UsageError(
            f"there is no command {called!r}; "
            + (f"did you mean {hint}?" if hint else f"there are {', '.join(known)}")
        )
    return name


def _note_misspelt_env_variables(verb: str) -> None:
    """Print a note on stderr for each variable whose name is nearly that of a flag's.

    Variables with other names may belong to another program.
    """
    unknown = env.flag_variables_in_env()
    # flags are read only where a variable is set, those of other verbs where it is none of this
    if not unknown or unknown <= _flag_env_variables(verb):
        return
    known = set().union(*map(_flag_env_variables, list_subcommands()))
    prefix = env.VARIABLE_PREFIX
    names = [each.removeprefix(prefix) for each in (*known, *env.NON_FLAG_VARIABLES)]
    for name in sorted(unknown - known):
        # without the prefix, which would make any two names similar
        hint = most_similar_name(name.removeprefix(prefix), names, cutoff=0.8)
        if hint is not None:
            print_note(f"no flag or setting is called {name}; did you mean {prefix}{hint}?")


def _flag_env_variables(verb: str) -> set[str]:
    """Return the names of the variables of a verb's flags."""
    from modelmill.cli.options import collect_cli_parameters, flag_env_variable

    module = import_module_if_exists("modelmill.cli", verb)
    flags = [] if module is None else collect_cli_parameters(module.Args)
    return {flag_env_variable(name) for flag in flags for name in flag.names}


def _make_app(verb: str | None) -> Any:
    """Make the typer application with one verb; all of them for a shell's completion."""
    import typer
    from typer.core import TyperCommand, TyperGroup

    from modelmill.cli.options import make_typer_function

    app = typer.Typer(
        name="modelmill",
        help=DESCRIPTION,
        cls=_typer_class_with_help(TyperGroup, _top_help_page),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings=_typer_settings(),
    )
    app.callback()(_make_version_callback())
    completing = "_MODELMILL_COMPLETE" in env.child_process_env()
    for name in list_subcommands() if completing else filter(None, [verb]):
        module = import_module_if_exists("modelmill.cli", name)
        assert module is not None
        app.command(
            name,
            cls=_typer_class_with_help(TyperCommand, partial(_subcommand_help_page, name, module)),
            help=module.HELP,
            short_help=module.HELP,
            context_settings=_typer_settings(),
        )(make_typer_function(module.Args, module.run))
    return app


def _typer_settings() -> dict[str, Any]:
    return {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    }


def _typer_class_with_help(base: type, page: Callable[[], str]) -> type:
    """Return typer's class ``base`` with the text of ``page`` as its help."""

    def format_help(_: Any, __: Any, formatter: Any) -> None:
        formatter.write(page())

    return type(base.__name__, (base,), {"format_help": format_help})


def _subcommand_help_page(name: str, module: ModuleType) -> str:
    from modelmill.cli.help_page import page_width, subcommand_help_page

    return subcommand_help_page(name, module, page_width())


def _top_help_page() -> str:
    """Return the help page of the command itself, with every verb and its one-line help."""
    from modelmill.cli.help_page import command_help_page, page_width

    modules = [
        (name, import_module_if_exists("modelmill.cli", name)) for name in list_subcommands()
    ]
    listed = [
        (name.replace("_", "-"), module.HELP) for name, module in modules if module is not None
    ]
    return command_help_page(DESCRIPTION, listed, page_width())


def _make_version_callback() -> Callable[..., None]:
    """Make the callback of the command itself, which has --version."""
    import typer

    def show(show_version: bool) -> None:
        if show_version:
            from modelmill import __version__

            print(f"modelmill {__version__}")
            raise typer.Exit

    option = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=show
    )

    def top(version: bool = option) -> None:
        """Do nothing: --version is handled by its callback."""

    return top


def _usage_error_text(error: Any, argv: list[str]) -> str:
    """Format an error of the command line parser in one line."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    option = getattr(error, "option_name", None)
    if option and type(error).__name__ == "NoSuchOption":
        from modelmill.cli.options import collect_cli_parameters

        verb = _parse_subcommand(argv)
        module = import_module_if_exists("modelmill.cli", verb) if verb else None
        known = (
            [n for f in collect_cli_parameters(module.Args) if not f.positional for n in f.names]
            if module
            else []
        )
        # without the dashes, which would make any two flags similar
        hint = most_similar_name(option.replace("_", "-").lstrip("-"), known, cutoff=0.65)
        text = f"there is no flag {option}" + (f"; did you mean --{hint}?" if hint else "")
    text = (text[:1].lower() + text[1:]).replace("Value error, ", "", 1)
    variable = _invalid_env_variable(error)
    if variable:
        text = text.replace("for '--", f"in {variable} for '--", 1)
    # click's newer versions name pydantic's types
    text = re.sub(r"Input should be (a valid \w+), unable to parse .*", r"it must be \1", text)
    text += _rounding_method_hint(text)
    is_extra = "unexpected extra argument" in text
    is_positional = getattr(getattr(error, "param", None), "param_type_name", "") == "argument"
    if is_extra and argv[0] in EXTRA_ARGUMENT_HINTS:
        text += f"; {EXTRA_ARGUMENT_HINTS[argv[0]]}"
    elif is_extra or is_positional or type(error).__name__ == "MissingParameter":
        text += _subcommand_usage(argv)
    verb = next((word for word in argv if not word.startswith("-")), "")
    return f"{text} (flags: modelmill {verb + ' ' if verb else ''}--help)"


def _rounding_method_hint(text: str) -> str:
    """Return the end of an error about -q that says how to name a rounding method; else ""."""
    wrong = re.search(r"'--quantization'.*?: '(.*?)' is not one of", text)
    if wrong is None:
        return ""
    from modelmill.core.recipe_declaration import rounding_method_hint

    return rounding_method_hint(wrong[1])


def _subcommand_usage(argv: list[str]) -> str:
    """Return the usage of the verb, for an error about a missing argument."""
    from modelmill.cli.help_page import usage_with_example

    verb = _parse_subcommand(argv)
    module = import_module_if_exists("modelmill.cli", verb) if verb else None
    return (
        ""
        if verb is None or module is None
        else f"; the form is: {usage_with_example(verb, module)}"
    )


def _invalid_env_variable(error: Any) -> str | None:
    """Return the environment variable that holds an invalid value; None if a flag holds it."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or param is None:
        return None
    if getattr(context.get_parameter_source(param.name), "name", "") != "ENVIRONMENT":
        return None
    named = param.envvar if isinstance(param.envvar, (list, tuple)) else [param.envvar]
    return next(
        (
            each
            for each in named
            if env.option_from_env(each.removeprefix(env.VARIABLE_PREFIX)) is not None
        ),
        None,
    )


def _print_error(message: str, code: int) -> int:
    with contextlib.suppress(ModelmillError):  # only the first error is reported
        sys.stdout.flush()
    print(f"modelmill: {' '.join(message.split())}", file=sys.stderr)
    return code
