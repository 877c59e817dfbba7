"""ChatGLM2: numbered rounds of a question and an answer in Chinese, as one text.

Facts: THUDM/chatglm2-6b, modeling_chatglm.py (``build_prompt``) and tokenization_chatglm.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelmill.text.prompt_format import PromptFormat, Segment, TurnMessage

PROMPT_PREFIX_TOKENS = ("[gMASK]", "sop")


class ChatGLM2Format(PromptFormat):
    """[gMASK] sop, then "[Round 1]", "问：…" and "答：…", with an empty line between them."""

    name = "chatglm2"
    has_system = False

    def segments(
        self,
        system: str,  # noqa: ARG002
        turns: Sequence[TurnMessage],
        add_generation_prompt: bool,
    ) -> list[Segment]:
        """See ``PromptFormat.segments``."""
        text = ""
        for index, (role, content) in enumerate(turns):
            text += (
                f"[Round {index // 2 + 1}]\n\n问：{content}\n\n"
                if role == "user"
                else f"答：{content}\n\n"
            )
        prefix = [self.control_id(token) for token in PROMPT_PREFIX_TOKENS]
        return [*prefix, text + "答：" * add_generation_prompt]


FORMAT = ChatGLM2Format
