"""Random answers that a constraint allows: what a model with random logits would write."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from modelmill.core.types import Grammar
from modelmill.text.grammar import GuideFactory

END = 256


class MarkTokenizer:
    """A vocabulary of 256 bytes, an end, and marks: control tokens, or tokens of text."""

    bos_id = None
    eos_ids = (END,)

    def __init__(self, marks: Sequence[str], control: bool) -> None:
        self.marks = [mark for mark in dict.fromkeys(marks) if len(mark) > 3]
        self._ids = {mark: END + 1 + place for place, mark in enumerate(self.marks)}
        self.special = {"<end>": END, **(self._ids if control else {})}
        self.vocab_size = END + 1 + len(self.marks)

    def token_bytes(self, id: int) -> bytes:
        if id <= END:
            return bytes([id]) if id < END else b""
        return self.marks[id - END - 1].encode()

    def split_control_tokens(self, text: str) -> list[str | int]:
        control = [mark for mark in self.special if mark in text]
        pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if control else [text]
        return [self.special.get(part, part) for part in parts if part]

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        return [
            id for part in pieces for id in ([part] if isinstance(part, int) else part.encode())
        ]


class AnswerSampler:
    """Samples answers of one vocabulary."""

    def __init__(self, marks: Sequence[str], control: bool) -> None:
        self._tokenizer = MarkTokenizer(marks, control)
        self._guides = GuideFactory(self._tokenizer, self._tokenizer.vocab_size, (END,))  # type: ignore[arg-type]

    def sample(self, grammar: Grammar, rng: random.Random, max_tokens: int = 1200) -> str | None:
        """An answer, ends and marks preferred; None where it takes too long."""
        guide, out = self._guides.make_guide(grammar, (END,)), bytearray()
        vocab = self._tokenizer.vocab_size
        for _ in range(max_tokens):
            bits = guide.mask()
            allowed = [id for id in range(vocab) if bits[id >> 3] >> (id & 7) & 1]
            if END in allowed and (rng.random() < 0.8 or len(allowed) == 1):
                # a failed guide has no way to its end (a schema without finite values)
                return None if guide.failed else out.decode()
            marks = [id for id in allowed if id > END]
            ends = [id for id in allowed if id < END and id in b"\"}]')\n<"]
            id = rng.choice([id for id in allowed if id != END])
            if marks and rng.random() < 0.5:
                id = rng.choice(marks)
            elif ends and rng.random() < 0.4:
                id = rng.choice(ends)
            out += self._tokenizer.token_bytes(id)
            guide.accept(id)
        return None

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether a text is a whole answer that the grammar allows."""
        guide = self._guides.make_guide(grammar, (END,))
        for id in [*self._tokenizer.encode_pieces(self._tokenizer.split_control_tokens(text)), END]:
            if not guide.mask()[id >> 3] >> (id & 7) & 1:
                return False
            guide.accept(id)
        return True
