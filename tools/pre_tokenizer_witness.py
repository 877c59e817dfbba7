r"""``python -m tools.pre_tokenizer_witness FOLDER VOCABULARY.gguf [NAME ...]``: ids of llama.cpp.

FOLDER holds llama.cpp's shared libraries (``tools.gguf_witness``). VOCABULARY is a GGUF with
byte-level merges, such as llama.cpp's models/ggml-vocab-gpt-2.gguf. For each name of
``tokenizer.ggml.pre`` its vocabulary is written with that name, and random texts are encoded by
modelmill and by llama.cpp. Printed: how many differ, and the shortest with both its cuts.

Known differences: words of o200k (gpt-4o and others), tekken and Kimi K2 that begin with a
combining mark, whose classes llama.cpp replaces by letters; ``\d`` and ``\b`` of tiny_aya and
superbpe, which in llama.cpp know ASCII alone. There the cuts are those of the package tokenizers
with the model's own expressions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from modelmill.checkpoint.gguf import GgufFile
from modelmill.checkpoint.gguf_config import array_as_list
from modelmill.text.pre_tokenizers import PRE_TOKENIZERS
from modelmill.text.tokenizer_loader import load_tokenizer
from tools.gguf_witness import LlamaCpp

TEXTS, MAX_PARTS = 3000, 24
PARTS = (
    *"aBéßЖж中文日のカ가กिा12٣½ \n\r\t\u3000'.,!?/-_(€$+=<`|~^ªⅧ…。“🦙\u0e34\u200d",
    "  ", "'s", "'S", "'ll", "'RE", "the", " and", "Hello", "World", "don't", "123", "1234567",
)  # fmt: skip
VOCAB_ONLY = 72
"""Byte of ``llama_model_params`` that says to load no weights: behind five pointers and numbers."""
TOKENIZER_KEYS = ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


def random_texts(seed: int = 5) -> list[str]:
    """Texts that are in NFC, which llama.cpp does not bring about."""
    draw = random.Random(seed)
    texts = (
        "".join(draw.choice(PARTS) for _ in range(draw.randint(1, MAX_PARTS))) for _ in range(TEXTS)
    )
    return [text for text in texts if unicodedata.is_normalized("NFC", text)]


def write_vocabulary(path: Path, name: str, metadata: dict[str, Any]) -> dict[str, bytes]:
    """Write the vocabulary with this name; returns it as modelmill's tokenizer reads it."""
    values = {key: array_as_list(metadata[f"tokenizer.ggml.{key}"]) for key in TOKENIZER_KEYS}
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["token_type"])
    writer.add_token_merges(values["merges"])
    writer.add_bos_token_id(int(values["bos_token_id"]))
    writer.add_eos_token_id(int(values["eos_token_id"]))
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length):
        add(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    own |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}
    return {"gguf_vocab.json": json.dumps(own).encode()}


class LlamaCppTokenizer:
    """A vocabulary as llama.cpp loads it."""

    def __init__(self, library: LlamaCpp, path: Path) -> None:
        self._lib = lib = library.functions
        lib.llama_model_get_vocab.restype = ctypes.c_void_p
        lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        ids, number = ctypes.POINTER(ctypes.c_int32), ctypes.c_int32
        lib.llama_tokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, number, ids, number, ctypes.c_bool, ctypes.c_bool,
        ]  # fmt: skip
        params = lib.llama_model_default_params()
        ctypes.memset(ctypes.addressof(params) + VOCAB_ONLY, 1, 1)
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError("llama.cpp does not load it")
        self._vocabulary = lib.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        """The ids, without special tokens."""
        data = text.encode()
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._lib.llama_tokenize(self._vocabulary, data, len(data), ids, room, False, False)
        return list(ids[:count])


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each name; 1 if llama.cpp loads none of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of llama.cpp's shared libraries")
    parser.add_argument("vocabulary", type=Path, help="a GGUF with byte-level merges")
    parser.add_argument("name", nargs="*", default=[name for name in PRE_TOKENIZERS if name])
    options = parser.parse_args(argv)
    library, texts, loaded = LlamaCpp(options.folder), random_texts(), 0
    metadata = GgufFile(options.vocabulary).metadata
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for name in options.name:
            own = load_tokenizer(write_vocabulary(path, name, metadata))
            try:
                other = LlamaCppTokenizer(library, path)
            except RuntimeError as reason:
                print(f"{name}: {reason}", flush=True)
                continue
            loaded += 1
            pairs = ((each, own.encode(each, bos=False), other.encode(each)) for each in texts)
            different = [each for each in pairs if each[1] != each[2]]
            shown = min(different, key=lambda each: len(each[0])) if different else ""
            print(f"{name}: {len(different)} of {len(texts)} {shown!r}", flush=True)
    return 0 if loaded else 1


if __name__ == "__main__":
    sys.exit(main())
