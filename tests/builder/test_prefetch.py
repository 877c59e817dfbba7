"""Reading ahead: in order, one ahead and no more; errors where they belong; a fingerprint that is
given up.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.build_engine import BackgroundFingerprint, prefetch
from modelmill.checkpoint.open import open_checkpoint
from tests.accept.build_and_accept import save_tiny


class Tensor:
    """Something that can be counted."""


def test_two_are_there_at_most_and_in_order() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def make(_: int) -> Tensor:
        nonlocal most
        tensor = Tensor()
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    items = []
    for item, tensor in prefetch(make, range(20)):
        items.append(item)
        del tensor  # an assert on it would keep it
    assert items == list(range(20))
    assert 1 <= most <= 2


def test_the_next_one_is_made_meanwhile() -> None:
    begun = [threading.Event() for _ in range(3)]
    for item, _ in prefetch(lambda item: begun[item].set(), range(3)):
        assert begun[min(item + 1, 2)].wait(20)


def test_an_error_comes_with_its_item() -> None:
    items = prefetch(lambda item: 1 // (3 - item), range(9))
    assert [next(items)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert list(prefetch(str, [])) == []


def test_a_fingerprint_is_the_checkpoints_and_reports_progress(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny("llama", tmp_path / "hf"))
    made = BackgroundFingerprint(checkpoint)
    assert made.result(lambda *_: None) == checkpoint.fingerprint()
    made.stop()


def test_a_fingerprint_that_is_not_needed_ends() -> None:
    begun, released = threading.Event(), threading.Event()

    class Slow:
        """A checkpoint that reads until it is stopped."""

        def fingerprint(self, on_progress: Any) -> str:
            begun.set()
            released.wait(20)
            on_progress("fingerprint", 1, 2)
            raise AssertionError("it went on")

    slow: Any = Slow()
    made = BackgroundFingerprint(slow)
    assert begun.wait(20)
    stopping = threading.Thread(target=made.stop)
    stopping.start()
    while not made._stop_event.wait(1):
        pass
    released.set()
    stopping.join(20)
    assert isinstance(made._future.exception(), InterruptedError)
