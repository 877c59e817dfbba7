"""Reads and writes the parts of SentencePiece's model file that modelmill uses.

The file is a protocol buffer. Its fields are parsed here because the generated classes of
sentencepiece need the protobuf package, which modelmill does not need otherwise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modelmill.core.errors import TokenizerError

NORMAL_PIECE = 1
UNKNOWN_PIECE = 2
CONTROL_PIECE = 3
USER_DEFINED_PIECE = 4
UNUSED_PIECE = 5
BYTE_PIECE = 6
VARINT_WIRE_TYPE = 0
FIXED64_WIRE_TYPE = 1
BYTES_WIRE_TYPE = 2
FIXED32_WIRE_TYPE = 5
# field numbers of sentencepiece_model.proto
PIECES_FIELD, TRAINER_SPEC_FIELD, NORMALIZER_SPEC_FIELD = 1, 2, 3
PIECE_TEXT_FIELD, PIECE_SCORE_FIELD, PIECE_TYPE_FIELD = 1, 2, 3
MODEL_TYPE_FIELD = 3
BYTE_FALLBACK_FIELD = 35
UNK_ID_FIELD = 40
BOS_ID_FIELD = 41
EOS_ID_FIELD = 42
PAD_ID_FIELD = 43
CHARSMAP_FIELD = 2
ADD_DUMMY_PREFIX_FIELD = 3
REMOVE_EXTRA_SPACES_FIELD = 4
ESCAPE_SPACES_FIELD = 5
BPE_MODEL_TYPE = 2
MAX_NORMALIZED_GROWTH = 64
"""Times longer that a tokenizer may make a text before it is split. SentencePiece's own maps write
up to 18 characters for one; a chain of long replacements would turn a short prompt into gigabytes.
"""


@dataclass(frozen=True)
class SpmPiece:
    """One row of the vocabulary; the row's index is the token id."""

    text: str
    score: float
    type: int = NORMAL_PIECE


@dataclass(frozen=True)
class SpmModel:
    """The parts of a model that determine the ids of a text; id -1: the token does not exist."""

    pieces: Sequence[SpmPiece]
    dummy_prefix: bool = True
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1


def serialize_spm_model(model: SpmModel) -> bytes:
    """Write a BPE model without normalization, with byte fallback if all 256 byte pieces exist."""
    parts = []
    for piece in model.pieces:
        text = piece.text.encode("utf-8")
        body = (
            _encode_bytes_field(PIECE_TEXT_FIELD, text)
            + _encode_field_key(PIECE_SCORE_FIELD, FIXED32_WIRE_TYPE)
            + struct.pack("<f", piece.score)
        )
        parts.append(
            _encode_bytes_field(
                PIECES_FIELD, body + _encode_int_field(PIECE_TYPE_FIELD, piece.type)
            )
        )
    fallback = sum(piece.type == BYTE_PIECE for piece in model.pieces) == 256
    trainer = (
        _encode_int_field(MODEL_TYPE_FIELD, BPE_MODEL_TYPE)
        + _encode_int_field(BYTE_FALLBACK_FIELD, fallback)
        + _encode_int_field(UNK_ID_FIELD, model.unk_id)
    )
    trainer += (
        _encode_int_field(BOS_ID_FIELD, model.bos_id)
        + _encode_int_field(EOS_ID_FIELD, model.eos_id)
        + _encode_int_field(PAD_ID_FIELD, model.pad_id)
    )
    normalizer = (
        _encode_int_field(ADD_DUMMY_PREFIX_FIELD, model.dummy_prefix)
        + _encode_int_field(REMOVE_EXTRA_SPACES_FIELD, 0)
        + _encode_int_field(ESCAPE_SPACES_FIELD, 1)
    )
    return (
        b"".join(parts)
        + _encode_bytes_field(TRAINER_SPEC_FIELD, trainer)
        + _encode_bytes_field(NORMALIZER_SPEC_FIELD, normalizer)
    )


def disable_dummy_prefix(proto: bytes) -> bytes:
    """Return the model without the dummy space: a later field of a protocol buffer overrides."""
    return proto + _encode_bytes_field(
        NORMALIZER_SPEC_FIELD, _encode_int_field(ADD_DUMMY_PREFIX_FIELD, 0)
    )


def parse_spm_model(proto: bytes, file: str) -> SpmModel:
    """Read a model file.

    Raises:
        TokenizerError: if the bytes are not a valid model; the message names `file`.
    """
    pieces: list[SpmPiece] = []
    ids = {
        UNK_ID_FIELD: 0,
        BOS_ID_FIELD: 1,
        EOS_ID_FIELD: 2,
        PAD_ID_FIELD: -1,
    }  # the format's defaults
    dummy_prefix = True
    growth = 1
    try:
        for field, value in _iter_proto_fields(proto):
            if field == PIECES_FIELD and isinstance(value, bytes):
                pieces.append(_parse_piece(value))
            elif field == TRAINER_SPEC_FIELD and isinstance(value, bytes):
                ids |= {
                    f: _to_signed_int32(v)
                    for f, v in _iter_proto_fields(value)
                    if f in ids and isinstance(v, int)
                }
            elif field == NORMALIZER_SPEC_FIELD and isinstance(value, bytes):
                for inner, flag in _iter_proto_fields(value):
                    dummy_prefix = bool(flag) if inner == ADD_DUMMY_PREFIX_FIELD else dummy_prefix
                    if inner == CHARSMAP_FIELD and isinstance(flag, bytes):
                        growth = max(growth, max_charsmap_replacement_len(flag))
    except (ValueError, IndexError, struct.error):
        raise TokenizerError(
            f"{file} is not a SentencePiece model, or is truncated; copy the file again"
        ) from None
    if not pieces:
        raise TokenizerError(f"{file} has no vocabulary; copy the file again")
    if growth > MAX_NORMALIZED_GROWTH:
        raise TokenizerError(f"{file} makes texts {growth} times longer; no known tokenizer does")
    check_spm_pieces(pieces, file)
    return SpmModel(
        pieces,
        dummy_prefix,
        ids[UNK_ID_FIELD],
        ids[BOS_ID_FIELD],
        ids[EOS_ID_FIELD],
        ids[PAD_ID_FIELD],
    )


def max_charsmap_replacement_len(charsmap: bytes) -> int:
    """The most characters that a precompiled map of characters writes for one.

    The map is the size of a trie as an uint32, the trie, and replacements that end with a zero.
    """
    start = 4 + int.from_bytes(charsmap[:4], "little")
    return max(len(each.decode(errors="replace")) for each in charsmap[start:].split(b"\0"))


def check_spm_pieces(pieces: Sequence[SpmPiece], file: str) -> None:
    """Check the pieces.

    Raises:
        TokenizerError: if a piece is empty or repeated, or a score is not finite.
    """
    ids_by_text: dict[str, int] = {}
    for id, piece in enumerate(pieces):
        if not piece.text:
            raise TokenizerError(f"{file}: token {id} is empty")
        if ids_by_text.setdefault(piece.text, id) != id:
            raise TokenizerError(f"{file}: tokens {ids_by_text[piece.text]} and {id} are the same")
        if not abs(piece.score) < 3.4e38:
            raise TokenizerError(f"{file}: the score of token {id} is not a finite number")


def _parse_piece(data: bytes) -> SpmPiece:
    text = ""
    score = 0.0
    type_ = NORMAL_PIECE
    for field, value in _iter_proto_fields(data):
        if field == PIECE_TEXT_FIELD and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif field == PIECE_SCORE_FIELD and isinstance(value, bytes):
            score = struct.unpack("<f", value)[0]
        elif field == PIECE_TYPE_FIELD and isinstance(value, int):
            type_ = value
    return SpmPiece(text, score, type_)


def _iter_proto_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value); raises ValueError or IndexError if the bytes end early."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire_type = key & 7
        if wire_type == VARINT_WIRE_TYPE:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        if wire_type == BYTES_WIRE_TYPE:
            size, at = _read_varint(data, at)
        else:
            size = {FIXED64_WIRE_TYPE: 8, FIXED32_WIRE_TYPE: 4}.get(wire_type, len(data) + 1)
        if size > len(data) - at:
            raise ValueError("a field reaches past the end")
        yield key >> 3, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("a number without end")


def _to_signed_int32(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _encode_field_key(field: int, wire_type: int) -> bytes:
    return _encode_varint(field << 3 | wire_type)


def _encode_int_field(field: int, value: int) -> bytes:
    return _encode_field_key(field, VARINT_WIRE_TYPE) + _encode_varint(value & (1 << 64) - 1)


def _encode_bytes_field(field: int, value: bytes) -> bytes:
    return _encode_field_key(field, BYTES_WIRE_TYPE) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
