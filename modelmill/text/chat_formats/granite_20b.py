"""Granite 20B function calling: <function_call> before each object."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Granite 20B function calling",
    tokens=("<function_call>",),
    calls=CallSyntax("json", call=("<function_call> ", ""), separator=" "),
)
