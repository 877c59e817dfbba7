"""The answers that a peer's test gives to modelmill's parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class AskedAnswer:
    """One answer.

    Attributes:
        peer_class: the peer's parser that the test names.
        tools: name → parameters.
        pieces: the answer as the test cut it; a whole one is one piece.
        streamed: whether the test streamed it.
    """

    peer_class: str
    tools: Mapping[str, Mapping[str, Any] | None]
    pieces: list[str]
    streamed: bool


ASKED: list[AskedAnswer] = []
"""Those of the current test."""
