"""vLLM as one side of a comparison, through its public API, on made-up weights of a known shape.

    python -m benchmarks.vllm_peer '{"config": FOLDER, "run": {"max_num_seqs": 64, …}}'

FOLDER holds a ``config.json`` (``benchmarks/synthetic_shapes.py`` writes it). Weights are dummies
at the start, as vLLM makes them; ``randomise`` then draws every parameter like
``make_checkpoint.py`` does. Greedy, end-of-text ignored, no prefix cache, no text.

With ``"images": true`` FOLDER is one of ``benchmarks/blip2_folder.py``, and requests may bring a
picture each, which vLLM puts before the text. It keeps no picture for another request either.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peer_process import Images, Prepared, serve_requests, take_over_stdout

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

    llm = LLM(**engine_arguments(options))

    def prepare(
        prompts: Sequence[list[int]], outputs: Sequence[int], images: Images | None = None
    ) -> Prepared:
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for each, image in zip(inputs, make_images(images, len(inputs)), strict=False):
            each["multi_modal_data"] = {"image": image}
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
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    facts = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("vllm", "torch", "triton", "transformers")
            if importlib.util.find_spec(name)
        },
    }
    serve_requests(prepare, facts, pipe, randomize=draw)


def engine_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for this process's argument.

    Limits that ``run`` does not name are vLLM's own choice for the device.
    """
    arguments = {
        "model": options["config"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if options.get("images"):
        # its processor of pictures asks the tokenizer for the mark of a picture
        arguments |= {
            "skip_tokenizer_init": False,
            "limit_mm_per_prompt": {"image": 1},
            "mm_processor_cache_gb": 0,
            "enable_mm_embeds": True,
        }
    return arguments | options["run"]


def make_images(images: Images | None, count: int) -> list[Any]:
    """Return a picture for each of ``count`` requests, or its embeddings; none without ``images``.

    A picture is bytes [S, S, 3] on the host, the same as any other side gets for the seed.
    """
    if images is None:
        return []
    import torch

    from benchmarks.blip2_folder import random_images

    if "width" not in images:
        return list(random_images(count, images["seed"], images["side"]).numpy())
    generator = torch.Generator().manual_seed(images["seed"])
    size = (count, images["embeddings"], images["width"])
    return [[each] for each in torch.randn(size, generator=generator).to(torch.bfloat16)]


def _randomise(weights: str, model: Any) -> None:
    from benchmarks.synthetic_shapes import randomize_weights

    randomize_weights(model, weights)


if __name__ == "__main__":
    main()
