"""Gives modules with bounds values beyond them, which the text of acceptance may never have.

The text is short, and few of its tokens reach a bound: one that is lost, or 10 % off, would show
nowhere. Checked are clips of queries, keys and values, windows longer than the text, soft caps of
scores and of logits, biases of scores by distance, sinks, the clamp of gated experts, the limits of
a recurrence's steps, and factors of queries by position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from modelmill.accept.reference import ReferenceModel
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference_trace import cast_like
from modelmill.nn.layer_spec import ModuleSpec, RecurrenceSpec
from modelmill.runtime.engine_core import EngineCore

QKV_CLIP_OP = "clamp"
"""The op of modules that bound queries, keys and values."""
SSD_SCAN_OP = "ssd_scan"
"""The op of recurrences whose steps may have limits."""
ACTIVATION_PATH_SUFFIX = ".act"
"""The end of paths of activations."""
NUM_ACTIVATION_ROWS = 16
CONTEXT_TOKENS_BEYOND_WINDOW = 96
"""Keys of a query where no layer has a window."""


@runtime_checkable
class PagedAttention(Protocol):
    """The attention of queries to pages of keys and values."""

    cache_index: int
    window: int | None
    scale: float
    modifies_scores: bool

    def forward(self, q: Tensor, step: Any) -> Tensor:
        """[T, heads, D] → [T, heads·D]."""


class ExtremeInputOutputs(NamedTuple):
    """A module's output, and the reference's, of values beyond a bound.

    Attributes:
        label: what the report names.
        arithmetic: a key of MODULE_BOUNDS.
        ours: the module's.
        expected: the reference's.
        noise: relative error that float32 makes of such large values, beside the published bound.
    """

    label: str
    arithmetic: str
    ours: Tensor
    expected: Tensor
    noise: float = 0.0


class QueryScoreTarget(NamedTuple):
    """The scores of one query: ``shift`` ± ``spread``, and far below for keys that do not count."""

    spread: float
    shift: float | Tensor = 0.0


class ExtremeInputRunner:
    """Runs modules of an engine, and the reference, on such values.

    Args:
        engine_core: the engine.
        reference: the reference.
        final_norm: what its head reads, of as many rows as the engine's head in a step.

    Attributes:
        clipped_layers: layers whose clip of queries, keys and values has run.
    """

    def __init__(
        self, engine_core: EngineCore, reference: ReferenceModel, final_norm: Tensor
    ) -> None:
        self.model: Any = engine_core.model_runner.model
        self.reference, self.final_norm = reference, final_norm
        self.clipped_layers: set[int] = set()
        self.longest: int = engine_core.opened_artifact.manifest.max_model_len

    def run(
        self, name: str, layer: int | None, spec: ModuleSpec | None, args: tuple[Any, ...]
    ) -> Iterator[ExtremeInputOutputs]:
        """Run a module; nothing where it has no bounds.

        Args:
            name: the module's path.
            layer: its layer; None: outside.
            spec: what the layer says of it.
            args: arguments that it was called with.
        """
        if layer is None:
            if name == "embed":  # the first of a step
                yield from self._compare_query_factors_by_position(args[-1])
            elif name == "head" and self.reference.softcap is not None:
                yield self._run_head_on_large_inputs(self.reference.softcap, args)
            return
        module = self.model.get_submodule(name)
        if spec is None:
            return
        bound, qkv_bound = self.reference.gate_bound, self.reference.qkv_bound
        if spec.op == QKV_CLIP_OP and qkv_bound is not None:
            self.clipped_layers.add(layer)
            yield self._run_qkv_clip(spec, qkv_bound, module, args)
        elif isinstance(module, PagedAttention):
            yield from self._run_attention_beyond_bounds(f"{spec.path}.bound", layer, module, args)
        elif bound is not None and spec.path.endswith(ACTIVATION_PATH_SUFFIX):
            yield self._run_bounded_activation(f"{spec.path}.bound", bound, module, args)
        elif isinstance(spec, RecurrenceSpec) and spec.op == SSD_SCAN_OP:
            yield from self._run_recurrence_beyond_limits(layer, spec, module, args)

    def _to_reference(self, x: Tensor) -> Tensor:
        return x.to(self.reference.device, self.reference.dtype)

    def _run_qkv_clip(
        self, spec: ModuleSpec, bound: float, module: nn.Module, args: tuple[Any, ...]
    ) -> ExtremeInputOutputs:
        """Run a clip of queries, keys and values on values beyond its bound."""
        x = (_seeded_randn(*args[0].shape) * bound).to(args[0].device, args[0].dtype)
        expected = self._to_reference(x).clamp(-bound, bound)
        ours = module.forward(x, *args[1:])
        return ExtremeInputOutputs(f"{spec.path}.bound", spec.arithmetic, ours, expected)

    def _run_bounded_activation(
        self, label: str, bound: float, module: nn.Module, args: tuple[Any, ...]
    ) -> ExtremeInputOutputs:
        """Run an activation of gate and up on values beyond their bound."""
        x = args[0]
        both = (_seeded_randn(NUM_ACTIVATION_ROWS, x.shape[-1]) * bound).to(x.device, x.dtype)
        gate, up = self._to_reference(both).chunk(2, -1)
        ours, expected = (
            module.forward(both, *args[1:]),
            self.reference.clamped_gated_activation(gate, up),
        )
        return ExtremeInputOutputs(label, "activation", ours, expected)

    def _run_recurrence_beyond_limits(
        self, layer: int, spec: RecurrenceSpec, module: Any, args: tuple[Any, ...]
    ) -> Iterator[ExtremeInputOutputs]:
        """Run a recurrence with steps beyond each of their limits; its states."""
        mixed, dt, step = args
        right = self._to_reference(mixed)
        for steps, expected in self.reference.scan_extreme_time_steps(layer, right, dt.dtype):
            module.forward(mixed, cast_like(steps, dt), step)
            state = step.state.cache.states[module.state_index][step.state.rows.slots[0]]
            # a copy: the next steps are computed in the same slot
            ours = state.reshape(1, -1).clone()
            yield ExtremeInputOutputs(f"{spec.path}.bound", spec.arithmetic, ours, expected)

    def _run_head_on_large_inputs(self, cap: float, args: tuple[Any, ...]) -> ExtremeInputOutputs:
        """Run the head on inputs so large that its logits are beyond their cap.

        Factors of 2 leave the rounding of inputs as it is.
        """
        head = self.model.head
        rows = cast_like(self.final_norm, args[0])
        largest = float(head.forward(rows, *args[1:]).abs().max())
        x = rows * 2.0 ** max(math.ceil(math.log2(2 * cap / max(largest, 1e-30))), 1)
        ours, expected = (
            head.forward(x, *args[1:]), self.reference.head_logits(self._to_reference(x))
        )  # fmt: skip
        return ExtremeInputOutputs("head.bound", "linear", ours, expected)

    def _compare_query_factors_by_position(self, step: Any) -> Iterator[ExtremeInputOutputs]:
        """Compare the factors of queries at positions up to the longest sequence's."""
        reference, model = self.reference, self.model
        rotates = hasattr(model, "compute_rope_cos_sin")
        if not isinstance(reference, PlainDecoderReference) or not rotates:
            return
        places = torch.linspace(0, self.longest - 1, len(step.positions)).long()
        far = replace(
            step,
            positions=places.to(step.positions.device),
            rope_frequency_ids=torch.zeros_like(step.rope_frequency_ids),
        )
        ours, expected = (
            model.compute_rope_cos_sin(far).q_scale,
            reference.query_scaling_by_position(self.longest),
        )
        if ours is None and expected is None:
            return
        ones = torch.ones(len(places))
        ours = ones if ours is None else ours.cpu()
        right = ones if expected is None else expected.cpu()[places]
        yield ExtremeInputOutputs("rotary.query_factors", "linear", ours[:, None], right[:, None])

    def _run_attention_beyond_bounds(
        self, label: str, layer: int, module: PagedAttention, args: tuple[Any, ...]
    ) -> Iterator[ExtremeInputOutputs]:
        """Run queries with more keys than the text has, where their scores have bounds.

        Of each query the keys on both sides of every window count most.
        """
        reference = self.reference
        if not isinstance(reference, PlainDecoderReference):
            return
        cap, sinks = reference.score_softcap, reference.attention_sinks(layer)
        sizes = (*reference.windows, module.window)
        windows = {size for size in sizes if size is not None and size < self.longest}
        bounded = cap is not None or sinks is not None or reference.alibi_slopes is not None
        if not (windows or bounded or module.modifies_scores):
            return
        q, step = args[0], args[-1]
        pages = step.kv.k[module.cache_index]
        kv_heads, size, dim = pages.shape[1:]
        count = min(self.longest, max(windows, default=0) + CONTEXT_TOKENS_BEYOND_WINDOW)
        edges = {count - each for each in windows if each < count}
        table, *stored = _make_kv_pages_with_edges(count, edges, size, dim)
        rows = (
            _queries_with_scores(_query_score_targets(cap, sinks), q.shape[1], dim) / module.scale
        )
        # of few digits, so that products are exact in any arithmetic
        rows = rows.bfloat16().to(q.device, q.dtype)
        stored = [each.bfloat16().to(pages.device, pages.dtype) for each in stored]
        keys, values = (each[:, None].expand(-1, kv_heads, -1, -1).contiguous() for each in stored)
        copies = module.cache_index + 1
        cache = replace(step.kv, k=(keys,) * copies, v=(values,) * copies, stored=())
        ours = module.forward(rows, _make_decode_step(step, cache, len(rows), count, table))
        k, v = (
            self._to_reference(each.cpu()[table].reshape(-1, 1, dim)[:count])
            .expand(-1, kv_heads, -1)
            for each in stored
        )  # fmt: skip
        expected = torch.cat(
            [
                reference.run_attention_core(layer, row[None], k, v)
                for row in self._to_reference(rows)
            ]
        )
        # of a score as large as its cap, and of the exponential that a GPU makes its tanh of
        noise = 0.0 if cap is None else 8 * cap * torch.finfo(torch.float32).eps
        yield ExtremeInputOutputs(label, "attention", ours, expected, noise)


def _seeded_randn(*shape: int) -> Tensor:
    """Return the same normal numbers in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(17))


def _query_score_targets(cap: float | None, sinks: Tensor | None) -> list[QueryScoreTarget]:
    rows = [QueryScoreTarget(6.0)]
    if cap is not None:
        # where the cap bends, and behind, some scores near each other, on both sides
        rows += [QueryScoreTarget(6.0, cap), QueryScoreTarget(6.0, -cap)]
        rows += [QueryScoreTarget(24.0, 2 * cap), QueryScoreTarget(24.0, -2 * cap)]
    if sinks is not None:  # sums of exponentials as large as those of the sinks
        rows.append(QueryScoreTarget(2.0, sinks.cpu().float() - 4.5))
    return rows


def _queries_with_scores(rows: list[QueryScoreTarget], heads: int, dim: int) -> Tensor:
    """Return queries [rows, heads, dim] whose products with the pages' keys are the rows."""
    q = torch.zeros(len(rows), heads, dim)
    for place, (spread, shift) in enumerate(rows):
        q[place, :, 0], q[place, :, 1], q[place, :, 2] = spread, shift, 2 * spread + 12
    return q


def _make_kv_pages_with_edges(
    count: int, edges: set[int], size: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return page numbers of ``count`` keys, and the pages' keys and values [pages, size, dim].

    The last keys, and those around the edges, have products of ±1 with the first channel, the edges
    themselves 1. All other keys are in one page, which counts little.
    """
    last = -(-count // size) - 1
    near = {(edge + side) // size for edge in edges for side in (-1, 0)}
    own = sorted(page for page in {*near, last, last - 1} if page >= 0)
    table = torch.zeros(last + 1, dtype=torch.int32)
    keys, values = torch.zeros(len(own) + 1, size, dim), _seeded_randn(len(own) + 1, size, dim)
    keys[0, :, 2] = -1
    keys[..., 1] = 1
    keys[1:, :, 0] = (torch.erf(_seeded_randn(len(own), size) / 2**0.5)).clamp(-1, 1)
    for number, page in enumerate(own, 1):
        table[page] = number
        for edge in edges:
            for place in (edge - 1, edge):
                if place >= 0 and place // size == page:
                    keys[number, place % size, 0] = 1
    return table, keys, values


def _make_decode_step(step: Any, cache: Any, rows: int, count: int, table: Tensor) -> Any:
    """Return a step of ``rows`` sequences with the same ``count`` keys, each with one query."""
    lengths = step.context_lens
    return replace(
        step,
        kv=cache,
        block_tables=table.to(step.block_tables).expand(rows, -1).contiguous(),
        query_start=torch.arange(rows + 1, dtype=lengths.dtype, device=lengths.device),
        context_lens=lengths.new_full((rows,), count),
        max_query=1,
        max_context=count,
        num_decodes=None,
    )
