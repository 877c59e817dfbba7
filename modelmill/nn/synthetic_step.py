"""A step without an engine, for measuring: random weights and keys, sequences of given lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from modelmill.nn.kv import KVCache, ModelKVCacheSpec
from modelmill.nn.layer_stack import model_state_shape
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import GatedMLP
from modelmill.nn.moe import MoE
from modelmill.nn.recurrent_state import make_standalone_step_states
from modelmill.nn.step import Step
from modelmill.ops.recurrent_metadata import chunk_size_for_page
from modelmill.ops.registry import Ops
from modelmill.weights import base
from modelmill.weights.base import WeightFormat

PAGE_SIZE = 16


PackWeight = Callable[[torch.Tensor, torch.dtype], WeightFormat]


def fill_random_weights(
    model: nn.Module,
    weight_formats: Mapping[str, str | PackWeight],
    dtype: torch.dtype,
    device: str,
) -> nn.Module:
    """Fill a model that has no memory yet; never with zeros, which run faster than values do.

    The matrices of a layer's experts are drawn as one, and lie one after another in memory.

    weight_formats: linear module → how its weight is held ("dense" where it is not named): a
    format, rounded to nearest, or what makes the weight of a drawn one and the activations' dtype.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, scale, generator=generator)

    def draw_weight(name: str, rows: int, columns: int) -> WeightFormat:
        how = weight_formats.get(name, "dense")
        drawn = draw(rows, columns, scale=columns**-0.5)
        return base.pack_as_format(how, drawn, dtype) if isinstance(how, str) else how(drawn, dtype)

    of_experts = set()
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            experts = module.local_expert_modules
            gated = isinstance(experts[0], GatedMLP)
            for path in ("gate_up_proj" if gated else "fc_proj", "down_proj"):
                linears = [cast(Linear, expert.get_submodule(path)) for expert in experts]
                n, k = linears[0].shape
                first = f"{name}.experts.{module.local_experts[0]}.{path}".removeprefix(".")
                stack = draw_weight(first, len(linears) * n, k)
                for index, linear in enumerate(linears):
                    linear.weight = stack.slice([(index * n, index * n + n)], (0, k))
                of_experts.update(linears)
        elif isinstance(module, Linear) and module not in of_experts:
            module.weight = draw_weight(name, *module.shape)
    for name, buffer in list(model.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        value = draw(*buffer.shape) if buffer.is_meta else buffer.to(device)
        norm = leaf == "weight" and buffer.dim() == 1
        setattr(model.get_submodule(parent), leaf, value * 0.1 + 1 if norm else value)
    return model.eval().requires_grad_(False)


def synthetic_step(
    model: nn.Module,
    ops: Ops,
    sequences: tuple[int, int, int] | Sequence[tuple[int, int, int]],
    *,
    max_context: int | None = None,
    kv: KVCache | None = None,
) -> Step:
    """Make a step over random KV pages, in shuffled order.

    Args:
        model: A language model with weights.
        ops: The ops of the step.
        sequences: (how many, new tokens of each, tokens of each with the new ones), or several of
            these, for prompts beside decoding sequences.
        max_context: The launch bound of their lengths, as a CUDA graph has one; default: the
            longest.
        kv: Pages to use, which are overwritten; default: as many as are needed, of the activations'
            dtype.
    """
    several = not isinstance(sequences[0], int)
    groups = cast(list[tuple[int, int, int]], list(sequences) if several else [sequences])
    # two tensors, not columns of one: a length alone would keep that one's stride
    each = zip(
        *((new, context) for count, new, context in groups for _ in range(count)), strict=True
    )
    new, contexts = (torch.tensor(numbers) for numbers in each)
    batch = len(new)
    longest = int(contexts.max())
    widest = int(new.max())
    weight = model.embed.weight  # type: ignore[union-attr]
    assert isinstance(weight, torch.Tensor)
    shape, device = model.kv, weight.device
    assert isinstance(shape, ModelKVCacheSpec)
    max_context = max_context or longest
    page_size = PAGE_SIZE if kv is None else kv.page_size
    columns, num_pages = -(-max_context // page_size), -(-contexts // page_size)
    pages = int(num_pages.sum())
    if kv is None:
        kv = KVCache.allocate(shape, pages + 1, page_size, weight.dtype, str(device))
    _fill_kv_random(kv, pages)
    page_order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tables = torch.zeros(batch, columns, dtype=torch.int32)
    tables[torch.arange(columns) < num_pages[:, None]] = page_order
    starts = torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)]).int()
    sequence = torch.arange(batch).repeat_interleave(new)
    positions = torch.arange(len(sequence)) - starts[sequence] + (contexts - new)[sequence]
    slots = tables[sequence, positions // page_size].long() * page_size + positions % page_size
    begin = bool(((new == 1) | (new == contexts)).all())  # all prompts
    ids = torch.randint(int(model.config.vocab), (len(sequence),))  # type: ignore[union-attr, arg-type]
    return Step(
        kv=kv,
        ops=ops,
        ids=ids.to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        rope_frequency_ids=torch.tensor(
            [model.rope_frequency_id(int(c)) for c in contexts]  # type: ignore[operator]
        )[sequence].to(device),
        block_tables=tables.to(device),
        query_start=starts.to(device),
        context_lens=contexts.int().to(device),
        logit_rows=None if widest == 1 else (starts[1:] - 1).long().to(device),
        max_query=widest,
        max_context=max_context,
        state=make_standalone_step_states(
            model_state_shape(model),
            starts.to(device),
            positions.to(device),
            weight.dtype,
            max_query=widest,
            chunk=chunk_size_for_page(page_size),
        ),
        num_decodes=int((new == 1).sum()) if begin else None,
    )


def _fill_kv_random(kv: KVCache, pages: int) -> None:
    """Random values in the first pages: no arithmetic is easier than in an answer.

    8-bit pages get scales as well.
    """
    for cache in (each[:pages] for each in (*kv.k, *kv.v)):
        if cache.dtype == torch.int8:
            cache.random_(-127, 128)
        elif cache.dtype.itemsize == 1:
            cache.copy_(torch.randn(cache.shape, dtype=torch.float16, device=cache.device))
        else:
            cache.normal_()
    for scale in (*kv.k_scale, *kv.v_scale):
        scale[:pages].fill_(1 / 64)
