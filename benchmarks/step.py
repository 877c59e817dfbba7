"""Times single steps of a model shape on the GPU, without an engine: seeded random weights, decode as one graph.

    python benchmarks/step.py qwen-7b [--decode 1x128,8x1024] [--prefill 1x1024,1x4096] [--profile] [--save FILE.jsonl]

``decode BxC``: one step of B sequences that hold C tokens each, the median of graph replays, beside the floor: the
bytes of weights and KV that it must read over the copy bandwidth measured in the same run. ``prefill BxN``: a first
step of B prompts of N tokens, launched as the engine does, the median over runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.make_checkpoint import SHAPES  # noqa: E402
from modelmill.nn.kv import KVCache  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.ops.shelf import resolve  # noqa: E402
from modelmill.runtime.graph import bucket  # noqa: E402
from modelmill.runtime.load import build  # noqa: E402
from modelmill.weights import held  # noqa: E402

PAGE = 16


def random_model(shape: str, kind: str = "dense") -> nn.Module:
    """A model of a shape of ``make_checkpoint`` on the GPU, every weight drawn at random."""
    raw = SHAPES[shape]
    dtype = getattr(torch, str(raw["torch_dtype"]))
    model = build(str(raw["model_type"]), raw)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="cuda").normal_(0, scale, generator=generator)

    for name, module in model.named_modules():
        if isinstance(module, Linear):
            chosen = "dense" if name == "head" else kind
            module.held = held.pack(chosen, draw(*module.shape, scale=module.shape[1] ** -0.5), dtype)
    for name, buffer in list(model.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        value = draw(*buffer.shape) if buffer.is_meta else buffer.cuda()
        norm = leaf == "weight" and buffer.dim() == 1
        setattr(model.get_submodule(parent), leaf, value * 0.1 + 1 if norm else value)
    return model.eval().requires_grad_(False)


def make_step(model: nn.Module, batch: int, new: int, context: int, *, decode: bool) -> Step:
    """``batch`` sequences with ``new`` tokens each, the last at ``context``; pages in shuffled order."""
    shape, dtype = model.kv, model.embed.weight.dtype  # type: ignore[union-attr]
    bound = bucket(context) if decode else context
    columns, pages = -(-bound // PAGE), -(-context // PAGE)
    kv = KVCache.allocate(shape, batch * pages + 1, PAGE, dtype, "cuda")  # type: ignore[arg-type]
    for cache in (*kv.k, *kv.v):
        cache.normal_()
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).view(batch, pages)
    tables = torch.zeros(batch, columns, dtype=torch.int32)
    tables[:, :pages] = order
    positions = torch.arange(context - new, context).repeat(batch)
    sequence = torch.arange(batch).repeat_interleave(new)
    slots = tables[sequence, positions // PAGE].long() * PAGE + positions % PAGE
    ids = torch.randint(int(model.config.vocab), (batch * new,))  # type: ignore[union-attr, arg-type]
    starts = torch.arange(batch + 1, dtype=torch.int32) * new
    return Step(
        ids=ids.cuda(), positions=positions.cuda(), slots=slots.cuda(), rope_keys=torch.zeros_like(ids).cuda(),
        block_tables=tables.cuda(), query_start=starts.cuda(),
        context_lens=torch.full((batch,), context, dtype=torch.int32).cuda(),
        logit_rows=None if decode else (starts[1:] - 1).long().cuda(),
        max_query=new, max_context=bound, kv=kv, ops=resolve("cuda"), whole=True,
    )  # fmt: skip


def recorded(model: nn.Module, step: Step) -> Callable[[], Any]:
    """A replay of the step's graph, down to the greedy ids."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(step).argmax(-1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(step).argmax(-1)
    return graph.replay


def median_ms(call: Callable[[], Any], repeats: int, queued: int = 1) -> float:
    """Median milliseconds of a call; ``queued`` calls between two events."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(queued):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / queued)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second of a device-to-device copy, read plus written."""
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), 10) * 1e3


def weight_bytes(model: nn.Module) -> int:
    """Bytes of every matrix that a decode step reads."""
    return sum(t.nbytes for m in model.modules() if isinstance(m, Linear) for t in m.held.tensors().values())


@torch.inference_mode()
def decode(model: nn.Module, batch: int, context: int, rate: float, profile: bool = False) -> dict[str, Any]:
    """Milliseconds of one decode step and of its floor."""
    step = make_step(model, batch, 1, context, decode=True)
    replay = recorded(model, step)
    ms = median_ms(replay, 15, 4)
    if profile:
        kernels(replay)
    floor = (weight_bytes(model) + step.kv.nbytes) / rate * 1e3
    return {"figure": "step.decode_ms", "batch": batch, "context": context, "value": ms, "floor_ms": floor}


@torch.inference_mode()
def prefill(model: nn.Module, batch: int, tokens: int, profile: bool = False) -> dict[str, Any]:
    """Milliseconds of a first step."""
    step = make_step(model, batch, tokens, tokens, decode=False)
    ms = median_ms(lambda: model(step).argmax(-1), 7)
    if profile:
        kernels(lambda: model(step).argmax(-1))
    return {"figure": "step.prefill_ms", "batch": batch, "tokens": tokens, "value": ms}


def kernels(call: Callable[[], Any]) -> None:
    """Print the kernels of one call by the time they take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    for row in rows[:18]:
        print(f"{row.self_device_time_total / 1e3:9.3f} ms {row.count:5} × {row.key[:90]}", flush=True)


def pairs(text: str) -> Iterator[tuple[int, int]]:
    """1x128,8x1024 → (1, 128), (8, 1024)."""
    for part in filter(None, text.split(",")):
        a, b = part.split("x")
        yield int(a), int(b)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--decode", default="")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--weights", default="dense")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    model = random_model(options.shape, options.weights)
    rate = copy_rate()
    stamp = {
        "command": "python benchmarks/step.py " + " ".join(sys.argv[1:]), "shape": options.shape, "unit": "ms",
        "weights": options.weights, "copy_gbps": round(rate / 1e9), "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__}, "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    rows = [decode(model, b, c, rate, options.profile) for b, c in pairs(options.decode)]
    rows += [prefill(model, b, n, options.profile) for b, n in pairs(options.prefill)]
    for row in rows:
        print(json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | stamp) + "\n")


if __name__ == "__main__":
    main()
