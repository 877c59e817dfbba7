"""Baichuan-13B-Chat and Baichuan2-Chat: ids of two reserved tokens before the texts.

The ids are ``user_token_id`` and ``assistant_token_id`` of generation_config.json: 195 and 196,
<reserved_102> and <reserved_103> of Baichuan, <reserved_106> and <reserved_107> of Baichuan 2.
Facts: generation_utils.py of both (``build_chat_input``). History is not cut there to fit, as it is
upstream: a prompt that is too long is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.errors import TemplateError
from modelmill.core.quoting import quote
from modelmill.text.prompt_format import PromptFormat, Segment, TurnMessage
from modelmill.text.tokenizer_base import Tokenizer

DEFAULT_ROLE_TOKEN_IDS = {"user": 195, "assistant": 196}


class BaichuanFormat(PromptFormat):
    """A system text, then each text behind the id of its role; the assistant's id."""

    name = "baichuan"

    def __init__(self, tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> None:
        super().__init__(tokenizer, generation_config)
        self._ids = {
            role: _role_id(generation_config, role, default, tokenizer)
            for role, default in DEFAULT_ROLE_TOKEN_IDS.items()
        }
        self.stop_ids = (*self.stop_ids, self._ids["user"])

    def segments(
        self, system: str, turns: Sequence[TurnMessage], add_generation_prompt: bool
    ) -> list[Segment]:
        """See ``PromptFormat.segments``; an answer at the end is continued."""
        out: list[Segment] = [system]
        for role, content in turns:
            out += [self._ids[role], content]
        continues = bool(turns) and turns[-1].role == "assistant"
        return [*out, self._ids["assistant"]] if add_generation_prompt and not continues else out


def _role_id(
    generation_config: Mapping[str, Any], role: str, default: int, tokenizer: Tokenizer
) -> int:
    """Return the id before a role's texts; raises TemplateError if it is no id of the tokenizer."""
    key = f"{role}_token_id"
    id = generation_config.get(key, default)
    if type(id) is not int or not 0 <= id < tokenizer.vocab_size:
        raise TemplateError(
            f"generation_config.json: {key}={quote(id, 60)} is no id of the tokenizer (0 to "
            f"{tokenizer.vocab_size - 1}); correct it there"
        )
    return id


FORMAT = BaichuanFormat
