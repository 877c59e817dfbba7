"""Measure MiniGPT-4's published sizes on the GPU, beside vLLM and transformers' pipeline.

    python benchmarks/minigpt4.py [--sides bfloat16,int4,vLLM,vLLM-embeddings,transformers]
                                  [--works encoder,first,request,many] [--rounds 5] [--layers N]
                                  [--peer DIR | --peer-python PYTHON] [--vllm-options JSON]
                                  [--work DIR] [--out FILE.jsonl]

request: 100 text tokens and one picture (32 embeddings), 100 new tokens, greedy. first: its first
token alone. many: 64 of them at once. encoder: the image encoder alone (tower, Q-Former,
projection), one picture and 16; vLLM has no call for it. Every call has new pictures. A call runs
from pixels on the host (ours and vLLM: bytes; transformers: normalised floats, as its processor
gives them) to ids on the host. Sides take turns call by call on one card, and their seconds become
a figure by one function (``figure_statistics.whole_call_figure``). Weights are drawn at random: the
language model is LLaMA-7B's shape with Vicuna's vocabulary. Sides of ours: how the language model's
matrices are held (``weight_formats.py``; bfloat16: as they are), ``+int8-tower``.

vLLM is found as in ``table.py`` and runs BLIP-2 of the same sizes in its own process, where the
picture stands before the text. ``vLLM-embeddings`` is the same process, with the 32 embeddings of a
picture in its requests: the language model alone, less work than the other sides do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.append_rows import append_rows, portable_command  # noqa: E402
from benchmarks.blip2_folder import blip2_config, random_images, write_blip2_folder  # noqa: E402
from benchmarks.figure_statistics import whole_call_figure  # noqa: E402
from benchmarks.model_shapes import SHAPES  # noqa: E402
from benchmarks.peer_process import PeerError, PeerProcess, random_prompts  # noqa: E402
from benchmarks.peer_setup import PeerSetup  # noqa: E402
from benchmarks.weight_formats import weight_quantizer  # noqa: E402
from benchmarks.workloads import WARM_UP_CALLS  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.core.types import ImageEmbeddingSpan  # noqa: E402
from modelmill.eval.bench_targets import greedy_request  # noqa: E402
from modelmill.eval.report import device_name, versions  # noqa: E402
from modelmill.loader.model_loader import build_model  # noqa: E402
from modelmill.models.minigpt4 import IMAGE_MEAN, IMAGE_STD  # noqa: E402
from modelmill.nn.layer_stack import locate_module_in_stacks  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.synthetic_step import fill_random_weights  # noqa: E402
from modelmill.runtime.engine_core import EngineCore  # noqa: E402

VISION_ENCODER = {"width": 1408, "depth": 39, "heads": 16, "inner": 6144, "image": 224, "patch": 14}
QFORMER = {
    "width": 768, "depth": 12, "heads": 12, "inner": 3072, "image_width": 1408,
    "cross_attention_frequency": 2, "queries": 32,
}  # fmt: skip
TEXT, NEW_TOKENS, TOKENS_BEFORE_IMAGE, MANY_REQUESTS = 100, 100, 40, 64
"""Tokens of text and of an answer; how many of the text stand before the picture; requests at once.
"""
PEER = "transformers"
VLLM, VLLM_EMBEDDINGS = "vLLM", "vLLM-embeddings"
VLLM_GPU_FRACTION = 0.35
"""Of the card's memory, for its weights, pages and CUDA graphs: all sides live there together."""
BATCH_SIZES = {"request": (1,), "first": (1,), "many": (MANY_REQUESTS,), "encoder": (1, 16)}
"""Pictures of a call, each of a request of its own."""
OUTPUT_LENGTHS = {"request": NEW_TOKENS, "first": 1, "many": NEW_TOKENS}
Prepare = Callable[[int], Callable[[], int]]
"""A seed for the prompts and pictures → what is timed, which gives the number of tokens that came.
"""


@dataclass(frozen=True)
class MiniGPT4Side:
    """One subject of the comparison.

    time_requests: seconds of a call of (so many requests, so many new tokens each, the seed of
    prompts and pictures). time_encoder: seconds of a call of the image encoder with (so many
    pictures, their seed); None where a side has no such call.
    """

    name: str
    time_requests: Callable[[int, int, int], float]
    time_encoder: Callable[[int, int], float] | None
    facts: dict[str, Any]


def side_in_this_process(
    name: str,
    prepare_requests: Callable[[int, int], Prepare],
    prepare_encoder: Callable[[int], Prepare],
    facts: dict[str, Any],
) -> MiniGPT4Side:
    """Return a side whose calls are timed here.

    prepare_requests: makes a call of so many requests and tokens. prepare_encoder: makes a call of
    the image encoder with so many pictures.
    """

    def time_requests(count: int, new: int, seed: int) -> float:
        return time_call(prepare_requests(count, new)(seed), count * new, name)

    def time_encoder(count: int, seed: int) -> float:
        return time_call(prepare_encoder(count)(seed), count, name)

    return MiniGPT4Side(name, time_requests, time_encoder, facts)


def make_config(
    layers: int | None, tower: dict[str, int] = VISION_ENCODER, qformer: dict[str, int] = QFORMER
) -> dict[str, Any]:
    """Return the config of MiniGPT-4's published sizes; layers: fewer, for a dry run."""
    config = (
        SHAPES["llama-7b"]
        | {"vocab_size": 32001}
        | ({} if layers is None else {"num_hidden_layers": layers})
    )
    return config | {
        "model_type": "minigpt4",
        "image_embedder": {"vision_encoder": tower, "qformer": qformer},
    }


def random_model(name: str, config: dict[str, Any], device: str) -> nn.Module:
    """Our model with weights held as a side's name says."""
    language, _, tower = name.partition("+")
    weight_format = "dense" if language == "bfloat16" else language
    model = build_model("minigpt4", config)
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear)]
    quantizers = {
        name: weight_quantizer(weight_format) for name in linears if name.startswith("layers.")
    }
    if tower == "int8-tower":
        quantizers |= {
            name: weight_quantizer("smoothquant")
            for name in linears
            if (place := locate_module_in_stacks(model, name)) is not None
            and place.stack.recipe == "tower"
        }
    elif tower:
        raise SystemExit(f"{name}: behind the + may stand int8-tower")
    return fill_random_weights(model, quantizers, torch.bfloat16, device)


def modelmill_side(name: str, config: dict[str, Any], device: str) -> MiniGPT4Side:
    """A loop around a drawn model."""
    model = random_model(name, config, device)
    queries, side = (
        config["image_embedder"]["qformer"]["queries"],
        config["image_embedder"]["vision_encoder"]["image"],
    )
    length = TEXT + queries + NEW_TOKENS
    page = 16
    size = model.kv.page_bytes(page, torch.bfloat16)  # type: ignore[union-attr, operator]
    run_options = {
        "kv_cache_bytes": (MANY_REQUESTS + 1) * -(-length // page) * size,
        "max_num_seqs": MANY_REQUESTS,
        "page_size": page,
    }
    run = RunConfig(**run_options, max_model_len=length, device=device, enable_prefix_caching=False)
    loop = EngineCore(model, run, max_model_len=length)

    def prepare_requests(count: int, new: int) -> Prepare:
        return functools.partial(_prepare_requests, loop, (count, new), queries, side)

    def prepare_images(count: int) -> Prepare:
        def prepare(seed: int) -> Callable[[], int]:
            shown = list(random_images(count, seed, side))
            return lambda: len(torch.stack(loop.vision_runner.encode_images(shown)).cpu())

        return prepare

    facts = {
        "device": device_name(loop.device),
        "versions": versions(),
        "kernels": dict(loop.ops.backends),
    }
    return side_in_this_process(name, prepare_requests, prepare_images, facts)


def _prepare_requests(
    engine_core: EngineCore, work: tuple[int, int], queries: int, side: int, seed: int
) -> Callable[[], int]:
    count, new = work
    prompts = random_prompts([(TEXT, new)] * count, seed)
    shown = random_images(count, seed, side).numpy()
    requests = []
    for i, prompt in enumerate(prompts):
        ids = [*prompt[:TOKENS_BEFORE_IMAGE], *[0] * queries, *prompt[TOKENS_BEFORE_IMAGE:]]
        insert = ImageEmbeddingSpan(TOKENS_BEFORE_IMAGE, queries, f"{seed}-{i}", shown[i])
        requests.append(replace(greedy_request(f"{seed}-{i}", ids, new), embedding_spans=(insert,)))

    def call() -> int:
        engine_core.add_all(requests)
        tokens = ended = 0
        while ended < count:
            for token in engine_core.step():
                tokens += token.token_id is not None
                ended += token.finish_reason is not None
        return tokens

    return call


def transformers_side(config: dict[str, Any], device: str) -> MiniGPT4Side:
    """Return transformers' BLIP-2 with a LLaMA: one static batch through generate()."""
    import transformers

    from benchmarks.synthetic_shapes import randomize_weights

    tower, qformer = config["image_embedder"]["vision_encoder"], config["image_embedder"]["qformer"]
    blip2 = transformers.Blip2Config(**blip2_config(config))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = (
                transformers.Blip2ForConditionalGeneration(blip2)
                .to(torch.bfloat16)
                .eval()
                .requires_grad_(False)
            )
    finally:
        torch.set_default_dtype(before)
    randomize_weights(model)

    def floats(count: int, seed: int) -> torch.Tensor:
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGE_MEAN, IMAGE_STD))
        return (
            random_images(count, seed, tower["image"]).permute(0, 3, 1, 2).float() / 255 - mean
        ) / std

    def prepare_requests(count: int, new: int) -> Prepare:
        lengths = {"max_new_tokens": new, "min_new_tokens": new}
        options = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0, **lengths
        )

        def prepare(seed: int) -> Callable[[], int]:
            prompts = [
                [
                    *prompt[:TOKENS_BEFORE_IMAGE],
                    *[0] * qformer["queries"],
                    *prompt[TOKENS_BEFORE_IMAGE:],
                ]
                for prompt in random_prompts([(TEXT, new)] * count, seed)
            ]
            cpu_ids, shown = torch.tensor(prompts), floats(count, seed)

            @torch.inference_mode()
            def call() -> int:
                ids, values = cpu_ids.to(device), shown.to(device, torch.bfloat16)
                mask = torch.ones_like(ids)
                out = model.generate(
                    pixel_values=values,
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=options,
                )
                sequences = out.tolist()
                prompt_tokens = cpu_ids.shape[1] if len(sequences[0]) > new else 0
                return count * (len(sequences[0]) - prompt_tokens)

            return call

        return prepare

    def prepare_images(count: int) -> Prepare:
        def prepare(seed: int) -> Callable[[], int]:
            shown = floats(count, seed)

            @torch.inference_mode()
            def call() -> int:
                image = model.vision_model(shown.to(device, torch.bfloat16)).last_hidden_state
                queries = model.query_tokens.expand(count, -1, -1)
                cpu_ids = model.qformer(
                    query_embeds=queries, encoder_hidden_states=image
                ).last_hidden_state
                return len(model.language_projection(cpu_ids.to(torch.bfloat16)).cpu())

            return call

        return prepare

    versions = {each: importlib.metadata.version(each) for each in ("transformers", "torch")}
    return side_in_this_process(
        PEER,
        prepare_requests,
        prepare_images,
        {"device": device_name(device), "versions": versions},
    )


@contextlib.contextmanager
def vllm_sides(
    names: Sequence[str], config: dict[str, Any], options: argparse.Namespace
) -> Iterator[list[MiniGPT4Side]]:
    """Start vLLM on BLIP-2 of the same sizes, if one of the names is its; none if it fails."""
    names = [name for name in names if name in (VLLM, VLLM_EMBEDDINGS)]
    if not names:
        yield []
        return
    setup = PeerSetup(options.work.resolve(), options.peer, options.peer_python)
    queries = config["image_embedder"]["qformer"]["queries"]
    length = TEXT + queries + NEW_TOKENS
    run = {
        "dtype": "bfloat16", "gpu_memory_utilization": VLLM_GPU_FRACTION,
        "max_num_seqs": MANY_REQUESTS, "max_model_len": length,
        # vLLM's own choice for these on a large card; all prompts of ``many`` fit into one step
        "max_num_batched_tokens": MANY_REQUESTS * length, **options.vllm_options,
    }  # fmt: skip
    folder = write_blip2_folder(config, setup.work / "blip2-proxy")
    with contextlib.closing(setup.start_vllm(VLLM, folder, run, images=True)) as process:
        try:
            process.ready()
            process.randomize_weights(setup.weights)
            setup.note(f"vLLM is ready after {time.perf_counter() - process.start_time:.1f} s")
        except PeerError as error:
            setup.note(f"going on without the peer: {error}")
            yield []
            return
        yield [vllm_side(name, process, config, options.vllm_options) for name in names]


def vllm_side(
    name: str, process: PeerProcess, config: dict[str, Any], options: dict[str, Any]
) -> MiniGPT4Side:
    """Return vLLM's process as a side: with pictures, or with their embeddings."""
    embedder = config["image_embedder"]
    images = {"side": embedder["vision_encoder"]["image"]}
    if name == VLLM_EMBEDDINGS:
        images = {"embeddings": embedder["qformer"]["queries"], "width": config["hidden_size"]}

    def time_requests(count: int, new: int, seed: int) -> float:
        return process.generate([(TEXT, new)] * count, seed, images | {"seed": seed})

    facts = process.facts | {"images": "embeddings" if "width" in images else "pictures"}
    return MiniGPT4Side(
        name, time_requests, None, facts | ({"vllm_options": options} if options else {})
    )


def measure_rows(
    sides: Sequence[MiniGPT4Side], works: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """One row a side and work; sides take turns."""
    rows = []
    for work, count in [(each, count) for each in works for count in BATCH_SIZES[each]]:
        new = OUTPUT_LENGTHS.get(work, 1)
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(-WARM_UP_CALLS, rounds):  # the first compile and record
            for side in sides:
                seed = turn + WARM_UP_CALLS + 1000 * count + new
                if work != "encoder":
                    took = side.time_requests(count, new, seed)
                elif side.time_encoder is not None:
                    took = side.time_encoder(count, seed)
                else:
                    continue
                if turn >= 0:
                    seconds[side.name].append(took)
        rows += [
            make_row(work, count, side, seconds[side.name]) for side in sides if seconds[side.name]
        ]
    return rows


def time_call(call: Callable[[], int], expected_count: int, name: str) -> float:
    """Seconds of one call that must give so many tokens (embeddings)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    count = call()
    took = time.perf_counter() - began
    if count != expected_count:
        raise SystemExit(f"{name} gave {count} tokens, expected {expected_count}")
    return took


def make_row(work: str, count: int, side: MiniGPT4Side, seconds: Sequence[float]) -> dict[str, Any]:
    """What is kept of one figure."""
    figure = whole_call_figure(seconds, 1e3)
    fields = {
        "bench": "minigpt4", "work": work, "pictures": count, "subject": side.name,
        "value": round(figure.value, 3),
        "unit": "ms", "spread": {k: round(v, 3) for k, v in figure.to_dict().items()},
        "statistic": "median of whole calls, sides in turn",
        "calls_s": [round(each, 5) for each in seconds],
    }  # fmt: skip
    if work == "many":
        fields["requests_per_s"] = round(count / figure.value * 1e3, 2)
    print(json.dumps({k: v for k, v in fields.items() if k != "calls_s"}), flush=True)
    return fields | {"facts": side.facts}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--sides", help=f"default: bfloat16,int4,{PEER}, and vLLM where it was named"
    )
    parser.add_argument("--works", default="encoder,first,request,many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--layers", type=int, help="of the language model, for a dry run; do not publish such rows"
    )
    parser.add_argument("--peer", type=Path, help="folder of vLLM's packages")
    parser.add_argument("--peer-python", type=Path, help="interpreter that has vLLM")
    parser.add_argument(
        "--vllm-options",
        type=json.loads,
        default={},
        metavar="JSON",
        help='further arguments of vLLM, {"mm_encoder_attn_backend": "TORCH_SDPA"} say',
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "minigpt4", help="of vLLM's config and log"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    has_vllm = options.peer is not None or options.peer_python is not None
    if options.sides is None:
        options.sides = f"bfloat16,int4,{f'{VLLM},{VLLM_EMBEDDINGS},' if has_vllm else ''}{PEER}"
    if VLLM in options.sides and not has_vllm:
        parser.error("a side of vLLM needs --peer or --peer-python")
    return options


def main() -> None:
    """Measure, print and record."""
    options = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = make_config(options.layers)
    names = options.sides.split(",")
    # vLLM first: it measures the card's memory, which must not move meanwhile
    with vllm_sides(names, config, options) as started:
        by_name = {side.name: side for side in started}
        for name in names:
            if name == PEER:
                by_name[name] = transformers_side(config, device)
            elif name not in (VLLM, VLLM_EMBEDDINGS):
                by_name[name] = modelmill_side(name, config, device)
        sides = [by_name[name] for name in names if name in by_name]
        rows = measure_rows(sides, options.works.split(","), options.rounds)
    if options.out:
        append_rows(options.out, rows, portable_command("minigpt4", sys.argv[1:]))


if __name__ == "__main__":
    main()
