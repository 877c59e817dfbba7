"""What rank 0 tells the other ranks: which step to run, in a short header and the step's buffer as it stands.

Ranks exchange numbers, never objects: a header is HEADER whole numbers, and what follows is the int64 buffer of a
``Layout`` (or pairs of pages to copy), read straight into the memory from which it goes to the device.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from modelmill.runtime.batch import Batch
from modelmill.runtime.graph import DRAWN, GREEDY, LOGITS
from modelmill.runtime.layout import Layout, Views

FORWARD, COPY, END, PING = "forward", "copy", "end", "ping"
KINDS = (FORWARD, GREEDY, DRAWN, LOGITS, COPY, END, PING)
_HEADER = struct.Struct("<13q")
HEADER = _HEADER.size
_NOTHING = Layout(0, 0, 0, 0)


@dataclass(frozen=True)
class Order:
    """kind: FORWARD runs the model, GREEDY, DRAWN and LOGITS replay such a graph, COPY copies pages, END ends the rank,
    PING is answered by a line.

    words: of 64 bits that follow. keep: so many ids are broadcast after the step, to be kept for the next one. inserts:
    width of foreign embeddings that are broadcast before it; 0: none. states: of how many rows, the last ones that are
    wanted, the hidden state is read and not the logits.
    """

    kind: str
    words: int = 0
    layout: Layout = _NOTHING
    every_row: bool = False
    max_query: int = 0
    max_context: int = 0
    fed: bool = False
    keep: int = 0
    inserts: int = 0
    states: int = 0

    @staticmethod
    def of(batch: Batch, kind: str, keep: int = 0, states: int = 0) -> Order:
        """The order that runs this batch."""
        inserts = 0 if batch.embeds is None else batch.embeds.shape[1]
        views = batch.views
        more = (batch.every_row, batch.max_query, batch.max_context, batch.fed, keep, inserts, states)
        return Order(kind, views.words, views.layout, *more)

    def batch(self, views: Views) -> Batch:
        """The batch of the order, its numbers in ``views``."""
        return Batch(views, self.layout.tokens, self.every_row, self.max_query, self.max_context, self.fed)

    def pack(self) -> bytes:
        """HEADER bytes."""
        layout = self.layout
        return _HEADER.pack(
            KINDS.index(self.kind), self.words, layout.tokens, layout.seqs, layout.samples, layout.pages,
            self.every_row, self.max_query, self.max_context, self.fed, self.keep, self.inserts,
            self.states,
        )  # fmt: skip

    @staticmethod
    def unpack(header: bytes) -> Order:
        """The inverse of ``pack``."""
        kind, words, t, b, r, p, every, query, context, fed, *counts = _HEADER.unpack(header)
        return Order(KINDS[kind], words, Layout(t, b, r, p), bool(every), query, context, bool(fed), *counts)
