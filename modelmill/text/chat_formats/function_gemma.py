"""FunctionGemma: bare keys and marked strings in a call."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="FunctionGemma",
    tokens=("<start_function_call>", "<escape>"),
    calls=CallSyntax(
        "named",
        call=("<start_function_call>", "<end_function_call>"),
        head="call:{name}",
        head_pattern=r"(?:call)?\s*:?\s*(?P<name>[^\s:][^:\"'<>\[\]{}()]*)",
        string_mark="<escape>",
    ),
)
