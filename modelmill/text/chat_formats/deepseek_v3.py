"""DeepSeek V3 and R1: the type, the name, and the arguments in a Markdown block."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax, ThinkingSyntax

FORMAT = ChatSyntax(
    title="DeepSeek V3, R1, and models distilled from it",
    calls=CallSyntax(
        style="named",
        section_open="<｜tool▁calls▁begin｜>",
        call_open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        call_close="\n```<｜tool▁call▁end｜>",
        separator="\n",
        section_close="<｜tool▁calls▁end｜>",
    ),
    thinking=ThinkingSyntax("<think>\n", "\n</think>\n\n", ends_at_calls=True),
    detect=(
        ("<｜tool▁calls▁begin｜>", "```json"),
        ("<｜tool▁calls▁begin｜>", "tool['type'] + '<｜tool▁sep｜>'"),
    ),
)
