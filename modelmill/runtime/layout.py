"""Where every integer of a step stands in its buffer.

It follows from four numbers (``Layout``), so that a CUDA graph of a layout finds them at the same place every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ALIGN = 8  # int64 words: sections start at multiples of 64 bytes, as kernels like their pointers
DRAWN = ("temperature", "top_k", "top_p", "min_p", "noise")  # what ``ops.sample`` takes for each row


@dataclass(frozen=True)
class Layout:
    """tokens: T. seqs: B. samples: rows whose logits are wanted. pages: columns of the block tables."""

    tokens: int
    seqs: int
    samples: int
    pages: int

    def sections(self) -> list[tuple[str, int, int]]:
        """(name, elements, bytes per element) in order."""
        t, b, r = self.tokens, self.seqs, self.samples
        wide = [("ids", t), ("feed", t), ("positions", t), ("slots", t), ("rope_keys", t)]
        wide += [("rows", r), ("outs", r), ("noise", r)]
        narrow = [("temperature", r), ("top_k", r), ("top_p", r), ("min_p", r)]
        narrow += [("query_start", b + 1), ("context_lens", b), ("block_tables", b * self.pages)]
        return [(n, c, 8) for n, c in wide] + [(n, c, 4) for n, c in narrow]

    def words(self) -> int:
        """int64 words of the buffer."""
        return sum(_words(count, width) for _, count, width in self.sections())


class Views:
    """The sections of a layout as tensors over one int64 buffer; ``noise`` is float64."""

    ids: torch.Tensor
    feed: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rope_keys: torch.Tensor
    rows: torch.Tensor
    outs: torch.Tensor
    noise: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor

    def __init__(self, buffer: torch.Tensor, layout: Layout) -> None:
        self.layout = layout
        start = 0
        for name, count, width in layout.sections():
            words = _words(count, width)
            part = buffer[start : start + words]
            part = part[:count] if width == 8 else part.view(torch.int32)[:count]
            setattr(self, name, part)
            start += words
        self.words = start
        self.noise = self.noise.view(torch.float64)
        for name in ("temperature", "top_p", "min_p"):
            setattr(self, name, getattr(self, name).view(torch.float32))
        self.block_tables = self.block_tables.view(layout.seqs, layout.pages)

    def how(self, rows: int) -> dict[str, torch.Tensor]:
        """How the first samples are drawn, as ``ops.sample`` takes it."""
        return {name: getattr(self, name)[:rows] for name in DRAWN}


class Arrays:
    """The same sections of a host buffer as numpy arrays, to be written."""

    def __init__(self, views: Views) -> None:
        self.ids, self.feed = views.ids.numpy(), views.feed.numpy()
        self.positions, self.slots = views.positions.numpy(), views.slots.numpy()
        self.rope_keys = views.rope_keys.numpy()
        self.rows, self.outs = views.rows.numpy(), views.outs.numpy()
        self.how = {name: getattr(views, name).numpy() for name in DRAWN}
        self.query_start, self.context_lens = views.query_start.numpy(), views.context_lens.numpy()
        self.block_tables = views.block_tables.numpy()


def _words(count: int, width: int) -> int:
    words = -(-count * width // 8)
    return -(-words // _ALIGN) * _ALIGN
