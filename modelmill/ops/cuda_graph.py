"""Captures calls as CUDA graphs: the one place that does, for steps, encoders and timing.

A site that captures keeps its own static inputs, and says what it calls before a capture: kernels
must be compiled and workspaces allocated by then.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class NotCapturable(RuntimeError):
    """A selected op cannot be captured in a CUDA graph."""


class CapturedGraph(Generic[T]):
    """A call captured in a CUDA graph, with its output tensors."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: T) -> None:
        self._graph = graph
        self.output = output
        """What the call returned; every replay overwrites it."""

    def replay(self) -> T:
        """Launch the graph; returns ``output``."""
        self._graph.replay()
        return self.output


class GraphCapturer:
    """Captures calls; its graphs share one memory pool, so they must not run at the same time."""

    def __init__(self, *, shared_pool: bool = True) -> None:
        """Reserve a pool; with ``shared_pool=False`` every graph has its own."""
        self._pool = torch.cuda.graph_pool_handle() if shared_pool else None

    def capture(
        self, call: Callable[[], T], stream: torch.cuda.Stream | None = None
    ) -> CapturedGraph[T]:
        """Capture a call.

        Args:
            call: Launches the work; it was called before.
            stream: To capture on; None: a stream of torch's.
        """
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (the NCCL watchdog, a second engine) may use CUDA meanwhile
        with (
            paused_garbage_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            output = call()
        return CapturedGraph(graph, output)

    def capture_on_current_stream(self, call: Callable[[], T]) -> CapturedGraph[T]:
        """Capture a call within a request, without ``torch.cuda.graph``.

        That collects garbage and empties the cache first, which is too slow there.

        Raises:
            NotCapturable: The call cannot be captured.
        """
        with paused_garbage_collection():
            return self._capture_on_current_stream(call)

    def _capture_on_current_stream(self, call: Callable[[], T]) -> CapturedGraph[T]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            output = call()
            graph.capture_end()
        except RuntimeError as error:
            # the stream may still be capturing, or the capture may be invalid
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCapturable(str(error)) from None
        return CapturedGraph(graph, output)


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block, which holds a whole capture: its end, too.

    A graph of an engine that was dropped may be part of a reference cycle. To free it is not
    permitted in a capture on the same thread, and makes the capture invalid. Objects are counted
    meanwhile, so garbage is collected as soon as the block ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def run_on_side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the block on ``stream``, after earlier and before later work of the current stream."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


def run_without_host_sync(call: Callable[[], object]) -> None:
    """Call what will be captured, with synchronization as an error.

    Raises:
        NotCapturable: An op synchronizes with the host, such as a torch reference with ``tolist``.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotCapturable(str(error)) from None
    finally:
        torch.cuda.set_sync_debug_mode(before)
