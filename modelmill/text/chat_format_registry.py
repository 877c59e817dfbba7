"""Finds chat formats by name, and the format of a model from its chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache

from modelmill.core.module_lookup import import_module_if_exists, list_module_names
from modelmill.text.chat_syntax import NO_MARKS, ChatSyntax, ThinkingSyntax
from modelmill.text.tag_suffix import add_tag_suffix, find_tag_suffix, remove_tag_suffixes

CHAT_FORMATS_PACKAGE = "modelmill.text.chat_formats"
THINK_TAGS = ThinkingSyntax()
FALLBACK_CHAT_FORMAT, NO_TOOLS_CHAT_FORMAT = "json", "described"


def list_chat_formats() -> list[str]:
    """Return the names of all formats."""
    return list_module_names(CHAT_FORMATS_PACKAGE)


@cache
def load_chat_syntax(name: str) -> ChatSyntax:
    """Return the format of a name, which may end with the suffix of its tags (hy_v4:6124c78e).

    Raises:
        ValueError: if there is no file of that name, or its tags have no suffix.
    """
    base, colon, suffix = name.partition(":")
    module = import_module_if_exists(CHAT_FORMATS_PACKAGE, base)
    if module is None:
        raise ValueError(f"no chat format {name!r}; there are {', '.join(list_chat_formats())}")
    syntax: ChatSyntax = module.FORMAT
    if not colon:
        return syntax
    if not syntax.suffixed_tags:
        raise ValueError(f"the tags of the chat format {base} have no suffix; leave {name!r} out")
    return add_tag_suffix(syntax, syntax.suffixed_tags, colon + suffix)


def detect_chat_format(template: str, tokens: Collection[str] = ()) -> str:
    """Return the name of the format in which chat templates write calls.

    Args:
        template: text of all templates of the model.
        tokens: control tokens of its tokenizer.

    Returns:
        The name, with the suffix of its tags if the template has one.
    """
    found = max(
        (
            (len(group), sum(map(len, group)), name)
            for name in list_chat_formats()
            for group in _detected_groups(load_chat_syntax(name), template)
        ),
        default=(0, 0, ""),
    )
    if name := found[-1]:
        return name + find_tag_suffix(load_chat_syntax(name).suffixed_tags, template)
    if "tools" not in template:
        return NO_TOOLS_CHAT_FORMAT
    by_tokens = max(
        (
            (len(load_chat_syntax(name).tokens), name)
            for name in list_chat_formats()
            if load_chat_syntax(name).tokens and set(load_chat_syntax(name).tokens) <= set(tokens)
        ),
        default=(0, FALLBACK_CHAT_FORMAT),
    )
    return by_tokens[1]


def _detected_groups(syntax: ChatSyntax, template: str) -> Iterable[tuple[str, ...]]:
    """The groups of texts that show a format, of which a template has all texts."""
    plain = remove_tag_suffixes(syntax.suffixed_tags, template)
    groups = syntax.template_detection_groups
    return (group for group in groups if all(text in plain for text in group))


def detect_thinking_marks(syntax: ChatSyntax, template: str) -> ThinkingSyntax | None:
    """Return the marks of the thinking if a chat template has them; None if it has none."""
    if syntax.thinking is None:
        return None
    for thinking in (syntax.thinking, THINK_TAGS):
        if (thinking.in_template or thinking.marks[1]) in template:
            return thinking
    return None


def select_format_variant(
    name: str, thinking: ThinkingSyntax | None, options: Mapping[str, object]
) -> tuple[str, ThinkingSyntax | None]:
    """Return format and thinking of answers to a prompt with these variables of its template.

    Args:
        name: of the format.
        thinking: marks of the thinking; None stays None.
        options: the variables.
    """
    for variant in load_chat_syntax(name).variants:
        if options.get(variant.option) == variant.value:
            name = variant.format_name or name
            if thinking is not None:
                thinking = variant.thinking or thinking
    return name, thinking


def parser_marks_without_calls(
    syntax: ChatSyntax, thinking: ThinkingSyntax | None
) -> Iterable[str]:
    """Return the texts that the parser needs in an answer without calls."""
    from modelmill.text.tool_call_reader import split_mark_parts

    marks = [] if thinking is None else [*thinking.marks]
    if syntax.content != NO_MARKS:
        marks += [*syntax.content, *syntax.dropped]
    return {part for mark in marks for part in (mark, *split_mark_parts(mark))}


def parser_marks_with_calls(syntax: ChatSyntax, thinking: ThinkingSyntax | None) -> Iterable[str]:
    """Return the texts that the parser needs in the answer, though they may be control tokens."""
    from modelmill.text.tool_call_reader import split_mark_parts

    calls = syntax.calls
    marks = [*calls.section, *calls.call, *calls.optional, *syntax.content]
    marks += [calls.head, calls.name_end, calls.code_mark, calls.string_mark]
    if calls.parameter is not None:
        marks += [calls.parameter.open, calls.parameter.key_end, calls.parameter.close]
        marks += [calls.parameter.type_open, *calls.parameter.type_marks]
    if thinking is not None:
        marks += [thinking.open, thinking.close]
    parts = {part for mark in marks for part in (mark.strip(), *split_mark_parts(mark))}
    return parts | {*syntax.control_tokens, *calls.openers, *calls.closers}
