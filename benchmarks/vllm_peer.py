"""vLLM as one side of a comparison, through its public API, on made-up weights of a known shape.

    python -m benchmarks.vllm_peer '{"config": FOLDER, "run": {"max_num_seqs": 64, …}}'

FOLDER holds a ``config.json`` (``benchmarks/synthetic_shapes.py`` writes it). Weights are dummies
at the start, as vLLM makes them; ``randomise`` then draws every parameter like
``make_checkpoint.py`` does. Greedy, end-of-text ignored, no prefix cache, no text.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_process import Prepared, serve_requests, take_over_stdout

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # in this process: no second one between the call and the GPU, and the model can be reached
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""Set by the driver before this process starts."""


def main() -> None:
    """Open vLLM and serve. run: arguments of ``vllm.LLM`` beside the fixed ones."""
    pipe = take_over_stdout()
    options = json.loads(sys.argv[1])
    import torch
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model=options["config"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_batched_tokens=8192,
        disable_log_stats=True,
        **options["run"],
    )

    def prepare(prompts: Sequence[list[int]], outputs: Sequence[int]) -> Prepared:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in outputs
        ]

        def call() -> int:
            results = llm.generate(inputs, params, use_tqdm=False)
            return sum(len(each.outputs[0].token_ids) for each in results)

        return call

    def draw(weights: str) -> None:
        llm.apply_model(functools.partial(_randomise, weights))
        torch.cuda.synchronize()

    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")
    }
    facts = {
        "device": torch.cuda.get_device_name(),
        "versions": {"vllm": importlib.metadata.version("vllm"), **versions},
    }
    serve_requests(prepare, facts, pipe, randomize=draw)


def _randomise(weights: str, model: Any) -> None:
    from benchmarks.synthetic_shapes import randomize_weights

    randomize_weights(model, weights)


if __name__ == "__main__":
    main()
