"""A tokenizer that cuts texts as peers' tests need it: control tokens whole, short words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tools.peer_parsers.peer_parser import PeerInternalError

_TOKENS = re.compile(
    r"<[|｜][^<>\s]{1,40}[|｜]>|\[/?[A-Z_]{3,}\]|</?[a-z_:]+>|<[|]?[a-z_]+[|]?>"
    r"|\s?[^\W\d_]{1,5}|\d{1,3}|\s+|."
)


class Vocabulary(dict[str, int]):
    """Tokens → ids; a new token gets an id."""

    def __missing__(self, token: str) -> int:
        """Give a token its id."""
        self[token] = len(self) + 1
        return self[token]

    def __contains__(self, token: object) -> bool:
        """Every text is a token."""
        return isinstance(token, str)

    def get(self, token: str, *_: object) -> int:
        """Return the id of a token."""
        return self[token]


class PlainTokenizer:
    """Text ↔ tokens by a regular expression."""

    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()
    eos_token_id, eos_token, bos_token = 0, "</s>", "<s>"
    is_fast = True

    def __init__(self) -> None:
        self._vocabulary = Vocabulary()
        self._texts: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        """Refuse what no test of calls or content needs."""
        raise PeerInternalError(name)

    @classmethod
    def from_pretrained(cls, *_: Any, tokenizer_mode: str = "", **__: Any) -> PlainTokenizer:
        """Return a tokenizer, whatever the model."""
        return EncoderTokenizer() if tokenizer_mode == "mistral" else cls()

    def get_vocab(self) -> Vocabulary:
        """Return tokens → ids."""
        return self._vocabulary

    def add_tokens(self, *_: Any, **__: Any) -> int:
        """Do nothing: control tokens are whole anyway."""
        return 0

    def tokenize(self, text: str, **_: Any) -> list[str]:
        """Cut a text."""
        return (
            _TOKENS.findall(text)
            if "\n" not in text
            else re.findall(_TOKENS.pattern, text, re.DOTALL)
        )

    def encode(self, text: str, **_: Any) -> list[int]:
        """Return the ids of a text."""
        ids = [self._vocabulary[token] for token in self.tokenize(text)]
        self._texts.update(zip(ids, self.tokenize(text), strict=True))
        return ids

    __call__ = encode

    def decode(self, ids: int | Iterable[int], **_: Any) -> str:
        """Return the text of ids."""
        ids = [ids] if isinstance(ids, int) else ids
        return "".join(self._texts[id] for id in ids)

    def convert_ids_to_tokens(self, ids: Iterable[int], **_: Any) -> list[str]:
        """Return the tokens of ids."""
        return [self._texts[id] for id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the ids of tokens."""
        if isinstance(tokens, str):
            return self._vocabulary[tokens]
        return [self._vocabulary[token] for token in tokens]


class EncoderTokenizer(PlainTokenizer):
    """Stands for Mistral's tokenizer: a test that writes its text with its encoder is internal."""

    version = 13


def detokenize_incrementally(
    tokenizer: PlainTokenizer,
    all_input_ids: Sequence[int],
    prev_tokens: Sequence[str] | None = None,
    *_: Any,
    **__: Any,
) -> tuple[list[str], str, int, int]:
    """Return the last token and its text, in the form of vLLM's function."""
    token = tokenizer.decode(all_input_ids[-1])
    size = len(prev_tokens or ()) + 1
    return [token], token, size - 1, size
