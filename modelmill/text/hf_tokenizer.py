"""Hugging Face byte-level and SentencePiece-like BPE: tokenizer.json or vocab.json and merges."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from modelmill.core.errors import TokenizerError
from modelmill.text.added_tokens import add_tokens, update_token_flags
from modelmill.text.byte_level import byte_level_char_to_byte
from modelmill.text.rust_errors import build_raising_tokenizer_error, is_rust_panic
from modelmill.text.tokenizer_base import Tokenizer, VocabInfo
from modelmill.text.tokenizer_files import (
    TokenizerSettings,
    check_bos_eos_in_vocab,
    parse_json_file,
    read_tokenizer_settings,
    unique_ids,
)
from modelmill.text.tokenizer_json_checks import check_tokenizer_json, check_vocab, unknown_token_id

# Qwen lists <|fim_prefix|> and its like as ordinary added tokens; they steer the model all the
# same.
CONTROL_TOKEN_PATTERN = re.compile(r"<[|｜][^<>]*[|｜]>")
METASPACE = "▁"
MAX_CHARS_ENCODED_WITH_GIL = 2048
"""Characters that take a millisecond or two."""
BYTE_TOKEN_PATTERN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_LEVEL_ALPHABET = byte_level_char_to_byte()
AFFIX_PROBES = ("x", "1", ".")
"""Texts to find out what is added around one; some tokenizers drop some."""


def load_tokenizer_json(files: Mapping[str, bytes]) -> Tokenizer:
    """Load the tokenizer of tokenizer.json.

    Raises:
        TokenizerError: if the file is broken or has another model type.
    """
    spec = parse_json_file(files, "tokenizer.json")
    check_tokenizer_json(spec)
    settings = read_tokenizer_settings(files)
    text = (
        json.dumps(spec) if update_token_flags(spec, settings) else files["tokenizer.json"].decode()
    )
    core = build_raising_tokenizer_error(
        "tokenizer.json", lambda: tokenizers.Tokenizer.from_str(text)
    )
    if hasattr(core.model, "dropout"):
        core.model.dropout = None  # of training: the same text must give the same ids
    return wrap_tokenizers_core(
        core,
        settings,
        tokenizer_type="hf",
        file="tokenizer.json",
        unknown_id=unknown_token_id(spec),
    )


def load_vocab_and_merges(files: Mapping[str, bytes]) -> Tokenizer:
    """GPT-2's older layout: vocab.json and merges.txt. Raises TokenizerError."""
    vocab = parse_json_file(files, "vocab.json")
    check_vocab(vocab, "vocab.json")
    try:
        lines = files["merges.txt"].decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise TokenizerError("merges.txt is not UTF-8 text; copy the file again") from None
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not all(len(pair) == 2 for pair in pairs):
        raise TokenizerError("merges.txt must hold two tokens on every line")
    merges = [(left, right) for left, right in pairs]
    settings = read_tokenizer_settings(files)
    core = make_byte_level_bpe(vocab, merges, "merges.txt")
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known = [text for text in ("<|endoftext|>",) if text in vocab]
    core.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in known])
    return wrap_tokenizers_core(core, settings, tokenizer_type="hf", file="vocab.json")


def make_byte_level_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], file: str, ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """Make a byte-level BPE without pre-tokenizer or added tokens.

    Raises:
        TokenizerError: if the merges do not match the vocabulary.
    """
    model = build_raising_tokenizer_error(
        file,
        lambda: models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges, fuse_unk=False),
    )
    core = tokenizers.Tokenizer(model)
    core.decoder = decoders.ByteLevel()
    return core


def make_byte_fallback_metaspace_bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], file: str
) -> tokenizers.Tokenizer:
    """Make a BPE of characters with spaces as ▁, which writes unknown ones in bytes (<0x0A>).

    Raises:
        TokenizerError: if the merges do not match the vocabulary.
    """
    model = build_raising_tokenizer_error(
        file, lambda: models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True)
    )
    core = tokenizers.Tokenizer(model)
    core.normalizer = normalizers.Replace(" ", METASPACE)
    core.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return core


def wrap_tokenizers_core(
    core: tokenizers.Tokenizer,
    settings: TokenizerSettings,
    *,
    tokenizer_type: str,
    file: str,
    special_ids: Mapping[str, int] | None = None,
    unknown_id: int | None = None,
) -> HfTokenizer:
    """Wraps a finished tokenizers.Tokenizer.

    special_ids: bos_token, eos_token, … by id, where the file has ids. unknown_id: what its model
    writes for characters that it does not know, if it does.
    """
    core.no_truncation()
    core.no_padding()
    add_tokens(core, settings)
    names = dict(settings.special_tokens)
    for key, id in (special_ids or {}).items():
        text = core.id_to_token(id)
        if text is None:
            raise TokenizerError(f"{file}: the id {id} of {key} is outside the vocabulary")
        names.setdefault(key, text)
    known = {text for text in names.values() if core.token_to_id(text) is not None}
    check_bos_eos_in_vocab(names, known, file)
    by_id = {key: core.token_to_id(text) for key, text in names.items()}
    added = core.get_added_tokens_decoder()
    flagged = {id for id, token in added.items() if token.special}
    control = flagged | {
        id for id, token in added.items() if CONTROL_TOKEN_PATTERN.fullmatch(token.content)
    }
    # transformers takes a tokenizer.json's own post-processor, whatever tokenizer_config.json says
    # beside it
    prefix, suffix = _prefix_and_suffix_ids(
        core, settings if file != "tokenizer.json" else None, by_id
    )
    traits = VocabInfo(
        tokenizer_type=tokenizer_type,
        vocab_size=max(core.get_vocab(with_added_tokens=True).values()) + 1,
        special={added[id].content: id for id in sorted(control)},
        skipped_ids=frozenset(flagged),
        bos_id=by_id.get("bos_token"),
        eos_ids=unique_ids([by_id.get("eos_token"), *settings.eos_ids]),
        pad_id=by_id.get("pad_token"),
        prefix=prefix,
        suffix=suffix,
        template_names=names,
        edges={
            t.content: (t.lstrip, t.rstrip, t.single_word) for t in (added[id] for id in control)
        },
    )
    return HfTokenizer(core, traits, unknown_id)


class HfTokenizer(Tokenizer):
    """A tokenizers.Tokenizer behind our interface, with its own normalizer and pre-tokenizer."""

    def __init__(
        self, core: tokenizers.Tokenizer, traits: VocabInfo, unknown_id: int | None = None
    ) -> None:
        super().__init__(traits)
        self._core = core
        self._unknown_id = unknown_id
        self._control = frozenset(traits.special.values())
        self._added = {id: token.content for id, token in core.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        spec = json.loads(checked_decoder_json(core))
        self._byte_level = "ByteLevel" in json.dumps(spec)
        self.each_byte = not self._byte_level
        self._drops_space = not self._byte_level and _drops_leading_space(spec)

    def _encode_ordinary(self, text: str, at_start: bool) -> list[int]:
        core = self._core if at_start else self._no_prefix_core
        ids: list[int] = _encode_or_raise(core, text).ids
        if self._control.isdisjoint(ids):
            return ids
        # The usual case above costs nothing; only text that spells a control token comes here.
        return self._encode_spelled_control_tokens(
            text, self._no_control_core if at_start else self._no_control_inner_core
        )

    def _encode_spelled_control_tokens(self, text: str, core: tokenizers.Tokenizer) -> list[int]:
        """Encode text that spells control tokens; one that the model itself makes is cut inside.

        A Unigram model makes them, and a BPE with ignore_merges. Every cut of a part is made at
        once, so that a long text of them takes no more time or memory than another.
        """
        ids: list[int] = []
        parts = [text]  # the next one last
        while parts:
            part = parts.pop()
            encoded = _encode_or_raise(core, part)
            cuts = self._control_token_cuts(encoded)
            if cuts:
                bounds = [0, *cuts, len(part)]
                parts += [part[i:j] for i, j in pairwise(bounds)][::-1]
            else:
                ids += encoded.ids
                core = self._no_control_cut_core
        return ids

    def _control_token_cuts(self, encoded: tokenizers.Encoding) -> list[int]:
        """The places behind the first character of each control token that the model made.

        Raises:
            TokenizerError: for a control token of one character.
        """
        cuts = []
        for id, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            # characters that the model does not know are no control token, although theirs is one
            if id in self._control and id != self._unknown_id:
                if stop <= start + 1:
                    raise TokenizerError(f"the text cannot be encoded without control token {id}")
                cuts.append(start + 1)
        return cuts

    @cached_property
    def _no_control_core(self) -> tokenizers.Tokenizer:
        return _make_no_control_core(self._core, self._control)

    @cached_property
    def _no_control_inner_core(self) -> tokenizers.Tokenizer:
        return (
            self._no_control_core
            if self._no_prefix_core is self._core
            else _make_no_control_core(self._no_prefix_core, self._control)
        )

    @cached_property
    def _no_control_cut_core(self) -> tokenizers.Tokenizer:
        """For text behind a cut, in front of which nothing may be added."""
        return _make_no_control_core(
            _without_prepended_space(self._core, "first", "always"), self._control
        )

    @cached_property
    def _no_prefix_core(self) -> tokenizers.Tokenizer:
        """For text that does not start the prompt: a Metaspace "first" adds no space there."""
        return _without_prepended_space(self._core, "first")

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; b"" for an unknown id."""
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._token_to_bytes(id)
        return data

    def token_bytes_at_text_start(self, id: int) -> bytes:
        """Return the bytes of a text's first token, without the space that the decoder drops."""
        data = self.token_bytes(id)
        if self._drops_space and id not in self._added and data.startswith(b" "):
            return data[1:]
        return data

    def _token_to_bytes(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode("utf-8")
        token = self._core.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes(BYTE_LEVEL_ALPHABET[char] for char in token)
            except KeyError:
                return token.encode("utf-8")
        byte = BYTE_TOKEN_PATTERN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(METASPACE, " ").encode("utf-8")


def checked_decoder_json(core: tokenizers.Tokenizer) -> str:
    """The decoder as JSON; TokenizerError when it is not one whose bytes we can name."""
    decoder = core.decoder
    text = decoder.__getstate__().decode() if decoder is not None else "null"
    decoder_types = set(re.findall(r'"type":\s*"(\w+)"', text)) - {"Sequence", "Fuse", "Strip"}
    if not decoder_types or not decoder_types <= {
        "ByteLevel",
        "ByteFallback",
        "Metaspace",
        "Replace",
    }:
        named = ", ".join(sorted(decoder_types)) or "none"
        raise TokenizerError(
            f"tokenizer.json: cannot decode with {named}; use a byte-level or SentencePiece BPE"
        )
    return text


def _drops_leading_space(spec: dict[str, Any]) -> bool:
    steps = spec.get("decoders", [spec])
    for step in steps:
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always") != "never"
        if step.get("type") == "Strip":
            return step.get("content") == " " and step.get("start", 0) > 0
    return False


def _make_no_control_core(
    core: tokenizers.Tokenizer, control: frozenset[int]
) -> tokenizers.Tokenizer:
    """The same model, shared, behind a front that reads no `control` token out of text."""
    guarded = tokenizers.Tokenizer(core.model)
    if core.normalizer is not None:
        guarded.normalizer = core.normalizer
    if core.pre_tokenizer is not None:
        guarded.pre_tokenizer = core.pre_tokenizer
    for id, token in sorted(core.get_added_tokens_decoder().items()):
        token.special = token.special or id in control
        guarded.add_tokens([token])
        if guarded.token_to_id(token.content) != id:
            # ids with gaps cannot be given one by one
            return _no_control_core_via_json(core, control)
    guarded.encode_special_tokens = True
    return guarded


def _no_control_core_via_json(
    core: tokenizers.Tokenizer, control: frozenset[int]
) -> tokenizers.Tokenizer:
    """As ``_make_no_control_core``, from the whole file; takes seconds for a large vocabulary."""
    spec = json.loads(core.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] or token["id"] in control
    copy = tokenizers.Tokenizer.from_str(json.dumps(spec))
    copy.encode_special_tokens = True
    return copy


def _without_prepended_space(core: tokenizers.Tokenizer, *schemes: str) -> tokenizers.Tokenizer:
    """A copy that adds no space in front of a text.

    Args:
        core: The tokenizer; it is returned itself where it adds none.
        schemes: Those of a Metaspace that are meant; with "always" a Prepend is meant too.
    """
    steps = (core.pre_tokenizer, core.normalizer)
    written = b"".join(each.__getstate__() for each in steps if each is not None)
    names = {*schemes, "Prepend"} if "always" in schemes else {*schemes}
    if not any(f'"{name}"'.encode() in written for name in names):
        return core
    spec = json.loads(core.to_str())
    for key in ("pre_tokenizer", "normalizer"):
        _disable_prepended_space(spec[key], names)
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _disable_prepended_space(step: dict[str, Any] | None, names: set[str]) -> None:
    """Change a step, and those inside it, so that it adds nothing in front of a text."""
    if step is None:
        return
    if step.get("prepend_scheme") in names:
        step["prepend_scheme"] = "never"
    if step["type"] in names:
        step["prepend"] = ""
    for inner in (*step.get("pretokenizers", ()), *step.get("normalizers", ())):
        _disable_prepended_space(inner, names)


def _prefix_and_suffix_ids(
    core: tokenizers.Tokenizer, settings: TokenizerSettings | None, by_id: Mapping[str, int | None]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the library adds around a text, unless add_bos/add_eos are set."""
    text = next((each for each in AFFIX_PROBES if core.encode(each, add_special_tokens=False)), "x")
    plain = core.encode(text, add_special_tokens=False).ids
    full = core.encode(text, add_special_tokens=True).ids
    extra = len(full) - len(plain)
    cut = next((i for i in range(extra + 1) if full[i : i + len(plain)] == plain), 0)
    prefix, suffix = tuple(full[:cut]), tuple(full[cut + len(plain) :])
    bos, eos = by_id.get("bos_token"), by_id.get("eos_token")
    if settings is None:
        return prefix, suffix
    if settings.add_bos is not None:
        prefix = (bos,) if settings.add_bos and bos is not None else ()
    if settings.add_eos is not None:
        suffix = (eos,) if settings.add_eos and eos is not None else ()
    return prefix, suffix


def _encode_or_raise(core: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """The library's encoding; TokenizerError where its regular expressions give up on the text."""
    try:
        if len(text) <= MAX_CHARS_ENCODED_WITH_GIL:
            return core.encode(text, add_special_tokens=False)
        # of a batch, even of one, the library gives the interpreter to other threads while it works
        return core.encode_batch([text], add_special_tokens=False)[0]
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        raise TokenizerError(
            "the tokenizer's rules cannot split this text in reasonable time; shorten it"
        ) from None
