"""Times single steps of a model shape on the GPU, without an engine: seeded random weights, decode as one graph.

    python benchmarks/step.py qwen-7b [--decode 1x128,8x1024] [--prefill 1x1024,1x4096] [--mixed 768+230x1000]
                              [-q int4] [--kv-cache-dtype int8] [--profile] [--save FILE.jsonl]

``decode BxC``: one step of B sequences that hold C tokens each, the median of graph replays, beside the floor: the
bytes of weights and KV that it must read over the copy bandwidth measured in the same run. ``prefill BxN``: a first
step of B prompts of N tokens, launched as the engine does, the median over runs. ``mixed N+BxC``: N tokens of prompts
(of 512 at most) beside B answers that hold C tokens each, launched likewise. ``-q``: how the matrices are held
(``forms.py``); the head stays as it is without ``--quantize-head``. ``--kernel OP=VARIANT`` switches a kernel.
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

from benchmarks.forms import FORMS, form  # noqa: E402
from benchmarks.make_checkpoint import SHAPES  # noqa: E402
from benchmarks.works import pairs  # noqa: E402
from modelmill.cli.profile import show  # noqa: E402
from modelmill.core.config import KV_DTYPES, RunConfig  # noqa: E402
from modelmill.eval.ceilings import Ceilings, measure  # noqa: E402
from modelmill.eval.profile import Work, profile_step  # noqa: E402
from modelmill.eval.profile import profile as profiled  # noqa: E402
from modelmill.eval.report import Spread, versions  # noqa: E402
from modelmill.nn.kv import KVCache, held_dtype  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.nn.trial import PAGE, draw_weights, trial_step  # noqa: E402
from modelmill.ops.clock import copy_rate, in_turn, recorded  # noqa: E402
from modelmill.ops.shelf import resolve  # noqa: E402
from modelmill.ops.tuning import Tuning  # noqa: E402
from modelmill.runtime.graph import bucket  # noqa: E402
from modelmill.runtime.load import build  # noqa: E402
from modelmill.runtime.loop import Loop  # noqa: E402

ROUNDS, PROMPT = 15, 512


def random_model(shape: str, kind: str = "dense", *, head: bool = False) -> nn.Module:
    """A model of a shape of ``make_checkpoint`` on the GPU, every weight drawn at random; kind: one of ``FORMS``.

    head: whether the matrix of the logits is held so, too.
    """
    raw = SHAPES[shape]
    model = build(str(raw["model_type"]), raw)
    linears = [
        name for name, module in model.named_modules() if isinstance(module, Linear) and (head or name != "head")
    ]
    return draw_weights(model, dict.fromkeys(linears, form(kind)), getattr(torch, str(raw["torch_dtype"])), "cuda")


def make_step(
    model: nn.Module,
    batch: int,
    new: int,
    context: int,
    tuning: Tuning | None = None,
    kv_dtype: str = "auto",
    kernels: Mapping[str, str] | None = None,
) -> Step:
    """``batch`` sequences with ``new`` tokens each, the last at ``context``; pages in shuffled order.

    kernels: op → variant, where one is switched by hand.
    """
    bound = bucket(context) if new == 1 else context
    pages = batch * -(-context // PAGE) + 1
    kv = KVCache.allocate(model.kv, pages, PAGE, kept(model, kv_dtype), "cuda")  # type: ignore[arg-type]
    return trial_step(model, resolve("cuda", kernels, tuning), (batch, new, context), bound=bound, kv=kv)


def mixed_step(model: nn.Module, sizes: tuple[int, int, int], kv_dtype: str, kernels: Mapping[str, str]) -> Step:
    """sizes: tokens of prompts, answers, tokens of each of those."""
    prompts, answers, context = sizes
    pieces = [(1, min(PROMPT, prompts - at), min(PROMPT, prompts - at)) for at in range(0, prompts, PROMPT)]
    pages = sum(-(-count // PAGE) for _, _, count in pieces) + answers * -(-context // PAGE) + 1
    device = model.embed.weight.device.type  # type: ignore[union-attr]
    kv = KVCache.allocate(model.kv, pages, PAGE, kept(model, kv_dtype), device)  # type: ignore[arg-type]
    groups = [*pieces, (answers, 1, context)]
    return trial_step(model, resolve(device, kernels), groups, bound=bucket(max(context, PROMPT)), kv=kv)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of every matrix that a decode step reads."""
    return sum(t.nbytes for m in model.modules() if isinstance(m, Linear) for t in m.held.tensors().values())


@torch.inference_mode()
def decode(model: nn.Module, step: Step, rate: float) -> dict[str, Any]:
    """Milliseconds of one decode step and of its floor."""
    call = functools.partial(greedy, model, step)
    call()  # compiles
    times = [each * 1e3 for each in in_turn([recorded(call)], ROUNDS, 4, "cuda")[0]]
    batch, context = step.query_start.numel() - 1, int(step.context_lens[0])
    token = step.kv.nbytes / step.kv.pages / PAGE
    floor = (weight_bytes(model) + batch * context * token) / rate * 1e3
    return {"figure": "step.decode_ms", "batch": batch, "context": context, **spread(times), "floor_ms": floor}


@torch.inference_mode()
def prefill(model: nn.Module, step: Step) -> dict[str, Any]:
    """Milliseconds of a first step."""
    times = [each * 1e3 for each in in_turn([functools.partial(greedy, model, step)], 9, 1, "cuda")[0]]
    batch, tokens = step.query_start.numel() - 1, step.max_query
    return {"figure": "step.prefill_ms", "batch": batch, "tokens": tokens, **spread(times)}


@torch.inference_mode()
def mixed(model: nn.Module, step: Step, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Milliseconds of a step with prompts beside answers."""
    times = [each * 1e3 for each in in_turn([functools.partial(greedy, model, step)], 9, 1, "cuda")[0]]
    tokens, batch, context = sizes
    return {"figure": "step.mixed_ms", "tokens": tokens, "batch": batch, "context": context, **spread(times)}


def spread(times: list[float]) -> dict[str, Any]:
    """The median as the row's value, and how far it spreads."""
    found = Spread.of(times)
    return {"value": found.median, "spread": asdict(found)}


def greedy(model: nn.Module, step: Step) -> torch.Tensor:
    """The step down to the ids."""
    return step.ops.argmax(model(step))


def kept(model: nn.Module, kv_dtype: str) -> torch.dtype:
    """What keys and values are held in."""
    return held_dtype(kv_dtype, model.embed.weight.dtype)  # type: ignore[union-attr, arg-type]


def kv_bytes(model: nn.Module, kv_dtype: str = "auto") -> int:
    """Bytes of one token's keys and values in all layers."""
    return model.kv.page_bytes(1, kept(model, kv_dtype))  # type: ignore[union-attr, operator]


def profile(model: nn.Module, work: Work, ceilings: Ceilings, kv_dtype: str, kernels: Mapping[str, str]) -> None:
    """Print where the time of one step goes, as ``modelmill profile`` does."""
    length = work.prompt + PAGE
    pages = work.batch * (length // PAGE + 1) + 2
    config = RunConfig(
        kv_cache_bytes=pages * PAGE * kv_bytes(model, kv_dtype), max_num_seqs=work.batch, page_size=PAGE,
        max_num_batched_tokens=max(work.batch * work.prompt, length), kv_cache_dtype=kv_dtype, kernels=kernels,
    )  # fmt: skip
    found, _ = profiled(Loop(model, config, max_model_len=length), work, ceilings)
    show(found, 16)


def beside(text: str) -> Iterator[tuple[int, int, int]]:
    """768+230x1000 → (768, 230, 1000)."""
    for part in filter(None, text.split(",")):
        tokens, answers = part.split("+")
        batch, context = answers.split("x")
        yield int(tokens), int(batch), int(context)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--decode", default="")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--mixed", default="")
    parser.add_argument("-q", "--weights", default="dense", choices=FORMS, metavar="KIND", help=", ".join(FORMS))
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument("--kernel", action="append", default=[], metavar="OP=VARIANT")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--state", help="of the code, for the row")
    return parser.parse_args()


def main() -> None:
    """Measure, print and record."""
    options = parse()
    kv, switched = options.kv_cache_dtype, dict(each.split("=") for each in options.kernel)
    model = random_model(options.shape, options.weights, head=options.quantize_head)
    rate = copy_rate()
    stamp = {
        "command": "python benchmarks/step.py " + " ".join(sys.argv[1:]), "shape": options.shape, "unit": "ms",
        "weights": options.weights, "kv": kv, "copy_gbps": round(rate / 1e9), "device": torch.cuda.get_device_name(),
        "versions": versions(), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **({"state": options.state} if options.state else {}),
    }  # fmt: skip
    works = [Work("decode", b, c) for b, c in pairs(options.decode)]
    works += [Work("prefill", b, n) for b, n in pairs(options.prefill)]
    for work in works:
        new = 1 if work.phase == "decode" else work.prompt
        step = make_step(model, work.batch, new, work.prompt, None, kv, switched)
        row = decode(model, step, rate) if new == 1 else prefill(model, step)
        del step  # its pages
        print(json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | stamp) + "\n")
    for sizes in beside(options.mixed):
        step = mixed_step(model, sizes, kv, switched)
        row = mixed(model, step, sizes)
        print(json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | stamp) + "\n")
        if options.profile:
            ceilings = measure("cuda", [model.embed.weight.dtype])  # type: ignore[union-attr, list-item]
            show(profile_step(model, step, Work("mixed", *sizes[1:]), ceilings)[0], 20)
    if options.profile and works:
        ceilings = measure("cuda", [model.embed.weight.dtype])  # type: ignore[union-attr, list-item]
        for work in works:
            profile(model, work, ceilings, kv, switched)


if __name__ == "__main__":
    main()
