"""GigaChat 3: one call in a message of its own, of the role "function call"."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="GigaChat 3, 3.1",
    detect=(("function call", "<|role_sep|>"), ("<|function_call|>",)),
    tokens=("<|message_sep|>", "<|role_sep|>"),
    thinking=None,
    calls=CallSyntax(
        "json",
        call=("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|message_sep|>\n\n"),
        # 3.1 has a token of its own; without content the role stands alone
        openers=("function call<|role_sep|>", "<|function_call|>"),
        max_calls=1,
    ),
)
