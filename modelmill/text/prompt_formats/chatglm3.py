"""ChatGLM3: a control token of the role, a newline and the text, each tokenized apart.

The model begins its answer with the newline of the answer's header. Facts:
THUDM/chatglm3-6b, tokenization_chatglm.py (``build_chat_input``) and modeling_chatglm.py
(``process_response``, which strips answers before they become history; the ids that end one).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.text.prompt_format import PromptFormat, Segment, TurnMessage
from modelmill.text.prompt_formats.chatglm2 import PROMPT_PREFIX_TOKENS
from modelmill.text.tokenizer_base import Tokenizer

TURN_ENDS = ("<|user|>", "<|observation|>")


class ChatGLM3Format(PromptFormat):
    """[gMASK] sop, then <|role|>, a newline and the text of each message; <|assistant|>."""

    name = "chatglm3"
    answers_begin_with_space = True
    answer_header = "\n"

    def __init__(self, tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> None:
        super().__init__(tokenizer, generation_config)
        self.stop_ids = (*self.stop_ids, *map(self.control_id, TURN_ENDS))

    def segments(
        self, system: str, turns: Sequence[TurnMessage], add_generation_prompt: bool
    ) -> list[Segment]:
        """See ``PromptFormat.segments``."""
        out: list[Segment] = [self.control_id(token) for token in PROMPT_PREFIX_TOKENS]
        for role, content in [*([TurnMessage("system", system)] if system else []), *turns]:
            text = content.strip() if role == "assistant" else content
            out += [self.control_id(f"<|{role}|>"), "\n", text]
        return [*out, self.control_id("<|assistant|>")] if add_generation_prompt else out


FORMAT = ChatGLM3Format
