"""Time the host's work for a step with prompts, launched kernel by kernel; needs no GPU.

    python benchmarks/host_overhead.py [-q smoothquant] [--kv-cache-dtype int8] [--steps
        1024,768+230] [--rounds 60] [--profile]

A LLaMA of 32 layers, its matrices narrow, on a driver that launches nothing
(``fake_cuda_driver.py``). ``1024``: a prompt of so many tokens; ``768+230``: so many tokens of
prompts beside so many answers. CPU milliseconds of this process, the least and the median of the
rounds: other programs make them larger, never smaller. What torch itself computes (cuBLAS on a GPU)
would run here, so that ``-q`` is one of the kinds whose products are kernels of ours. To compare
two checkouts, run each in turn.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import fake_cuda_driver  # noqa: E402
from benchmarks.weights_option import add_weights_option  # noqa: E402

WEIGHT_FORMATS = ("smoothquant", "smoothquant-static", "fp8", "fp8-static")
SMALL_CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
CHUNK_TOKENS, CONTEXT = 512, 1000
FAKE_DRIVER_VAR = "MODELMILL_FAKE_CUDA_DRIVER"


def make_step(shape: str, weight_format: str, kv_dtype: str) -> Callable[[], Any]:
    """One step down to the ids, with kernels that have been compiled."""
    import torch

    from benchmarks.model_shapes import SHAPES
    from benchmarks.weight_formats import weight_quantizer
    from modelmill.loader.model_loader import build_model
    from modelmill.nn.fusion import fuse_model
    from modelmill.nn.kv import KVCache, kv_cache_dtype
    from modelmill.nn.linear import Linear
    from modelmill.nn.synthetic_step import PAGE_SIZE, fill_random_weights, synthetic_step
    from modelmill.ops.registry import select_backends
    from modelmill.runtime.graph_sizes import context_bucket

    raw = {
        **SHAPES["llama-7b"],
        **SMALL_CONFIG,
        "num_key_value_heads": SMALL_CONFIG["num_attention_heads"],
    }
    model = build_model(str(raw["model_type"]), raw)
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and name != "head"
    ]
    fill_random_weights(
        model, dict.fromkeys(linears, weight_quantizer(weight_format)), torch.bfloat16, "cpu"
    )
    tokens, answers = (int(part or 0) for part in shape.partition("+")[::2])
    pieces = range(0, tokens, CHUNK_TOKENS) if answers else (0,)
    lengths = [min(CHUNK_TOKENS, tokens - at) if answers else tokens for at in pieces]
    groups = [(1, length, length) for length in lengths] + (
        [(answers, 1, CONTEXT)] if answers else []
    )
    pages = sum(count * -(-context // PAGE_SIZE) for count, _, context in groups) + 1
    cache_dtype = kv_cache_dtype(kv_dtype, torch.bfloat16)
    cache = KVCache.allocate(model.kv, pages, PAGE_SIZE, cache_dtype, "cpu")  # type: ignore[arg-type]
    bound = context_bucket(CONTEXT) if answers else tokens
    step = synthetic_step(model, select_backends("cuda"), groups, max_context=bound, kv=cache)

    fused = fuse_model(model)

    @torch.inference_mode()
    def call() -> Any:
        return step.ops.argmax(fused(step))

    for _ in range(3):
        call()
    return call


def cpu_ms(call: Callable[[], Any], rounds: int) -> list[float]:
    """CPU milliseconds of each call."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - began))
    return times


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_weights_option(parser, WEIGHT_FORMATS, "smoothquant")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"))
    parser.add_argument("--steps", default="1024,768+230")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    return parser.parse_args()


def main() -> int:
    """Measure and print; restart in a process with the fake driver if this one lacks it."""
    options = parse_args()
    if os.environ.get(FAKE_DRIVER_VAR) != "1":
        os.environ[FAKE_DRIVER_VAR] = "1"
        return fake_cuda_driver.rerun_with_driver(
            Path(tempfile.gettempdir()) / "modelmill-silent-driver", sys.argv
        )
    import torch

    torch.set_num_threads(1)
    fake_cuda_driver.fake_hopper_device()
    fake_cuda_driver.disable_kernels()
    for step_name in options.steps.split(","):
        call = make_step(step_name, options.weights, options.kv_cache_dtype)
        times = cpu_ms(call, options.rounds)
        what = f"{options.weights}, pages {options.kv_cache_dtype}, {step_name} tokens"
        print(
            f"{what}: {min(times):.2f} ms of CPU at least, {statistics.median(times):.2f} in the "
            "median"
        )
        if options.profile:
            with cProfile.Profile() as profile:
                for _ in range(5):
                    call()
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0


if __name__ == "__main__":
    sys.exit(main())
