"""The vocabulary of a GGUF file (tokenizer.* metadata as JSON), by its tokenizer.ggml.model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from modelmill.core.errors import TokenizerError
from modelmill.text.hf_tokenizer import (
    make_byte_fallback_metaspace_bpe,
    make_byte_level_bpe,
    wrap_tokenizers_core,
)
from modelmill.text.pre_tokenizers import PRE_TOKENIZERS
from modelmill.text.sentencepiece_proto import (
    BYTE_PIECE,
    CONTROL_PIECE,
    NORMAL_PIECE,
    UNKNOWN_PIECE,
    USER_DEFINED_PIECE,
    SpmModel,
    SpmPiece,
)
from modelmill.text.sentencepiece_tokenizer import METASPACE, make_spm_tokenizer
from modelmill.text.tokenizer_base import Tokenizer
from modelmill.text.tokenizer_files import (
    TokenizerSettings,
    is_token_id,
    parse_json_file,
    read_tokenizer_settings,
)

GGUF_VOCAB_FILE = "gguf_vocab.json"
SPECIAL_TOKEN_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_gguf_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Load the tokenizer of gguf_vocab.json.

    Raises:
        TokenizerError: if the vocabulary is broken or unknown.
    """
    data = parse_gguf_vocab_json(files)
    tokens = data.get("tokens")
    if (
        not isinstance(tokens, list)
        or not tokens
        or not all(isinstance(text, str) for text in tokens)
    ):
        raise TokenizerError("the GGUF file's tokenizer.ggml.tokens must be a list of strings")
    types = data.get("token_type", [NORMAL_PIECE] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not all(map(is_token_id, types)):
        raise TokenizerError(
            "the GGUF file's tokenizer.ggml.token_type must hold one number a token"
        )
    model = data.get("model")
    if model == "gpt2":
        return _make_byte_level_tokenizer(data, tokens, types, files)
    if model == "llama":
        return _make_sentencepiece_tokenizer(data, tokens, types, files)
    if model == "gemma4":
        return _make_gemma4_bpe_tokenizer(data, tokens, types, files)
    raise TokenizerError(
        f"the GGUF file's tokenizer model {str(model)[:40]!r} is not supported; convert one with "
        "gpt2, llama or gemma4"
    )


def parse_gguf_vocab_json(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the metadata with short keys: "tokens" for tokenizer.ggml.tokens and so on."""
    data = parse_json_file(files, GGUF_VOCAB_FILE)
    short = {
        key.removeprefix("tokenizer.").removeprefix("ggml."): value for key, value in data.items()
    }
    nested = short.pop("ids", None)
    return short | (nested if isinstance(nested, dict) else {})


def _make_byte_level_tokenizer(
    data: Mapping[str, Any], tokens: list[str], types: list[int], files: Mapping[str, bytes]
) -> Tokenizer:
    name = str(data.get("pre", ""))
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise TokenizerError(
            f"the GGUF file's pre-tokenizer {name[:40]!r} is not supported (known: "
            f"{', '.join(sorted(filter(None, PRE_TOKENIZERS)))})"
        )
    vocab = {text: id for id, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError("the GGUF file's vocabulary holds a token twice")
    core = make_byte_level_bpe(
        vocab, _read_merges(data), "the GGUF file's vocabulary", ignore_merges=pre.ignores_merges
    )
    core.pre_tokenizer = pre.build()
    if pre.normalizes:
        core.normalizer = normalizers.NFC()
    return _finish_tokenizer(
        core, data, tokens, types, _make_settings(data, files, pre.adds_bos, tokens)
    )


def _make_gemma4_bpe_tokenizer(
    data: Mapping[str, Any], tokens: list[str], types: list[int], files: Mapping[str, bytes]
) -> Tokenizer:
    """Gemma 4's: merges of characters with spaces as ▁; what has no token is written in bytes.

    Lines are cut from the newlines between them. Of texts that are twice in the vocabulary the
    later id is used, as in llama.cpp.
    """
    core = make_byte_fallback_metaspace_bpe(
        {text: id for id, text in enumerate(tokens)},
        _read_merges(data),
        "the GGUF file's vocabulary",
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    return _finish_tokenizer(core, data, tokens, types, _make_settings(data, files, True, tokens))


def _read_merges(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs in the order of their ranks.

    Raises:
        TokenizerError: for what is no list of pairs.
    """
    merges = data.get("merges")
    if not isinstance(merges, list) or not all(
        isinstance(pair, str) and " " in pair[1:] for pair in merges
    ):
        raise TokenizerError(
            'the GGUF file\'s tokenizer.ggml.merges must be a list of "left right" pairs'
        )
    cuts = [pair.index(" ", 1) for pair in merges]
    return [(pair[:cut], pair[cut + 1 :]) for pair, cut in zip(merges, cuts, strict=True)]


def _finish_tokenizer(
    core: tokenizers.Tokenizer,
    data: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    settings: TokenizerSettings,
) -> Tokenizer:
    """Add the control tokens and those that the user defined."""
    ids = _read_special_token_ids(data, len(tokens))
    control = {
        id for id, type_ in enumerate(types) if type_ in (CONTROL_PIECE, UNKNOWN_PIECE)
    } | set(ids.values())
    core.add_special_tokens(
        [
            AddedToken(tokens[id], normalized=False, special=True)
            for id in sorted(control)
            if tokens[id]
        ]
    )
    user = [
        tokens[id]
        for id, type_ in enumerate(types)
        if type_ == USER_DEFINED_PIECE and id not in control
    ]
    core.add_tokens([AddedToken(text, normalized=False) for text in user if text])
    return wrap_tokenizers_core(
        core, settings, tokenizer_type="gguf-bpe", file="the GGUF file", special_ids=ids
    )


def _make_sentencepiece_tokenizer(
    data: Mapping[str, Any], tokens: list[str], types: list[int], files: Mapping[str, bytes]
) -> Tokenizer:
    scores = data.get("scores")
    numbers = isinstance(scores, list) and all(isinstance(score, int | float) for score in scores)
    if not isinstance(scores, list) or not numbers or len(scores) != len(tokens):
        raise TokenizerError("the GGUF file's tokenizer.ggml.scores must hold one number a token")
    ids = _read_special_token_ids(
        data, len(tokens), {"bos_token": 1, "eos_token": 2, "unk_token": 0}
    )
    if not all(NORMAL_PIECE <= type_ <= BYTE_PIECE for type_ in types):
        raise TokenizerError(
            "the GGUF file's tokenizer.ggml.token_type holds numbers outside 1 to 6"
        )
    piece_types = [NORMAL_PIECE if type_ == UNKNOWN_PIECE else type_ for type_ in types]
    for key, id in ids.items():
        piece_types[id] = (
            UNKNOWN_PIECE
            if key == "unk_token"
            else piece_types[id]
            if piece_types[id] == UNKNOWN_PIECE
            else CONTROL_PIECE
        )
    pieces = [
        # llama.cpp's converter writes the spaces of these alone as they are
        SpmPiece(
            text.replace(" ", METASPACE) if piece_type == USER_DEFINED_PIECE else text,
            float(score),
            piece_type,
        )
        for text, score, piece_type in zip(tokens, scores, piece_types, strict=True)
    ]
    model = SpmModel(
        pieces,
        dummy_prefix=data.get("add_space_prefix") is not False,
        unk_id=ids["unk_token"],
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        pad_id=ids.get("pad_token", -1),
    )
    settings = _make_settings(data, files, True, tokens)
    return make_spm_tokenizer(
        model, settings, tokenizer_type="gguf-spm", file="the GGUF file's vocabulary"
    )


def _read_special_token_ids(
    data: Mapping[str, Any], size: int, defaults: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the ids of the special tokens that the file names, by name (bos_token, …).

    Raises:
        TokenizerError: if an id is outside the vocabulary.
    """
    ids: dict[str, int] = {}
    for name, key in SPECIAL_TOKEN_ID_KEYS.items():
        id = data.get(key, (defaults or {}).get(name))
        if id is None:
            continue
        if not is_token_id(id) or id >= size:
            raise TokenizerError(
                f"the GGUF file's {key} {str(id)[:20]} is outside its vocabulary of {size}"
            )
        ids[name] = id
    return ids


def _make_settings(
    data: Mapping[str, Any], files: Mapping[str, bytes], add_bos: bool, tokens: list[str]
) -> TokenizerSettings:
    """Return tokenizer_config.json's equivalent: add BOS and EOS, further end-of-turn ids."""
    beside = read_tokenizer_settings(files)
    add = data.get("add_bos_token", data.get("add_bos"))
    ends = [
        int(data[key]) for key in ("eot_token_id", "eom_token_id") if is_token_id(data.get(key))
    ]
    return TokenizerSettings(
        special_tokens=beside.special_tokens,
        extra_special_tokens=beside.extra_special_tokens,
        added_tokens={},
        add_bos=add if isinstance(add, bool) else add_bos,
        add_eos=data.get("add_eos_token") is True,
        legacy=True,
        eos_ids=(*(id for id in ends if id < len(tokens)), *beside.eos_ids),
    )
