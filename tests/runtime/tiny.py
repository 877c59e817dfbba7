"""A tiny seeded decoder and small drivers of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from modelmill.core.config import RunConfig
from modelmill.core.types import Finish, Request, SamplingParams, Token
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.linear import Linear
from modelmill.nn.rotary import RopeSpec
from modelmill.runtime.load import fill
from modelmill.runtime.loop import Loop

VOCAB = 97
EOS = 1


def decoder(
    kind: str = "fixed", window: int | None = None, device: str = "cpu", vocab: int = VOCAB, max_len: int = 128
) -> Decoder:
    """Two layers, 32 wide; kind is a rope rule."""
    if kind == "prompt":
        rope = RopeSpec(8, 10000.0, 16, ntk_length=16)
    elif kind == "running":
        rope = RopeSpec(8, 10000.0, 16, scaling={"rope_type": "dynamic", "factor": 2.0})
    else:
        rope = RopeSpec(8, 10000.0, 16)
    config = DecoderConfig(
        hidden=32,
        inner=48,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab=vocab,
        eps=1e-6,
        max_len=max_len,
        rope=rope,
        qkv_bias=True,
        windows=() if window is None else (window, window),
        logn=16 if kind == "prompt" else None,
    )
    model = Decoder(config)
    tensors = weights(model)
    fill(model, tensors.__getitem__, tensors, {}, {}, device)
    return model


def weights(model: Decoder, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded values for every tensor of a model; large enough that tokens vary."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    shapes = {n: tuple(b.shape) for n, b in model.named_buffers() if b.is_meta}
    shapes |= {f"{n}.weight": m.shape for n, m in model.named_modules() if isinstance(m, Linear)}
    for name in sorted(shapes):
        shape = shapes[name]
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            found[name] = 1 + 0.1 * values
        elif len(shape) == 2:
            found[name] = values * (1.5 if name == "embed.weight" else 1.5 * shape[1] ** -0.5)
        else:
            found[name] = 0.1 * values
    return found


def loop(model: Decoder | None = None, pages: int | None = None, **options: Any) -> Loop:
    """A loop with 8-token pages; ``pages`` bounds the pool."""
    overlap = options.pop("overlap", None)
    model = model or decoder()
    options = {"page_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
    if pages is not None:
        per = model.kv.page_bytes(options["page_size"], torch.float32)
        options["kv_cache_bytes"] = (pages + 1) * per
        options.setdefault("max_model_len", min(pages * options["page_size"], 128))
    else:
        options.setdefault("kv_cache_bytes", 1 << 24)
    return Loop(model, RunConfig(**options), overlap=overlap)


def prompts(count: int, low: int = 1, high: int = 40, seed: int = 0, vocab: int = VOCAB) -> list[tuple[int, ...]]:
    """Random prompts of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(2, vocab, (n,), generator=generator).tolist()) for n in lengths]


def params(**given: Any) -> SamplingParams:
    """Greedy unless told otherwise."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **given}).resolved({})


def requests(
    given: Iterable[tuple[int, ...]], how: SamplingParams | None = None, eos: tuple[int, ...] = (EOS,)
) -> list[Request]:
    """One request per prompt."""
    return [Request(id=str(i), prompt=p, params=how or params(), eos_ids=eos) for i, p in enumerate(given)]


def drain(engine: Loop, most: int = 5000) -> list[Token]:
    """Step until nothing is left."""
    events: list[Token] = []
    for _ in range(most):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the loop does not end")


def answers(events: Iterable[Token]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Answer ids by (request, index)."""
    found: dict[tuple[str, int], list[int]] = {}
    for event in events:
        ids = found.setdefault((event.request, event.index), [])
        if event.id is not None:
            ids.append(event.id)
        if event.replay is not None:
            ids.extend(event.replay)
    return {k: tuple(v) for k, v in found.items()}


def finishes(events: Iterable[Token]) -> dict[tuple[str, int], Finish]:
    """How each sequence ended."""
    return {(e.request, e.index): e.finish for e in events if e.finish is not None}


def run(engine: Loop, todo: Iterable[Request]) -> dict[tuple[str, int], tuple[int, ...]]:
    """All requests at once; checks that nothing is left behind."""
    for request in todo:
        engine.add(request)
    found = answers(drain(engine))
    idle(engine)
    return found


def alone(engine: Loop, todo: Iterable[Request]) -> dict[tuple[str, int], tuple[int, ...]]:
    """One request after the other."""
    found: Mapping[tuple[str, int], tuple[int, ...]] = {}
    for request in todo:
        found = {**found, **run(engine, [request])}
    return dict(found)


def idle(engine: Loop) -> None:
    """Nothing runs, every page is free, every row is free."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, engine.num_pages)
    assert engine.scheduler.tables.free == engine.config.max_num_seqs
    assert not engine.ledger.live
    assert not engine.sampler.tally._slot
    assert not any(engine.scheduler.pool.refs)
