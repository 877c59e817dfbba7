"""Reading the small JSON files beside a tokenizer, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from modelmill.core.errors import TokenizerError

SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def parse_json_file(
    files: Mapping[str, bytes], name: str, expected: type[dict] | type[list] = dict
) -> Any:
    """Parse a JSON file.

    Returns:
        The value; an empty ``expected`` if the file is absent.

    Raises:
        TokenizerError: if the file is not valid JSON or has another type.
    """
    if name not in files:
        return expected()
    try:
        value = json.loads(files[name].decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{name} is not valid JSON ({type(error).__name__}); copy the file again"
        ) from None
    if not isinstance(value, expected):
        word = "array" if expected is list else "object"
        raise TokenizerError(f"{name} must be a JSON {word}, not {type(value).__name__}")
    return value


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of tokenizer_config.json and related files, for all vocabulary formats."""

    special_tokens: Mapping[str, str]  # bos_token → "<s>", …; only those that are set
    extra_special_tokens: tuple[str, ...]  # additional special tokens
    added_tokens: Mapping[int, Mapping[str, Any]]  # added_tokens_decoder
    add_bos: bool | None
    add_eos: bool | None
    legacy: bool  # SentencePiece: every stretch between control tokens gets the dummy space
    eos_ids: tuple[int, ...]  # from generation_config.json
    # added_tokens.json, which counts where there is no added_tokens_decoder
    older_added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


def read_tokenizer_settings(files: Mapping[str, bytes]) -> TokenizerSettings:
    """Read the settings.

    Raises:
        TokenizerError: if a value has the wrong type; the message names the file.
    """
    config = parse_json_file(files, "tokenizer_config.json")
    extra = parse_json_file(files, "special_tokens_map.json")
    names: dict[str, str] = {}
    for key in SPECIAL_TOKEN_KEYS:
        text = token_text(config.get(key, extra.get(key)), "tokenizer_config.json", key)
        if text:
            names[key] = text
    texts = _read_extra_special_tokens(config, extra)
    older = (
        {} if "added_tokens_decoder" in config else _read_older_added_tokens(files, names, texts)
    )
    return TokenizerSettings(
        special_tokens=names,
        extra_special_tokens=texts,
        added_tokens=_read_added_tokens_decoder(config),
        add_bos=_read_bool_setting(config, "add_bos_token"),
        add_eos=_read_bool_setting(config, "add_eos_token"),
        legacy=config.get("legacy") is not False,
        eos_ids=_read_generation_eos_ids(files),
        older_added_tokens=older,
    )


def _read_extra_special_tokens(
    config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> tuple[str, ...]:
    """Special tokens without a role: a list, under its name before transformers 5 or its newer one.

    The newer one may be an object, role → token.
    """
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key) or special_map.get(key)
        if isinstance(listed, dict) and key == "extra_special_tokens":
            listed = list(listed.values())
        if not listed:
            continue
        if not isinstance(listed, list):
            raise TokenizerError(f"tokenizer_config.json: {key} must be a list")
        texts = [token_text(item, "tokenizer_config.json", key) for item in listed]
        return tuple(text for text in texts if text)
    return ()


def _read_older_added_tokens(
    files: Mapping[str, bytes], names: Mapping[str, str], extra: Iterable[str]
) -> dict[int, Mapping[str, Any]]:
    """Return added_tokens.json by id; a token is special if a role or a list names it."""
    special = {*names.values(), *extra}
    entries: dict[int, Mapping[str, Any]] = {}
    for text, id in parse_json_file(files, "added_tokens.json").items():
        if not is_token_id(id) or not text:
            raise TokenizerError("added_tokens.json must map token strings to ids")
        other = entries.setdefault(id, {"content": text, "special": text in special})["content"]
        if other != text:
            raise TokenizerError(f"added_tokens.json: {other!r} and {text!r} share the id {id}")
    return entries


def token_text(value: object, file: str, key: str) -> str | None:
    """Return the text of a token that is a string or {"content": …}; None stays None."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{file}: {key} must be a string, not {type(value).__name__}")


def check_bos_eos_in_vocab(names: Mapping[str, str], known: Container[str], file: str) -> None:
    """Check that the tokens that begin and end a text are in the vocabulary.

    Args:
        names: bos_token → "<s>", …; a key may be missing.
        known: The texts of the vocabulary's tokens.
        file: The vocabulary's.

    Raises:
        TokenizerError: if one is not; the message names it.
    """
    for key in ("bos_token", "eos_token"):
        if key in names and names[key] not in known:
            raise TokenizerError(
                f"tokenizer_config.json: {key} {names[key]!r} is not in the vocabulary of {file}"
            )


def unique_ids(ids: Iterable[int | None]) -> tuple[int, ...]:
    """Return the ids in order, without duplicates and None."""
    return tuple(dict.fromkeys(id for id in ids if id is not None))


def is_token_id(value: object) -> TypeGuard[int]:
    """Return whether a JSON value can be a token id (bool is an int in Python)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _read_bool_setting(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(f"tokenizer_config.json: {key} must be true or false")
    return value


def _read_added_tokens_decoder(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise TokenizerError("tokenizer_config.json: added_tokens_decoder must be an object")
    entries: dict[int, Mapping[str, Any]] = {}
    for key, entry in listed.items():
        valid = key.isdecimal() and len(key) < 10 and isinstance(entry, dict)
        if not valid or not isinstance(entry.get("content"), str) or not entry["content"]:
            raise TokenizerError(
                "tokenizer_config.json: added_tokens_decoder must map ids to {content, …}"
            )
        entries[int(key)] = entry
    return entries


def _read_generation_eos_ids(files: Mapping[str, bytes]) -> tuple[int, ...]:
    value = parse_json_file(files, "generation_config.json").get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(id for id in values if is_token_id(id))
