"""Llama 3.2 and 4 in Python's syntax: the answer is a list of calls."""

from modelmill.text.chat_syntax import ChatSyntax, python_list_call_syntax

FORMAT = ChatSyntax(
    title="Llama 3.2 and 4 with pythonic calls, ToolACE",
    detect=(("[func_name1(",), ("tool_call.name + '('", "[", ")")),
    calls=python_list_call_syntax(("<|python_start|>", "<|python_end|>")),
)
