"""xLAM 2: the answer is a list of call objects; models also write it between other marks."""

from dataclasses import replace

from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="xLAM 2",
    detect=(("xLAM", "JSON array", "tool_calls"),),
    thinking=ThinkingSyntax("<think>", "</think>"),
    calls=replace(
        json_list_call_syntax("["),
        bare=True,
        openers=("```json", "[TOOL_CALLS]", "<tool_call>"),
        closers=("```", "</tool_call>"),
    ),
)
