"""Time single steps of a model shape on the GPU with seeded random weights, without an engine.

    python benchmarks/model_step.py qwen-7b [--decode 1x128,8x1024] [--prefill 1x1024,1x4096]
    [--mixed 768+230x1000]
                              [-q int4] [--kv-cache-dtype int8] [--profile] [--save FILE.jsonl]

``decode BxC``: one step of B sequences that hold C tokens each, the median of graph replays, beside
the floor: the bytes of weights and KV that it must read over the copy bandwidth measured in the
same run. ``prefill BxN``: a first step of B prompts of N tokens, launched as the engine does, the
median over runs. ``mixed N+BxC``: N tokens of prompts (of 512 at most) beside B answers that hold C
tokens each, launched likewise. ``-q``: how the matrices are held (``weight_formats.py``); the head
stays as it is without ``--quantize-head``. ``--kernel OP=VARIANT`` switches a kernel.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model_shapes import MOE_SHAPES, SHAPES  # noqa: E402
from benchmarks.weight_formats import WEIGHT_FORMATS, weight_quantizer  # noqa: E402
from benchmarks.weights_option import add_weights_option  # noqa: E402
from benchmarks.workloads import parse_pairs  # noqa: E402
from modelmill.cli.profile import show_profile  # noqa: E402
from modelmill.core.config import KV_DTYPE_CHOICES, RunConfig  # noqa: E402
from modelmill.eval.profile import ProfileCase, profile_step  # noqa: E402
from modelmill.eval.profile import profile_case as profiled  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402
from modelmill.eval.report import MeasurementStats, versions  # noqa: E402
from modelmill.eval.roofline import RooflineCeilings, measure_roofline  # noqa: E402
from modelmill.loader.model_loader import build_model  # noqa: E402
from modelmill.nn.fusion import fuse_model  # noqa: E402
from modelmill.nn.kv import KVCache, ModelKVCacheSpec, kv_cache_dtype  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.moe import MoE  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.nn.synthetic_step import PAGE_SIZE, fill_random_weights, synthetic_step  # noqa: E402
from modelmill.ops.launch_configs import TunedLaunchConfigs  # noqa: E402
from modelmill.ops.registry import select_backends  # noqa: E402
from modelmill.ops.timing import capture_graph, copy_bandwidth, time_interleaved  # noqa: E402
from modelmill.runtime.engine_core import EngineCore  # noqa: E402
from modelmill.runtime.graph_sizes import context_bucket  # noqa: E402

ROUNDS, PROMPT = 15, 512


def random_model(
    shape: str, weight_format: str = "dense", *, head: bool = False, device: str = "cuda"
) -> nn.Module:
    """Build a model of a ``make_checkpoint`` shape with random weights, on the GPU by default.

    weight_format: one of ``WEIGHT_FORMATS``.

    head: whether the matrix of the logits is held so, too.
    """
    raw = {**SHAPES, **MOE_SHAPES}[shape]
    model = build_model(str(raw["model_type"]), raw)
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, Linear) and _takes_format(name, weight_format, head=head)
    ]
    return fill_random_weights(
        model,
        dict.fromkeys(linears, weight_quantizer(weight_format)),
        getattr(torch, str(raw["torch_dtype"])),
        device,
    )


def _takes_format(name: str, weight_format: str, *, head: bool) -> bool:
    """Whether a matrix is held in the format: in MXFP4 the experts' alone, as in gpt-oss."""
    if weight_format == "mxfp4":
        return ".experts." in name
    return head or name != "head"


def make_step(
    model: nn.Module,
    batch: int,
    new: int,
    context: int,
    tuning: TunedLaunchConfigs | None = None,
    kv_dtype: str = "auto",
    kernels: Mapping[str, str] | None = None,
) -> Step:
    """Make a step of ``batch`` sequences with ``new`` tokens each, the last at ``context``.

    The pages are in shuffled order.

    kernels: op → variant, where one is switched by hand.
    """
    bound = context_bucket(context) if new == 1 else context
    pages = batch * -(-context // PAGE_SIZE) + 1
    kv = KVCache.allocate(model.kv, pages, PAGE_SIZE, model_kv_dtype(model, kv_dtype), "cuda")  # type: ignore[arg-type]
    return synthetic_step(
        model,
        select_backends("cuda", kernels, tuning),
        (batch, new, context),
        max_context=bound,
        kv=kv,
    )


def mixed_step(
    model: nn.Module, sizes: tuple[int, int, int], kv_dtype: str, kernels: Mapping[str, str]
) -> Step:
    """sizes: tokens of prompts, answers, tokens of each of those."""
    prompts, answers, context = sizes
    pieces = [
        (1, min(PROMPT, prompts - at), min(PROMPT, prompts - at))
        for at in range(0, prompts, PROMPT)
    ]
    pages = (
        sum(-(-count // PAGE_SIZE) for _, _, count in pieces)
        + answers * -(-context // PAGE_SIZE)
        + 1
    )
    device = str(model.embed.weight.device.type)  # type: ignore[union-attr]
    kv = KVCache.allocate(model.kv, pages, PAGE_SIZE, model_kv_dtype(model, kv_dtype), device)  # type: ignore[arg-type]
    groups = [*pieces, (answers, 1, context)]
    return synthetic_step(
        model,
        select_backends(device, kernels),
        groups,
        max_context=context_bucket(max(context, PROMPT)),
        kv=kv,
    )


def weight_bytes(model: nn.Module, tokens: int = 1) -> float:
    """Bytes of every matrix that a decode step of so many tokens reads.

    Of a mixture of experts: of as many as evenly distributed choices are expected to name.
    """
    total, of_experts = 0.0, set()
    for module in model.modules():
        if isinstance(module, MoE):
            config = module.routing.config
            chosen = config.experts * (1 - (1 - config.top_k / config.experts) ** tokens)
            linears = [each for each in module.experts.modules() if isinstance(each, Linear)]
            total += sum(map(_linear_bytes, linears)) * chosen / config.experts
            of_experts.update(linears)
        elif isinstance(module, Linear) and module not in of_experts:
            total += _linear_bytes(module)
    return total


def tokens_read(kv: ModelKVCacheSpec, context: int) -> float:
    """Tokens whose keys a query behind ``context`` tokens reads, on average over the layers."""
    windows = kv.layer_windows or (kv.window,)
    return sum(min(context, window or context) for window in windows) / len(windows)


def _linear_bytes(linear: Linear) -> int:
    return sum(tensor.nbytes for tensor in linear.weight.tensors().values())


@torch.inference_mode()
def time_decode(model: nn.Module, step: Step, rate: float) -> dict[str, Any]:
    """Milliseconds of one decode step and of its floor."""
    call = functools.partial(greedy_ids, fuse_model(model), step)
    call()  # compiles
    times = [each * 1e3 for each in time_interleaved([capture_graph(call)], ROUNDS, 4, "cuda")[0]]
    batch, context = step.query_start.numel() - 1, int(step.context_lens[0])
    token = step.kv.nbytes / step.kv.num_pages_per_layer / PAGE_SIZE
    keys = tokens_read(model.kv, context)  # type: ignore[arg-type]
    floor = (weight_bytes(model, batch) + batch * keys * token) / rate * 1e3
    return {
        "figure": "step.decode_ms",
        "batch": batch,
        "context": context,
        **spread_fields(times),
        "floor_ms": floor,
    }


@torch.inference_mode()
def time_prefill(model: nn.Module, step: Step) -> dict[str, Any]:
    """Milliseconds of a first step."""
    call = functools.partial(greedy_ids, fuse_model(model), step)
    times = [seconds * 1e3 for seconds in time_interleaved([call], 9, 1, "cuda")[0]]
    batch, tokens = step.query_start.numel() - 1, step.max_query
    return {"figure": "step.prefill_ms", "batch": batch, "tokens": tokens, **spread_fields(times)}


@torch.inference_mode()
def time_mixed_step(model: nn.Module, step: Step, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Milliseconds of a step with prompts beside answers."""
    call = functools.partial(greedy_ids, fuse_model(model), step)
    times = [seconds * 1e3 for seconds in time_interleaved([call], 9, 1, "cuda")[0]]
    tokens, batch, context = sizes
    return {
        "figure": "step.mixed_ms",
        "tokens": tokens,
        "batch": batch,
        "context": context,
        **spread_fields(times),
    }


def spread_fields(times: list[float]) -> dict[str, Any]:
    """The median as the row's value, and how far it spreads."""
    spread = MeasurementStats.from_values(times)
    return {"value": spread.median, "spread": asdict(spread)}


def greedy_ids(model: nn.Module, step: Step) -> torch.Tensor:
    """The step down to the ids."""
    return step.ops.argmax(model(step))


def model_kv_dtype(model: nn.Module, kv_dtype: str) -> torch.dtype:
    """What keys and values are held in."""
    return kv_cache_dtype(kv_dtype, model.embed.weight.dtype)  # type: ignore[union-attr, arg-type]


def kv_bytes_per_token(model: nn.Module, kv_dtype: str = "auto") -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.kv.page_bytes(1, model_kv_dtype(model, kv_dtype))  # type: ignore[union-attr, operator]


def print_profile(
    model: nn.Module,
    work: ProfileCase,
    ceilings: RooflineCeilings,
    kv_dtype: str,
    kernels: Mapping[str, str],
) -> None:
    """Print where the time of one step goes, as ``modelmill profile`` does."""
    length = work.prompt + PAGE_SIZE
    pages = work.batch * (length // PAGE_SIZE + 1) + 2
    config = RunConfig(
        kv_cache_bytes=pages * PAGE_SIZE * kv_bytes_per_token(model, kv_dtype),
        max_num_seqs=work.batch,
        page_size=PAGE_SIZE,
        max_num_batched_tokens=max(work.batch * work.prompt, length), kv_cache_dtype=kv_dtype,
        kernels=kernels,
    )  # fmt: skip
    profile, _ = profiled(EngineCore(model, config, max_model_len=length), work, ceilings)
    show_profile(profile, 16)


def parse_mixed_sizes(text: str) -> Iterator[tuple[int, int, int]]:
    """768+230x1000 → (768, 230, 1000)."""
    for part in filter(None, text.split(",")):
        tokens, answers = part.split("+")
        batch, context = answers.split("x")
        yield int(tokens), int(batch), int(context)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted([*SHAPES, *MOE_SHAPES]))
    parser.add_argument("--decode", default="")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--mixed", default="")
    add_weights_option(parser, WEIGHT_FORMATS, "dense")
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPE_CHOICES)
    parser.add_argument("--kernel", action="append", default=[], metavar="OP=VARIANT")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--state", help="of the code, for the row")
    return parser.parse_args()


def main() -> None:
    """Measure, print and record."""
    options = parse_args()
    kv, switched = options.kv_cache_dtype, dict(each.split("=") for each in options.kernel)
    model = random_model(options.shape, options.weights, head=options.quantize_head)
    rate = copy_bandwidth()
    stamp = {
        **provenance(),
        "command": "python benchmarks/model_step.py " + " ".join(sys.argv[1:]),
        "shape": options.shape, "unit": "ms",
        "weights": options.weights, "kv": kv, "copy_gbps": round(rate / 1e9),
        "device": torch.cuda.get_device_name(),
        "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **({"state": options.state} if options.state else {}),
    }  # fmt: skip
    works = [ProfileCase("decode", b, c) for b, c in parse_pairs(options.decode)]
    works += [ProfileCase("prefill", b, n) for b, n in parse_pairs(options.prefill)]
    for work in works:
        new = 1 if work.phase == "decode" else work.prompt
        step = make_step(model, work.batch, new, work.prompt, None, kv, switched)
        row = time_decode(model, step, rate) if new == 1 else time_prefill(model, step)
        del step  # its pages
        print(json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | stamp) + "\n")
    for sizes in parse_mixed_sizes(options.mixed):
        step = mixed_step(model, sizes, kv, switched)
        row = time_mixed_step(model, step, sizes)
        print(json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | stamp) + "\n")
        if options.profile:
            ceilings = measure_roofline("cuda", [model.embed.weight.dtype])  # type: ignore[union-attr, list-item]
            show_profile(
                profile_step(model, step, ProfileCase("mixed", *sizes[1:]), ceilings)[0], 20
            )
    if options.profile and works:
        ceilings = measure_roofline("cuda", [model.embed.weight.dtype])  # type: ignore[union-attr, list-item]
        for work in works:
            print_profile(model, work, ceilings, kv, switched)


if __name__ == "__main__":
    main()
