"""The range of an attention kernel as data, and the phases that a step consists of.

A step that mixes prompts and single queries may be computed by two kernels: prefill kernels take
whole tiles of queries, of which a single query would fill one row.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from modelmill.ops.kernel_support import UNBOUNDED, KernelSupportRange


class AttentionPhase(enum.Enum):
    """What a kernel computes of a step."""

    PREFILL = "one sequence of several queries"
    DECODE = "sequences of a single query each"
    MIXED = "sequences of both kinds"
    PROMPTS = "of a mixed step, the sequences of several queries"
    SINGLE_QUERIES = "of a mixed step, the sequences of a single query"

    @classmethod
    def classify_step(cls, queries: int, sequences: int) -> AttentionPhase:
        """The phase of a step of so many sequences, of which one has at most so many queries."""
        if queries <= 1:
            return cls.DECODE
        return cls.MIXED if sequences > 1 else cls.PREFILL


class AttentionProblem(NamedTuple):
    """Sizes and dtypes of a step of paged attention.

    Attributes:
        m: tokens of the step.
        queries: most queries of a sequence.
        sequences: sequences of the step.
        pairs: sequences times KV heads.
        heads: query heads.
        kv_heads: KV heads.
        dim: channels of a head.
        page_size: tokens of a page.
        dtype: of the queries.
        page_dtypes: of keys and values.
        scaled: whether pages have scales.
        device: of the queries.
        on_gpu: whether they are on a GPU.
        phase: what is computed.
        has_score_mods: whether there are ``score_mods`` (soft cap, ALiBi, sinks).
        value_dim: channels of the values where these are the first ones of the keys (latent
            attention), or None.
    """

    m: int
    queries: int
    sequences: int
    pairs: int
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: torch.dtype
    page_dtypes: tuple[torch.dtype, torch.dtype]
    scaled: bool
    device: torch.device
    on_gpu: bool
    phase: AttentionPhase
    has_score_mods: bool = False
    value_dim: int | None = None

    def with_step_counts(
        self, m: int, queries: int, sequences: int, pairs: int
    ) -> AttentionProblem:
        """The same with other counts, and the phase that they make."""
        phase = AttentionPhase.classify_step(queries, sequences)
        return self._replace(m=m, queries=queries, sequences=sequences, pairs=pairs, phase=phase)


@dataclass(frozen=True, kw_only=True)
class AttentionSupportRange(KernelSupportRange):
    """Steps that a kernel serves.

    Attributes:
        phases: what it computes.
        queries: least and largest number of queries of the longest sequence.
        sequences: least and largest number of sequences.
        pairs: least and largest number of sequences times KV heads.
        max_group_heads: query heads of a KV head at most.
        dims: channels of a head; () means any.
        page_sizes: least and largest number of tokens of a page, a power of two; (): any.
        dtypes: of the queries; () means any.
        page_dtypes: of the pages; (): they are of the queries' dtype.
        scaled: whether pages must have scales, or must not.
        on_gpu: whether the queries must be on a GPU.
        serves_score_mods: whether it also serves steps with soft cap, ALiBi or sinks.
        latent: whether values must be the first channels of the keys (latent attention), or must
            not.
    """

    phases: tuple[AttentionPhase, ...] = (
        AttentionPhase.PREFILL,
        AttentionPhase.DECODE,
        AttentionPhase.MIXED,
    )
    queries: tuple[int, int] = (0, UNBOUNDED)
    sequences: tuple[int, int] = (0, UNBOUNDED)
    pairs: tuple[int, int] = (0, UNBOUNDED)
    max_group_heads: int = 1 << 31
    dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    page_dtypes: tuple[torch.dtype, ...] = ()
    scaled: bool = False
    on_gpu: bool = False
    serves_score_mods: bool = False
    latent: bool = False

    def covers_ignoring_m(self, problem: AttentionProblem) -> bool:
        """Whether it serves a step with some number of tokens in ``m``."""
        counts = (
            (self.queries, problem.queries),
            (self.sequences, problem.sequences),
            (self.pairs, problem.pairs),
        )
        return (
            problem.phase in self.phases
            and all(least <= count <= most for (least, most), count in counts)
            and self._covers_page_size(problem.page_size)
            and problem.heads <= self.max_group_heads * problem.kv_heads
            and (not self.dims or problem.dim in self.dims)
            and (not self.dtypes or problem.dtype in self.dtypes)
            and self._covers_page_dtypes(problem)
            and self.on_gpu <= problem.on_gpu
            and problem.has_score_mods <= self.serves_score_mods
            and (problem.value_dim is not None) is self.latent
            and super().covers_ignoring_m(problem)
        )

    def _covers_page_dtypes(self, problem: AttentionProblem) -> bool:
        keys, values = problem.page_dtypes
        allowed = self.page_dtypes or (problem.dtype,)
        return problem.scaled is self.scaled and keys is values and keys in allowed

    def _covers_page_size(self, size: int) -> bool:
        if not self.page_sizes:
            return True
        least, most = self.page_sizes
        return least <= size <= most and size & (size - 1) == 0


def split_mixed_problem(problem: AttentionProblem) -> tuple[AttentionProblem, ...]:
    """The prompts and the single queries of a step that may have both; () for any other step."""
    if problem.phase is not AttentionPhase.MIXED:
        return ()
    return problem._replace(phase=AttentionPhase.PROMPTS), problem._replace(
        phase=AttentionPhase.SINGLE_QUERIES
    )


@functools.cache
def compose_mixed_step_kernel(
    prefill: Callable[..., torch.Tensor], decode: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """One function of two kernels that fill the rows of a mixed step."""

    def run(inputs: Any) -> torch.Tensor:
        q = inputs.q
        shape = q.shape[0], q.shape[1] * inputs.output_dim
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
        prefill(inputs, out, mixed=True)
        return decode(inputs, out)

    return run
