"""Prompts with control tokens in their text, and prompts that fill in the middle of a text.

Text of a request is plain text unless the client asks for more: ``parse_special`` makes control
tokens of their names, as clients that write the chat template themselves need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelmill.core.errors import RequestError, TokenizerError
from modelmill.text.tokenizer_loader import Tokenizer

FIM_TOKEN_TRIPLES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coders, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek coders
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
"""Control tokens before the prefix, the suffix and the middle, which the model writes."""
SUFFIX_FIRST_FIM_TOKENS = ("[PREFIX]", "[SUFFIX]")
"""Codestral's: [SUFFIX] suffix [PREFIX] prefix."""
FIM_STOP_TOKENS = (
    "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<|file_separator|>",
    "<file_sep>", "<fim_pad>", "▁<EOT>", "<EOT>",
)  # fmt: skip
"""Control tokens that end a middle, beside EOS and the marks themselves."""
MAX_SHOWN_NAMES = 3
"""Special tokens that a warning names."""


@dataclass(frozen=True)
class FimTokens:
    """Ids of the marks of a vocabulary; middle: None where the suffix comes first."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]


def find_fim_tokens(special: Mapping[str, int]) -> FimTokens | None:
    """The marks of a vocabulary; None if it has none.

    Args:
        special: control tokens by their text.
    """
    ends = tuple(special[mark] for mark in FIM_STOP_TOKENS if mark in special)
    for prefix, suffix, middle in FIM_TOKEN_TRIPLES:
        if prefix in special and suffix in special and middle in special:
            ids = special[prefix], special[suffix], special[middle]
            return FimTokens(*ids, ends=(*ends, *ids))
    if all(mark in special for mark in SUFFIX_FIRST_FIM_TOKENS):
        prefix_id, suffix_id = (special[mark] for mark in SUFFIX_FIRST_FIM_TOKENS)
        return FimTokens(prefix_id, suffix_id, None, (*ends, prefix_id, suffix_id))
    return None


def encode_infill_with_fim_tokens(
    tokenizer: Tokenizer, prefix: str, suffix: str
) -> tuple[list[int], FimTokens]:
    """The prompt after which a model writes what stands between two texts.

    Returns:
        The ids, and the marks.

    Raises:
        RequestError: the vocabulary has no marks for it.
    """
    marks = find_fim_tokens(tokenizer.special)
    if marks is None:
        raise RequestError(
            "suffix is not supported by this model: its vocabulary has no tokens that mark a "
            "prefix, a suffix and the middle"
        )
    start = tokenizer.encode("")
    before, after = (tokenizer.encode_pieces(["", text]) for text in (prefix, suffix))
    if marks.middle is None:
        return [*start, marks.suffix, *after, marks.prefix, *before], marks
    return [*start, marks.prefix, *before, marks.suffix, *after, marks.middle], marks


def find_special_tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    """The texts of special tokens in a text, each once."""
    ids = {piece for piece in tokenizer.split_control_tokens(text) if isinstance(piece, int)}
    return [name for name, id in tokenizer.special.items() if id in ids]


def plain_special_tokens_warning(names: Sequence[str]) -> str:
    """The warning about special tokens of a prompt that were read as plain text."""
    shown = ", ".join(names[:MAX_SHOWN_NAMES])
    more = ", …" if len(names) > MAX_SHOWN_NAMES else ""
    return (
        f"prompt: {shown}{more} is read as plain text; parse_special: true makes it the special "
        "token, and false says that text is meant"
    )


def encode_text(
    tokenizer: Tokenizer | None, text: str, *, parse_special: bool, add_special: bool = True
) -> list[int]:
    """Ids of a prompt.

    Args:
        tokenizer: of the engine.
        text: the prompt.
        parse_special: whether control tokens in the text become their ids.
        add_special: whether the tokenizer's own BOS is put first; a text that begins with it gets
            no second one.

    Raises:
        TokenizerError: the engine has no tokenizer.
    """
    if tokenizer is None:
        raise TokenizerError("this engine has no tokenizer; give token ids")
    if not add_special:
        return tokenizer.encode(text, bos=False, special=parse_special)
    ids = tokenizer.encode(text, special=parse_special)
    if parse_special and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_id:
        del ids[0]
    return ids
