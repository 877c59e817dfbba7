"""What the classes of the Python API share: opening a model with progress, and closing it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Self, TypeVar

from modelmill.core.errors import UsageError
from modelmill.core.progress_callback import Progress
from modelmill.progress_display import show_progress

T = TypeVar("T")


class OpenedEngine(ABC, Generic[T]):
    """An engine that is open until ``close``; ``with`` closes it at the end of the block."""

    path: Path
    _opened: T | None
    """What runs the model; None once it is closed."""

    @property
    def opened_or_raise(self) -> T:
        """What runs the model. Raises UsageError once it is closed."""
        if self._opened is None:
            raise make_closed_error(self, self.path)
        return self._opened

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._opened is None

    @abstractmethod
    def close(self) -> None:
        """Free the engine; calling it again does nothing."""

    def __enter__(self) -> Self:
        self.opened_or_raise  # noqa: B018 -- raises UsageError if closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_model_argument(model: object) -> Path:
    """Return the path of an engine or checkpoint that a class was given.

    Raises:
        UsageError: it is no path, or an empty one.
    """
    if not isinstance(model, (str, Path)) or not str(model).strip():
        raise UsageError(
            f"{model!r} is no model: give the path of an engine or of a checkpoint's folder or file"
        )
    return Path(model)


def make_closed_error(opened: object, path: Path) -> UsageError:
    """The error of a call on a closed object."""
    return UsageError(f"this {type(opened).__name__} ({path}) is closed; open the engine again")


@contextlib.contextmanager
def show_opening_progress(model: Path, progress: Progress | bool | None) -> Iterator[Progress]:
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
