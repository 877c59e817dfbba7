"""Log-probabilities as bytes.

Long prompts and outputs have hundreds of thousands. An object for each would block the event loop
and slow down every garbage collection.
"""

from __future__ import annotations

import struct
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import overload

import numpy as np

from modelmill.core.types import Logprob

ENTRY_STRUCT = struct.Struct("<iid")
"""Id, rank, value."""
BLOBS_PER_PROMPT = 2
"""Blobs of one prompt."""


def encode_position_logprobs(entries: Mapping[int, Logprob]) -> bytes:
    """Encode the entries of one position."""
    return b"".join(
        [ENTRY_STRUCT.pack(id, each.rank, each.logprob) for id, each in entries.items()]
    )


class EncodedPositionLogprobs(Mapping[int, Logprob]):
    """The encoded entries of one position, decoded on access."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def _decode(self) -> dict[int, Logprob]:
        return {
            id: Logprob(value, rank) for id, rank, value in ENTRY_STRUCT.iter_unpack(self._data)
        }

    def __getitem__(self, id: int) -> Logprob:
        return self._decode()[id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._decode())

    def __len__(self) -> int:
        return len(self._data) // ENTRY_STRUCT.size

    def items(self) -> ItemsView[int, Logprob]:
        """All entries at once."""
        return self._decode().items()


def encode_prompt_logprobs(tables: Sequence[Mapping[int, Logprob] | None]) -> list[bytes]:
    """Encode a prompt as two blobs: where each position's entries end (int64), and all entries.

    A position without a table has no entries.
    """
    parts = [b"" if each is None else encode_position_logprobs(each) for each in tables]
    return [
        np.fromiter(accumulate(map(len, parts)), np.int64, len(parts)).tobytes(),
        b"".join(parts),
    ]


class EncodedPromptLogprobs(Sequence[Mapping[int, Logprob] | None]):
    """The encoded entries of a prompt."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self._ends, self._data = np.frombuffer(blobs[0], np.int64), blobs[1]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(a == b for a, b in zip(self, other))
        )

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, position: int) -> EncodedPositionLogprobs | None: ...
    @overload
    def __getitem__(self, position: slice) -> list[EncodedPositionLogprobs | None]: ...
    def __getitem__(
        self, position: int | slice
    ) -> EncodedPositionLogprobs | list[EncodedPositionLogprobs | None] | None:
        if isinstance(position, slice):
            return [self[each] for each in range(*position.indices(len(self)))]
        end = int(self._ends[position])  # raises IndexError
        position %= len(self)
        begin = int(self._ends[position - 1]) if position else 0
        return EncodedPositionLogprobs(self._data[begin:end]) if end > begin else None
