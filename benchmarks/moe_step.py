"""Times the mixture-of-experts blocks of a step of Qwen3-30B-A3B's shape beside their floor.

    python benchmarks/moe_step.py [--format int4] [--batch 1] [--prompt 1024] [--layers 48]
                                  [--kernel triton] [--device cuda] [--save FILE.jsonl]

Every layer has its own random weights and reads the same random states, so that each chooses other
experts. On a GPU a step is a CUDA graph of all layers. The floor is the larger of two times: the
bytes of the chosen experts, each once, over the bandwidth of a copy, and the products over the rate
of torch's own, both measured in the same run. On a CPU the bandwidth is that of a read in turn with
the steps, and each step has other states, so that its experts are in no cache; up to 16 tokens the
bytes alone are the floor there, since on a busy machine torch's products wait at barriers and are
no measure. Columns: the step, its routing alone (router and top-k, as separate ops even where the
step is one call), the first part of the floor (bytes), the floor, their ratio, distinct experts of
a layer, and the largest difference from the torch reference of the ops in units of the output's
root mean square. --kernel names the backend of the fused MoE ops, one run for each that is named;
what it does not serve is not timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.weight_formats import weight_quantizer  # noqa: E402
from modelmill.eval.provenance import git_commit, host_and_gpu_info  # noqa: E402
from modelmill.eval.report import append_rows, device_name, make_row  # noqa: E402
from modelmill.eval.roofline import RooflineCeilings, measure_roofline  # noqa: E402
from modelmill.nn.expert_stack import FUSED_MOE_OPS  # noqa: E402
from modelmill.nn.fused_moe import MAX_SINGLE_THREAD_TOKENS, FusedMoE, route_tokens  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.mlp import MLPSpec  # noqa: E402
from modelmill.nn.moe import Expert, MoE, RouterConfig  # noqa: E402
from modelmill.nn.moe_spec import MoESpec  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.ops import registry  # noqa: E402
from modelmill.ops.cpu.common.thread_pool import single_thread_torch  # noqa: E402
from modelmill.ops.timing import capture_graph, make_cpu_memory_read_with_bytes, time_interleaved  # noqa: E402

FORMATS = ("dense", "int8", "int4", "smoothquant", "fp8", "mxfp4")  # names of weight_formats
BATCHES, PROMPTS = (1, 2, 8, 32, 64, 256), (1024, 4096)
ROUNDS = 9
CPU_STATES = 16
HEADER = (
    "format      kernel  tokens    step ms routing ms  memory ms   floor ms   ratio  experts"
    "     error"
)
DEFAULT_KERNEL = "default"  # of the registry's choice
# tokens that the reference computes, on a CPU and on a GPU: it runs every expert on each
MAX_CHECKED = {"cpu": 64, "cuda": 512}


@dataclass(frozen=True)
class MoEShape:
    """Sizes of a stack of blocks."""

    layers: int
    hidden: int
    inner: int
    experts: int
    top_k: int


QWEN3_30B_A3B = MoEShape(48, 2048, 768, 128, 8)


@dataclass(frozen=True)
class MoEStepTiming:
    """One line of the table; times in milliseconds for all layers."""

    weight_format: str
    kernel: str
    tokens: int
    step_ms: float
    routing_ms: float
    memory_ms: float
    floor_ms: float
    experts_per_layer: float
    error: float

    @property
    def ratio(self) -> float:
        """How many times the floor a step takes."""
        return self.step_ms / self.floor_ms


def make_layers(shape: MoEShape, name: str, device: str) -> list[FusedMoE]:
    """Blocks with seeded weights, those of a layer's experts next to each other."""
    dtype, draw = torch.bfloat16, torch.Generator(device).manual_seed(0)
    spec = MoESpec(RouterConfig(shape.experts, shape.top_k), MLPSpec(shape.hidden, shape.inner))
    quantize = weight_quantizer(name)
    layers = []
    for _ in range(shape.layers):
        moe = spec.build_module()
        moe.router.weight = random_matrix(shape.experts, shape.hidden, dtype, draw)
        for path in ("gate_up_proj", "down_proj"):
            linears = [cast(Linear, getattr(expert, path)) for expert in moe.experts]
            n, k = linears[0].shape
            whole = quantize(random_matrix(shape.experts * n, k, dtype, draw), dtype)
            for index, linear in enumerate(linears):
                linear.weight = whole.slice([(index * n, index * n + n)], (0, k))
        layers.append(FusedMoE(moe))
    return layers


def random_matrix(n: int, k: int, dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """[N, K] of spread 1/√K."""
    matrix = torch.empty(n, k, dtype=dtype, device=draw.device)
    return matrix.normal_(0, k**-0.5, generator=draw)


def states(tokens: int, shape: MoEShape, device: str, seed: int = 0) -> torch.Tensor:
    """Seeded states [T, H] of unit spread."""
    draw = torch.Generator(device).manual_seed(tokens + 1009 * seed)
    return random_matrix(tokens, shape.hidden, torch.bfloat16, draw) * shape.hidden**0.5


def measure(
    layers: Sequence[FusedMoE],
    shape: MoEShape,
    name: str,
    tokens: int,
    roofline: RooflineCeilings,
    rounds: int,
    kernel: str = DEFAULT_KERNEL,
) -> MoEStepTiming:
    """Time one step of all layers, and of their routers alone."""
    device = roofline.device
    step, on_cpu = make_step(device, kernel=kernel), device == "cpu"
    few = on_cpu and tokens <= MAX_SINGLE_THREAD_TOKENS
    inputs = [states(tokens, shape, device, seed) for seed in range(CPU_STATES if on_cpu else 1)]
    x = inputs[0]
    moes = [cast(MoE, layer.plain) for layer in layers]

    def run_layers(turns: Iterator[torch.Tensor]) -> None:
        x = next(turns)
        for layer in layers:
            layer(x, step)

    def run_routers(turns: Iterator[torch.Tensor]) -> None:
        x = next(turns)
        for moe in moes:
            with single_thread_torch() if few else nullcontext():  # as the layers do
                route_tokens(moe, x, step)

    calls: list[Callable[[], Any]] = [
        functools.partial(run, cycle(inputs)) for run in (run_layers, run_routers)
    ]
    if on_cpu:
        read, size = make_cpu_memory_read_with_bytes()
        calls.append(read)
    for call in calls:
        call()  # compiles
    if device.startswith("cuda"):
        calls = [capture_graph(call) for call in calls]
    times = [statistics.median(each) for each in time_interleaved(calls, rounds, 1, device)]
    if on_cpu:
        roofline = replace(roofline, memory_bandwidth=size / times[2])
    counts = [
        statistics.mean(int(route_tokens(moe, x, step)[1].unique().numel()) for x in inputs)
        for moe in moes
    ]
    expert = cast(Expert, moes[0].experts[0])
    expert_bytes = sum(
        tensor.nbytes
        for linear in (expert.gate_up_proj, expert.down_proj)
        for suffix, tensor in linear.weight.tensors().items()
        if suffix != "sizes"
    )
    moved = sum(counts) * expert_bytes + shape.layers * (
        moes[0].router.weight.nbytes + 2 * x.nbytes
    )
    operations = 6 * tokens * shape.top_k * shape.hidden * shape.inner * shape.layers
    memory = moved / roofline.memory_bandwidth
    floor = memory if few else roofline.min_seconds(moved, operations, "bfloat16")
    return MoEStepTiming(
        name, kernel, tokens, 1e3 * times[0], 1e3 * times[1],
        1e3 * memory, 1e3 * floor,
        sum(counts) / len(counts), reference_error(layers[0], x, device, kernel),
    )  # fmt: skip


@functools.cache
def make_step(device: str, *, reference: bool = False, kernel: str = DEFAULT_KERNEL) -> Step:
    """A step with nothing but the ops, which is all that the blocks read; or their references.

    kernel: backend of the fused MoE ops that it implements; the others, and what it does not serve,
    go to those behind it.
    """
    overrides = dict.fromkeys(registry.op_names(), "torch") if reference else {}
    if kernel != DEFAULT_KERNEL and not reference:
        overrides = {
            op: kernel
            for op in FUSED_MOE_OPS.values()
            if registry.implementation(op, kernel) is not None
        }
    return cast(Step, SimpleNamespace(ops=registry.select_backends(device, overrides)))


def is_served(layer: FusedMoE, x: torch.Tensor, kernel: str) -> bool:
    """Whether this backend computes a layer's experts; else another would be timed in its name."""
    stacked = layer._stacked
    if kernel == DEFAULT_KERNEL:
        return True
    if stacked is None or registry.implementation(stacked.op, kernel) is None:
        return False
    weights, ids = route_tokens(cast(MoE, layer.plain), x, make_step(x.device.type))
    inputs = stacked.make_empty_op_inputs(x)._replace(x=x, topk_weights=weights, topk_ids=ids)
    return registry.backend_serves_args(stacked.op, kernel, inputs)


def reference_error(layer: FusedMoE, x: torch.Tensor, device: str, kernel: str) -> float:
    """Largest difference from the references of all ops over the output's root mean square."""
    x = x[: MAX_CHECKED["cpu" if device == "cpu" else "cuda"]]
    expected = layer(x, make_step(device, reference=True)).float()
    actual = layer(x, make_step(device, kernel=kernel)).float()
    return float((actual - expected).abs().max() / expected.square().mean().sqrt())


def line(timing: MoEStepTiming) -> str:
    """A line of the table."""
    return (
        f"{timing.weight_format:11} {timing.kernel:7} {timing.tokens:6} {timing.step_ms:10.4f} "
        f"{timing.routing_ms:10.4f} {timing.memory_ms:10.4f} {timing.floor_ms:10.4f} "
        f"{timing.ratio:7.2f} "
        f"{timing.experts_per_layer:8.1f} {timing.error:9.4f}"
    )


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> list[MoEStepTiming]:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", action="append", choices=FORMATS)
    parser.add_argument("--batch", action="append", type=int, help="tokens of a decode step")
    parser.add_argument("--prompt", action="append", type=int, help="tokens of a prefill step")
    parser.add_argument(
        "--kernel", action="append", choices=(*registry.BACKENDS_BESIDES_TORCH, DEFAULT_KERNEL)
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", type=Path)
    for name, value in vars(QWEN3_30B_A3B).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args(words)
    shape = MoEShape(**{name: getattr(options, name) for name in vars(QWEN3_30B_A3B)})
    is_default = options.batch is None and options.prompt is None
    counts = [*(options.batch or (BATCHES if is_default else ()))]
    counts += [*(options.prompt or (PROMPTS if is_default else ()))]
    roofline = measure_roofline(options.device, [torch.bfloat16])
    facts = {
        "commit": git_commit(),
        **host_and_gpu_info(),
        "shape": vars(shape),
        "ceilings": roofline.to_dict(),
    }
    device, command = device_name(options.device), shlex.join(["python", *sys.argv])
    print(json.dumps({"device": device, **facts}), flush=True)
    print(HEADER)
    timings, rows = [], []
    for name in options.format or FORMATS:
        layers = make_layers(shape, name, options.device)
        for tokens, kernel in product(counts, options.kernel or (DEFAULT_KERNEL,)):
            if not is_served(layers[0], states(tokens, shape, options.device), kernel):
                print(f"{name:11} {kernel:7} {tokens:6}: not served", flush=True)
                continue
            timing = measure(layers, shape, name, tokens, roofline, options.rounds, kernel)
            timings.append(timing)
            print(line(timing), flush=True)
            details = {**facts, **vars(timing), "ratio": round(timing.ratio, 3)}
            value = round(timing.step_ms, 5)
            rows.append(make_row(command, "moe_step", value, "ms", device, **details))
        del layers
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.save is not None:
        append_rows(options.save, rows)
    return timings


if __name__ == "__main__":
    main()
