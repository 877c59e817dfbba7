"""InternLM-Chat-7B and 7B-8K (InternLM 1): lines of the user end with <eoh>, of the bot with <eoa>.

Facts: internlm/internlm-chat-7b, modeling_internlm.py (``build_inputs``) of 2023-07; the system
line is of its later versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.text.prompt_format import PromptFormat, Segment, TurnMessage
from modelmill.text.tokenizer_base import Tokenizer

ANSWER_END = "<eoa>"


class InternLMFormat(PromptFormat):
    """BOS, then "<|User|>:…<eoh>" and "<|Bot|>:…<eoa>", a line each, as one text."""

    name = "internlm"
    question_end = "<eoh>"

    def __init__(self, tokenizer: Tokenizer, generation_config: Mapping[str, Any]) -> None:
        super().__init__(tokenizer, generation_config)
        end = self._answer_end_id()
        if end is None:
            self.stop_strings = (ANSWER_END,)
        else:
            self.stop_ids = (*self.stop_ids, end)

    def segments(
        self, system: str, turns: Sequence[TurnMessage], add_generation_prompt: bool
    ) -> list[Segment]:
        """See ``PromptFormat.segments``; marks that are control tokens are ids."""
        out: list[Segment] = [f"<|System|>:{system}\n"] if system else []
        for role, content in turns:
            who, end = ("User", self.question_end) if role == "user" else ("Bot", ANSWER_END)
            out += [f"<|{who}|>:{content}", self._tokenizer.special.get(end, end), "\n"]
        return _merge_texts([*out, "<|Bot|>:"] if add_generation_prompt else out)

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of a prompt: BOS, then one text, interrupted by control tokens alone."""
        bos = self._tokenizer.bos_id
        return [*([] if bos is None else [bos]), *self._tokenizer.encode_pieces(segments)]

    def _answer_end_id(self) -> int | None:
        """Return the id of <eoa>: a control token or a piece of the vocabulary; None if neither."""
        if ANSWER_END in self._tokenizer.special:
            return self._tokenizer.special[ANSWER_END]
        last = self._tokenizer.encode(ANSWER_END, bos=False)[-1]
        return last if self._tokenizer.token_bytes(last) == ANSWER_END.encode() else None


def _merge_texts(segments: Sequence[Segment]) -> list[Segment]:
    out: list[Segment] = []
    for segment in segments:
        if isinstance(segment, str) and out and isinstance(out[-1], str):
            out[-1] += segment
        elif segment != "":
            out.append(segment)
    return out


FORMAT = InternLMFormat
