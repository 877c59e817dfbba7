"""Plain JSON: the answer is a call object, or a list of them."""

from dataclasses import replace

from modelmill.text.chat_syntax import ChatSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="models whose template has tools, but no marks that are known",
    calls=replace(
        json_list_call_syntax("["),
        section_if_several=True,
        bare=True,
        one_per_message=True,
        code_mark="<|python_tag|>",
    ),
)
