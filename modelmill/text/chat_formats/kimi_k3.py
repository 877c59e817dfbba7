"""Kimi K3: tags of control tokens; each argument has a tag with its key and type."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ParameterSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="Kimi K3",
    tokens=("<|open|>", "<|close|>", "<|sep|>"),
    thinking=ThinkingSyntax("<|open|>think<|sep|>", "<|close|>think<|sep|>", in_template="'think'"),
    dropped=("<|close|>tools<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    calls=CallSyntax(
        "parameters",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        call=('<|open|>call tool="', "<|close|>call<|sep|>"),
        head='{name}" index="{number}"',
        head_pattern=r"(?P<name>[^\"]+)\"?(?:\s+index=\"[0-9]*\"?)?",
        name_end="<|sep|>",
        parameter=ParameterSyntax(
            '<|open|>argument key="',
            "<|sep|>",
            "<|close|>argument<|sep|>",
            type_attribute="type",
            whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
            escaped=True,
        ),
        whole_marks=True,
    ),
)
