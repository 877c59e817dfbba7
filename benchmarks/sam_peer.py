"""Run a compiled encoder of Segment Anything as one side of a comparison, for one batch.

    python -m benchmarks.sam_peer '{"side": NAME, "batch": 1, "spec": {…}, "work": FOLDER, …}'

| NAME | what |
|---|---|
| transformers-MODE | transformers' encoder with ``torch.compile(mode=MODE)``: reduce-overhead, max-autotune |
| segment-anything-fast | its encoder as ``build_sam_fast_vit_h`` makes it: bfloat16, max-autotune |
| segment-anything-fast-sdpa | without its Triton attention, as it advises where that is slow |
| segment-anything-fast-int8 | with torchao's dynamic int8 for its matrices, as in its experiments |

spec: the sizes, ``SamVitSpec``'s fields. segment_anything_fast: a checkout of it. lock: a file;
processes that compile at the same time take turns in timing their candidates. A process says that
it is ready when it is compiled, and in its facts whether a CUDA graph was left out. Weights are
drawn at random.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peer_process import Images, Prepared, serve_requests, take_over_stdout

TRANSFORMERS, FAST = "transformers", "segment-anything-fast"
GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Of torch.compile: those that replay CUDA graphs."""
COMPILED_SIDES = (
    *(f"{TRANSFORMERS}-{mode}" for mode in GRAPH_MODES), FAST, f"{FAST}-sdpa", f"{FAST}-int8",
)  # fmt: skip
IMAGE_SIZE = 1024
WARM_UP_CALLS = 3
"""torch compiles in the first call, records the CUDA graph in the second and replays it then."""


def side_environment(name: str) -> dict[str, str]:
    """Return what to add to the environment of a side's process."""
    return {"SEGMENT_ANYTHING_FAST_USE_FLASH_4": "0"} if name.endswith("-sdpa") else {}


def transformers_encoder(spec: Mapping[str, Any], device: str) -> Any:
    """Return transformers' encoder in bfloat16 with random weights."""
    import torch
    import transformers

    from benchmarks.synthetic_shapes import randomize_weights

    vision = transformers.SamVisionConfig(
        hidden_size=spec["width"], num_hidden_layers=spec["depth"],
        num_attention_heads=spec["heads"], mlp_dim=spec["inner"],
        global_attn_indexes=list(spec["global_attn_indexes"]),
    )  # fmt: skip
    with torch.device(device):
        model = transformers.SamModel(transformers.SamConfig(vision_config=vision.to_dict()))
    encoder = model.vision_encoder.to(torch.bfloat16).eval().requires_grad_(False)
    randomize_weights(encoder)
    return encoder


def fast_encoder(folder: Path, spec: Mapping[str, Any], device: str, int8: bool) -> Any:
    """Return segment-anything-fast's encoder in bfloat16 with random weights, not yet compiled.

    folder: its checkout. int8: its matrices by torchao, which must be installed.
    """
    import torch

    from benchmarks.synthetic_shapes import randomize_weights

    if spec["inner"] != 4 * spec["width"]:
        raise ValueError("its MLPs are four times as wide as the model")
    sys.path.insert(0, str(folder))
    # its package has a function of this module's name
    build_sam = importlib.import_module("segment_anything_fast.build_sam")
    with torch.device(device):
        sam = build_sam._build_sam(
            spec["width"], spec["depth"], spec["heads"], list(spec["global_attn_indexes"])
        )
    encoder = build_sam._apply_eval_dtype_sam(sam, torch.bfloat16).image_encoder
    encoder.requires_grad_(False)
    randomize_weights(encoder)
    if int8:
        from torchao.quantization import (  # type: ignore[import-not-found]
            Int8DynamicActivationInt8WeightConfig,
            quantize_,
        )

        quantize_(encoder, Int8DynamicActivationInt8WeightConfig())
    return encoder


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file, which another process waits for."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def time_candidates_in_turn(lock: Path) -> None:
    """Let torch.compile time its candidates only while this process holds the lock.

    A candidate is called once before, since its first call may compile it.
    """
    from torch._inductor.runtime import benchmarking

    timer: Any = type(benchmarking.benchmarker)
    benchmark = timer.benchmark_gpu

    def benchmark_in_turn(
        self: Any, candidate: Callable[[], Any], *arguments: Any, **options: Any
    ) -> Any:
        with contextlib.suppress(Exception):  # the benchmark meets the same error and reports it
            candidate()
        with exclusive(lock):
            return benchmark(self, candidate, *arguments, **options)

    timer.benchmark_gpu = benchmark_in_turn


def compile_candidates_at_once(
    autotune: Callable[..., Any], lock: Path
) -> Callable[[Sequence[tuple[int, ...]], Callable[..., object]], Any]:
    """Return segment-anything-fast's ``_autotune`` behind a compilation of all its candidates.

    Its own loop compiles 60 kernels one after the other, some of which take half a minute. What it
    times and which one it takes stays its own matter.
    """

    def autotune_compiled(
        configs: Sequence[tuple[int, ...]], function: Callable[..., object]
    ) -> Any:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for future in [pool.submit(function, *config) for config in configs]:
                future.exception()  # one that does not fit is left out by its loop as well
        with exclusive(lock):
            return autotune(configs, function)

    return autotune_compiled


def make_encoder(options: Mapping[str, Any], device: str) -> tuple[Callable[[Any], Any], Any, str]:
    """Return the call from pixels to embeddings, the module, and the mode of torch.compile."""
    import torch

    name, lock = options["side"], Path(options["lock"])
    if name.startswith(FAST):
        folder = Path(options["segment_anything_fast"])
        encoder = fast_encoder(folder, options["spec"], device, name.endswith("-int8"))
        from segment_anything_fast import flash_4  # type: ignore[import-not-found]

        flash_4._autotune = compile_candidates_at_once(flash_4._autotune, lock)
        return torch.compile(encoder, mode="max-autotune"), encoder, "max-autotune"
    mode = name.removeprefix(f"{TRANSFORMERS}-")
    encoder = transformers_encoder(options["spec"], device)
    compiled = torch.compile(encoder, mode=mode)
    return lambda pixels: compiled(pixels).last_hidden_state, encoder, mode


def random_pixels(batch: int, seed: int, device: str) -> Any:
    """Normalised pixels [B, 3, 1024, 1024] in bfloat16, different for each seed."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    size = (batch, 3, IMAGE_SIZE, IMAGE_SIZE)
    return torch.randn(size, device=device, generator=generator).to(torch.bfloat16)


def side_facts(name: str, module: Any, mode: str, device: str) -> dict[str, Any]:
    """Return what a row says of a side that has been compiled."""
    import torch
    from torch._dynamo.utils import counters

    packages = ["torch", "triton", "torchao" if name.endswith("-int8") else "transformers"]
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {
            each: importlib.metadata.version(each)
            for each in packages
            if importlib.util.find_spec(each)
        },
        "compile_mode": mode,
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }
    if not name.startswith(FAST):
        return facts | {"attention": module.config._attn_implementation}
    from segment_anything_fast import flash_4

    return facts | {"flash_4": [str(each) for each in (flash_4.BEST_CONFIGS or {}).values()]}


def main() -> None:
    """Compile the encoder for its batch, then serve."""
    pipe = take_over_stdout()
    options = json.loads(sys.argv[1])
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # segment-anything-fast writes what it found into the folder where it runs
    Path(options["work"]).mkdir(parents=True, exist_ok=True)
    os.chdir(options["work"])
    time_candidates_in_turn(Path(options["lock"]))
    encode, module, mode = make_encoder(options, device)

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def prepare(
        prompts: Sequence[list[int]], outputs: Sequence[int], images: Images | None = None
    ) -> Prepared:
        assert images is not None
        assert set(outputs) == {1}, "an embedding for each picture, and no text"
        pixels = random_pixels(len(prompts), images["seed"], device)
        synchronize()

        @torch.no_grad()
        def call() -> int:
            embeddings = encode(pixels)
            synchronize()
            return len(embeddings)

        return call

    for seed in range(WARM_UP_CALLS):
        prepare([[]] * options["batch"], [1] * options["batch"], {"seed": seed})()
    serve_requests(prepare, side_facts(options["side"], module, mode, device), pipe)


if __name__ == "__main__":
    main()
