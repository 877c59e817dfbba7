"""The help pages: names are never broken at any width, examples can be copied."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType

from modelmill.cli.options import CliParameter, collect_cli_parameters, help_with_default
from modelmill.core import env

MAX_WIDTH = 110
MAX_NAME_WIDTH = 30
"""Maximum columns of the names; the text of a longer name starts on the next line."""
EXAMPLES_HEADING = "Examples:"
METAVARS = {
    "pairs": "KEY=VALUE",
    "ints": "N,N,…",
    "int": "N",
    "float": "X",
    "str": "TEXT",
    "Path": "PATH",
}

HelpRow = tuple[Sequence[str], str]
"""Names, which must not be broken, and their text."""


def page_width() -> int:
    """Return the columns of a page on this terminal."""
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def subcommand_help_page(verb: str, module: ModuleType, width: int) -> str:
    """Return the help page of a verb."""
    flags = [flag for flag in collect_cli_parameters(module.Args) if not flag.hidden]
    about, examples = _split_epilog(module)
    panels: dict[str, list[HelpRow]] = {"Arguments": [], "Options": []}
    for flag in flags:
        panel = "Arguments" if flag.positional else flag.panel or "Options"
        panels.setdefault(panel, []).append((flag_names(flag), _format_flag_help(flag)))
    panels["Options"].append((("-h,", "--help"), "show this page and exit"))
    parts = [
        _style_heading("Usage:") + f" {usage_line(verb, module)}",
        *(textwrap.fill(each, width) for each in about),
    ]
    if examples:
        parts.append(
            "\n".join((_style_heading(EXAMPLES_HEADING), *(f"  {line}" for line in examples)))
        )
    parts += [
        f"{_style_heading(title)}\n{_table(rows, width)}" for title, rows in panels.items() if rows
    ]
    return "\n\n".join(parts) + "\n"


def command_help_page(about: str, verbs: Sequence[tuple[str, str]], width: int) -> str:
    """Return the help page of the command itself; verbs: name and help."""
    options: list[HelpRow] = [
        (("--version",), "show the version and exit"),
        (("--install-completion",), "install completion for this shell"),
        (("--show-completion",), "print the completion script"),
        (("-h,", "--help"), "show this page and exit"),
    ]
    parts = [
        _style_heading("Usage:") + " modelmill COMMAND …",
        textwrap.fill(about, width),
        f"{_style_heading('Commands')}\n{_table([((name,), text) for name, text in verbs], width)}",
        f"{_style_heading('Options')}\n{_table(options, width)}",
        "modelmill COMMAND --help shows the flags of a command",
    ]
    return "\n\n".join(parts) + "\n"


def usage_line(verb: str, module: ModuleType) -> str:
    """Return the usage line, e.g. 'modelmill perplexity ENGINE --data FILE [OPTIONS]'."""
    words = ["modelmill", verb.replace("_", "-")]
    for flag in collect_cli_parameters(module.Args):
        if flag.positional:
            words.append(flag.label if flag.required else f"[{flag.label}]")
    words += [
        f"--{f.long} {_value_placeholder(f)}"
        for f in collect_cli_parameters(module.Args)
        if f.required and not f.positional
    ]
    return " ".join([*words, "[OPTIONS]"])


def usage_with_example(verb: str, module: ModuleType) -> str:
    """Return the usage and an example, for an error about a missing argument."""
    examples = _split_epilog(module)[1]
    return usage_line(verb, module) + (f", for example: {examples[0]}" if examples else "")


def flag_names(flag: CliParameter) -> list[str]:
    """Return a flag's names, followed by the placeholder of its value."""
    if flag.positional:
        return [flag.label]
    short = [name for name in flag.short if not name.startswith("--")]
    names = [
        *short,
        *(f"--{name}" for name in flag.names),
        *([f"--no-{flag.long}"] if flag.negatable else []),
    ]
    shown = [f"{name}," for name in names[:-1]] + names[-1:]
    return shown if flag.value_type is bool else [*shown, _value_placeholder(flag)]


def _format_flag_help(flag: CliParameter) -> str:
    """Return a flag's help with its choices and its default."""
    text = help_with_default(flag)
    return f"{text}; one of {', '.join(map(str, flag.choices))}" if flag.choices else text


def _value_placeholder(flag: CliParameter) -> str:
    if flag.metavar:
        return flag.metavar
    if flag.is_bytes:
        return "SIZE"
    if flag.choices:
        return "CHOICE"
    return METAVARS.get(flag.container) or METAVARS.get(flag.value_type.__name__, "VALUE")


def _split_epilog(module: ModuleType) -> tuple[list[str], list[str]]:
    """Return the paragraphs of a verb's text, and the unchanged lines of its examples."""
    text, _, examples = getattr(module, "EPILOG", "").partition(EXAMPLES_HEADING)
    about = [" ".join(each.split()) for each in text.split("\n\n") if each.strip()]
    return [*filter(None, [getattr(module, "HELP", "")]), *about], [
        line.strip() for line in examples.splitlines() if line.strip()
    ]


def _table(rows: Sequence[HelpRow], width: int) -> str:
    """Format names on the left, texts on the right; long names get a line of their own."""
    widths = [len(" ".join(names)) for names, _ in rows]
    left = (
        2 + max((size for size in widths if size <= min(MAX_NAME_WIDTH, width // 2)), default=8) + 2
    )
    lines = []
    for names, text in rows:
        heads = _wrap_words(names, width - 2)
        room = max(width - left, 16)
        texts = textwrap.wrap(text, room) if text else []
        if len(heads) == 1 and len(heads[0]) + 4 <= left and texts:
            lines.append(
                f"  {_style_name(heads[0])}{' ' * (left - 2 - len(heads[0]))}{texts.pop(0)}"
            )
        else:
            lines += [f"  {_style_name(head)}" for head in heads]
        lines += [" " * left + each for each in texts]
    return "\n".join(lines)


def _wrap_words(words: Sequence[str], width: int) -> list[str]:
    """Wrap words into lines without breaking a word."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _use_color() -> bool:
    return sys.stdout.isatty() and not env.is_plain_output()


def _style_heading(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if _use_color() else text


def _style_name(text: str) -> str:
    return f"\x1b[36m{text}\x1b[0m" if _use_color() else text
