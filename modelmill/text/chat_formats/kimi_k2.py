"""Kimi K2: a section of calls between control tokens; the id has the name and a number."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Kimi K2, K2 Thinking, K2.5",
    tokens=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    thinking=ThinkingSyntax("<think>", "</think>", ends_at_calls=True),
    dropped=(
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    calls=CallSyntax(
        "named",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        id_from_head=True,
        counter_alone=True,
        head="functions.{name}:{index}",
        head_pattern=r"(?:functions\.)?(?P<name>[^\s:<>{}]+?)(?::[0-9]+)?",
        name_end="<|tool_call_argument_begin|>",
    ),
)
