"""Qwen v1: Thought, Action, Action Input and Observation, a line each (text/react_tools.py)."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Qwen v1",
    thinking=None,
    calls=CallSyntax(
        "react",
        call=("Action: ", ""),
        name_end="\nAction Input: ",
        content_end="\n",
        one_per_message=True,
        stops=("Observation:",),
        max_calls=1,
    ),
)
