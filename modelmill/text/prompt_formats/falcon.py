"""Falcon-7B-Instruct and 40B-Instruct: "User: …" and "Assistant: …" with empty lines, as one text.

Facts: the chat template of tiiuae/falcon-7b-instruct's later revisions, which strips messages and
takes empty lines out of them. The stop string is that of FastChat, since the models were trained on
dialogues without a mark at the end of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelmill.text.prompt_format import PromptFormat, Segment, TurnMessage


class FalconFormat(PromptFormat):
    """[system], then an empty line, "User: …", an empty line, "Assistant: …"."""

    name = "falcon"
    stop_strings = ("\nUser:",)

    def segments(
        self, system: str, turns: Sequence[TurnMessage], add_generation_prompt: bool
    ) -> list[Segment]:
        """See ``PromptFormat.segments``."""
        text = system.strip()
        for role, content in turns:
            line = content.strip().replace("\r\n", "\n").replace("\n\n", "\n")
            text += f"\n\n{'User' if role == 'user' else 'Assistant'}: {line}"
        return [text + "\n\nAssistant:" * add_generation_prompt]


FORMAT = FalconFormat
