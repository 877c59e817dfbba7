"""What the classes of the Python API share: opening a model with progress, and closing it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from modelmill.core.errors import UsageError
from modelmill.core.progress_types import StageProgress
from modelmill.progress import show_progress


class OpenedEngine(ABC):
    """An engine that is open until ``close``; ``with`` closes it at the end of the block."""

    path: Path

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether ``close`` was called."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine; calling it again does nothing."""

    def check_open(self) -> None:
        """Check that the engine is open.

        Raises:
            UsageError: It is closed.
        """
        if self.closed:
            raise closed_error(self, self.path)

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def closed_error(opened: object, path: Path) -> UsageError:
    """The error of a call on a closed object."""
    return UsageError(f"this {type(opened).__name__} ({path}) is closed; open the engine again")


@contextlib.contextmanager
def opening_progress(model: Path, progress: StageProgress | bool | None) -> Iterator[StageProgress]:
    """Yield the progress callback of opening ``model``.

    Args:
        model: What is opened.
        progress: A callback; None: shown on a terminal and in a notebook; False: never shown.
    """
    if callable(progress):
        yield progress
    else:
        with show_progress(f"opening {model.name}", enabled=progress) as report:
            yield report
