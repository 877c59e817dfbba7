"""``python -m tools.gguf_witness FOLDER [FAMILY ...]``: families' GGUFs as llama.cpp reads them.

FOLDER holds llama.cpp's shared libraries (``libllama``, ``libggml``, ``libggml-base`` and those of
its CPU backend), as a build leaves them or a package of its bindings brings them. Of each family
the seeded GGUF of ``tests/models/test_family_gguf.py`` is computed by llama.cpp in float32.
Printed: the largest difference of its logits from transformers' for the folder that the GGUF was
made from. Exit code 1 if one is above 1e-4 or no number, as it is for families with GELU, whose
table has 16 bits there, and those for which llama.cpp tells a rule by the number of layers of the
real models.

The functions are called by their names in ``llama.h``. Parameters stay those that llama.cpp sets,
but for keys and values in float32 and attention in single operations: else it rounds to 16 bits.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch

from tests.models.all_families import CASES
from tests.models.family_cases import FamilyCase
from tests.models.family_gguf import write_gguf

LIBRARIES = ("libggml-base", "libggml", "libllama")
"""In the order in which they need each other."""
TOKENS, TOLERANCE = 40, 1e-4
FLASH_ATTENTION, FIRST_TYPE = 13, 14
"""Words of ``llama_context_params``: whether attention is fused, and where the search for the types
of keys and values begins, which are two words that hold 1 (float16)."""


class _Params(ctypes.Structure):
    """A structure of parameters that is passed by value; larger than any of them."""

    _fields_ = (("words", ctypes.c_int32 * 256),)


class _Batch(ctypes.Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class LlamaCpp:
    """llama.cpp's library.

    Attributes:
        functions: Its functions by their names.
    """

    def __init__(self, folder: Path) -> None:
        loaded = {name: self._load(folder, name) for name in LIBRARIES}
        load_backends = loaded["libggml"].ggml_backend_load_all_from_path
        load_backends.argtypes = [ctypes.c_char_p]
        load_backends(str(folder).encode())
        self.functions = lib = loaded["libllama"]
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(lib, name).restype = _Params
        lib.llama_model_load_from_file.restype = ctypes.c_void_p
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Params]
        lib.llama_init_from_model.restype = ctypes.c_void_p
        lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _Params]
        lib.llama_batch_init.restype = _Batch
        lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
        lib.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        lib.llama_get_logits.argtypes = [ctypes.c_void_p]
        lib.llama_free.argtypes = lib.llama_model_free.argtypes = [ctypes.c_void_p]
        lib.llama_backend_init()

    @staticmethod
    def _load(folder: Path, name: str) -> Any:
        found_paths = sorted([*folder.glob(f"{name}.so*"), *folder.glob(f"{name}.v*.so")])
        if not found_paths:
            raise SystemExit(f"{folder} has no {name}: name the folder of llama.cpp's libraries")
        return ctypes.CDLL(str(found_paths[0]), mode=ctypes.RTLD_GLOBAL)

    def logits(self, path: Path, ids: Sequence[int], vocabulary: int) -> torch.Tensor:
        """Logits [T, V] of a prompt."""
        lib = self.functions
        model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not model:
            raise RuntimeError("llama.cpp does not load it")
        params = lib.llama_context_default_params()
        words = params.words
        first = next(i for i in range(FIRST_TYPE, 60) if words[i] == words[i + 1] == 1)
        words[first] = words[first + 1] = words[FLASH_ATTENTION] = 0
        context = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama.cpp does not compute it")
        shape = (len(ids), vocabulary)
        rows = np.ctypeslib.as_array(lib.llama_get_logits(context), shape).copy()
        lib.llama_free(context)
        lib.llama_model_free(model)
        return torch.from_numpy(rows)


def difference(case: FamilyCase, library: LlamaCpp, folder: Path) -> float:
    """The largest difference of llama.cpp's logits from transformers'."""
    assert case.gguf is not None
    raw = case.raw(**case.gguf.changes)
    expected = case.save(folder / "hf", **case.gguf.changes)
    vocabulary, path = int(raw["vocab_size"]), folder / "model.gguf"
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_vocabulary(writer: Any, *rest: Any) -> None:
        """llama.cpp loads no file without a tokenizer, or the word that there is none."""
        writer.add_string("tokenizer.ggml.model", "no_vocab")
        writer.add_uint32(f"{writer.arch}.vocab_size", vocabulary)
        write_header(writer, *rest)

    with mock.patch.object(gguf.GGUFWriter, "write_header_to_file", with_vocabulary):
        write_gguf(path, folder / "hf", raw, case.gguf)
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(2, vocabulary, (TOKENS,), generator=draw).tolist()
    return float((library.logits(path, ids, vocabulary) - expected(ids)).abs().max())


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each family; 1 if one differs."""
    with_gguf = [name for name, case in CASES.items() if case.gguf is not None]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="of llama.cpp's shared libraries")
    parser.add_argument("family", nargs="*", default=with_gguf, help="default: all with a GGUF")
    options = parser.parse_args(argv)
    if unknown := set(options.family) - set(with_gguf):
        parser.error(f"no GGUF of {', '.join(sorted(unknown))}; there are {', '.join(with_gguf)}")
    library, failed = LlamaCpp(options.folder), 0
    for name in options.family:
        with tempfile.TemporaryDirectory() as folder:
            try:
                error = difference(CASES[name], library, Path(folder))
                shown = f"{error:.1e}"
            except RuntimeError as reason:
                error, shown = float("inf"), str(reason)
        failed += not error <= TOLERANCE  # of NaN, too
        print(f"{name}: {shown}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
