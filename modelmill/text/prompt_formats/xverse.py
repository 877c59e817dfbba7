"""XVERSE-Chat: "Human: …" and "Assistant: …", each message tokenized apart, EOS after an answer.

Facts: xverse/XVERSE-13B-Chat, modeling_xverse.py (``_build_chat_input``): "Assistant: " belongs to
the text of the last question.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelmill.core.errors import TemplateError
from modelmill.text.prompt_format import PromptFormat, Segment, TurnMessage


class XverseFormat(PromptFormat):
    """A system text, then "Human: …", an empty line, "Assistant: …" and EOS for each round."""

    name = "xverse"

    def segments(
        self, system: str, turns: Sequence[TurnMessage], add_generation_prompt: bool
    ) -> list[Segment]:
        """See ``PromptFormat.segments``."""
        if not self._tokenizer.eos_ids:
            raise TemplateError("the chat format xverse needs an EOS token; the tokenizer has none")
        out: list[Segment] = [f"{system}\n\n"] if system else []
        for role, content in turns:
            if role == "user":
                out.append(f"Human: {content}\n\n")
            else:
                out += [f"Assistant: {content}", self._tokenizer.eos_ids[0]]
        if add_generation_prompt:
            asks = bool(turns) and turns[-1].role == "user"
            out = [*out[:-1], f"{out[-1]}Assistant: "] if asks else [*out, "Assistant: "]
        return out

    def encode_segments(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of a prompt; upstream each text has what its tokenizer puts around it."""
        encode = self._tokenizer.encode
        return [i for s in segments for i in ([s] if isinstance(s, int) else encode(s))]


FORMAT = XverseFormat
