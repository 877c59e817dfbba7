"""Run transformers as one side of a comparison.

    python -m benchmarks.transformers_peer '{"config": …, "dtype": …, "threads": …}'

Its generate() on one batch of equal prompts, greedy, end-of-text ignored, with random weights of a
known shape.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import sys
from collections.abc import Sequence

from benchmarks.peer_process import Prepared, serve_requests, take_over_stdout


def main() -> None:
    """Make the model on the GPU and serve."""
    pipe = take_over_stdout()
    options = json.loads(sys.argv[1])
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from benchmarks.synthetic_shapes import randomize_weights

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "threads" in options:
        torch.set_num_threads(options["threads"])
    with torch.device(device):
        config = AutoConfig.from_pretrained(options["config"])
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options["dtype"]))
    model = model.eval().requires_grad_(False)

    def prepare(prompts: Sequence[list[int]], outputs: Sequence[int]) -> Prepared:
        assert len(set(outputs)) == 1, "one static batch has one length"
        cpu_ids = torch.tensor(list(prompts))
        fields = GenerationConfig(
            do_sample=False, max_new_tokens=outputs[0], eos_token_id=None, pad_token_id=0
        )

        @torch.inference_mode()
        def call() -> int:
            ids = cpu_ids.to(device)
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=fields
            )
            return sum(len(row) - cpu_ids.shape[1] for row in output.tolist())

        return call

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {each: importlib.metadata.version(each) for each in ("transformers", "torch")}
    serve_requests(
        prepare,
        {"device": name, "versions": versions},
        pipe,
        randomize=functools.partial(randomize_weights, model),
    )


if __name__ == "__main__":
    main()
