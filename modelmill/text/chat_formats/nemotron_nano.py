"""Nemotron Nano 2: a list of objects in <TOOLCALL>."""

from modelmill.text.chat_syntax import ChatSyntax, json_list_call_syntax

FORMAT = ChatSyntax(
    title="Nemotron Nano 2, Llama Nemotron",
    detect=(("<TOOLCALL>",),),
    calls=json_list_call_syntax("<TOOLCALL>[", "]</TOOLCALL>"),
)
