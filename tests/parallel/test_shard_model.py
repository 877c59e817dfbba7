"""Every family, split over ranks, computes what it computes whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from modelmill.core.errors import UsageError
from modelmill.loader.capacity import weight_bytes
from modelmill.loader.model_loader import build_model, fill_weights
from modelmill.nn.fusion import fuse_model
from modelmill.nn.kv import KVCache, ModelKVCacheSpec
from modelmill.nn.layer_stack import model_state_shape, stack_layer_specs, vision_encoder_stacks
from modelmill.nn.linear import Linear
from modelmill.nn.partition import NO_PARTITIONS
from modelmill.nn.recurrent_state import RecurrentStateCache, make_standalone_step_states
from modelmill.nn.shard_model import shard_model
from modelmill.nn.step import Step
from modelmill.ops.registry import select_backends
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.weights import base
from tests.models.all_families import CASES
from tests.models.minigpt4_seeded import QFORMER, VISION_ENCODER
from tests.parallel.thread_tp_group import run_on_ranks
from tests.runtime import tiny

LLAMA = {
    "hidden_size": 32, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64}
QWEN = {
    "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "kv_channels": 8,
    "seq_length": 16, "vocab_size": 61, "use_dynamic_ntk": True, "use_logn_attn": True,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama-bias": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5}),
    "qwen": ("qwen", QWEN),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", LLAMA),
    "gpt2": ("gpt2", GPT2),
}


def make_shard(
    name: str,
    weight_format: str,
    tp_group: TPGroup,
    device: str = "cpu",
    config: dict[str, Any] | None = None,
) -> nn.Module:
    """A rank's part of a family's model, its weights the same at every call.

    config: of the family ``name``; None: that of the entry ``name``.
    """
    model_type, config = FAMILIES[name] if config is None else (name, config)
    full_model = build_model(model_type, config)
    tensors = tiny.random_tensors(full_model)  # type: ignore[arg-type]
    tied = bool(getattr(full_model.config, "tied", False))
    aliases = {"head.weight": "embed.weight"} if tied else {}
    if tied:
        del tensors["head.weight"]
    weight_formats = {}
    for linear in [
        n for n, m in full_model.named_modules() if isinstance(m, Linear) and n != "head"
    ]:
        packed = base.pack_as_format(weight_format, tensors.pop(f"{linear}.weight"), torch.float32)
        tensors |= {f"{linear}.{s}": t for s, t in packed.tensors().items()}
        weight_formats[linear] = weight_format
    model = build_model(model_type, config)
    shard_model(model, tp_group, lambda _: 1)
    fill_weights(model, tensors.__getitem__, tensors, weight_formats, aliases, device)
    return model


@torch.inference_mode()
def logits(model: nn.Module, tp_group: TPGroup, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A prompt of 11 tokens, then one of 3 beside a next token of the first."""
    kv = KVCache.allocate(model.kv, 8, 8, dtype, "cpu")  # type: ignore[arg-type]
    ops = select_backends("cpu")
    out = []
    shape = model_state_shape(model)
    states = RecurrentStateCache.allocate(shape, 3, torch.float32, "cpu")
    ids = torch.arange(2, 16)
    keys = [model.rope_frequency_id(11)] * 12 + [model.rope_frequency_id(3)] * 3  # type: ignore[operator]
    for rows, starts, lens in ((range(11), [0, 11], [11]), ([11, 12, 13, 14], [0, 1, 4], [12, 3])):
        at = torch.tensor([0 if r < 12 else 12 for r in rows])
        positions = torch.tensor(list(rows)) - at
        base = torch.tensor([0 if r < 12 else 16 for r in rows])
        step = Step(
            ids=ids[positions], positions=positions, slots=base + positions,
            rope_frequency_ids=torch.tensor([keys[r] for r in rows]),
            block_tables=torch.tensor([[0, 1], [2, 3]][: len(lens)], dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
            logit_rows=torch.tensor(starts[1:]) - 1,
            max_query=max(b - a for a, b in pairwise(starts)),
            max_context=max(lens), kv=kv, ops=ops, tp_group=tp_group,
            state=make_standalone_step_states(
                shape, torch.tensor(starts, dtype=torch.int32), positions, torch.float32,
                max_query=max(b - a for a, b in pairwise(starts)), chunk=8, cache=states,
            ),
        )  # fmt: skip
        out.append(fuse_model(model)(step))
    return torch.cat(out)


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_equals_whole(name: str, size: int) -> None:
    weight_format = "int8" if size == 2 else "dense"
    expected = logits(make_shard(name, weight_format, SINGLE_RANK), SINGLE_RANK)
    outputs = run_on_ranks(
        size, lambda tp_group: logits(make_shard(name, weight_format, tp_group), tp_group)
    )
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)
        assert torch.equal(output, outputs[0])


MINIGPT4 = {
    **LLAMA,
    "image_embedder": {
        "vision_encoder": VISION_ENCODER,
        "qformer": QFORMER,
    },
}


def test_vision_layers_are_whole_on_every_rank() -> None:
    """Rank 0 encodes images: the other ranks' vision layers are whole and divided by no rank."""
    model = build_model("minigpt4", MINIGPT4)
    specs = [
        spec for stack in vision_encoder_stacks(model) for spec in stack_layer_specs(model, stack)
    ]
    assert len(specs) == VISION_ENCODER["depth"] + QFORMER["depth"]
    assert {spec.partitions for spec in specs} == {NO_PARTITIONS}
    shard_model(model, TPGroup(1, 2), lambda _: 1)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    divided = {name for name, linear in linears.items() if linear.weight_shard is not None}
    assert any(name.startswith("layers.") for name in divided)
    assert not [name for name in divided if name.startswith("image_embedder.")]


def test_each_rank_holds_its_share() -> None:
    """What is not split (embedding, norms) is small beside what is."""
    full_bytes = weight_bytes(make_shard("llama", "dense", SINGLE_RANK))
    shares = run_on_ranks(3, lambda tp_group: weight_bytes(make_shard("llama", "dense", tp_group)))
    embedding = 61 * 32 * 4
    assert sum(shares) < full_bytes + 2 * embedding + 2 * 4096
    assert max(shares) - embedding < 0.4 * full_bytes


def test_shares_follow_the_grain() -> None:
    """Columns of a linear are split at multiples of its weight's alignment."""
    tp_group = TPGroup(1, 2)
    model = build_model("llama", LLAMA)
    shard_model(model, tp_group, lambda name: 16 if name.endswith("down_proj") else 1)
    part = model.get_submodule("layers.1.mlp.down_proj").weight_shard
    assert part is not None
    assert part.columns == (32, 52)
    gate_up = model.get_submodule("layers.1.mlp.gate_up_proj").weight_shard
    assert gate_up is not None
    assert gate_up.rows == ((32, 52), (84, 104))


def test_more_ranks_than_heads_is_one_line() -> None:
    tp_group = TPGroup(0, 7)
    with pytest.raises(
        UsageError, match=r"^--tp 7: the model has 6 attention heads; use --tp 6 or less$"
    ):
        shard_model(build_model("llama", LLAMA), tp_group, lambda _: 1)


def test_layers_that_share_pages_have_the_same_heads_on_a_rank() -> None:
    """One alignment for all of them, where a recipe would cut some layers' columns elsewhere."""
    raw = CASES["gemma4_text"].raw(num_attention_heads=8, num_key_value_heads=4)

    def rank_shape(rank: int, alignments: Callable[[str], int]) -> ModelKVCacheSpec:
        model = build_model("gemma4_text", raw)
        shard_model(model, TPGroup(rank, 2), alignments)
        shape = model.kv
        assert isinstance(shape, ModelKVCacheSpec)
        heads = [layer.attn.kv_heads for layer in model.layers]  # type: ignore[union-attr]
        # layers 4 and 5 read the pages of layers 2 and 3
        assert heads[4:] == heads[2:4]
        assert [kv_heads for kv_heads, _ in shape.layer_kv_sizes] == heads[:4]
        assert [dim for _, dim in shape.layer_kv_sizes] == [16, 32, 16, 32]
        # page groups need the same layers' sizes on every rank
        assert bool(shape.layer_windows) == (raw["num_key_value_heads"] % 2 == 0)
        return shape

    for rank in range(2):
        rank_shape(rank, lambda _: 1)
        rank_shape(rank, lambda name: 64 if name == "layers.4.attn.o_proj" else 1)
    raw = CASES["gemma4_text"].raw(num_attention_heads=6, num_key_value_heads=3)
    for rank in range(2):
        rank_shape(rank, lambda _: 1)
