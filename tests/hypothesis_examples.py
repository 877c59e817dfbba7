"""How many examples a property gets, or rows a decoder: fewer in ``make test`` than in
``make test-all``.
"""

from __future__ import annotations

_quick = False


def set_quick(quick: bool) -> None:
    """Say whether this is ``make test``; before test modules are imported."""
    global _quick
    _quick = quick


def examples(full: int, quick: int) -> int:
    """The examples of a property that is tested for each of many cases."""
    return quick if _quick else full


def is_quick() -> bool:
    """Whether this is ``make test``."""
    return _quick
