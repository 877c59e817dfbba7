"""How a chat format writes an answer: thinking, content, tool calls and their arguments.

A format is one file of ``chat_formats`` with a ``FORMAT``. From it follow the parser of answers
(``answer_parser``), the constraint on answers (``answer_grammar``), the writer of earlier answers
(``answer_renderer``) and random answers for tests (``tools.chat_formats``).

Marks are written as the model writes them, with their whitespace. The parser also accepts them with
other whitespace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CallStyle = Literal["json", "named", "parameters", "tags", "pythonic", "react", "harmony"]
"""Where a call has its name and its arguments:

* ``json``: in one object, {"name", "arguments"};
* ``named``: the name between marks, then the arguments as one value;
* ``parameters``: the name between marks, then each argument between marks of its own;
* ``tags``: the name between marks, then a tag for each argument, named after it; lists and objects
  are nested tags;
* ``pythonic``: name(key=value, …);
* ``react``: lines "Action:" and "Action Input:";
* ``harmony``: messages on channels.
"""


Marks = tuple[str, str]
"""What is written before something and after it."""
NO_MARKS: Marks = ("", "")


@dataclass(frozen=True)
class ThinkingSyntax:
    """Marks around the thinking at the begin of an answer.

    Attributes:
        open: before the thinking; often written by the prompt already.
        close: after it.
        ends_at_calls: the first mark of a call ends the thinking, too (only where that mark is a
            control token, which a model does not quote).
        in_template: text of a template that writes the marks, if it does so by a macro.
    """

    open: str = "<think>\n"
    close: str = "\n</think>\n\n"
    ends_at_calls: bool = False
    in_template: str = ""

    @property
    def marks(self) -> Marks:
        """The marks without whitespace."""
        return self.open.strip(), self.close.strip()


@dataclass(frozen=True)
class ParameterSyntax:
    """Marks of one argument in the style ``parameters``.

    Attributes:
        open: before the key.
        key_end: between key and value.
        close: after the value.
        type_attribute: what follows the key: "string": string="true" for a string, else
            string="false"; "type": the value's type, as type="number".
        undeclared: type of an argument that the tool does not declare: a string, or JSON if it is.
        verbatim: marks that may stand around the text of a value.
        whole: marks that may stand around all arguments as one JSON object; read, not written.
        escaped: "&" and quotes of names and keys are written as in XML.
        type_open: between the key and the name of the value's type, which key_end ends.
        type_marks: marks around the name of a value's type, which may stand behind the key; read,
            not written.
        whole_key_end: all marks of key_end are there; else they may be missing but for the first.
    """

    open: str
    key_end: str
    close: str
    type_attribute: Literal["", "string", "type"] = ""
    undeclared: Literal["string", "json"] = "json"
    verbatim: Marks = NO_MARKS
    whole: Marks = NO_MARKS
    escaped: bool = False
    type_open: str = ""
    type_marks: Marks = NO_MARKS
    whole_key_end: bool = False


@dataclass(frozen=True)
class CallSyntax:
    """How tool calls are written: section call separator call … section.

    Attributes:
        style: where a call has its name and its arguments.
        section: marks around all calls of an answer.
        call: marks around each call.
        separator: between two calls.
        content_end: between content and the calls.
        section_if_several: one call alone has no section marks.
        optional: marks that may stand around the calls; read, not written.
        name_key: key of the name in the style ``json``.
        repeats: models repeat the calls behind their end mark; such a repeat is dropped.
        number_key: key of a call's number, written as a string, in the style ``json``; read over.
        arguments_key: key of the arguments in the style ``json``.
        declared_types: arguments in the style ``json`` get the types that the tool declares; they
            are passed on when they are complete.
        head: name of the call as written; {index}: number of the call; {number}: from 1.
        head_pattern: regular expression of ``head`` with the groups name and perhaps id.
        name_end: between the name and the arguments.
        empty_end: after the name instead of name_end, where a call without arguments ends at once.
        json_too: objects in the style ``json`` may stand instead of name and arguments.
        parameter: marks of an argument in the style ``parameters``.
        tag_prefix: before each tag in the style ``tags``.
        string_mark: encloses strings inside arguments instead of quotes; keys are then bare.
        bare: an answer that begins with a call needs no mark before it.
        code_mark: before a call in Python syntax, which some models write instead.
        inline: texts that begin a call inside content without a mark.
        openers: further marks at which calls may begin, where models leave marks out.
        closers: marks that may stand behind such calls in the style ``json``.
        whole_marks: only a whole mark tells calls from other text, since its parts stand in
            other marks, too.
        id_from_head: the id of a call is its written head.
        counter_alone: models write a number alone as a head; the call is then that of the one tool
            that takes its arguments.
        checked: a call is reported when it is complete and the tool takes it; else it is text.
        short_ids: ids have nine letters and digits.
        one_per_message: earlier calls are given to the template one per message.
        stops: strings that end an answer with calls.
        max_calls: calls that one answer can have; None: any number.
    """

    style: CallStyle
    section: Marks = NO_MARKS
    call: Marks = NO_MARKS
    separator: str = ""
    content_end: str = ""
    section_if_several: bool = False
    optional: Marks = NO_MARKS
    repeats: bool = False
    name_key: str = "name"
    number_key: str = ""
    arguments_key: str = "arguments"
    declared_types: bool = False
    head: str = "{name}"
    head_pattern: str = r"(?P<name>[^\s\"'<>\[\]{}()]+)"
    name_end: str = ""
    empty_end: str = ""
    json_too: bool = False
    parameter: ParameterSyntax | None = None
    tag_prefix: str = ""
    string_mark: str = ""
    bare: bool = False
    code_mark: str = ""
    inline: tuple[str, ...] = ()
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    whole_marks: bool = False
    id_from_head: bool = False
    counter_alone: bool = False
    checked: bool = False
    short_ids: bool = False
    one_per_message: bool = False
    stops: tuple[str, ...] = ()
    max_calls: int | None = None

    @property
    def writes_arguments_as_json(self) -> bool:
        """Whether the arguments of a call are written as one JSON object."""
        return self.style not in ("parameters", "tags", "pythonic") and not self.string_mark


def json_list_call_syntax(open: str, close: str = "]", content_end: str = "\n") -> CallSyntax:
    """Return the syntax of calls that are the objects of one JSON list.

    Args:
        open: marks before the list, and its bracket.
        close: its bracket, and marks after it.
        content_end: between content and the calls.
    """
    return CallSyntax("json", section=(open, close), separator=", ", content_end=content_end)


def python_list_call_syntax(marks: Marks) -> CallSyntax:
    """Return the syntax of calls that are one list in Python's syntax, alone in the answer.

    Args:
        marks: what may stand around the list; read, not written.
    """
    return CallSyntax("pythonic", section=("[", "]"), separator=", ", optional=marks, bare=True)


@dataclass(frozen=True)
class ChatFormatVariant:
    """Another way in which a model writes answers where a variable of its template says so.

    Attributes:
        option: the variable.
        value: of it.
        format_name: format of the answers; "": the same.
        thinking: marks of the thinking; None: the same.
    """

    option: str
    value: str
    format_name: str = ""
    thinking: ThinkingSyntax | None = None


@dataclass(frozen=True)
class ChatSyntax:
    """One chat format: of which models, how it is recognized, and how an answer is written.

    Attributes:
        title: models that use it, for the documentation.
        detect: groups of texts; a chat template with all texts of one group has this format. Of
            several formats the one with the longest group is taken. Empty: the ``tokens``.
        tokens: the same for control tokens of the tokenizer, if the template shows no format.
        suffixed_tags: names of tags behind which a checkpoint may write a suffix of its own, as
            <tool_call:6124c78e>; the template shows it, and the format's name then ends with it.
        control_tokens: further control tokens that the parser needs in the text.
        not_turn_ends: control tokens that end a turn in other formats only.
        thinking: marks of the thinking; used if the chat template has them. None: never.
        calls: how tool calls are written.
        begun: begin of the marks of content and calls that the prompt writes, and the answer not.
        content: marks around the content. With a closing mark they are written around an empty
            content, too.
        dropped: control tokens that are no content where a model writes them without a call.
        variants: what variables of the template change.
    """

    title: str
    calls: CallSyntax
    thinking: ThinkingSyntax | None = field(default_factory=ThinkingSyntax)
    detect: tuple[tuple[str, ...], ...] = ()
    tokens: tuple[str, ...] = ()
    suffixed_tags: tuple[str, ...] = ()
    control_tokens: tuple[str, ...] = ()
    not_turn_ends: tuple[str, ...] = ()
    begun: str = ""
    content: Marks = NO_MARKS
    dropped: tuple[str, ...] = ()
    variants: tuple[ChatFormatVariant, ...] = ()

    @property
    def template_detection_groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups of texts by which a chat template shows this format."""
        return self.detect or ((self.tokens,) if self.tokens else ())
