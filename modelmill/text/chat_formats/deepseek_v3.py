"""DeepSeek V3 and R1: the type, the name, and the arguments in a Markdown block."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V3, R1, and models distilled from it",
    detect=(
        ("<｜tool▁calls▁begin｜>", "```json"),
        ("<｜tool▁calls▁begin｜>", "tool['type'] + '<｜tool▁sep｜>'"),
    ),
    thinking=ThinkingSyntax("<think>\n", "\n</think>\n\n", ends_at_calls=True),
    calls=CallSyntax(
        "named",
        separator="\n",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
        name_end="\n```json\n",
    ),
)
