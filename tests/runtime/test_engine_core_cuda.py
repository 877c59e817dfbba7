"""On a GPU: the same tokens as on the CPU, with graphs and without, ahead and not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from modelmill.core.types import Request
from modelmill.loader.model_loader import fill_weights
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.rotary import RopeSpec
from modelmill.runtime.cuda_graphs import PaddedStepAction, PrefillGraphs
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny

MODEL_KINDS = [("fixed", None), ("prompt", None), ("running", None), ("fixed", 12)]


def work() -> list[Request]:
    params_list = [
        tiny.params(max_tokens=20),
        tiny.params(max_tokens=3),
        tiny.params(temperature=0.8, seed=3, top_p=0.9, max_tokens=20),
        tiny.params(repetition_penalty=1.3, max_tokens=20, min_tokens=5),
        tiny.params(n=3, temperature=1.0, seed=1, max_tokens=12),
        tiny.params(num_beams=3, n=2),
        tiny.params(logprobs=2, prompt_logprobs=1),
        *[tiny.params(max_tokens=10 + i) for i in range(8)],
    ]
    prompts = tiny.prompts(len(params_list), 1, 60)
    return [
        Request(id=str(i), prompt=p, params=h, eos_ids=(1,))
        for i, (p, h) in enumerate(zip(prompts, params_list))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
def test_the_same_tokens_as_the_cpu(rope_length_source: str, window: int | None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = tiny.run(tiny.make_engine(tiny.decoder(rope_length_source, window)), work())
    model = tiny.decoder(rope_length_source, window, device="cuda:0")
    for options in (
        {},
        {"cuda_graphs": False},
        {"overlap": False},
        {"pages": 16},
        {"max_num_batched_tokens": 9},
    ):
        engine = tiny.make_engine(model, **options)
        assert tiny.run(engine, work()) == expected, options
        if "cuda_graphs" not in options:
            assert engine.model_runner.decode_graphs is not None
            assert engine.model_runner.decode_graphs._graphs
    greedy = [r for r in work() if r.params.greedy and r.params.num_beams == 1]
    assert tiny.run_one_by_one(tiny.make_engine(model), greedy) == {
        k: v for k, v in expected.items() if k[0] in {r.id for r in greedy}
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
@pytest.mark.parametrize("cached", [False, True])
def test_prompts_by_graph_give_the_tokens_of_the_cpu(
    rope_length_source: str, window: int | None, *, cached: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    todo = tiny.requests(tiny.prompts(12, 2, 60, seed=4))
    expected = tiny.run_one_by_one(tiny.make_engine(tiny.decoder(rope_length_source, window)), todo)
    engine = tiny.make_engine(
        tiny.decoder(rope_length_source, window, device="cuda:0"), enable_prefix_caching=cached
    )
    for _ in range(3):
        assert tiny.run_one_by_one(engine, todo) == expected
    assert tiny.run(engine, todo) == expected
    assert engine.model_runner.prefill_graphs is not None
    assert len(engine.model_runner.prefill_graphs) > 2


def compare_with_launched(
    model: Decoder,
    todo: list[Request],
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[EngineCore, list[Request]], object],
) -> PrefillGraphs:
    """The same tokens three times from graphs as from an engine that never records one."""
    engine, launched = tiny.make_engine(model, **options), tiny.make_engine(model, **options)
    assert launched.model_runner.prefill_graphs is not None
    monkeypatch.setattr(
        launched.model_runner.prefill_graphs,
        "choose_step_action",
        lambda _: PaddedStepAction.LAUNCH,
    )
    expected = run(launched, todo)
    for _ in range(3):
        assert run(engine, todo) == expected
    assert engine.model_runner.prefill_graphs is not None
    return engine.model_runner.prefill_graphs


def by_graph_as_launched(
    model: Decoder, todo: list[Request], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens where filled steps of prompts are recorded and where they never are."""
    graphs = compare_with_launched(model, todo, options, monkeypatch, tiny.run_one_by_one)
    assert len(graphs) >= 3


def mixed_by_graph_as_launched(
    model: Decoder, todo: list[Request], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens where padded mixed steps are captured and where they never are."""
    graphs = compare_with_launched(model, todo, options, monkeypatch, tiny.run)
    assert any(size.is_mixed for size in graphs._captured)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(("rope_length_source", "window"), MODEL_KINDS)
def test_mixed_steps_answer_by_graph_as_launched(
    rope_length_source: str, window: int | None, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.decoder(rope_length_source, window, device="cuda:0")
    todo = tiny.requests(tiny.prompts(24, 2, 60, seed=4), tiny.params(max_tokens=9))
    options = {
        "kv_cache_dtype": kv,
        "kv_cache_bytes": 1 << 22,
        "enable_prefix_caching": False,
        "max_mixed_tokens": 64,
    }
    mixed_by_graph_as_launched(model, todo, options, monkeypatch)


@pytest.mark.gpu
def test_mixed_steps_of_a_wide_model_answer_by_graph_as_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles of 128 queries, whose bound on a sequence's queries is the whole step's tokens."""
    todo = tiny.requests(tiny.prompts(20, 100, 500, seed=5), tiny.params(max_tokens=20))
    options = {
        "max_num_batched_tokens": 1024,
        "max_mixed_tokens": 512,
        "kv_cache_bytes": 1 << 26,
        "enable_prefix_caching": False,
        "page_size": 16,
    }
    mixed_by_graph_as_launched(wide(), todo, options, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_prompts_over_8_bit_pages_answer_by_graph_as_launched(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.decoder(device="cuda:0")
    todo = tiny.requests(tiny.prompts(12, 2, 60, seed=4))
    options = {"kv_cache_dtype": kv, "kv_cache_bytes": 1 << 22, "enable_prefix_caching": False}
    by_graph_as_launched(model, todo, options, monkeypatch)


def wide() -> Decoder:
    """Wide enough for the kernels of prompts of 7B models: heads of 128, a gated product of 11,008,
    bfloat16.
    """
    config = DecoderConfig(
        hidden=512, inner=11008, layers=2, heads=4, kv_heads=4, head_dim=128, vocab=tiny.VOCAB,
        eps=1e-6, max_len=2048,
        rope=RopeSpec(128, 10000.0, 2048), qkv_bias=True,
    )  # fmt: skip
    model = Decoder(config)
    tensors = {name: values.bfloat16() for name, values in tiny.random_tensors(model).items()}
    fill_weights(model, tensors.__getitem__, tensors, {}, {}, "cuda:0")
    return model


@pytest.mark.gpu
def test_prompts_of_a_wide_model_answer_by_graph_as_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts' attention, whose counters are a graph's own there, and the gated product of many
    rows.
    """
    model = wide()
    todo = tiny.requests(
        tiny.prompts(2, 100, 500, seed=5)
        + tiny.prompts(3, 1008, 1024, seed=6)
        + tiny.prompts(1, 512, 512)
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
    engine = tiny.make_engine(
        tiny.decoder(device="cuda:0"), max_num_batched_tokens=64, enable_prefix_caching=False
    )
    engine.warm_up(1, all_specializations=True)
    graphs = engine.model_runner.prefill_graphs
    assert graphs is not None
    captured = graphs.limits.capture_sizes()
    assert len(graphs) == len(captured)
    assert sum(not size.is_mixed for size in captured) == 3
    assert any(size.is_mixed for size in captured)
    todo = tiny.requests(tiny.prompts(12, 2, 60, seed=4))
    expected = tiny.run_one_by_one(tiny.make_engine(), todo)
    assert tiny.run_one_by_one(engine, todo) == expected
    assert tiny.run(engine, todo) == expected
    assert len(graphs) == len(captured), "nothing is met for the first time"


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_8_bit_pages_answer_alike_with_graphs_and_without(kv: str) -> None:
    """Not always as on the CPU: a value at the border between two steps may be stored as either."""
    model = tiny.decoder(device="cuda:0")
    options = {"kv_cache_dtype": kv, "kv_cache_bytes": 1 << 22}
    expected = tiny.run(tiny.make_engine(model, cuda_graphs=False, **options), work())
    engine = tiny.make_engine(model, **options)
    assert tiny.run(engine, work()) == expected
    assert engine.model_runner.decode_graphs is not None
    assert engine.model_runner.decode_graphs._graphs


@pytest.mark.gpu
@pytest.mark.parametrize("all_specializations", [False, True])
def test_warm_up_records_and_changes_nothing(all_specializations: bool) -> None:
    model = tiny.decoder(device="cuda:0")
    expected = tiny.run(tiny.make_engine(model), work())
    engine = tiny.make_engine(model)
    engine.warm_up(4, all_specializations=all_specializations)
    assert len(engine.model_runner.decode_graphs._graphs) == 6  # greedy and drawn, of three sizes
    assert tiny.run(engine, work()) == expected


@pytest.mark.gpu
def test_ops_that_wait_for_the_host_run_without_graphs() -> None:
    model = tiny.decoder(device="cuda:0")
    expected = tiny.run(tiny.make_engine(model), work())
    engine = tiny.make_engine(model, kernels={"paged_attention": "torch"})
    assert tiny.run(engine, work()) == expected
    assert engine.model_runner.decode_graphs is None


@pytest.mark.gpu
def test_pages_follow_from_the_memory_that_is_free() -> None:
    from modelmill.core.config import RunConfig
    from modelmill.runtime.engine_core import EngineCore

    engine = EngineCore(
        tiny.decoder(device="cuda:0"), RunConfig(max_num_seqs=4, max_num_batched_tokens=64)
    )
    assert engine.num_pages == 4 * 8
    tiny.run(engine, tiny.requests(tiny.prompts(3)))
