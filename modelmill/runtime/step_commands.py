"""What rank 0 tells the other ranks: which step to run, in a short header and the step's buffer as
it stands.

Ranks exchange numbers, never objects: a header is HEADER_BYTES of whole numbers, and what follows
is the int64 buffer of a ``BatchLayout`` (or pairs of pages to copy), read straight into the memory
from which it goes to the device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from modelmill.runtime.batch import PackedBatch
from modelmill.runtime.batch_layout import BatchLayout, BatchViews
from modelmill.runtime.decode_graphs import GREEDY, LOGITS, SAMPLED

FORWARD, COPY, END, PING = "forward", "copy", "end", "ping"
COMMANDS = (FORWARD, GREEDY, SAMPLED, LOGITS, COPY, END, PING)
_HEADER_STRUCT = struct.Struct("<13q")
HEADER_BYTES = _HEADER_STRUCT.size
_EMPTY_LAYOUT = BatchLayout(0, 0, 0, 0)


@dataclass(frozen=True)
class StepCommand:
    """command: FORWARD runs the model, GREEDY, SAMPLED and LOGITS replay such a graph, COPY copies
    pages, END ends the rank, PING is answered by a line.

    num_words: of 64 bits that follow. num_kept_ids: so many ids are broadcast after the step, to be
    kept for the next one. embed_width: of foreign embeddings that are broadcast before it; 0: none.
    num_state_rows: of how many rows, the last ones that are wanted, the hidden state is read and
    not the logits.
    """

    command: str
    num_words: int = 0
    layout: BatchLayout = _EMPTY_LAYOUT
    all_rows: bool = False
    max_query: int = 0
    max_context: int = 0
    uses_last_ids: bool = False
    num_kept_ids: int = 0
    embed_width: int = 0
    num_state_rows: int = 0

    @staticmethod
    def from_batch(
        batch: PackedBatch, command: str, num_kept_ids: int = 0, num_state_rows: int = 0
    ) -> StepCommand:
        """The command that runs this batch."""
        embed_width = 0 if batch.embeds is None else batch.embeds.shape[1]
        views = batch.views
        more = (
            batch.all_rows,
            batch.max_query,
            batch.max_context,
            batch.uses_last_ids,
            num_kept_ids,
            embed_width,
            num_state_rows,
        )
        return StepCommand(command, views.num_words, views.layout, *more)

    def batch(self, views: BatchViews) -> PackedBatch:
        """The batch of the command, its numbers in ``views``."""
        return PackedBatch(
            views,
            self.layout.tokens,
            self.all_rows,
            self.max_query,
            self.max_context,
            self.uses_last_ids,
        )

    def pack(self) -> bytes:
        """HEADER_BYTES bytes."""
        layout = self.layout
        return _HEADER_STRUCT.pack(
            COMMANDS.index(self.command), self.num_words,
            layout.tokens, layout.seqs, layout.num_logit_rows, layout.table_columns,
            self.all_rows, self.max_query, self.max_context, self.uses_last_ids, self.num_kept_ids,
            self.embed_width,
            self.num_state_rows,
        )  # fmt: skip

    @staticmethod
    def unpack(header: bytes) -> StepCommand:
        """The inverse of ``pack``."""
        code, words, t, b, r, p, all_rows, query, context, uses_last_ids, *counts = (
            _HEADER_STRUCT.unpack(header)
        )
        return StepCommand(
            COMMANDS[code],
            words,
            BatchLayout(t, b, r, p),
            bool(all_rows),
            query,
            context,
            bool(uses_last_ids),
            *counts,
        )
