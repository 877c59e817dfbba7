"""Run llama.cpp as one side of a comparison, through llama-cpp-python's C functions.

    python -m benchmarks.llamacpp_side '{"gguf": FILE, "threads": 2, "n_ctx": 2048, "n_seq_max": 1}'
    python -m benchmarks.llamacpp_side quantize SOURCE.gguf TARGET.gguf q8_0

Ids go straight into ``llama_decode`` and out of llama.cpp's own greedy sampler: no text, and no
Python between a token and the next but the loop. Everything else is llama.cpp's default; prompts
are decoded in batches of its default size. A fair build is native:
``CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python``.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_process import Prepared, serve_requests, take_over_stdout

FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15, "bf16": 32}
"""llama.cpp's file types (``LLAMA_FTYPE_MOSTLY_*``)."""
BATCH_TOKENS = 2048
"""Tokens of one ``llama_decode``: llama.cpp's default ``n_batch``."""


def main() -> None:
    """Serve, or write a file in another type."""
    if sys.argv[1] == "quantize":
        quantize(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        _serve(json.loads(sys.argv[1]))


def quantize(source: Path, target: Path, file_type: str) -> None:
    """Write ``target`` in a file type of llama.cpp; SystemExit where llama.cpp refuses."""
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FILE_TYPES[file_type], True
    partial = target.with_suffix(".partial")
    code = llama_cpp.llama_model_quantize(
        str(source).encode(), str(partial).encode(), ctypes.byref(params)
    )
    if code:
        raise SystemExit(f"llama.cpp cannot write {source.name} as {file_type} (code {code})")
    partial.rename(target)


def _serve(options: dict[str, Any]) -> None:
    pipe = take_over_stdout()
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        options["gguf"].encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = options["n_ctx"], options["n_seq_max"]
    params.n_threads = params.n_threads_batch = options["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot open {options['gguf']} with {options}")
    sampler = llama_cpp.llama_sampler_init_greedy()
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, options["n_seq_max"])

    def decode(tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run (id, position, sequence, whether its logits are needed), at most a batch of them."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, needs_logits) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = needs_logits
        code = llama_cpp.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")

    def prepare(prompts: Sequence[list[int]], outputs: Sequence[int]) -> Prepared:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

        def call() -> int:
            ids = _prefill(llama_cpp, context, sampler, decode, prompts)
            produced = len(ids)
            for step in range(1, max(outputs)):
                running = [s for s, output in enumerate(outputs) if output > step]
                decode([(ids[s], len(prompts[s]) + step - 1, s, True) for s in running])
                for row, s in enumerate(running):
                    ids[s] = llama_cpp.llama_sampler_sample(sampler, context, row)
                produced += len(running)
            return produced

        return call

    facts = {
        "device": "CPU",
        "versions": {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")},
        "cpu_features": llama_cpp.llama_print_system_info().decode(),
    }
    serve_requests(prepare, facts, pipe)


def _prefill(
    llama_cpp: Any, context: Any, sampler: Any, decode: Any, prompts: Sequence[list[int]]
) -> list[int]:
    """Run the prompts one after the other in batches; the first token of each."""
    first = []
    for sequence, prompt in enumerate(prompts):
        for start in range(0, len(prompt), BATCH_TOKENS):
            part = prompt[start : start + BATCH_TOKENS]
            last = start + len(part) == len(prompt)
            decode([
                (token, start + i, sequence, last and i == len(part) - 1)
                for i, token in enumerate(part)
            ])  # fmt: skip
        first.append(llama_cpp.llama_sampler_sample(sampler, context, -1))
    return first


if __name__ == "__main__":
    main()
