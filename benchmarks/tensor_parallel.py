"""Time a model shape on several GPUs with seeded random weights, one process per GPU.

    python benchmarks/tensor_parallel.py qwen-7b --tp 2 [--sums 1,8,64] [--decode 1x128,64x1024]
        [--prefill 1x1024] [--loop 1x128] [--layers N] [--save FILE.jsonl]

``sums``: microseconds of one sum over the ranks with its residual and norm, for so many tokens,
ours and NCCL's, each in a recorded graph; checked against float64 before. ``decode BxC``: one step
of B sequences that hold C tokens each, as a graph. ``prefill BxN``: a first step of B prompts of N
tokens, as a graph where the engine would capture one (``captured`` in the row), else launched
kernel by kernel. ``loop BxC``: milliseconds a token, and until the last first token, through the
whole loop (scheduling, orders to the other ranks, graphs), B prompts of C tokens at once; the
median of calls after those that compile and capture. All on one GPU and then on several, in one
run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import socket
import statistics
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

from benchmarks.model_shapes import with_num_layers  # noqa: E402
from benchmarks.model_step import kv_bytes_per_token, weight_bytes  # noqa: E402
from benchmarks.workloads import WARM_UP_CALLS, parse_pairs  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.core.types import Request, SamplingParams  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402
from modelmill.loader.capacity import total_gpu_bytes  # noqa: E402
from modelmill.loader.model_loader import build_model  # noqa: E402
from modelmill.nn.fusion import fuse_model  # noqa: E402
from modelmill.nn.shard_model import shard_model  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step  # noqa: E402
from modelmill.ops.add_rms_norm import add_rms_norm  # noqa: E402
from modelmill.ops.registry import select_backends  # noqa: E402
from modelmill.ops.timing import capture_graph, copy_bandwidth, median_time  # noqa: E402
from modelmill.parallel.rendezvous import RendezvousServer, connect_or_serve_store  # noqa: E402
from modelmill.parallel.tp_group import SINGLE_RANK, DistributedTPGroup, TPGroup  # noqa: E402
from modelmill.runtime.cuda_graphs import graph_limits  # noqa: E402
from modelmill.runtime.engine_core import EngineCore  # noqa: E402
from modelmill.runtime.graph_sizes import PaddedStepShape, context_bucket  # noqa: E402
from modelmill.runtime.tp_worker_pool import END_COMMAND, WorkerCommand  # noqa: E402
from modelmill.runtime.tp_worker_process import run_commands  # noqa: E402

Row = dict[str, Any]
OUTPUT_TOKENS = 128
LOOP_ROUNDS = 3


class OtherRanks:
    """The other ranks, for a loop whose engine is on no disk."""

    def __init__(self, links: list[socket.socket]) -> None:
        self.links = links

    def broadcast(self, command: WorkerCommand, payload: memoryview | bytes = b"") -> None:
        """Send a command with its payload to all ranks."""
        for link in self.links:
            link.sendall(command.pack() + bytes(payload))

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without supervision of the ranks."""
        return contextlib.nullcontext()

    def ping(self) -> None:
        """Trust that the ranks are there."""

    def close(self) -> None:
        """Leave the ranks running; the process that started them ends them."""


def random_model(options: argparse.Namespace, tp_group: TPGroup) -> nn.Module:
    """A rank's part of a model, every weight drawn at random."""
    raw = with_num_layers(options.shape, options.layers)
    model = build_model(str(raw["model_type"]), raw)
    shard_model(model, tp_group, lambda _: 1, options.enable_expert_parallel)
    device = f"cuda:{tp_group.rank}"
    return fill_random_weights(model, {}, getattr(torch, str(raw["torch_dtype"])), device)


@torch.inference_mode()
def time_all_reduce(tp_group: DistributedTPGroup, tokens: int, width: int = 4096) -> Row:
    """One sum with residual and norm: right, the same on all ranks, and how long it takes."""
    peers, device = tp_group.peer_buffers, tp_group.device
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        every = [
            torch.randn(tokens, width, generator=torch.Generator().manual_seed(r + tokens))
            for r in range(tp_group.size)
        ]
        x = every[tp_group.rank].to(device, dtype)
        residual = torch.randn(tokens, width, generator=torch.Generator().manual_seed(99)).to(
            device, dtype
        )
        weight = (
            torch.rand(width, generator=torch.Generator().manual_seed(7)).to(device, dtype) + 0.5
        )
        expected = sum(e.to(device, dtype).double() for e in every) + residual.double()
        normed, total = tp_group.all_reduce_add_rms_norm(
            add_rms_norm, x.clone(), residual.clone(), weight, 1e-6
        )
        wide = total.double()
        target = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.double()
        limit = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        for actual, reference in (
            (total, expected),
            (normed, target),
            (tp_group.all_reduce(x.clone()), expected - residual.double()),
        ):
            error = float((actual.double() - reference).norm() / reference.norm())
            assert error < limit, f"rank {tp_group.rank}: {tokens} tokens of {dtype}: error {error}"
        checksum = normed.float().double().sum().view(torch.int64)
        assert (
            tp_group.all_reduce_min(int(checksum))
            == int(checksum)
            == -tp_group.all_reduce_min(-int(checksum))
        ), "ranks hold different sums"
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.rand(width, device=device, dtype=torch.bfloat16)
    ops = select_backends(str(device))

    def rows() -> None:
        for _ in range(20):
            tp_group.all_reduce_add_rms_norm(ops.add_rms_norm, x, residual, weight, 1e-6)

    row: Row = {"figure": "sum.us", "tokens": tokens, "width": width}
    row["value"] = _captured_us(rows)
    tp_group.peer_buffers = None
    row["nccl_us"] = _captured_us(rows)
    tp_group.peer_buffers = peers
    return row


@torch.inference_mode()
def time_all_gather(tp_group: DistributedTPGroup, tokens: int, vocab: int = 151936) -> Row:
    """The logits of all ranks side by side."""
    share = vocab // tp_group.size // 16 * 16
    widths = (*[share] * (tp_group.size - 1), vocab - share * (tp_group.size - 1))
    full = torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(3)).to(
        tp_group.device, torch.bfloat16
    )
    x = full.split(widths, 1)[tp_group.rank].contiguous()
    assert torch.equal(tp_group.all_gather(x, widths), full)

    def rows() -> None:
        for _ in range(20):
            tp_group.all_gather(x, widths)

    peers = tp_group.peer_buffers
    row: Row = {
        "figure": "gather.us",
        "tokens": tokens,
        "width": vocab,
        "value": _captured_us(rows),
    }
    tp_group.peer_buffers = None
    assert torch.equal(tp_group.all_gather(x, widths), full)
    row["nccl_us"] = _captured_us(rows)
    tp_group.peer_buffers = peers
    return row


def _captured_us(rows: Callable[[], None]) -> float:
    rows()
    return median_time(capture_graph(rows), 15, 2, "cuda") / 20 * 1e6


@torch.inference_mode()
def time_steps(options: argparse.Namespace, model: nn.Module, tp_group: TPGroup) -> Iterator[Row]:
    """Decode steps as graphs, first steps as the engine runs them."""
    device = f"cuda:{tp_group.rank}"
    ops, rate = select_backends(device), copy_bandwidth(device)
    for batch, context in parse_pairs(options.decode):
        step = synthetic_step(model, ops, (batch, 1, context), max_context=context_bucket(context))
        floor = (weight_bytes(model) + batch * context * kv_bytes_per_token(model)) / rate
        yield {
            "figure": "step.decode_ms", "tp": tp_group.size, "batch": batch,
            "value": _step_ms(model, _with(step, tp_group=tp_group), captured=True),
            "context": context, "floor_ms": floor * 1e3,
        }  # fmt: skip
        del step
        _free_memory()
    config = run_config(tp_group, 1)
    for batch, tokens in parse_pairs(options.prefill):
        size = prefill_graph_size(config, batch, tokens, total_gpu_bytes(device))
        new, bound = (tokens, tokens) if size is None else (size.tokens, size.context)
        step = synthetic_step(model, ops, (batch, new, new), max_context=bound)
        captured = size is not None
        yield {
            "figure": "step.prefill_ms", "tp": tp_group.size, "batch": batch,
            "value": _step_ms(
                model, _with(step, tp_group=tp_group, is_padded=captured), captured=captured
            ),
            "tokens": tokens, "captured": captured,
        }  # fmt: skip
        del step
        _free_memory()


def run_config(tp_group: TPGroup, max_num_seqs: int) -> RunConfig:
    """Options of the loop."""
    return RunConfig(
        device=f"cuda:{tp_group.rank}", tp=tp_group.size, max_num_seqs=max_num_seqs,
        kv_cache_bytes=48 << 30, max_model_len=2048,
    )  # fmt: skip


def prefill_graph_size(
    config: RunConfig, batch: int, tokens: int, device_bytes: int
) -> PaddedStepShape | None:
    """The size of the graph that the engine runs a prompt by; None: it launches kernel by kernel.

    batch: prompts; of several, whose graphs have rows for more, the steps here are launched.
    """
    pages = -(-(config.max_model_len or tokens) // config.page_size)
    limits = graph_limits(config, pages, device_bytes)
    return None if limits is None or batch > 1 else limits.prefill.padded_shape(tokens, 1, tokens)


def _step_ms(model: nn.Module, step: Step, *, captured: bool) -> float:
    call = functools.partial(_greedy, fuse_model(model), step)
    call()
    timed = capture_graph(call) if captured else call
    return median_time(timed, 15 if captured else 5, 4 if captured else 1, "cuda") * 1e3


def _with(step: Step, **fields: Any) -> Step:
    """The same tensors with other fields."""
    for name, value in fields.items():
        object.__setattr__(step, name, value)
    return step


def _greedy(model: nn.Module, step: Step) -> torch.Tensor:
    return model(step).argmax(-1)


def time_engine_core(
    options: argparse.Namespace, model: nn.Module, tp_group: TPGroup, links: list[socket.socket]
) -> Iterator[Row]:
    """Through the loop; of several ranks, rank 0 measures and the others follow."""
    shapes = list(parse_pairs(options.loop))
    if not shapes:
        return
    config = run_config(tp_group, max(batch for batch, _ in shapes))
    others: Any = OtherRanks(links)
    leads_others = tp_group.rank == 0 and tp_group.size > 1
    loop = EngineCore(model, config, tp_group=tp_group, tp_workers=others if leads_others else None)
    if tp_group.rank:
        run_commands(links[0], loop.model_runner)
        return
    for batch, count in shapes:
        yield {"figure": "loop.decode_ms", "tp": tp_group.size} | time_loop(loop, batch, count)
    others.broadcast(WorkerCommand(END_COMMAND))


def time_loop(engine_core: EngineCore, batch: int, count: int) -> Row:
    """Medians of calls, none of which compiles or captures."""
    for _ in range(WARM_UP_CALLS):
        _time_batch(engine_core, batch, count)
    steps, firsts = zip(
        *(_time_batch(engine_core, batch, count) for _ in range(LOOP_ROUNDS)), strict=True
    )
    return {
        "batch": batch, "context": count, "value": statistics.median(steps),
        "first_token_ms": statistics.median(firsts), "rounds": LOOP_ROUNDS,
    }  # fmt: skip


def _time_batch(engine_core: EngineCore, batch: int, count: int) -> tuple[float, float]:
    """(milliseconds a step of decoding, milliseconds to the last first token)."""
    generator = torch.Generator().manual_seed(batch + count)
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True
    ).with_defaults({})
    for i in range(batch):
        prompt = tuple(torch.randint(2, engine_core.vocab, (count,), generator=generator).tolist())
        engine_core.add(
            Request(id=str(i), prompt=prompt, params=params, cache_salt=str(time.monotonic()))
        )
    num_tokens: dict[str, int] = {}
    began = time.perf_counter()
    first = steps = 0.0
    while engine_core.has_work:
        outputs = engine_core.step()
        if first:
            steps += bool(outputs)
        for token in outputs:
            num_tokens[token.request_id] = 1
        if not first and len(num_tokens) == batch:
            first = time.perf_counter() - began
    return (time.perf_counter() - began - first) / max(steps, 1) * 1e3, first * 1e3


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run_rank(
    options: argparse.Namespace, tp_group: DistributedTPGroup, links: list[socket.socket]
) -> Iterator[Row]:
    """What every rank does, in the same order."""
    for tokens in map(int, filter(None, options.sums.split(","))):
        yield time_all_reduce(tp_group, tokens) | {"tp": tp_group.size}
    if options.sums:
        for tokens in (1, 64):
            yield time_all_gather(tp_group, tokens) | {"tp": tp_group.size}
    if options.decode or options.prefill or options.loop:
        model = random_model(options, tp_group)
        yield from time_steps(options, model, tp_group)
        yield from time_engine_core(options, model, tp_group, links)


def run_all_ranks(options: argparse.Namespace) -> Iterator[Row]:
    """Rank 0: starts the others, measures one GPU, then all together."""
    meeting = RendezvousServer()
    links: list[socket.socket] = []
    children = []
    for number in range(1, options.tp):
        parent_socket, child_socket = socket.socketpair()
        word = [
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--rank",
            f"{number},{meeting.port},{child_socket.fileno()}",
        ]
        children.append(
            subprocess.Popen(word, pass_fds=(child_socket.fileno(),), stdout=subprocess.DEVNULL)
        )
        child_socket.close()
        links.append(parent_socket)
    try:
        store = meeting.start_store()
        torch.cuda.set_device(0)
        if not options.only:
            model = random_model(options, SINGLE_RANK)
            yield from time_steps(options, model, SINGLE_RANK)
            yield from time_engine_core(options, model, SINGLE_RANK, [])
            del model
            _free_memory()
        tp_group = DistributedTPGroup(0, options.tp, store, "cuda:0")
        yield from run_rank(options, tp_group, links)
        torch.cuda.synchronize()
        tp_group.abort()
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
    parser.add_argument("--enable-expert-parallel", action="store_true")
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
        tp_group = DistributedTPGroup(
            number, options.tp, connect_or_serve_store(port), f"cuda:{number}", 300
        )
        for _ in run_rank(options, tp_group, [socket.socket(fileno=descriptor)]):
            pass
        os._exit(0)  # the other ranks are gone: no NCCL shutdown
    stamp = {
        **provenance(),
        "command": "python benchmarks/tensor_parallel.py " + " ".join(sys.argv[1:]),
        "shape": options.shape,
        **({"expert_parallel": True} if options.enable_expert_parallel else {}),
        "device": f"{torch.cuda.get_device_name()} x{options.tp}",
        "versions": {"torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    began = time.perf_counter()
    for row in run_all_ranks(options):
        print(f"{time.perf_counter() - began:6.1f} s", json.dumps(row), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(
                    json.dumps(
                        row | {"unit": "us" if row["figure"].endswith("us") else "ms"} | stamp
                    )
                    + "\n"
                )


if __name__ == "__main__":
    main()
