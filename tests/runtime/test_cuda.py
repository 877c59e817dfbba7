"""On a GPU: the same tokens as on the CPU, with graphs and without, ahead and not."""

from __future__ import annotations

import pytest
import torch

from modelmill.core.types import Request
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.rotary import RopeSpec
from modelmill.runtime.graph import bucket, sizes_upto
from modelmill.runtime.load import fill
from tests.runtime import tiny

KINDS = [("fixed", None), ("prompt", None), ("running", None), ("fixed", 12)]


def test_sizes_and_buckets() -> None:
    assert sizes_upto(1) == [1]
    assert sizes_upto(3) == [1, 2, 4]
    assert sizes_upto(20) == [1, 2, 4, 8, 16, 24]
    assert sizes_upto(256)[-1] == 256
    assert sizes_upto(300)[-2:] == [288, 320]
    assert [bucket(n) for n in (1, 4096, 4097, 16384, 16385)] == [4096, 4096, 16384, 16384, 65536]


def work() -> list[Request]:
    hows = [
        tiny.params(max_tokens=20),
        tiny.params(max_tokens=3),
        tiny.params(temperature=0.8, seed=3, top_p=0.9, max_tokens=20),
        tiny.params(repetition_penalty=1.3, max_tokens=20, min_tokens=5),
        tiny.params(n=3, temperature=1.0, seed=1, max_tokens=12),
        tiny.params(num_beams=3, n=2),
        tiny.params(logprobs=2, prompt_logprobs=1),
        *[tiny.params(max_tokens=10 + i) for i in range(8)],
    ]
    given = tiny.prompts(len(hows), 1, 60)
    return [Request(id=str(i), prompt=p, params=h, eos_ids=(1,)) for i, (p, h) in enumerate(zip(given, hows))]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_the_same_tokens_as_the_cpu(kind: str, window: int | None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = tiny.run(tiny.loop(tiny.decoder(kind, window)), work())
    model = tiny.decoder(kind, window, device="cuda:0")
    for options in ({}, {"cuda_graphs": False}, {"overlap": False}, {"pages": 16}, {"max_num_batched_tokens": 9}):
        engine = tiny.loop(model, **options)
        assert tiny.run(engine, work()) == expected, options
        if "cuda_graphs" not in options:
            assert engine.runner.graphs is not None
            assert engine.runner.graphs._graphs
    greedy = [r for r in work() if r.params.greedy and r.params.num_beams == 1]
    assert tiny.alone(tiny.loop(model), greedy) == {k: v for k, v in expected.items() if k[0] in {r.id for r in greedy}}


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize("cached", [False, True])
def test_prompts_by_graph_give_the_tokens_of_the_cpu(kind: str, window: int | None, *, cached: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    todo = tiny.requests(tiny.prompts(12, 2, 60, seed=4))
    expected = tiny.alone(tiny.loop(tiny.decoder(kind, window)), todo)
    engine = tiny.loop(tiny.decoder(kind, window, device="cuda:0"), enable_prefix_caching=cached)
    for _ in range(3):
        assert tiny.alone(engine, todo) == expected
    assert tiny.run(engine, todo) == expected
    assert engine.runner.prompts is not None
    assert len(engine.runner.prompts) > 2


def by_graph_as_launched(
    model: Decoder, todo: list[Request], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens where filled steps of prompts are recorded and where they never are."""
    engine, launched = tiny.loop(model, **options), tiny.loop(model, **options)
    assert engine.runner.prompts is not None
    monkeypatch.setattr(launched.runner.prompts, "_met_again", lambda *_: None)
    expected = tiny.alone(launched, todo)
    for _ in range(3):
        assert tiny.alone(engine, todo) == expected
    assert len(engine.runner.prompts) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_prompts_over_8_bit_pages_answer_by_graph_as_launched(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.decoder(device="cuda:0")
    todo = tiny.requests(tiny.prompts(12, 2, 60, seed=4))
    options = {"kv_cache_dtype": kv, "kv_cache_bytes": 1 << 22, "enable_prefix_caching": False}
    by_graph_as_launched(model, todo, options, monkeypatch)


def wide() -> Decoder:
    """Wide enough for the kernels of prompts of 7B models: heads of 128, a gated product of 11,008, bfloat16."""
    config = DecoderConfig(
        hidden=512, inner=11008, layers=2, heads=4, kv_heads=4, head_dim=128, vocab=tiny.VOCAB, eps=1e-6, max_len=2048,
        rope=RopeSpec(128, 10000.0, 2048), qkv_bias=True,
    )  # fmt: skip
    model = Decoder(config)
    tensors = {name: values.bfloat16() for name, values in tiny.weights(model).items()}
    fill(model, tensors.__getitem__, tensors, {}, {}, "cuda:0")
    return model


@pytest.mark.gpu
def test_prompts_of_a_wide_model_answer_by_graph_as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts' attention, whose counters are a graph's own there, and the gated product of many rows."""
    model = wide()
    todo = tiny.requests(
        tiny.prompts(2, 100, 500, seed=5) + tiny.prompts(3, 1008, 1024, seed=6) + tiny.prompts(1, 512, 512)
    )
    options = {
        "max_num_batched_tokens": 1024,
        "kv_cache_bytes": 1 << 25,
        "enable_prefix_caching": False,
        "page_size": 16,
    }
    by_graph_as_launched(model, todo, options, monkeypatch)


@pytest.mark.gpu
def test_warm_up_records_prompts_of_all_sizes() -> None:
    engine = tiny.loop(tiny.decoder(device="cuda:0"), max_num_batched_tokens=64, enable_prefix_caching=False)
    engine.warm_up(1, forms=True)
    assert engine.runner.prompts is not None
    assert len(engine.runner.prompts) == len(engine.runner.prompts.sizes) == 3
    todo = tiny.requests(tiny.prompts(12, 2, 60, seed=4))
    assert tiny.alone(engine, todo) == tiny.alone(tiny.loop(), todo)
    assert len(engine.runner.prompts) == 3, "nothing is met for the first time"


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_8_bit_pages_answer_alike_with_graphs_and_without(kv: str) -> None:
    """Not always as on the CPU: a value at the border between two steps may be stored as either."""
    model = tiny.decoder(device="cuda:0")
    options = {"kv_cache_dtype": kv, "kv_cache_bytes": 1 << 22}
    expected = tiny.run(tiny.loop(model, cuda_graphs=False, **options), work())
    engine = tiny.loop(model, **options)
    assert tiny.run(engine, work()) == expected
    assert engine.runner.graphs is not None
    assert engine.runner.graphs._graphs


@pytest.mark.gpu
@pytest.mark.parametrize("forms", [False, True])
def test_warm_up_records_and_changes_nothing(forms: bool) -> None:
    model = tiny.decoder(device="cuda:0")
    expected = tiny.run(tiny.loop(model), work())
    engine = tiny.loop(model)
    engine.warm_up(4, forms=forms)
    assert len(engine.runner.graphs._graphs) == 6  # greedy and drawn, of three sizes
    assert tiny.run(engine, work()) == expected


@pytest.mark.gpu
def test_ops_that_wait_for_the_host_run_without_graphs() -> None:
    model = tiny.decoder(device="cuda:0")
    expected = tiny.run(tiny.loop(model), work())
    engine = tiny.loop(model, kernels={"paged_attention": "torch"})
    assert tiny.run(engine, work()) == expected
    assert engine.runner.graphs is None


@pytest.mark.gpu
def test_pages_follow_from_the_memory_that_is_free() -> None:
    from modelmill.core.config import RunConfig
    from modelmill.runtime.loop import Loop

    engine = Loop(tiny.decoder(device="cuda:0"), RunConfig(max_num_seqs=4, max_num_batched_tokens=64))
    assert engine.num_pages == 4 * 8
    tiny.run(engine, tiny.requests(tiny.prompts(3)))
