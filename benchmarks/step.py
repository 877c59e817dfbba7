"""Times single steps of a model shape on the GPU, without an engine: seeded random weights, decode as one graph.

    python benchmarks/step.py qwen-7b [--decode 1x128,8x1024] [--prefill 1x1024,1x4096] [--kv-cache-dtype int8]
                              [--profile] [--save FILE.jsonl]

``decode BxC``: one step of B sequences that hold C tokens each, the median of graph replays, beside the floor: the
bytes of weights and KV that it must read over the copy bandwidth measured in the same run. ``prefill BxN``: a first
step of B prompts of N tokens, launched as the engine does, the median over runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.make_checkpoint import SHAPES  # noqa: E402
from modelmill.cli.profile import show  # noqa: E402
from modelmill.core.config import KV_DTYPES, RunConfig  # noqa: E402
from modelmill.eval.ceilings import Ceilings, measure  # noqa: E402
from modelmill.eval.profile import Work  # noqa: E402
from modelmill.eval.profile import profile as profiled  # noqa: E402
from modelmill.nn.kv import KVCache, held_dtype  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.nn.trial import PAGE, draw_weights, trial_step  # noqa: E402
from modelmill.ops.clock import copy_rate, median, recorded  # noqa: E402
from modelmill.ops.shelf import resolve  # noqa: E402
from modelmill.ops.tuning import Tuning  # noqa: E402
from modelmill.runtime.graph import bucket  # noqa: E402
from modelmill.runtime.load import build  # noqa: E402
from modelmill.runtime.loop import Loop  # noqa: E402


def random_model(shape: str, kind: str = "dense") -> nn.Module:
    """A model of a shape of ``make_checkpoint`` on the GPU, every weight drawn at random."""
    raw = SHAPES[shape]
    model = build(str(raw["model_type"]), raw)
    linears = [name for name, module in model.named_modules() if isinstance(module, Linear) and name != "head"]
    return draw_weights(model, dict.fromkeys(linears, kind), getattr(torch, str(raw["torch_dtype"])), "cuda")


def make_step(
    model: nn.Module, batch: int, new: int, context: int, tuning: Tuning | None = None, kv_dtype: str = "auto"
) -> Step:
    """``batch`` sequences with ``new`` tokens each, the last at ``context``; pages in shuffled order."""
    bound = bucket(context) if new == 1 else context
    pages = batch * -(-context // PAGE) + 1
    kv = KVCache.allocate(model.kv, pages, PAGE, kept(model, kv_dtype), "cuda")  # type: ignore[arg-type]
    return trial_step(model, resolve("cuda", tuning=tuning), (batch, new, context), bound=bound, kv=kv)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of every matrix that a decode step reads."""
    return sum(t.nbytes for m in model.modules() if isinstance(m, Linear) for t in m.held.tensors().values())


@torch.inference_mode()
def decode(
    model: nn.Module, batch: int, context: int, rate: float, *, tuning: Tuning | None = None, kv_dtype: str = "auto"
) -> dict[str, Any]:
    """Milliseconds of one decode step and of its floor."""
    step = make_step(model, batch, 1, context, tuning, kv_dtype)
    call = functools.partial(greedy, model, step)
    call()  # compiles
    replay = recorded(call)
    ms = median(replay, 15, 4, "cuda") * 1e3
    floor = (weight_bytes(model) + batch * context * kv_bytes(model, kv_dtype)) / rate * 1e3
    return {"figure": "step.decode_ms", "batch": batch, "context": context, "value": ms, "floor_ms": floor}


@torch.inference_mode()
def prefill(model: nn.Module, batch: int, tokens: int, kv_dtype: str = "auto") -> dict[str, Any]:
    """Milliseconds of a first step."""
    call = functools.partial(greedy, model, make_step(model, batch, tokens, tokens, None, kv_dtype))
    ms = median(call, 7, 1, "cuda") * 1e3
    return {"figure": "step.prefill_ms", "batch": batch, "tokens": tokens, "value": ms}


def greedy(model: nn.Module, step: Step) -> torch.Tensor:
    """The step down to the ids."""
    return model(step).argmax(-1)


def kept(model: nn.Module, kv_dtype: str) -> torch.dtype:
    """What keys and values are held in."""
    return held_dtype(kv_dtype, model.embed.weight.dtype)  # type: ignore[union-attr, arg-type]


def kv_bytes(model: nn.Module, kv_dtype: str = "auto") -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.kv.page_bytes(1, kept(model, kv_dtype))  # type: ignore[union-attr, operator]


def kernels(model: nn.Module, work: Work, ceilings: Ceilings) -> None:
    """Print where the time of one step goes, as ``modelmill profile`` does."""
    length = work.prompt + PAGE
    pages = work.batch * (length // PAGE + 1) + 2
    held = pages * model.kv.page_bytes(PAGE, model.embed.weight.dtype)  # type: ignore[union-attr, operator]
    tokens = max(work.batch * work.prompt, length)
    config = RunConfig(kv_cache_bytes=held, max_num_seqs=work.batch, max_num_batched_tokens=tokens, page_size=PAGE)
    found, _ = profiled(Loop(model, config, max_model_len=length), work, ceilings)
    show(found, 16)


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
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    kv = options.kv_cache_dtype
    model = random_model(options.shape, options.weights)
    rate = copy_rate()
    stamp = {
        "command": "python benchmarks/step.py " + " ".join(sys.argv[1:]), "shape": options.shape, "unit": "ms",
        "weights": options.weights, "kv": kv, "copy_gbps": round(rate / 1e9), "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__}, "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    rows = [decode(model, b, c, rate, kv_dtype=kv) for b, c in pairs(options.decode)]
    rows += [prefill(model, b, n, kv) for b, n in pairs(options.prefill)]
    for row in rows:
        print(json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | stamp) + "\n")
    if options.profile:
        works = [Work("decode", b, c) for b, c in pairs(options.decode)]
        works += [Work("prefill", b, n) for b, n in pairs(options.prefill)]
        ceilings = measure("cuda", [model.embed.weight.dtype])  # type: ignore[union-attr, list-item]
        for work in works:
            kernels(model, work, ceilings)


if __name__ == "__main__":
    main()
