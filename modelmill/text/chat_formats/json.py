"""Plain JSON: the answer is a call object, or a list of them."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="models whose template has tools, but no marks that are known",
    calls=CallSyntax(
        style="json",
        section_open="[",
        section_close="]",
        section_if_several=True,
        separator=", ",
        content_end="\n",
        bare=True,
        one_per_message=True,
        code_mark="<|python_tag|>",
    ),
)
