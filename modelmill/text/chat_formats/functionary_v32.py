"""Functionary 3.2: >>> and who gets the text: a function, or "all"; the prompt writes the first."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Functionary 3.2",
    detect=((">>>${recipient}",), (">>>all",)),
    thinking=None,
    begun=">>>",
    content=(">>>all\n", ""),
    calls=CallSyntax("named", call=(">>>", ""), name_end="\n"),
)
