"""Nemotron Nano 2: a list of objects in <TOOLCALL>."""

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax

FORMAT = ChatSyntax(
    title="Nemotron Nano 2, Llama Nemotron",
    calls=CallSyntax(
        style="json",
        section_open="<TOOLCALL>[",
        section_close="]</TOOLCALL>",
        separator=", ",
        content_end="\n",
    ),
    detect=(("<TOOLCALL>",),),
)
