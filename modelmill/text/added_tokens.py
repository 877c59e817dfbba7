"""Added tokens: those of tokenizer_config.json, merged with those of tokenizer.json.

Older folders have added_tokens.json instead, which adds what tokenizer.json lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from modelmill.core.errors import TokenizerError
from modelmill.text.tokenizer_files import TokenizerSettings


def update_token_flags(spec: dict[str, Any], settings: TokenizerSettings) -> bool:
    """Where tokenizer_config.json lists an added token with other flags, transformers takes those.

    Whether it does.
    """
    changed = False
    for token in spec.get("added_tokens") or ():
        entry = settings.added_tokens.get(token["id"])
        if entry is None or entry["content"] != token["content"]:
            continue
        flags = _token_flags(entry)
        if any(bool(token.get(name)) != flag for name, flag in flags.items()):
            token.update(flags)
            changed = True
    return changed


def add_tokens(core: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Adds what only the files beside list; the ids must come out as they say."""
    _add_tokens_with_ids(core, settings.added_tokens, "tokenizer_config.json")
    _add_tokens_with_ids(core, settings.older_added_tokens, "added_tokens.json")
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    texts = [*settings.special_tokens.values(), *settings.extra_special_tokens]
    missing = [
        text
        for text in dict.fromkeys(texts)
        if text not in known and core.token_to_id(text) is not None
    ]
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])


def _add_tokens_with_ids(
    core: tokenizers.Tokenizer, tokens: Mapping[int, Mapping[str, Any]], file: str
) -> None:
    listed = {token.content for token in core.get_added_tokens_decoder().values()}
    for id, entry in sorted(tokens.items()):
        content = entry["content"]
        if content not in listed:
            core.add_tokens([AddedToken(content, **_token_flags(entry))])
        if core.token_to_id(content) != id:
            raise TokenizerError(
                f"{file} gives {content!r} the id {id}, tokenizer.json "
                f"{core.token_to_id(content)}; take both files from the same model"
            )


def _token_flags(entry: Mapping[str, Any]) -> dict[str, bool]:
    """How a token of added_tokens_decoder is matched in a text."""
    special = bool(entry.get("special"))
    flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip")}
    return {**flags, "normalized": bool(entry.get("normalized", not special)), "special": special}
