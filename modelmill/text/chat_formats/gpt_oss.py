"""gpt-oss's harmony: messages on channels (text/harmony.py)."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax
from modelmill.text.harmony import CONTROL_TOKENS

FORMAT = ChatSyntax(
    title="gpt-oss",
    tokens=("<|start|>", "<|channel|>", "<|message|>"),
    control_tokens=CONTROL_TOKENS,
    not_turn_ends=("<|end|>",),
    thinking=ThinkingSyntax("<|channel|>analysis<|message|>", "<|end|>"),
    # a call ends the turn, so that an answer has one
    calls=CallSyntax("harmony", one_per_message=True),
)
