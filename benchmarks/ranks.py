"""Times a model shape over several GPUs, without an engine: seeded random weights, one process a GPU.

    python benchmarks/ranks.py qwen-7b --tp 2 [--sums 1,8,64] [--decode 1x128,64x1024] [--prefill 1x1024] [--loop 1x128]
        [--layers N] [--save FILE.jsonl]

``sums``: microseconds of one sum over the ranks with its residual and norm, for so many tokens, ours and NCCL's, each
in a recorded graph; checked against float64 before. ``decode`` and ``prefill`` as in ``step.py``, on one GPU and then
on all, in one run. ``loop BxC``: milliseconds a token through the whole loop (scheduling, orders to the other ranks,
graphs), B prompts of C tokens at once.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.make_checkpoint import of_layers  # noqa: E402
from benchmarks.step import kv_bytes, weight_bytes  # noqa: E402
from benchmarks.works import pairs  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.core.types import Request, SamplingParams  # noqa: E402
from modelmill.nn.split import split  # noqa: E402
from modelmill.nn.trial import draw_weights, trial_step  # noqa: E402
from modelmill.ops.add_rms_norm import add_rms_norm  # noqa: E402
from modelmill.ops.clock import copy_rate, median, recorded  # noqa: E402
from modelmill.ops.shelf import resolve  # noqa: E402
from modelmill.parallel.meeting import Meeting, join  # noqa: E402
from modelmill.parallel.mesh import ALONE, Group, Mesh  # noqa: E402
from modelmill.runtime.follow import serve  # noqa: E402
from modelmill.runtime.graph import bucket  # noqa: E402
from modelmill.runtime.load import build  # noqa: E402
from modelmill.runtime.loop import Loop  # noqa: E402
from modelmill.runtime.orders import END, Order  # noqa: E402

Row = dict[str, Any]
OUTPUT = 128


class Others:
    """The other ranks, for a loop whose engine is on no disk."""

    def __init__(self, links: list[socket.socket]) -> None:
        self.links = links

    def tell(self, order: Order, words: memoryview | bytes = b"") -> None:
        for link in self.links:
            link.sendall(order.pack() + bytes(words))

    def guard(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def random_model(options: argparse.Namespace, mesh: Mesh) -> nn.Module:
    """A rank's part of a model, every weight drawn at random."""
    raw = of_layers(options.shape, options.layers)
    model = build(str(raw["model_type"]), raw)
    split(model, mesh, lambda _: 1)
    device = f"cuda:{mesh.rank}"
    return draw_weights(model, {}, getattr(torch, str(raw["torch_dtype"])), device)


@torch.inference_mode()
def exchanged(mesh: Group, tokens: int, width: int = 4096) -> Row:
    """One sum with residual and norm: right, the same on all ranks, and how long it takes."""
    peers, device = mesh.peers, mesh.device
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        every = [
            torch.randn(tokens, width, generator=torch.Generator().manual_seed(r + tokens)) for r in range(mesh.size)
        ]
        x = every[mesh.rank].to(device, dtype)
        residual = torch.randn(tokens, width, generator=torch.Generator().manual_seed(99)).to(device, dtype)
        weight = torch.rand(width, generator=torch.Generator().manual_seed(7)).to(device, dtype) + 0.5
        expected = sum(e.to(device, dtype).double() for e in every) + residual.double()
        normed, total = mesh.add_rms_norm(add_rms_norm, x.clone(), residual.clone(), weight, 1e-6)
        wide = total.double()
        target = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.double()
        limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        for found, wanted in ((total, expected), (normed, target), (mesh.sum(x.clone()), expected - residual.double())):
            error = float((found.double() - wanted).norm() / wanted.norm())
            assert error < limit, f"rank {mesh.rank}: {tokens} tokens of {dtype}: error {error}"
        mine = normed.float().double().sum().view(torch.int64)
        assert mesh.least(int(mine)) == int(mine) == -mesh.least(-int(mine)), "ranks hold different sums"
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.rand(width, device=device, dtype=torch.bfloat16)
    ops = resolve(str(device))

    def rows() -> None:
        for _ in range(20):
            mesh.add_rms_norm(ops.add_rms_norm, x, residual, weight, 1e-6)

    row: Row = {"figure": "sum.us", "tokens": tokens, "width": width}
    row["value"] = _recorded_us(rows)
    mesh.peers = None
    row["nccl_us"] = _recorded_us(rows)
    mesh.peers = peers
    return row


@torch.inference_mode()
def gathered(mesh: Group, tokens: int, vocab: int = 151936) -> Row:
    """The logits of all ranks side by side."""
    share = vocab // mesh.size // 16 * 16
    widths = (*[share] * (mesh.size - 1), vocab - share * (mesh.size - 1))
    full = torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(3)).to(mesh.device, torch.bfloat16)
    x = full.split(widths, 1)[mesh.rank].contiguous()
    assert torch.equal(mesh.gather(x, widths), full)

    def rows() -> None:
        for _ in range(20):
            mesh.gather(x, widths)

    peers = mesh.peers
    row: Row = {"figure": "gather.us", "tokens": tokens, "width": vocab, "value": _recorded_us(rows)}
    mesh.peers = None
    assert torch.equal(mesh.gather(x, widths), full)
    row["nccl_us"] = _recorded_us(rows)
    mesh.peers = peers
    return row


def _recorded_us(rows: Callable[[], None]) -> float:
    rows()
    return median(recorded(rows), 15, 2, "cuda") / 20 * 1e6


@torch.inference_mode()
def steps(options: argparse.Namespace, model: nn.Module, mesh: Mesh) -> Iterator[Row]:
    """Decode steps as graphs, first steps as they are."""
    device = f"cuda:{mesh.rank}"
    ops, rate = resolve(device), copy_rate(device)
    for figure, wanted in (("step.decode_ms", options.decode), ("step.prefill_ms", options.prefill)):
        for batch, count in pairs(wanted):
            decode = figure == "step.decode_ms"
            new, bound = (1, bucket(count)) if decode else (count, count)
            step = trial_step(model, ops, (batch, new, count), bound=bound)
            object.__setattr__(step, "mesh", mesh)
            call = functools.partial(_greedy, model, step)
            call()
            replay = recorded(call) if decode else call
            ms = median(replay, 15 if decode else 5, 4 if decode else 1, "cuda") * 1e3
            row = {"figure": figure, "tp": mesh.size, "batch": batch, "value": ms}
            if decode:
                row |= {"context": count}
                row |= {"floor_ms": (weight_bytes(model) + batch * count * kv_bytes(model)) / rate * 1e3}
            else:
                row |= {"tokens": count}
            yield row
            del step, call, replay
            _forget()


def _greedy(model: nn.Module, step: Any) -> torch.Tensor:
    return model(step).argmax(-1)


def looped(options: argparse.Namespace, model: nn.Module, mesh: Mesh, links: list[socket.socket]) -> Iterator[Row]:
    """Through the loop; of several ranks, rank 0 measures and the others follow."""
    shapes = list(pairs(options.loop))
    if not shapes:
        return
    most = max(batch for batch, _ in shapes)
    config = RunConfig(device=f"cuda:{mesh.rank}", max_num_seqs=most, kv_cache_bytes=48 << 30, max_model_len=2048)
    loop = Loop(model, config, mesh=mesh)
    if mesh.rank:
        serve(links[0], loop.runner)
        return
    others = Others(links)
    loop.runner.crew = others if mesh.size > 1 else None
    for batch, count in shapes:
        for _ in range(2):  # the first run compiles and records
            ms, first = _timed(loop, batch, count)
        yield {"figure": "loop.decode_ms", "tp": mesh.size, "batch": batch, "context": count, "value": ms} | {
            "first_token_ms": first
        }
    others.tell(Order(END))


def _timed(loop: Loop, batch: int, count: int) -> tuple[float, float]:
    """(milliseconds a step of decoding, milliseconds to the last first token)."""
    generator = torch.Generator().manual_seed(batch + count)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True).resolved({})
    for i in range(batch):
        prompt = tuple(torch.randint(2, loop.vocab, (count,), generator=generator).tolist())
        loop.add(Request(id=str(i), prompt=prompt, params=params, cache_salt=str(time.monotonic())))
    seen: dict[str, int] = {}
    began = time.perf_counter()
    first = steps = 0.0
    while loop.has_work:
        told = loop.step()
        if first:
            steps += bool(told)
        for token in told:
            seen[token.request] = 1
        if not first and len(seen) == batch:
            first = time.perf_counter() - began
    return (time.perf_counter() - began - first) / max(steps, 1) * 1e3, first * 1e3


def _forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def rank(options: argparse.Namespace, mesh: Group, links: list[socket.socket]) -> Iterator[Row]:
    """What every rank does, in the same order."""
    for tokens in map(int, filter(None, options.sums.split(","))):
        yield exchanged(mesh, tokens) | {"tp": mesh.size}
    if options.sums:
        for tokens in (1, 64):
            yield gathered(mesh, tokens) | {"tp": mesh.size}
    if options.decode or options.prefill or options.loop:
        model = random_model(options, mesh)
        yield from steps(options, model, mesh)
        yield from looped(options, model, mesh, links)


def start(options: argparse.Namespace) -> Iterator[Row]:
    """Rank 0: starts the others, measures one GPU, then all together."""
    meeting = Meeting()
    links: list[socket.socket] = []
    children = []
    for number in range(1, options.tp):
        ours, theirs = socket.socketpair()
        word = [sys.executable, __file__, *sys.argv[1:], "--rank", f"{number},{meeting.port},{theirs.fileno()}"]
        children.append(subprocess.Popen(word, pass_fds=(theirs.fileno(),), stdout=subprocess.DEVNULL))
        theirs.close()
        links.append(ours)
    try:
        store = meeting.store()
        torch.cuda.set_device(0)
        if not options.only:
            model = random_model(options, ALONE)
            yield from steps(options, model, ALONE)
            yield from looped(options, model, ALONE, [])
            del model
            _forget()
        mesh = Group(0, options.tp, store, "cuda:0")
        yield from rank(options, mesh, links)
        torch.cuda.synchronize()
        mesh.stop()
        for child in children:
            child.wait(30)
    finally:
        for child in children:
            child.kill()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--sums", default="")
    parser.add_argument("--decode", default="")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--loop", default="")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--only", action="store_true", help="leave the run on one GPU out")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.rank:
        number, port, descriptor = map(int, options.rank.split(","))
        mesh = Group(number, options.tp, join(port), f"cuda:{number}", 300)
        for _ in rank(options, mesh, [socket.socket(fileno=descriptor)]):
            pass
        os._exit(0)  # nobody is left to take leave of
    stamp = {
        "command": "python benchmarks/ranks.py " + " ".join(sys.argv[1:]), "shape": options.shape,
        "device": f"{torch.cuda.get_device_name()} x{options.tp}", "versions": {"torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    began = time.perf_counter()
    for row in start(options):
        print(f"{time.perf_counter() - began:6.1f} s", json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(row | {"unit": "us" if row["figure"].endswith("us") else "ms"} | stamp) + "\n")


if __name__ == "__main__":
    main()
