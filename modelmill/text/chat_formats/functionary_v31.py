"""Functionary 3.1: <function=name>, the arguments as one object, </function>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Functionary 3.1, Llama 3.1 with custom functions",
    detect=(("<function=", "</function>"), ("<function=example_function_name>",)),
    calls=CallSyntax("named", call=("<function=", "</function>"), name_end=">"),
)
