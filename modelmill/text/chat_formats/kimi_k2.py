"""Kimi K2: a section of calls between control tokens; the id has the name and a number."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Kimi K2, K2 Thinking, K2.5",
    calls=CallSyntax(
        style="named",
        section_open="<|tool_calls_section_begin|>",
        call_open="<|tool_call_begin|>",
        head="functions.{name}:{index}",
        head_pattern=r"(?:functions\.)?(?P<name>[^\s:<>{}]+?)(?::[0-9]+)?",
        name_end="<|tool_call_argument_begin|>",
        call_close="<|tool_call_end|>",
        section_close="<|tool_calls_section_end|>",
        id_from_head=True,
    ),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    detect=(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),),
    tokens=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
)
