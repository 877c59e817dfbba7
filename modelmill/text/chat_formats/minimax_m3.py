"""MiniMax M3: nested tags named after the arguments, each behind a token of its own."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

PREFIX = "]<]minimax[>["
FORMAT = ChatSyntax(
    title="MiniMax M3",
    detect=((PREFIX, "<tool_call>"),),
    tokens=(PREFIX,),
    control_tokens=(PREFIX,),
    thinking=ThinkingSyntax("<mm:think>", "</mm:think>"),
    # an answer without thinking sometimes begins with its end
    dropped=("</mm:think>",),
    calls=CallSyntax(
        "tags",
        section=(f"{PREFIX}<tool_call>\n", f"{PREFIX}</tool_call>"),
        call=(f'{PREFIX}<invoke name="', f"{PREFIX}</invoke>\n"),
        name_end='">',
        tag_prefix=PREFIX,
        whole_marks=True,
    ),
)
