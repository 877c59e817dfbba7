"""InternLM 2 and 2.5: an object between <|action_start|><|plugin|> and <|action_end|>."""

from dataclasses import replace

from modelmill.text.chat_formats import hermes
from modelmill.text.chat_syntax import ChatSyntax

FORMAT = ChatSyntax(
    title="InternLM 2, 2.5 and 3",
    tokens=("<|action_start|>", "<|plugin|>"),
    calls=replace(
        hermes.FORMAT.calls,
        call=("<|action_start|><|plugin|>\n", "<|action_end|>"),
        arguments_key="parameters",
        one_per_message=True,
    ),
)
