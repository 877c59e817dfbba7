"""Latent attention: absorbed and expanded are one function, and padding is not stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.kv import KVCache, ModelKVCacheSpec
from modelmill.nn.latent_attention import (
    LatentAttentionCore,
    LatentAttentionSpec,
    LatentExpansionPolicy,
    RopeAndLatentCache,
)
from modelmill.nn.step import Step
from modelmill.ops import registry
from modelmill.ops.paged_attention import PagedAttentionInputs

SPEC = LatentAttentionSpec(64, 4, None, 24, 12, 8, 10, False, 0.3, True)
LENGTHS = [(1, 20), (9, 9), (1, 1), (17, 17), (1, 33)]  # new tokens, keys
PAGE = 8


def make_step(lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Step:
    """Sequences over pages of seeded latent vectors, in an order of their own."""
    columns = max(-(-keys // PAGE) for _, keys in lengths)
    draw = torch.Generator().manual_seed(1)
    pages = len(lengths) * columns
    tables = torch.randperm(pages, generator=draw).view(len(lengths), columns).int()
    places = [(b, at) for b, (new, keys) in enumerate(lengths) for at in range(keys - new, keys)]
    slots = torch.tensor([int(tables[b, at // PAGE]) * PAGE + at % PAGE for b, at in places])
    new, keys = (torch.tensor(each, dtype=torch.int32) for each in zip(*lengths, strict=True))
    kv = KVCache.allocate(ModelKVCacheSpec(1, 1, SPEC.cached_dim, True), pages, PAGE, dtype, "cpu")
    rows = torch.randn(kv.k[0].shape, generator=draw)
    if kv.k_scale:
        kv.k[0].copy_((rows * 30).round().clamp(-100, 100))
        kv.k_scale[0].copy_(torch.rand(kv.k_scale[0].shape, generator=draw) / 30)
    else:
        kv.k[0].copy_(rows)
    return Step(
        ids=slots,
        positions=torch.tensor([at for _, at in places]),
        slots=slots,
        rope_frequency_ids=torch.zeros_like(slots),
        block_tables=tables,
        query_start=torch.cat((new.new_zeros(1), new.cumsum(0).int())),
        context_lens=keys,
        logit_rows=None,
        max_query=int(new.max()),
        max_context=int(keys.max()),
        kv=kv,
        ops=registry.select_backends("cpu"),
    )


def make_core(spec: LatentAttentionSpec = SPEC) -> LatentAttentionCore:
    core = LatentAttentionCore(spec, 0)
    draw = torch.Generator().manual_seed(2)
    core.kv_b = torch.randn(core.kv_b.shape, generator=draw) / 5
    return core


def queries(step: Step, spec: LatentAttentionSpec = SPEC) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(len(step.slots), spec.heads, spec.query_dim, generator=draw)


def heads_attended(step: Step) -> tuple[Step, list[int]]:
    """The step with its calls of attention recorded: the KV heads of each."""
    run, kv_heads = step.ops.paged_attention, []

    def recorded(inputs: PagedAttentionInputs) -> torch.Tensor:
        kv_heads.append(inputs.k_cache.shape[1])
        return run(inputs)

    return replace(step, ops=step.ops.replace({"paged_attention": recorded})), kv_heads


def check_expanded(step: Step, kv_heads: list[int], num_decodes: int, prompt_keys: int = 0) -> None:
    """A step that states these counts calls attention with these KV heads, and computes the same
    as one in which everything is absorbed.
    """
    core, q = make_core(), queries(step)
    counted = replace(step, num_decodes=num_decodes, num_prompt_keys=prompt_keys)
    recorded, heads = heads_attended(counted)
    torch.testing.assert_close(core(q, recorded), core(q, step), rtol=1e-5, atol=1e-5)
    assert heads == kv_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [(LENGTHS, [4, 1]), ([(9, 9)], [4]), ([(9, 9), (2, 2)], [4]), ([(1, 5), (1, 1)], [1])],
)
def test_prompts_are_expanded_to_the_same_result(
    lengths: list[tuple[int, int]], kv_heads: list[int], dtype: torch.dtype
) -> None:
    """Single queries beside them are absorbed."""
    check_expanded(make_step(lengths, dtype), kv_heads, sum(new == 1 for new, _ in lengths))


def test_values_may_have_more_channels_than_queries() -> None:
    spec = replace(SPEC, value_dim=28)
    core, step = make_core(spec), make_step(LENGTHS)
    q = queries(step, spec)
    expected = core(q, step)
    torch.testing.assert_close(
        core(q, replace(step, num_decodes=3)), expected, rtol=1e-5, atol=1e-5
    )


def test_the_rank_of_some_heads_expands_these_alone() -> None:
    core, step = make_core(), replace(make_step(LENGTHS), num_decodes=3)
    q = queries(step)
    whole = core(q, step).unflatten(1, (4, SPEC.value_dim))
    core.keep_local_heads((1, 3))
    part = core(q[:, 1:3], step).unflatten(1, (2, SPEC.value_dim))
    torch.testing.assert_close(part, whole[:, 1:3])


def test_other_up_projections_of_16_bits_are_packed_anew() -> None:
    core, step = make_core(), make_step(LENGTHS, torch.bfloat16)
    q = queries(step).bfloat16()
    core.kv_b = core.kv_b.bfloat16()
    before = core(q, step)
    core.kv_b = 2 * core.kv_b
    changed, other = core(q, step), make_core()
    other.kv_b = core.kv_b
    assert torch.equal(changed, other(q, step))
    assert not torch.allclose(changed, before)


def test_prompts_with_a_history_are_absorbed_where_the_step_does_not_say_so() -> None:
    step, heads = heads_attended(make_step([(9, 20), (4, 4)]))
    make_core()(queries(step), step)
    assert heads == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [([(9, 20)], [4]), ([(2, 25), (8, 8), (16, 40)], [4]),
     ([(1, 7), (9, 20), (1, 33), (1, 1), (5, 5)], [4, 1])],
)  # fmt: skip
def test_a_history_is_expanded_to_the_same_result(
    lengths: list[tuple[int, int]], kv_heads: list[int], dtype: torch.dtype
) -> None:
    """Keys lie in pages of any order; single queries beside the prompts are absorbed."""
    prompts = [keys for new, keys in lengths if new > 1]
    decodes = len(lengths) - len(prompts)
    check_expanded(make_step(lengths, dtype), kv_heads, decodes, sum(prompts))


V3 = LatentAttentionSpec(7168, 128, 1536, 512, 128, 64, 128, False, 0.1, True)


@pytest.mark.parametrize(
    ("prompts", "cheaper"),
    [
        ([(64, 64)], True),
        ([(512, 4096)], True),
        ([(100, 4096)], False),
        ([(20, 30)], False),
        ([(2000, 2010), (20, 30)], True),
    ],
    ids=str,
)
def test_the_history_is_expanded_where_that_takes_fewer_products(
    prompts: list[tuple[int, int]], cheaper: bool
) -> None:
    """Counted by hand for DeepSeek-V3: a key takes 512·256 multiplications, a pair 768 fewer."""
    saved = sum(new * keys - new * (new - 1) / 2 for new, keys in prompts) * (576 + 512 - 320)
    history = sum(keys - new for new, keys in prompts)
    assert (saved > history * 512 * 256) is cheaper
    assert V3.is_expansion_cheaper(prompts) is cheaper


def test_a_step_expands_no_more_keys_than_it_may_have_tokens() -> None:
    limit = 4096

    def max_keys() -> int:
        return limit

    expansion = LatentExpansionPolicy.for_model(torch.nn.ModuleList([V3.build_module(0)]), max_keys)
    assert expansion == LatentExpansionPolicy(V3, max_keys)
    assert expansion([(512, 4096)])
    limit = 4095
    assert not expansion([(512, 4096)])
    assert LatentExpansionPolicy.for_model(make_core(), max_keys) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("padding", [[], [0], [2, 3, 11], list(range(12))], ids=str)
def test_padding_is_not_stored(padding: list[int], dtype: torch.dtype) -> None:
    step = make_step([(12, 12)], dtype)
    rows = torch.randn(12, SPEC.cached_dim, generator=torch.Generator().manual_seed(4))
    angles = torch.zeros(12, SPEC.rope_dim // 2)
    rope = RopeCosSin(angles.cos(), angles.sin())
    slots = step.slots.clone()
    slots[padding] = -1
    before = [tensor.clone() for tensor in step.kv.tensors]
    cache = RopeAndLatentCache(SPEC, 0)
    q = torch.zeros(12, SPEC.heads * SPEC.query_dim)
    cache(q, rows, rope, replace(step, slots=slots))
    after = [tensor.clone() for tensor in step.kv.tensors]
    cache(q, rows, rope, step)
    stored = torch.zeros(after[0].shape[0] * PAGE, dtype=torch.bool)
    stored[slots[slots >= 0]] = True
    places = stored.view(-1, 1, PAGE)
    for old, new, whole in zip(before, after, step.kv.tensors, strict=True):
        assert torch.equal(new[places.expand(new.shape[:3])].float(),
                           whole[places.expand(new.shape[:3])].float())  # fmt: skip
        assert torch.equal(new[~places.expand(new.shape[:3])].float(),
                           old[~places.expand(new.shape[:3])].float())  # fmt: skip
