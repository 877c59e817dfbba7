"""Calls of a model captured as CUDA graphs: one launch for hundreds of small kernels."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from modelmill.core import log
from modelmill.ops import cuda_graph

_log = log.get_logger(__name__)
Tensors = tuple[torch.Tensor, ...]
MAX_GRAPHS = 24  # graphs in the cache; the least recently replayed is evicted first


@dataclass(frozen=True)
class _CachedGraph:
    """A graph with the static tensors that it reads."""

    graph: cuda_graph.CapturedGraph[Tensors]
    inputs: Tensors


class CudaGraphCache:
    """A cache of CUDA graphs, keyed by the call's name and the shapes and dtypes of its arguments.

    The first call with a key runs eagerly; the second captures a graph, which is replayed from then
    on. All graphs share one memory pool, so outputs are valid only until the next call.
    """

    def __init__(self, *, enabled: bool) -> None:
        """Start with an empty cache; with enabled=False every call runs eagerly."""
        self.enabled = enabled
        self._graphs: OrderedDict[Hashable, _CachedGraph | None] = OrderedDict()
        self._capturer = cuda_graph.GraphCapturer() if enabled else None

    def __len__(self) -> int:
        """Return the number of captured graphs in the cache."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, name: str, call: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
        """Return call(*inputs), from a CUDA graph where one is captured.

        Args:
            name: identifies the call; the same name must always mean the same function.
            call: takes and returns tensors on the device.
            inputs: its arguments.
        """
        if not self.enabled:
            return call(*inputs)
        key = (name, *((tuple(t.shape), t.dtype) for t in inputs))
        if key not in self._graphs:
            self._put_and_evict(key, None)
            return call(*inputs)
        captured = self._graphs[key]
        if captured is None:
            try:
                captured = self._capture_graph(call, inputs)
            except cuda_graph.NotCapturable as error:
                _log.warning("segmentation runs without CUDA graphs: %s", error)
                self.enabled = False
                return call(*inputs)
        self._put_and_evict(key, captured)
        for static_input, tensor in zip(captured.inputs, inputs, strict=True):
            static_input.copy_(tensor)
        return captured.graph.replay()

    def _put_and_evict(self, key: Hashable, graph: _CachedGraph | None) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture_graph(self, call: Callable[..., Tensors], inputs: Tensors) -> _CachedGraph:
        """Capture the call; raise cuda_graph.NotCapturable if an op synchronizes with the host."""
        assert self._capturer is not None
        static_inputs = tuple(t.clone() for t in inputs)
        with cuda_graph.run_on_side_stream(torch.cuda.Stream()):
            cuda_graph.run_without_host_sync(lambda: call(*static_inputs))
        return _CachedGraph(self._capturer.capture(lambda: call(*static_inputs)), static_inputs)
