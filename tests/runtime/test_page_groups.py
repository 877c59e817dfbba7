"""Models with windows in some layers only: pages behind them are freed, and not one bit differs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.errors import UsageError
from modelmill.core.types import Request
from modelmill.loader.model_loader import fill_weights
from modelmill.nn.decoder import Decoder
from modelmill.nn.whole_model_decode import model_kv_shape
from modelmill.runtime import cuda_graphs
from modelmill.runtime.batch import reserve_step_buffers
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.kv_pages import NO_PAGE, page_group_key
from modelmill.runtime.session_file import read_session, write_session
from modelmill.runtime.session_pages import (
    export_session,
    import_session,
    session_compatibility_layout,
)
from tests.models.all_families import CASES
from tests.models.families.gemma4_text import NO_EXPERTS
from tests.runtime import tiny
from tests.runtime.test_cuda_graphs import FakeCapturer, filling

PAGE, WINDOW, MAX_LEN = 8, 20, 512
Events = tiny.Events
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"]
GEMMA4 = {"num_hidden_layers": 7, "layer_types": LAYERS, "enable_moe_block": False, **NO_EXPERTS}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window_pattern": 3},
    "gpt_oss": {"num_hidden_layers": 4},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "olmo3": {"num_hidden_layers": 4},
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "gemma4_text": {**GEMMA4, "num_kv_shared_layers": 2},
    # a page of one layer with full attention has room for two with a window, and the other way
    "gemma4_text:wide": {**GEMMA4, "num_kv_shared_layers": 2, "global_head_dim": 64},
    "gemma4_text:narrow": {**GEMMA4, "num_kv_shared_layers": 0, "num_key_value_heads": 4},
}

SIZES_DIFFER = [name for name in FAMILIES if name.startswith("gemma4")]
TABLE_STEPS = {"gemma4_text:wide": (1, 2), "gemma4_text:narrow": (2, 1)}


def model(family: str = "gemma2", *, groups: bool = True) -> Decoder:
    """A seeded model of a family; all layers share a page table unless it has ``groups``."""
    name = family.partition(":")[0]
    raw = CASES[name].raw(**FAMILIES[family]) | {
        "sliding_window": WINDOW, "max_position_embeddings": MAX_LEN, "vocab_size": tiny.VOCAB,
    }  # fmt: skip
    if "layer_types" not in FAMILIES[family]:
        raw.pop("layer_types", None)
    module = import_module(f"modelmill.models.{name}")
    made: Decoder = module.Model(module.config_from_hf(raw))
    tensors = tiny.random_tensors(made)
    fill_weights(made, tensors.__getitem__, tensors, {}, {}, "cpu")
    if not groups:
        made.kv = replace(made.kv, layer_windows=())
    return made


def engine(family: str = "gemma2", *, groups: bool = True, **options: Any) -> EngineCore:
    options = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 24, **options}
    pages = options.pop("pages", None)
    made = model(family, groups=groups)
    if pages is not None:
        shape = made.kv.with_page_groups(options["max_model_len"])
        options["kv_cache_bytes"] = (pages + 1) * shape.page_bytes(PAGE, torch.float32)
    core = tiny.make_engine(made, **options)
    assert (len(core.kv_shape.groups) > 1) == groups
    if groups:
        assert core.kv_shape.page_id_strides[:2] == TABLE_STEPS.get(family, (1, 1))
    return core


def run_counting_pages(core: EngineCore, requests: Sequence[Request]) -> tuple[Events, int]:
    """The outputs, and the most bytes of pages that were in use at once."""
    pool, counts = core.scheduler.pool, [0]

    def look() -> None:
        counts.append(pool.count - pool.num_available)
        assert sum(core.stats().pages_by_window.values()) == counts[-1]
        check_owners(core)

    return tiny.run_watched(core, requests, look), max(counts) * core.page_bytes


def assert_same_with_fewer_pages(
    grouped: EngineCore, plain: EngineCore, requests: Sequence[Request], share: float, cached: int
) -> None:
    """Same outputs, cold and from a warm prefix cache, in less than that share of the pages."""
    for _ in range(2):
        outputs, most = run_counting_pages(grouped, requests)
        expected, plain_most = run_counting_pages(plain, requests)
        assert outputs == expected
        assert most < share * plain_most
    assert grouped.stats().cached_tokens == plain.stats().cached_tokens > cached


def check_owners(core: EngineCore) -> None:
    """Each page has as many references as sequences that use it, all of one group."""
    references = [0] * core.scheduler.pool.count
    groups: dict[int, int] = {}
    for seq in core.scheduler.running:
        for group, pages in enumerate(seq.group_pages):
            for page in pages:
                if page == NO_PAGE:
                    continue
                references[page] += 1
                assert groups.setdefault(page, group) == group
    assert references == core.scheduler.pool.refs


def long_requests(count: int = 3, **options: Any) -> list[Request]:
    """Prompts and answers of many windows."""
    prompts = tiny.prompts(count, low=75, high=95, seed=4)
    return tiny.requests(prompts, tiny.params(max_tokens=40, ignore_eos=True, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_with_fewer_pages(family: str) -> None:
    """Prompts in chunks, decodes beside them, and all of it again from a warm prefix cache."""
    grouped, plain = engine(family), engine(family, groups=False)
    assert_same_with_fewer_pages(grouped, plain, long_requests(), share=0.8, cached=190)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decode_from", [None, 40])
def test_logits_are_the_same_bit_for_bit(family: str, decode_from: int | None) -> None:
    """Whole prompts and decodes."""
    ids = [list(prompt) for prompt in tiny.prompts(3, low=90, high=140, seed=2)]
    grouped, plain = engine(family), engine(family, groups=False)
    logits = TeacherForcedScorer(grouped).compute_logits(ids, decode_from=decode_from)
    expected = TeacherForcedScorer(plain).compute_logits(ids, decode_from=decode_from)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    tiny.assert_idle(grouped)


@pytest.mark.parametrize("family", SIZES_DIFFER)
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_8_bit_pages_of_layers_that_differ(family: str, kv_dtype: str) -> None:
    """Scales stand beside the pages of each size; copies on write and cached prefixes take them."""
    grouped, plain = (
        engine(family, groups=groups, kv_cache_dtype=kv_dtype) for groups in (True, False)
    )
    assert grouped.model_runner.kv.k_scale
    requests = long_requests(2, n=2, temperature=1.0, seed=5)
    assert_same_with_fewer_pages(grouped, plain, requests, share=0.9, cached=120)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_longest_sequence_runs_in_the_pages_that_capacity_asks_for(
    overlap: bool, prefix_caching: bool
) -> None:
    options: dict[str, Any] = {"overlap": overlap, "enable_prefix_caching": prefix_caching}
    probe = engine()
    pages = probe.scheduler.limits.max_pages_in_use(MAX_LEN)
    small = engine(pages=pages, **options)
    assert small.num_pages == pages < len(probe.kv_shape.groups) * MAX_LEN // PAGE
    prompt = tiny.prompts(1, low=300, high=300, seed=1)
    requests = tiny.requests(prompt, tiny.params(max_tokens=MAX_LEN - 300, ignore_eos=True))
    outputs, _ = run_counting_pages(small, requests)
    assert outputs == run_counting_pages(engine(groups=False), requests)[0]
    assert small.stats().preemptions == 0
    tiny.assert_idle(small)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", *SIZES_DIFFER])
@pytest.mark.parametrize("options", [{"n": 3, "temperature": 1.0, "seed": 5}, {"num_beams": 3}])
def test_forks_and_beams(options: dict[str, Any], family: str) -> None:
    prompts = tiny.prompts(2, low=60, high=90, seed=7)
    requests = tiny.requests(prompts, tiny.params(max_tokens=50, ignore_eos=True, **options))
    outputs, most = run_counting_pages(engine(family), requests)
    expected, plain_most = run_counting_pages(engine(family, groups=False), requests)
    assert outputs == expected
    assert most < plain_most


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", *SIZES_DIFFER])
@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_sequences_answer_the_same(overlap: bool, family: str) -> None:
    prompts = tiny.prompts(6, low=5, high=8, seed=5)
    requests = tiny.requests(prompts, tiny.params(max_tokens=90, ignore_eos=True))
    pages = engine(family, max_model_len=100).scheduler.limits.max_pages_in_use(100)
    small = engine(family, pages=pages, overlap=overlap, max_model_len=100)
    small.scheduler.limits = replace(small.scheduler.limits, reserve_until_finish=False)
    outputs, _ = run_counting_pages(small, requests)
    assert outputs == run_counting_pages(engine(family, groups=False), requests)[0]
    assert small.stats().preemptions > 0


def test_prefill_graphs_read_every_groups_table_at_its_address() -> None:
    requests = tiny.requests(tiny.prompts(12, 1, 60, seed=4))
    capturer = FakeCapturer()
    answers = tiny.run_one_by_one(filling(capturer, model("gpt_oss")), requests)
    assert answers == tiny.run_one_by_one(
        tiny.make_engine(model("gpt_oss", groups=False)), requests
    )
    assert capturer.replayed > 2


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", *SIZES_DIFFER])
def test_decode_graphs_read_every_groups_table_at_its_address(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step is padded to a batch size, and replayed on what stands at its addresses."""
    capturer = FakeCapturer()
    monkeypatch.setattr(cuda_graphs, "run_without_host_sync", lambda call: call())
    monkeypatch.setattr(cuda_graphs, "run_on_side_stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(cuda_graphs, "GraphCapturer", lambda: SimpleNamespace(capture=capturer))
    core = engine(family)
    runner, longest = core.model_runner, -(-MAX_LEN // PAGE)
    reserve_step_buffers(runner.packer, core.config, longest)
    runner.keep_last_ids = True
    runner.decode_graphs = cuda_graphs.DecodeGraphs(
        runner.forward, runner.sampler.select_ids, runner.last_ids, runner.packer, 8, MAX_LEN
    )
    requests = long_requests(5)
    outputs, _ = run_counting_pages(core, requests)
    assert outputs == run_counting_pages(engine(family, groups=False), requests)[0]
    assert capturer.replayed > 20


def cached_tokens(core: EngineCore, request: Request) -> tuple[int, list[int]]:
    """Tokens of the prompt that were cached, and the answer."""
    core.add(request)
    events = tiny.drain(core)
    return events[-1].cached_tokens, [e.token_id for e in events if e.token_id is not None]


def evict(core: EngineCore, keys: Sequence[bytes], group: int) -> None:
    """Take pages of a group out of the prefix cache."""
    pool = core.scheduler.pool
    for key in keys:
        page = pool.cached_page_for_key(page_group_key(key, group))
        assert page is not None
        pool._drop_cache_key(page)


def test_a_cached_prefix_needs_all_pages_of_full_attention_and_those_of_the_window() -> None:
    core = engine()
    assert core.scheduler.limits.windows == (None, WINDOW)
    prompt = tiny.prompts(1, low=121, high=121, seed=3)[0]
    request = tiny.requests([prompt], tiny.params(max_tokens=20))[0]
    assert cached_tokens(core, request)[0] == 0
    expected = cached_tokens(engine(groups=False), request)[1]
    keys = core.input_processor.prompt_page_keys(prompt, "", PAGE)
    assert len(keys) == 15
    evict(core, keys[:12], 1)  # three pages are left: 24 tokens
    assert cached_tokens(core, request) == (120, expected)
    evict(core, keys[13:14], 1)  # page 12 alone is no window
    evict(core, keys[14:15], 1)
    assert cached_tokens(core, request) == (0, expected)
    assert cached_tokens(core, request) == (120, expected), "the pages are computed again"
    evict(core, keys[10:11], 0)  # the window is complete behind page 10, the full group is not
    assert cached_tokens(core, request) == (80, expected)


def test_layers_with_one_op_for_all_of_them_share_a_page_table() -> None:
    """The decoder's op has one page table; so has a model whose sequences fit into the window."""
    config = replace(tiny.decoder(max_len=512).config, windows=(20, None))
    mixed = Decoder(config)
    assert mixed.kv.layer_windows == (20, None)
    tensors = tiny.random_tensors(mixed)
    fill_weights(mixed, tensors.__getitem__, tensors, {}, {}, "cpu")
    core = tiny.make_engine(mixed, max_model_len=512)
    assert (core.ops.decode is None) == bool(core.kv_shape.groups)
    op = core.ops.decode or object()
    assert not model_kv_shape(mixed, 512, op, torch.float32).groups
    assert model_kv_shape(mixed, 512, op, torch.int8).groups, "the op reads no 8-bit pages"
    assert model_kv_shape(mixed, 512, op, torch.float32, ranks=2).groups, "it runs on one rank"
    assert model_kv_shape(mixed, 512, op, torch.float32, formats=["dense", "rptq"]).groups
    assert not model_kv_shape(mixed, 512, op, torch.float32, formats=["dense", "int4"]).groups
    short = tiny.make_engine(model(), max_model_len=WINDOW)
    assert not short.kv_shape.groups


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_layers_that_the_op_cannot_compute_answer_the_same_in_groups(kv_cache_dtype: str) -> None:
    """Its op would compute these layers, but reads no 8-bit pages."""
    config = replace(tiny.decoder(max_len=512).config, windows=(20, None))
    cores = []
    for groups in (True, False):
        made = Decoder(config)
        tensors = tiny.random_tensors(made)
        fill_weights(made, tensors.__getitem__, tensors, {}, {}, "cpu")
        if not groups:
            made.kv = replace(made.kv, layer_windows=())
        options: dict[str, Any] = {"max_num_batched_tokens": 24, "max_model_len": 512}
        cores.append(tiny.make_engine(made, kv_cache_dtype=kv_cache_dtype, **options))
    grouped, plain = cores
    assert [len(core.kv_shape.groups) for core in cores] == [2, 0]
    for _ in range(2):
        outputs, most = run_counting_pages(grouped, long_requests())
        expected, plain_most = run_counting_pages(plain, long_requests())
        assert outputs == expected
        assert most < 0.8 * plain_most


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", *SIZES_DIFFER])
def test_a_saved_session_has_the_pages_of_the_window_only(tmp_path: Path, family: str) -> None:
    prompt = tiny.prompts(1, low=121, high=121, seed=3)[0]
    request = tiny.requests([prompt], tiny.params(max_tokens=20))[0]
    core, fresh = engine(family), engine(family)
    first = cached_tokens(core, request)[1]
    session = export_session(core, prompt, "", 1 << 30)
    windows = core.scheduler.limits.windows
    assert len(session.data[0]) == sum(15 if window is None else 3 for window in windows)
    layout = session_compatibility_layout(core)
    write_session(tmp_path / "s", layout, session)
    loaded = read_session(tmp_path / "s", session_compatibility_layout(fresh))
    assert import_session(fresh, loaded, "") == 120
    assert cached_tokens(fresh, request) == (120, first)
    tiny.assert_idle(fresh)
    with pytest.raises(UsageError, match="saved with another version or --max-model-len"):
        read_session(tmp_path / "s", {**layout, "windows": [None, WINDOW + 1]})
    evict(fresh, core.input_processor.prompt_page_keys(prompt, "", PAGE)[14:], len(windows) - 1)
    with pytest.raises(UsageError, match="no full page of 8 tokens in the prefix cache"):
        export_session(fresh, prompt, "", 1 << 30)
