"""Calls of a model as CUDA graphs: hundreds of small kernels launched at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from modelmill.core import log
from modelmill.runtime.decode_graphs import NotCapturable, dry_run, on_side_stream

_log = log.get_logger(__name__)
Tensors = tuple[torch.Tensor, ...]
MAX_GRAPHS = 24  # graphs that are kept; what was replayed longest ago goes first


@dataclass(frozen=True)
class _CapturedCall:
    """inputs, outputs: where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensors
    outputs: Tensors


class CapturedCalls:
    """Calls by name, as graphs for each combination of their arguments' shapes.

    What is asked for once is called as it is; from the second time on a graph is recorded and
    replayed. All graphs share one pool of memory, so that what a replay puts out holds until the
    next one. enabled: False never records.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._graphs: OrderedDict[Hashable, _CapturedCall | None] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def __len__(self) -> int:
        """Graphs that were recorded and are kept."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, name: str, call: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
        """call(*inputs), tensors of the device in and out; the same name must mean the same
        call.
        """
        if not self.enabled:
            return call(*inputs)
        key = (name, *((tuple(t.shape), t.dtype) for t in inputs))
        if key not in self._graphs:
            self._store(key, None)
            return call(*inputs)
        found = self._graphs[key]
        if found is None:
            try:
                found = self._capture(call, inputs)
            except NotCapturable as error:
                _log.warning("pictures are segmented without CUDA graphs: %s", error)
                self.enabled = False
                return call(*inputs)
        self._store(key, found)
        for place, tensor in zip(found.inputs, inputs, strict=True):
            place.copy_(tensor)
        found.graph.replay()
        return found.outputs

    def _store(self, key: Hashable, graph: _CapturedCall | None) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)

    def _capture(self, call: Callable[..., Tensors], inputs: Tensors) -> _CapturedCall:
        """Raises NotCapturable where an op waits for the host."""
        places = tuple(t.clone() for t in inputs)
        with on_side_stream(torch.cuda.Stream()):
            dry_run(lambda: call(*places))
        graph = torch.cuda.CUDAGraph()
        # other threads (a second engine) go on meanwhile: only what this one does is recorded
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = call(*places)
        return _CapturedCall(graph, places, out)
