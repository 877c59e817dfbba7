"""Commands from rank 0 to the other ranks: a fixed-size header, then the step's packed buffer.

Ranks exchange integers only, no pickled objects. A header has HEADER_BYTES; the int64 buffer of a
``BatchLayout`` (or pairs of pages to copy) follows and is read directly into the host buffer from
which it is copied to the device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from modelmill.runtime.batch import PackedBatch
from modelmill.runtime.batch_layout import BatchLayout, BatchViews
from modelmill.runtime.decode_graphs import GREEDY, LOGITS, SAMPLED

FORWARD = "forward"
COPY = "copy"
END = "end"
PING = "ping"
COMMANDS = (FORWARD, GREEDY, SAMPLED, LOGITS, COPY, END, PING)
_HEADER_STRUCT = struct.Struct("<13q")
HEADER_BYTES = _HEADER_STRUCT.size
_EMPTY_LAYOUT = BatchLayout(0, 0, 0, 0)


@dataclass(frozen=True)
class StepCommand:
    """A command to the other ranks.

    Attributes:
        command: FORWARD runs the model; GREEDY, SAMPLED and LOGITS replay a graph with that output;
            COPY copies pages; END ends the rank; PING requests a reply.
        num_words: 64-bit words that follow.
        num_kept_ids: Ids that rank 0 broadcasts after the step, stored for the next one.
        embed_width: Columns of the image embeddings that are broadcast before the step; 0: none.
        num_state_rows: The last so many logit rows return hidden states instead of logits.
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
        fields = (
            batch.all_rows,
            batch.max_query,
            batch.max_context,
            batch.uses_last_ids,
            num_kept_ids,
            embed_width,
            num_state_rows,
        )
        return StepCommand(command, views.num_words, views.layout, *fields)

    def batch(self, views: BatchViews) -> PackedBatch:
        """The batch of this command; ``views``: its integers."""
        return PackedBatch(
            views,
            self.layout.tokens,
            self.all_rows,
            self.max_query,
            self.max_context,
            self.uses_last_ids,
        )

    def pack(self) -> bytes:
        """The header: HEADER_BYTES bytes."""
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
