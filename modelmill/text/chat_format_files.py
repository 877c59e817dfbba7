"""Finds chat formats by name, and the format of a model from its chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache

from modelmill.core.registry import find_module, module_names
from modelmill.text.chat_syntax import NO_MARKS, ChatSyntax, ThinkingSyntax

PACKAGE = "modelmill.text.chat_formats"
THINK_TAGS = ThinkingSyntax()
FALLBACK, WITHOUT_TOOLS = "json", "described"


def format_names() -> list[str]:
    """Return the names of all formats."""
    return module_names(PACKAGE)


@cache
def load_format(name: str) -> ChatSyntax:
    """Return the format of a name.

    Raises:
        ValueError: if there is no file of that name.
    """
    module = find_module(PACKAGE, name)
    if module is None:
        raise ValueError(f"no chat format {name!r}; there are {', '.join(format_names())}")
    syntax: ChatSyntax = module.FORMAT
    return syntax


def detect_format(template: str, tokens: Collection[str] = ()) -> str:
    """Return the name of the format in which chat templates write calls.

    Args:
        template: text of all templates of the model.
        tokens: control tokens of its tokenizer.
    """
    found = max(
        (
            (len(group), sum(map(len, group)), name)
            for name in format_names()
            for group in load_format(name).template_groups
            if all(text in template for text in group)
        ),
        default=(0, 0, ""),
    )
    if found[-1]:
        return found[-1]
    if "tools" not in template:
        return WITHOUT_TOOLS
    by_tokens = max(
        (
            (len(load_format(name).tokens), name)
            for name in format_names()
            if load_format(name).tokens and set(load_format(name).tokens) <= set(tokens)
        ),
        default=(0, FALLBACK),
    )
    return by_tokens[1]


def detect_thinking(syntax: ChatSyntax, template: str) -> ThinkingSyntax | None:
    """Return the marks of the thinking if a chat template has them; None if it has none."""
    if syntax.thinking is None:
        return None
    for thinking in (syntax.thinking, THINK_TAGS):
        if (thinking.in_template or thinking.marks[1]) in template:
            return thinking
    return None


def select_variant(
    name: str, thinking: ThinkingSyntax | None, options: Mapping[str, object]
) -> tuple[str, ThinkingSyntax | None]:
    """Return format and thinking of answers to a prompt with these variables of its template.

    Args:
        name: of the format.
        thinking: marks of the thinking; None stays None.
        options: the variables.
    """
    for variant in load_format(name).variants:
        if options.get(variant.option) == variant.value:
            name = variant.format_name or name
            if thinking is not None:
                thinking = variant.thinking or thinking
    return name, thinking


def text_marks(syntax: ChatSyntax, thinking: ThinkingSyntax | None) -> Iterable[str]:
    """Return the texts that the parser needs in an answer without calls."""
    from modelmill.text.call_reader import split_mark

    marks = [] if thinking is None else [*thinking.marks]
    if syntax.content != NO_MARKS:
        marks += [*syntax.content, *syntax.dropped]
    return {part for mark in marks for part in (mark, *split_mark(mark))}


def control_marks(syntax: ChatSyntax, thinking: ThinkingSyntax | None) -> Iterable[str]:
    """Return the texts that the parser needs in the answer, though they may be control tokens."""
    from modelmill.text.call_reader import split_mark

    calls = syntax.calls
    marks = [*calls.section, *calls.call, *calls.optional, *syntax.content]
    marks += [calls.head, calls.name_end, calls.code_mark, calls.string_mark]
    if calls.parameter is not None:
        marks += [calls.parameter.open, calls.parameter.key_end, calls.parameter.close]
        marks += [calls.parameter.type_open, *calls.parameter.type_marks]
    if thinking is not None:
        marks += [thinking.open, thinking.close]
    parts = {part for mark in marks for part in (mark.strip(), *split_mark(mark))}
    return parts | set(syntax.control_tokens) | set(calls.openers)
