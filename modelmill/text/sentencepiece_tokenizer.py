"""SentencePiece BPE: LLaMA's tokenizer.model, llama2.c's pieces.json, and GGUF vocabularies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

import sentencepiece

from modelmill.core.errors import TokenizerError
from modelmill.text.sentencepiece_proto import (
    BYTE_PIECE,
    CONTROL_PIECE,
    UNKNOWN_PIECE,
    USER_DEFINED_PIECE,
    SpmModel,
    SpmPiece,
    check_spm_pieces,
    disable_dummy_prefix,
    parse_spm_model,
    serialize_spm_model,
)
from modelmill.text.tokenizer_base import Tokenizer, VocabInfo
from modelmill.text.tokenizer_files import (
    TokenizerSettings,
    check_bos_eos_in_vocab,
    is_token_id,
    parse_json_file,
    read_tokenizer_settings,
    unique_ids,
)

METASPACE = "▁"
CHATGLM_CLASS = "ChatGLMTokenizer"
CHATGLM_TOKENS = (
    "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
"""Of ChatGLM2 and 3, behind the pieces, whether the config names them or not."""
CHATGLM_PREFIX = ("[gMASK]", "sop")
BYTE_PIECE_PATTERN = re.compile(r"<0x([0-9A-F]{2})>")


def load_spm_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """Load tokenizer.model with added_tokens.json and the config files.

    Raises:
        TokenizerError: if a file is invalid; the message names it.
    """
    proto = files["tokenizer.model"]
    model = parse_spm_model(proto, "tokenizer.model")
    added_tokens = parse_json_file(files, "added_tokens.json")
    settings = read_tokenizer_settings(files)
    prefix: tuple[str, ...] = ()
    if parse_json_file(files, "tokenizer_config.json").get("tokenizer_class") == CHATGLM_CLASS:
        first, prefix = len(model.pieces), CHATGLM_PREFIX
        added_tokens |= {text: first + i for i, text in enumerate(CHATGLM_TOKENS)}
    return spm_tokenizer_from_proto(
        proto, model, settings, added_tokens, tokenizer_type="sentencepiece",
        file="tokenizer.model", prefix=prefix,
    )  # fmt: skip


def load_pieces_json_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    r"""Load llama2.c's pieces.json: [{"piece", "score"}, …].

    Spaces are written plainly, and <s> is "\n<s>\n".

    Raises:
        TokenizerError: if the file is invalid.
    """
    rows = parse_json_file(files, "pieces.json", list)
    pieces: list[SpmPiece] = []
    for id, row in enumerate(rows):
        valid = isinstance(row, dict) and isinstance(row.get("piece"), str)
        score = row.get("score") if valid else None
        if not isinstance(score, int | float) or isinstance(score, bool):
            raise TokenizerError(
                f"pieces.json: row {id} needs a piece (string) and a score (number)"
            )
        text = row["piece"]
        name = text.strip("\n") or text
        if name in ("<unk>", "<s>", "</s>") and id < 3:
            pieces.append(
                SpmPiece(name, float(score), UNKNOWN_PIECE if name == "<unk>" else CONTROL_PIECE)
            )
        elif BYTE_PIECE_PATTERN.fullmatch(text):
            pieces.append(SpmPiece(text, float(score), BYTE_PIECE))
        else:
            pieces.append(SpmPiece(text.replace(" ", METASPACE), float(score)))
    return make_spm_tokenizer(
        SpmModel(pieces),
        read_tokenizer_settings(files),
        tokenizer_type="sentencepiece",
        file="pieces.json",
    )


def make_spm_tokenizer(
    model: SpmModel, settings: TokenizerSettings, *, tokenizer_type: str, file: str
) -> SpmTokenizer:
    """Make a tokenizer from a vocabulary in memory.

    Raises:
        TokenizerError: if the vocabulary is empty or invalid.
    """
    if not model.pieces:
        raise TokenizerError(f"{file}: the vocabulary is empty")
    check_spm_pieces(model.pieces, file)
    if (
        not 0 <= model.unk_id < len(model.pieces)
        or model.pieces[model.unk_id].type != UNKNOWN_PIECE
    ):
        raise TokenizerError(f"{file}: token {model.unk_id} must be <unk>")
    return spm_tokenizer_from_proto(
        serialize_spm_model(model), model, settings, {}, tokenizer_type=tokenizer_type, file=file
    )


def spm_tokenizer_from_proto(
    proto: bytes,
    model: SpmModel,
    settings: TokenizerSettings,
    added_tokens: dict[str, int],
    *,
    tokenizer_type: str,
    file: str,
    prefix: tuple[str, ...] = (),
) -> SpmTokenizer:
    """Make a tokenizer from a serialized model, and added tokens and names of other files.

    prefix: control tokens that begin a prompt in the place of BOS.
    """
    processor = _load_spm_processor(proto, file)
    added = _merge_added_tokens(added_tokens, settings, model, file)
    replaced = set(added.values())
    pieces = {p.text: id for id, p in enumerate(model.pieces) if id not in replaced}
    known = pieces | added
    control = {
        text: id
        for text, id in pieces.items()
        if model.pieces[id].type in (CONTROL_PIECE, UNKNOWN_PIECE)
    } | added
    names = {
        key: model.pieces[id].text
        for key, id in (
            ("bos_token", model.bos_id),
            ("eos_token", model.eos_id),
            ("unk_token", model.unk_id),
        )
        if 0 <= id < len(model.pieces)
    } | dict(settings.special_tokens)
    check_bos_eos_in_vocab(names, known, file)
    by_id = {key: known.get(text) for key, text in names.items()}
    control |= {
        text: known[text]
        for text in (*names.values(), *settings.extra_special_tokens)
        if text in known
    }
    bos, eos = by_id.get("bos_token"), by_id.get("eos_token")
    begins = (bos,) if bos is not None and settings.add_bos is not False else ()
    traits = VocabInfo(
        tokenizer_type=tokenizer_type,
        vocab_size=max(known.values()) + 1,
        special=control,
        skipped_ids=frozenset(control.values()),
        bos_id=bos,
        eos_ids=unique_ids([eos, *settings.eos_ids]),
        pad_id=by_id.get("pad_token", model.pad_id if model.pad_id >= 0 else None),
        prefix=tuple(control[text] for text in prefix) if prefix else begins,
        suffix=(eos,) if eos is not None and settings.add_eos else (),
        template_names=names,
    )
    return SpmTokenizer(processor, model, traits, added, prefix_everywhere=settings.legacy)


class SpmTokenizer(Tokenizer):
    """A SentencePiece model; every text is encoded with the model's dummy space in front."""

    each_byte = True

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        model: SpmModel,
        traits: VocabInfo,
        added: Mapping[str, int],
        *,
        prefix_everywhere: bool,
    ) -> None:
        super().__init__(traits)
        self._processor = processor
        self._dummy_prefix = model.dummy_prefix
        self._prefix_everywhere = prefix_everywhere
        self._control = frozenset(traits.special.values())
        self._leading = {
            id for id, piece in enumerate(model.pieces) if piece.text.startswith(METASPACE)
        }
        self._pieces = {id: _piece_to_bytes(piece) for id, piece in enumerate(model.pieces)}
        self._bytes = self._pieces | {id: text.encode("utf-8") for text, id in added.items()}

    def _encode_ordinary(self, text: str, at_start: bool) -> list[int]:
        prefixed = at_start or self._prefix_everywhere
        processor = self._processor if prefixed else self._no_prefix_processor
        ids: list[int] = processor.encode(text)
        if self._control.isdisjoint(ids):
            return ids
        # special in the config but an ordinary piece of the model: encode its text by character
        out: list[int] = []
        for id in ids:
            out.extend(self._encode_control_token_text(id) if id in self._control else [id])
        return out

    def _encode_control_token_text(self, id: int) -> list[int]:
        """Return the ids of a control token's piece by character; bytes where there is no piece."""
        out: list[int] = []
        for char in self._pieces[id].decode("utf-8"):
            one = self._processor.piece_to_id(char.replace(" ", METASPACE))
            if one in self._control:
                fallback = [
                    self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in char.encode("utf-8")
                ]
                out.extend(i for i in fallback if i not in self._control)
            else:
                out.append(one)
        return out

    @cached_property
    def _no_prefix_processor(self) -> sentencepiece.SentencePieceProcessor:
        return _load_spm_processor(
            disable_dummy_prefix(self._processor.serialized_model_proto()), "tokenizer.model"
        )

    def token_bytes(self, id: int) -> bytes:
        """Return the exact bytes of a token; b"" for an unknown id."""
        return self._bytes.get(id, b"")

    def token_bytes_at_text_start(self, id: int) -> bytes:
        """Return the bytes of a text's first token, without the dummy space."""
        data = self.token_bytes(id)
        return data[1:] if self._dummy_prefix and id in self._leading else data


def _piece_to_bytes(piece: SpmPiece) -> bytes:
    byte = BYTE_PIECE_PATTERN.fullmatch(piece.text) if piece.type == BYTE_PIECE else None
    return bytes([int(byte[1], 16)]) if byte else piece.text.replace(METASPACE, " ").encode("utf-8")


def _load_spm_processor(proto: bytes, file: str) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise TokenizerError(f"{file} cannot be read as a SentencePiece model: {reason}") from None


def _merge_added_tokens(
    added_tokens: dict[str, int], settings: TokenizerSettings, model: SpmModel, file: str
) -> dict[str, int]:
    """Tokens beyond the model's pieces, or in the place of one: added_tokens.json and the decoder.

    An added_tokens_decoder may give another text to a piece, as InternLM2's does to unused ones.
    """
    for text, id in added_tokens.items():
        if not is_token_id(id) or not text:
            raise TokenizerError("added_tokens.json must map token strings to ids")
    stated = {str(entry["content"]): id for id, entry in settings.added_tokens.items()}
    added_tokens = stated | added_tokens
    by_id: dict[int, str] = {}
    for text, id in added_tokens.items():
        other = id < len(model.pieces) and model.pieces[id].text != text
        if other and stated.get(text) != id:
            raise TokenizerError(
                f"{text!r} and {model.pieces[id].text!r} of {file} share the id {id}"
            )
        if by_id.setdefault(id, text) != text:
            raise TokenizerError(f"added_tokens.json: {by_id[id]!r} and {text!r} share the id {id}")
    return {
        text: id
        for text, id in added_tokens.items()
        if id >= len(model.pieces)
        or model.pieces[id].text != text
        or _is_not_user_or_byte_piece(model, id)
    }


def _is_not_user_or_byte_piece(model: SpmModel, id: int) -> bool:
    return model.pieces[id].type not in (USER_DEFINED_PIECE, BYTE_PIECE)
