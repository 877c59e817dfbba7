"""A tiny seeded decoder and small drivers of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from modelmill.core.config import RunConfig
from modelmill.core.types import FinishReason, Request, SamplingParams, TokenOutput
from modelmill.loader.model_loader import fill_weights
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.gated_delta_net import GatedDeltaNetSpec
from modelmill.nn.linear import Linear
from modelmill.nn.rotary import RopeSpec
from modelmill.runtime.engine_core import EngineCore

VOCAB = 97
EOS = 1


def decoder(
    rope_length_source: str = "fixed",
    window: int | None = None,
    device: str = "cpu",
    vocab: int = VOCAB,
    max_len: int = 128,
) -> Decoder:
    """Two layers, 32 wide."""
    if rope_length_source == "prompt":
        rope = RopeSpec(8, 10000.0, 16, ntk_length=16)
    elif rope_length_source == "running":
        rope = RopeSpec(8, 10000.0, 16, scaling={"rope_type": "dynamic", "factor": 2.0})
    else:
        rope = RopeSpec(8, 10000.0, 16)
    config = DecoderConfig(
        hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=vocab, eps=1e-6,
        max_len=max_len, rope=rope, qkv_bias=True,
        windows=() if window is None else (window, window),
        logn=16 if rope_length_source == "prompt" else None,
    )  # fmt: skip
    model = Decoder(config)
    tensors = random_tensors(model)
    fill_weights(model, tensors.__getitem__, tensors, {}, {}, device)
    return model


def hybrid(layers: int = 3, recurrent: tuple[int, ...] = (0, 2), device: str = "cpu") -> Decoder:
    """Layers with Gated DeltaNet and one with gated attention, 32 wide."""
    config = DecoderConfig(
        hidden=32,
        inner=48,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab=VOCAB,
        eps=1e-6,
        max_len=512,
        rope=RopeSpec(8, 10000.0, 512),
        qk_norm=True,
        output_gate=True,
        recurrence=GatedDeltaNetSpec(32, 2, 4, 8, 8, 4, 1e-6),
        recurrent_layers=frozenset(recurrent),
    )
    model = Decoder(config)
    tensors = random_tensors(model)
    tensors |= {name: each - 2 for name, each in tensors.items() if name.endswith("A_log")}
    fill_weights(model, tensors.__getitem__, tensors, {}, {}, device)
    return model


def random_tensors(model: Decoder, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded values for every tensor of a model; large enough that tokens vary."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    shapes = {n: tuple(b.shape) for n, b in model.named_buffers() if b.is_meta}
    shapes |= {f"{n}.weight": m.shape for n, m in model.named_modules() if isinstance(m, Linear)}
    for name in sorted(shapes):
        shape = shapes[name]
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * values
        elif len(shape) == 2:
            tensors[name] = values * (1.5 if name == "embed.weight" else 1.5 * shape[1] ** -0.5)
        else:
            tensors[name] = 0.1 * values
    return tensors


def make_engine(
    model: Decoder | None = None, pages: int | None = None, **options: Any
) -> EngineCore:
    """An engine core with 8-token pages; ``pages`` bounds the pool."""
    overlap = options.pop("overlap", None)
    model = model or decoder()
    options = {"page_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64, **options}
    if pages is not None:
        per = model.kv.page_bytes(options["page_size"], torch.float32)
        options["kv_cache_bytes"] = (pages + 1) * per
        options.setdefault("max_model_len", min(pages * options["page_size"], 128))
    else:
        options.setdefault("kv_cache_bytes", 1 << 24)
    return EngineCore(model, RunConfig(**options), overlap=overlap)


def prompts(
    count: int, low: int = 1, high: int = 40, seed: int = 0, vocab: int = VOCAB
) -> list[tuple[int, ...]]:
    """Random prompts of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [tuple(torch.randint(2, vocab, (n,), generator=generator).tolist()) for n in lengths]


def params(**options: Any) -> SamplingParams:
    """Greedy by default."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **options}).with_defaults({})


def requests(
    prompt_ids: Iterable[tuple[int, ...]],
    sampling: SamplingParams | None = None,
    eos: tuple[int, ...] = (EOS,),
) -> list[Request]:
    """One request per prompt."""
    return [
        Request(id=str(i), prompt=p, params=sampling or params(), eos_ids=eos)
        for i, p in enumerate(prompt_ids)
    ]


def drain(engine: EngineCore, max_steps: int = 5000) -> list[TokenOutput]:
    """Step until nothing is left."""
    events: list[TokenOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events += engine.step()
    raise AssertionError("the engine still has work")


def output_ids(events: Iterable[TokenOutput]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Answer ids by (request, index)."""
    ids_by_sequence: dict[tuple[str, int], list[int]] = {}
    for event in events:
        ids = ids_by_sequence.setdefault((event.request_id, event.index), [])
        if event.token_id is not None:
            ids.append(event.token_id)
        if event.replayed_ids is not None:
            ids.extend(event.replayed_ids)
    return {k: tuple(v) for k, v in ids_by_sequence.items()}


def finish_reasons(events: Iterable[TokenOutput]) -> dict[tuple[str, int], FinishReason]:
    """How each sequence ended."""
    return {(e.request_id, e.index): e.finish_reason for e in events if e.finish_reason is not None}


def run(
    engine: EngineCore, requests_to_run: Iterable[Request]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """All requests at once; checks that nothing is left behind."""
    for request in requests_to_run:
        engine.add(request)
    outputs = output_ids(drain(engine))
    assert_idle(engine)
    return outputs


Events = dict[tuple[str, int], list[int]]
"""Tokens by request and answer."""


def run_watched(
    engine: EngineCore, requests_to_run: Iterable[Request], look: Callable[[], object]
) -> Events:
    """All requests at once; ``look`` is called behind each step."""
    outputs: Events = {}
    for request in requests_to_run:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            ids = outputs.setdefault((event.request_id, event.index), [])
            ids += () if event.token_id is None else (event.token_id,)
            ids += event.replayed_ids or ()
        look()
    return outputs


def run_one_by_one(
    engine: EngineCore, requests_to_run: Iterable[Request]
) -> dict[tuple[str, int], tuple[int, ...]]:
    """One request after the other."""
    outputs: Mapping[tuple[str, int], tuple[int, ...]] = {}
    for request in requests_to_run:
        outputs = {**outputs, **run(engine, [request])}
    return dict(outputs)


def assert_idle(engine: EngineCore) -> None:
    """Nothing runs, every page is free, every row is free."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, engine.num_pages)
    assert engine.scheduler.tables.num_free_rows == engine.config.max_num_seqs
    assert not engine.output_processor.live_sequences
    assert not engine.sampler.token_counts._slot
    assert not any(engine.scheduler.pool.refs)
