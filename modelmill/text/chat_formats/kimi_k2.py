"""Kimi K2: a section of calls between control tokens; the id has the name and a number."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

CALLS_SECTION_MARKS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
CALL_MARKS = ("<|tool_call_begin|>", "<|tool_call_end|>")
ARGUMENTS_MARK = "<|tool_call_argument_begin|>"

FORMAT = ChatSyntax(
    title="Kimi K2, K2 Thinking, K2.5",
    tokens=(CALLS_SECTION_MARKS[0], ARGUMENTS_MARK),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    dropped=(CALLS_SECTION_MARKS[1], CALL_MARKS[1], ARGUMENTS_MARK),
    calls=CallSyntax(
        "named",
        section=CALLS_SECTION_MARKS,
        call=CALL_MARKS,
        id_from_head=True,
        counter_alone=True,
        head="functions.{name}:{index}",
        head_pattern=r"(?:functions\.)?(?P<name>[^\s:<>{}]+?)(?::[0-9]+)?",
        name_end=ARGUMENTS_MARK,
    ),
)
