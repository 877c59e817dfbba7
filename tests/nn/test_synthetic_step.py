"""Steps for measuring: prompts beside answers compute what each computes alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.nn.expert_stack import as_strided_stack
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.synthetic_step import PAGE_SIZE, fill_random_weights, synthetic_step
from modelmill.ops import registry
from tests.runtime import tiny


def test_sequences_have_pages_slots_and_positions_of_their_own() -> None:
    step = synthetic_step(tiny.decoder(), registry.select_backends("cpu"), [(2, 5, 40), (3, 1, 20)])
    assert step.query_start.tolist() == [0, 5, 10, 11, 12, 13]
    assert step.context_lens.tolist() == [40, 40, 20, 20, 20]
    assert (step.max_query, step.max_context) == (5, 40)
    assert step.positions.tolist() == [*range(35, 40), *range(35, 40), 19, 19, 19]
    assert step.logit_rows is not None
    assert step.logit_rows.tolist() == [4, 9, 10, 11, 12]
    used = [
        step.block_tables[b, : -(-int(n) // PAGE_SIZE)].tolist()
        for b, n in enumerate(step.context_lens)
    ]
    assert sorted(page for pages in used for page in pages) == list(range(3 + 3 + 2 + 2 + 2))
    rows = torch.repeat_interleave(torch.arange(5), step.query_start.diff())
    pages = step.block_tables[rows, step.positions // PAGE_SIZE]
    assert torch.equal(step.slots, pages.long() * PAGE_SIZE + step.positions % PAGE_SIZE)


def test_prompts_that_begin_are_computed_as_in_an_engine() -> None:
    ops, model = registry.select_backends("cpu"), tiny.decoder()
    begins = synthetic_step(model, ops, [(1, 9, 9), (3, 1, 20)])
    assert begins.num_decodes == 3
    assert synthetic_step(model, ops, [(1, 9, 10), (3, 1, 20)]).num_decodes is None


def test_integers_lie_side_by_side_also_of_one_sequence() -> None:
    """Kernels that read them by address leave others to slower ones: what is timed must be what is
    served.
    """
    for sequences in ((1, 9, 9), (1, 1, 40), (3, 1, 40)):
        step = synthetic_step(tiny.decoder(), registry.select_backends("cpu"), sequences)
        for name in ("positions", "slots", "query_start", "context_lens", "rope_frequency_ids"):
            assert getattr(step, name).stride() == (1,), name


def test_a_group_of_one_kind_is_as_given_alone() -> None:
    model, ops = tiny.decoder(), registry.select_backends("cpu")
    one, listed = (
        synthetic_step(model, ops, (3, 1, 40), max_context=64),
        synthetic_step(model, ops, [(3, 1, 40)], max_context=64),
    )
    assert one.logit_rows is None
    assert one.max_context == listed.max_context == 64
    for name in (
        "positions",
        "slots",
        "block_tables",
        "query_start",
        "context_lens",
        "rope_frequency_ids",
    ):
        assert torch.equal(getattr(one, name), getattr(listed, name)), name


def test_answers_beside_a_prompt_are_computed_as_without_it() -> None:
    model = tiny.decoder()
    step = synthetic_step(model, registry.select_backends("cpu"), [(1, 9, 30), (2, 1, 40)])
    with torch.inference_mode():
        together = model(step)
        rows = slice(9, 11)
        alone = replace(
            step,
            ids=step.ids[rows],
            positions=step.positions[rows],
            slots=step.slots[rows],
            rope_frequency_ids=step.rope_frequency_ids[rows],
            block_tables=step.block_tables[1:],
            query_start=torch.tensor([0, 1, 2], dtype=torch.int32),
            context_lens=step.context_lens[1:],
            logit_rows=None,
            max_query=1,
        )
        torch.testing.assert_close(model(alone), together[1:], rtol=1e-5, atol=1e-5)


def test_the_experts_of_a_layer_lie_one_after_another() -> None:
    spec = MoESpec(RouterConfig(experts=4, top_k=2), MLPSpec(hidden=32, inner=16))
    model = fill_random_weights(
        spec.build_module(), {"experts.0.down_proj": "int8"}, torch.float32, "cpu"
    )
    for path, name in (("gate_up_proj", "dense"), ("down_proj", "int8")):
        linears = [expert.get_submodule(path) for expert in model.experts]
        assert {linear.weight.format for linear in linears} == {name}
        stack = as_strided_stack([linear.weight.tensors()["weight"] for linear in linears])
        assert stack is not None
        assert len({float(each.float().sum()) for each in stack}) == 4, "four different experts"
