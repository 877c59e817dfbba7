"""A decoder layer split at its sites, and the calibration tokens on their way through it.

A site is an input that one or more linear layers share (nn/layer_spec.py). Statistics of inputs are
collected by site, and a recipe treats the matrices of a site together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from modelmill.core.expert_calibration_threshold import MIN_EXPERT_TOKENS
from modelmill.nn.attention import RopeCosSin
from modelmill.nn.kv import KVCache, ModelKVCacheSpec
from modelmill.nn.layer_spec import (
    LAYER_INPUTS,
    ROPE_VALUE_NAME,
    NormSpec,
    RoutingSpec,
    ScaleFoldRows,
    layer_spec,
)
from modelmill.nn.layer_stack import model_state_shape
from modelmill.nn.linear import Linear
from modelmill.nn.partition import HeadGroups
from modelmill.nn.recurrent_state import RecurrentStateCache, make_standalone_step_states
from modelmill.nn.step import Step

PAGE_SIZE = 16
ImageEmbeddingsByPosition = Mapping[int, torch.Tensor]
BATCH_TOKENS = 4096
EMBEDDING_MODULES = ("embed", "layer_inputs")
"""Modules of a model that ``CalibrationState.from_ids`` calls."""
ADDED_TOKEN_ROUTING_WEIGHT = (
    1e-30  # times an expert's output it is less than a rounding of any other's
)


class QuantizableLayer:
    """One layer of a model, by site."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.spec = layer_spec(layer)

    @property
    def sites(self) -> tuple[str, ...]:
        """Return the sites in the order of computation."""
        return self.spec.site_names

    def site_linears(self, site: str) -> dict[str, Linear]:
        """Return path → linear module of all that read a site."""
        return {each.path: self.linear_by_path(each.path) for each in self.spec.site_linears(site)}

    def linear_by_path(self, path: str) -> Linear:
        """Return a linear module by its path."""
        module = self.layer.get_submodule(path)
        assert isinstance(module, Linear)
        return module

    def all_linears(self) -> dict[str, Linear]:
        """Return path → linear module of the layer."""
        return {each.path: self.linear_by_path(each.path) for each in self.spec.linears}

    def stacked_site_weight(self, site: str) -> torch.Tensor:
        """Return the rows of all matrices that read a site, [N, K]."""
        weights = [linear.weight.dequantize() for linear in self.site_linears(site).values()]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def format_site_linear_names(self, site: str) -> str:
        """Return the linear modules that read a site, for messages."""
        return ", ".join(self.site_linears(site))

    def producer_norm(self, site: str) -> nn.Module | None:
        """Return the norm whose output a site is; None where it is none."""
        producer = self.spec.scale_fold_target(site)
        return self.layer.get_submodule(producer.path) if isinstance(producer, NormSpec) else None

    def norms_with_weights(self) -> list[nn.Module]:
        """Return the layer's norms that have a weight."""
        return [self.layer.get_submodule(norm.path) for norm in self.spec.norms if norm.tensors]

    def producer_head_groups(self, site: str) -> HeadGroups | None:
        """Return the heads that share a row of the site's producer; None: one row per channel."""
        producer = self.spec.scale_fold_target(site)
        return producer.groups if isinstance(producer, ScaleFoldRows) else None


@dataclass
class CalibrationBatch:
    """Some calibration sequences between two layers or at a site; all tensors are [T, …].

    Attributes:
        values: Inside a layer, the values that later modules read, by name.
        num_done: Modules of the layer that are computed.
        site_input: At a site, its input.
        expert_tokens: Inside a layer with experts, how many tokens chose each.
        module_paths: Of the last layer, the paths of its modules.
        output_sums: The sum of each computed module's outputs, zero for the others. One tensor for
            all layers: small tensors that stay allocated between large ones fragment the heap.
    """

    step: Step
    rope: RopeCosSin
    x: torch.Tensor
    residual: torch.Tensor | None = None
    values: dict[str, Any] = field(default_factory=dict)
    num_done: int = 0
    site_input: torch.Tensor | None = None
    expert_tokens: list[int] = field(default_factory=list)
    module_paths: tuple[str, ...] = ()
    output_sums: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def begin_layer(self, module_paths: tuple[str, ...]) -> None:
        """Forget what the modules of the layer before had as output."""
        self.module_paths = module_paths
        if len(self.output_sums) < len(module_paths):
            self.output_sums = self.x.new_zeros(len(module_paths), dtype=torch.float32)
        self.output_sums.zero_()


class CalibrationState:
    """The calibration tokens on their way through the layers, in batches of whole sequences."""

    def __init__(self, batches: Sequence[CalibrationBatch]) -> None:
        self.batches = list(batches)

    @staticmethod
    def from_ids(
        model: Any,
        ids: Sequence[Sequence[int]],
        ops: Any,
        device: str,
        image_embeddings: Sequence[ImageEmbeddingsByPosition] | None = None,
    ) -> CalibrationState:
        """Embed sequences of ids.

        Args:
            model: only its EMBEDDING_MODULES are used.
            ids: one tensor per sequence.
            ops: the ops of the device.
            device: where to compute, in float32.
            image_embeddings: for each sequence the image embeddings [L, H] by their first position;
                the ids at these positions are set to −1.
        """
        batches: list[CalibrationBatch] = []
        begun = 0
        for group in _batch_sequences(ids):
            step = _build_prefill_step(model, group, ops, device)
            foreign = (
                [] if image_embeddings is None else image_embeddings[begun : begun + len(group)]
            )
            begun += len(group)
            with torch.inference_mode():
                rope = (
                    model.compute_rope_cos_sin(step)
                    if hasattr(model, "compute_rope_cos_sin")
                    else RopeCosSin()
                )
                x = model.embed(step.ids, step)
                for first, places in zip(step.query_start.tolist(), foreign, strict=False):
                    for position, embeddings in places.items():
                        at = first + position
                        x[at : at + len(embeddings)] = embeddings.to(x.device, x.dtype)
                        step.ids[at : at + len(embeddings)] = -1
                if hasattr(model, "attach_per_layer_inputs"):
                    step = model.attach_per_layer_inputs(x, step)
                batches.append(CalibrationBatch(step, rope, x))
        return CalibrationState(batches)

    def fork(self, batches: int | None = None) -> CalibrationState:
        """Copy the state of the first ``batches``; ops may add into a residual in place."""
        return CalibrationState(
            [
                replace(
                    batch,
                    x=batch.x.clone(),
                    residual=None if batch.residual is None else batch.residual.clone(),
                    output_sums=batch.output_sums.clone(),
                )
                for batch in self.batches[:batches]
            ]
        )

    def copy_first_sequences(self, max_tokens: int) -> CalibrationState:
        """Copy the first sequences, at least one, with about ``max_tokens`` tokens."""
        batch = self.batches[0]
        ends = batch.step.query_start.tolist()[1:]
        count = max(1, sum(end <= max_tokens for end in ends))
        end = ends[count - 1]
        step, rope = batch.step, batch.rope
        lengths = step.context_lens[:count]
        cut = replace(
            step,
            **{
                name: getattr(step, name)[:end]
                for name in ("ids", "positions", "slots", "rope_frequency_ids")
            },
            layer_inputs=None if step.layer_inputs is None else step.layer_inputs[:end],
            block_tables=step.block_tables[:count],
            query_start=step.query_start[: count + 1],
            context_lens=lengths,
            max_query=int(lengths.max()),
            max_context=int(lengths.max()),
            state=None
            if step.state is None
            else step.state.select_first_sequences(count, end, int(lengths.max())),
        )
        residual = None if batch.residual is None else batch.residual[:end].clone()
        return CalibrationState(
            [CalibrationBatch(cut, rope.slice_first_tokens(end), batch.x[:end].clone(), residual)]
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return sum(len(batch.x) for batch in self.batches)

    def num_tokens_for_expert(self, expert: int) -> int:
        """Return how many tokens chose an expert of the layer, if any."""
        return sum(batch.expert_tokens[expert] for batch in self.batches)

    @torch.inference_mode()
    def forward_to_site(self, block: QuantizableLayer, site: str) -> None:
        """Compute from the site before (or the layer's input) up to this site."""
        value = block.spec.site_value_name(site)
        for batch in self.batches:
            while batch.num_done == 0 or value not in batch.values:
                _forward_next_module(block, batch)
            batch.site_input = batch.values[value]

    def is_finite(self) -> bool:
        """Return whether the values behind a layer are numbers."""
        values = [value for batch in self.batches for value in (batch.x, batch.residual)]
        return bool(torch.isfinite(sum_output_elements([v for v in values if v is not None])))

    def first_non_finite_module(self) -> str | None:
        """Return the last layer's first computed module with a NaN or infinite output, if any."""
        paths = self.batches[0].module_paths
        finite = torch.stack([batch.output_sums[: len(paths)] for batch in self.batches]).isfinite()
        failed = (~finite.all(0)).nonzero().flatten().tolist()
        return paths[failed[0]] if failed else None

    @torch.inference_mode()
    def forward_to_layer_end(self, block: QuantizableLayer) -> None:
        """Compute from the last site to the layer's output."""
        for batch in self.batches:
            while batch.num_done < len(block.spec.modules):
                _forward_next_module(block, batch)
            batch.x, *residual = (batch.values[name] for name in block.spec.outputs)
            batch.residual = residual[0] if residual else None
            batch.values, batch.num_done, batch.site_input = {}, 0, None
            batch.expert_tokens = []

    def forward_layer(self, block: QuantizableLayer) -> None:
        """Compute a whole layer."""
        self.forward_to_layer_end(block)

    def site_inputs(self) -> Iterator[torch.Tensor]:
        """Return the inputs at the current site by batch, [T, K] float32."""
        for batch in self.batches:
            assert batch.site_input is not None, "between two layers"
            yield batch.site_input.float()


def _forward_next_module(block: QuantizableLayer, batch: CalibrationBatch) -> None:
    """Compute the next module of a layer; values that no later module reads are dropped."""
    spec = block.spec
    if batch.num_done == 0:
        batch.values = dict(
            zip(
                (*LAYER_INPUTS, ROPE_VALUE_NAME), (batch.x, batch.residual, batch.rope), strict=True
            )
        )
        batch.residual = None  # freed when no later module reads it
        batch.begin_layer(tuple(module.path for module in spec.modules))
    module = spec.modules[batch.num_done]
    args = [batch.values[name] for name in module.reads]
    output = block.layer.get_submodule(module.path)(*args, batch.step)
    results = output if len(module.writes) > 1 else (output,)
    batch.output_sums[batch.num_done] = sum_output_elements(results)
    if isinstance(module, RoutingSpec):
        batch.expert_tokens = (results[0] != 0).sum(0).tolist()
        results = (route_all_tokens_to_rare_experts(results[0]),)
    batch.num_done += 1
    needed = {*spec.outputs, *(name for m in spec.modules[batch.num_done :] for name in m.reads)}
    batch.values |= zip(module.writes, results, strict=True)
    batch.values = {name: value for name, value in batch.values.items() if name in needed}


def sum_output_elements(results: Sequence[Any]) -> torch.Tensor:
    """Return a module's outputs added up, in float32; nothing waits for the device."""
    return torch.stack([each.sum(dtype=torch.float32) for each in results]).sum()


def route_all_tokens_to_rare_experts(routing: torch.Tensor) -> torch.Tensor:
    """The choice of experts, in which each has enough tokens to be calibrated on.

    An expert that fewer than MIN_EXPERT_TOKENS of the batch's tokens have gets all of them, with
    a weight that adds nothing: its inputs are then those of the layer, as they were before the
    router.
    """
    few = (routing != 0).sum(0) < MIN_EXPERT_TOKENS
    return torch.where(few & (routing == 0), ADDED_TOKEN_ROUTING_WEIGHT, routing)


def _batch_sequences(ids: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
    """Group sequences into batches of about BATCH_TOKENS."""
    group: list[list[int]] = []
    for one in ids:
        if group and sum(map(len, group)) + len(one) > BATCH_TOKENS:
            yield group
            group = []
        group.append(list(one))
    if group:
        yield group


def _allocate_shared_kv_pages(shape: ModelKVCacheSpec, pages: int, device: str) -> KVCache:
    """Pages of all layers, which take the memory of few."""
    made: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
    layers = []
    for number, size in enumerate(shape.layer_kv_sizes):
        key = number if number in shape.read_later else size
        if key not in made:
            one = KVCache.allocate(
                ModelKVCacheSpec(1, *size), pages, PAGE_SIZE, torch.float32, device
            )
            made[key] = one.k[0], one.v[0]
        layers.append(made[key])
    return KVCache(tuple(k for k, _ in layers), tuple(v for _, v in layers), PAGE_SIZE)


def _build_prefill_step(model: Any, ids: Sequence[Sequence[int]], ops: Any, device: str) -> Step:
    """Return the metadata of a prefill of whole sequences.

    Layers are computed one after another: those with pages of one size share them, but for those
    whose pages later layers read as well.
    """
    shape: ModelKVCacheSpec = model.kv
    lengths = [len(one) for one in ids]
    pages = [-(-n // PAGE_SIZE) for n in lengths]
    kv = _allocate_shared_kv_pages(shape, sum(pages), device)
    tables = torch.zeros(len(ids), max(pages), dtype=torch.int32)
    firsts = [sum(pages[:i]) for i in range(len(pages))]
    for row, (first, count) in enumerate(zip(firsts, pages, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
    places = [torch.arange(n) for n in lengths]
    slots = torch.cat(
        [place + first * PAGE_SIZE for place, first in zip(places, firsts, strict=True)]
    )
    keys = torch.cat([torch.full((n,), model.rope_frequency_id(n)) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    states, positions, starts = (
        model_state_shape(model),
        torch.cat(places).to(device),
        starts.to(device),
    )
    return Step(
        ids=torch.tensor([i for one in ids for i in one]).to(device),
        positions=positions,
        slots=slots.to(device),
        rope_frequency_ids=keys.to(device),
        block_tables=tables.to(device),
        query_start=starts,
        context_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        logit_rows=None,
        max_query=max(lengths),
        max_context=max(lengths),
        kv=kv,
        ops=ops,
        state=make_standalone_step_states(
            states,
            starts,
            positions,
            torch.float32,
            max_query=max(lengths),
            chunk=PAGE_SIZE,
            cache=RecurrentStateCache.allocate_shared_scratch(
                states, len(ids) + 1, torch.float32, device
            ),
        ),
    )
