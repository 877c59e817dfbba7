"""MiniMax M3: nested tags named after the arguments, each behind a token of its own."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

TAG_PREFIX = "]<]minimax[>["
FORMAT = ChatSyntax(
    title="MiniMax M3",
    detect=((TAG_PREFIX, "<tool_call>"),),
    tokens=(TAG_PREFIX,),
    control_tokens=(TAG_PREFIX,),
    thinking=ThinkingSyntax("<mm:think>", "</mm:think>"),
    # an answer without thinking sometimes begins with its end
    dropped=("</mm:think>",),
    calls=CallSyntax(
        "tags",
        section=(f"{TAG_PREFIX}<tool_call>\n", f"{TAG_PREFIX}</tool_call>"),
        call=(f'{TAG_PREFIX}<invoke name="', f"{TAG_PREFIX}</invoke>\n"),
        name_end='">',
        tag_prefix=TAG_PREFIX,
        whole_marks=True,
    ),
)
