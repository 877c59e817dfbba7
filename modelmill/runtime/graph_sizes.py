"""Sizes of the steps that are captured as CUDA graphs, and what a step is padded to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

MAX_GRAPH_SEQS = 512  # sequences of the largest decode graph
SINGLE_PROMPT_GRAPH_TOKEN_COUNTS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
"""Tokens of the steps of a single prompt."""
MAX_FREELY_PADDED_TOKENS = 512  # tokens: any padding up to this size costs less than launching
MAX_PAD_FRACTION = 1 / 64  # share of padding allowed in a larger size of a single prompt
MIXED_GRAPH_TOKEN_COUNTS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Tokens of steps with several sequences, decodes included."""
MIN_MIXED_GRAPH_SEQS, MIXED_GRAPH_SEQS_FACTOR = 16, 4
"""Sequences are padded to this, to four times as many, and so on: empty ones cost little."""
MAX_GRAPH_TOKENS_TIMES_RANKS = 2048
"""Divided by the ranks: of larger padded steps NCCL's all-reduces are faster, launched."""
MAX_WARM_UP_MIXED_GRAPH_SEQS = 64  # mixed graphs of more sequences are captured when they are met
MAX_SINGLE_PROMPT_GRAPHS = 16  # of a single prompt; steps of further sizes are launched
MAX_MIXED_GRAPHS = 48
PREFILL_GRAPH_BYTES = 40 << 20
"""Device memory of a prefill graph: mostly a cuBLAS workspace."""
MIXED_GRAPH_MEMORY_FRACTION = 1 / 64
"""Share of a GPU's memory that all mixed graphs may take."""


class PaddedStepShape(NamedTuple):
    """What a step is padded to: this determines its layout and launches.

    Attributes:
        tokens: T.
        seqs: B; one row of logits is computed for each.
        context: Bound on the tokens of a sequence.
    """

    tokens: int
    seqs: int
    context: int

    @property
    def is_mixed(self) -> bool:
        """Whether there are several sequences."""
        return self.seqs > 1


@dataclass(frozen=True)
class PrefillGraphLimits:
    """Which sizes the steps with prompts of an engine are padded to.

    Attributes:
        max_tokens: Most tokens of a step.
        max_context: Most tokens of a sequence.
        max_seqs: Most sequences of a step.
        max_mixed_graphs: Most graphs of several sequences; 0: such steps are not padded.
    """

    max_tokens: int
    max_context: int
    max_seqs: int = 1
    max_mixed_graphs: int = 0

    @cached_property
    def single_prompt_token_counts(self) -> tuple[int, ...]:
        """Sizes of the steps of a single prompt, none larger than needed."""
        return tuple(
            size
            for below, size in pairwise((0, *SINGLE_PROMPT_GRAPH_TOKEN_COUNTS))
            if size <= self.max_tokens and below < self.max_context
        )

    @cached_property
    def mixed_token_counts(self) -> tuple[int, ...]:
        """Sizes of the steps of several sequences."""
        return tuple(size for size in MIXED_GRAPH_TOKEN_COUNTS if size <= self.max_tokens)

    @cached_property
    def mixed_seqs(self) -> tuple[int, ...]:
        """Sequences of these steps; the last one is all of them."""
        sizes, size = [], MIN_MIXED_GRAPH_SEQS
        while size < self.max_seqs:
            sizes.append(size)
            size *= MIXED_GRAPH_SEQS_FACTOR
        return (*sizes, self.max_seqs)

    def max_graphs(self, size: PaddedStepShape) -> int:
        """Most graphs of the kind of ``size``."""
        return self.max_mixed_graphs if size.is_mixed else MAX_SINGLE_PROMPT_GRAPHS

    def padded_shape(self, tokens: int, seqs: int, context: int) -> PaddedStepShape | None:
        """What a step is padded to; None: it is not padded.

        Args:
            tokens: Of the step.
            seqs: Its sequences.
            context: Most tokens of one, with the new ones.
        """
        if seqs == 1:
            size = _smallest_size_at_least(tokens, self.single_prompt_token_counts)
            if tokens < 2 or size is None or _is_padded_too_much(tokens, size):
                return None
            return PaddedStepShape(size, 1, self._context_bound(context))
        size, padded_seqs = (
            _smallest_size_at_least(tokens, self.mixed_token_counts),
            _smallest_size_at_least(seqs, self.mixed_seqs),
        )
        if not self.max_mixed_graphs or size is None or padded_seqs is None:
            return None
        return PaddedStepShape(size, padded_seqs, self._context_bound(context))

    def capture_sizes(self) -> list[PaddedStepShape]:
        """What is captured before a request needs it, largest first.

        Each has the context bound of a first chunk. The smaller graphs reuse the memory of the
        largest. Of mixed steps those of many sequences go first, if not all may be captured: they
        hold the others.
        """
        singles = [
            PaddedStepShape(size, 1, self._context_bound(min(size, self.max_context)))
            for size in self.single_prompt_token_counts
        ]
        bound = self._context_bound(1)
        mixed = [
            PaddedStepShape(tokens, seqs, bound)
            for seqs in reversed(self.mixed_seqs)
            if 1 < seqs <= MAX_WARM_UP_MIXED_GRAPH_SEQS
            for tokens in reversed(self.mixed_token_counts)
        ]
        return sorted((*singles, *mixed[: self.max_mixed_graphs]), reverse=True)

    def _context_bound(self, context: int) -> int:
        return min(context_bucket(context), max(self.max_context, context))


def max_mixed_graphs(device_bytes: int) -> int:
    """Most mixed graphs on a GPU with so much memory."""
    return min(
        MAX_MIXED_GRAPHS, int(device_bytes * MIXED_GRAPH_MEMORY_FRACTION) // PREFILL_GRAPH_BYTES
    )


def _smallest_size_at_least(count: int, sizes: tuple[int, ...]) -> int | None:
    """The first of ascending sizes that is not below ``count``."""
    return next((size for size in sizes if size >= count), None)


def _is_padded_too_much(tokens: int, size: int) -> bool:
    return size > MAX_FREELY_PADDED_TOKENS and size - tokens > MAX_PAD_FRACTION * size


def graph_batch_sizes(max_seqs: int) -> list[int]:
    """Batch sizes of graphs: 1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 32 to ``max_seqs``.

    The last size is the first that is at least ``max_seqs``.
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_seqs:
        last = sizes[-1]
        sizes.append(last + (8 if last < 64 else 16 if last < 256 else 32))
    return [s for i, s in enumerate(sizes) if i == 0 or sizes[i - 1] < max_seqs]


def context_bucket(context: int) -> int:
    """A bound on the context: 4,096 times a power of four.

    Few bounds are enough, because kernels split each sequence's actual context.
    """
    bound = 4096
    while bound < context:
        bound *= 4
    return bound
