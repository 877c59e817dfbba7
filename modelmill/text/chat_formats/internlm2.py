"""InternLM 2 and 2.5: an object between <|action_start|><|plugin|> and <|action_end|>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="InternLM 2, 2.5 and 3",
    calls=CallSyntax(
        style="json",
        call_open="<|action_start|><|plugin|>\n",
        call_close="<|action_end|>",
        separator="\n",
        content_end="\n",
        arguments_key="parameters",
        one_per_message=True,
    ),
    detect=(("<|action_start|>", "<|plugin|>"),),
    tokens=("<|action_start|>", "<|plugin|>"),
)
