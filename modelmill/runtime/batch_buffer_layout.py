"""Where the integers of a step lie in one buffer, and its sections as tensors and arrays.

A ``BatchBufferLayout`` alone determines the offsets. It depends on six values, so that a CUDA graph
captured for it reads its inputs at fixed addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SECTION_ALIGNMENT_WORDS = (
    8  # int64 words: sections start at multiples of 64 bytes, for vectorized loads
)
# inputs of ``ops.sample`` for each row
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "noise")
# which recurrent state each sequence uses (``ops.recurrent_metadata.RecurrentStepMetadata``)
RECURRENT_STATE_SECTIONS = ("state_slots", "snapshot_slots", "snapshot_ends")


@dataclass(frozen=True)
class BatchBufferLayout:
    """Sizes that determine the layout.

    Attributes:
        tokens: T.
        seqs: B.
        num_logit_rows: Rows whose logits are computed, R.
        table_columns: Columns of the block tables.
        has_state: Whether sequences have recurrent state.
        page_groups: Page groups, each with slots and block tables of its own.
    """

    tokens: int
    seqs: int
    num_logit_rows: int
    table_columns: int
    has_state: bool = False
    page_groups: int = 1

    def sections(self) -> list[tuple[str, int, int]]:
        """The sections in order: (name, elements, bytes per element)."""
        t, b, r = self.tokens, self.seqs, self.num_logit_rows
        wide = [
            ("ids", t),
            ("last_id_rows", t),
            ("positions", t),
            ("slots", t),
            ("rope_frequency_ids", t),
        ]
        wide += [("logit_rows", r), ("keep_slots", r), ("noise", r)]
        if self.has_state:
            wide += [(name, b) for name in RECURRENT_STATE_SECTIONS]
        narrow = [("temperature", r), ("top_k", r), ("top_p", r), ("min_p", r)]
        narrow += [
            ("query_start", b + 1),
            ("context_lens", b),
            ("block_tables", b * self.table_columns),
        ]
        for group in range(1, self.page_groups):
            wide.append((_page_group_section_name("slots", group), t))
            narrow.append((_page_group_section_name("block_tables", group), b * self.table_columns))
        return [(n, c, 8) for n, c in wide] + [(n, c, 4) for n, c in narrow]

    def num_words(self) -> int:
        """Size of the buffer in int64 words."""
        return sum(_aligned_section_words(count, width) for _, count, width in self.sections())


def _page_group_section_name(name: str, group: int) -> str:
    """The name of a page group's section; that of the first group is the plain one."""
    return f"{name}_{group}"


class BatchViews:
    """The sections of a layout as tensors over one int64 buffer; ``noise`` is float64.

    more_slots, more_block_tables: those of the page groups behind the first.
    """

    ids: torch.Tensor
    last_id_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope_frequency_ids: torch.Tensor
    logit_rows: torch.Tensor
    keep_slots: torch.Tensor
    noise: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    state_slots: torch.Tensor
    snapshot_slots: torch.Tensor
    snapshot_ends: torch.Tensor

    def __init__(self, buffer: torch.Tensor, layout: BatchBufferLayout) -> None:
        self.layout = layout
        start = 0
        for name, count, width in layout.sections():
            words = _aligned_section_words(count, width)
            part = buffer[start : start + words]
            part = part[:count] if width == 8 else part.view(torch.int32)[:count]
            setattr(self, name, part)
            start += words
        self.num_words = start
        self.noise = self.noise.view(torch.float64)
        for name in ("temperature", "top_p", "min_p"):
            setattr(self, name, getattr(self, name).view(torch.float32))
        self.block_tables = self.block_tables.view(layout.seqs, layout.table_columns)
        groups = range(1, layout.page_groups)
        self.more_slots = [
            getattr(self, _page_group_section_name("slots", group)) for group in groups
        ]
        self.more_block_tables = [
            getattr(self, _page_group_section_name("block_tables", group)).view_as(
                self.block_tables
            )
            for group in groups
        ]

    def sampling_inputs(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Inputs of ``ops.sample`` for the first ``num_rows`` rows."""
        return {name: getattr(self, name)[:num_rows] for name in SAMPLING_FIELDS}


class HostArrays:
    """The same sections of a host buffer as writable numpy arrays."""

    def __init__(self, views: BatchViews) -> None:
        self.ids, self.last_id_rows = views.ids.numpy(), views.last_id_rows.numpy()
        self.positions, self.slots = views.positions.numpy(), views.slots.numpy()
        self.rope_frequency_ids = views.rope_frequency_ids.numpy()
        self.logit_rows, self.keep_slots = views.logit_rows.numpy(), views.keep_slots.numpy()
        self.sampling_inputs = {name: getattr(views, name).numpy() for name in SAMPLING_FIELDS}
        self.query_start, self.context_lens = views.query_start.numpy(), views.context_lens.numpy()
        self.block_tables = views.block_tables.numpy()
        self.more_slots = [each.numpy() for each in views.more_slots]
        self.more_block_tables = [each.numpy() for each in views.more_block_tables]
        self.state_fields = [
            getattr(views, name).numpy()
            for name in RECURRENT_STATE_SECTIONS
            if views.layout.has_state
        ]


def _aligned_section_words(count: int, width: int) -> int:
    words = -(-count * width // 8)
    return -(-words // _SECTION_ALIGNMENT_WORDS) * _SECTION_ALIGNMENT_WORDS
