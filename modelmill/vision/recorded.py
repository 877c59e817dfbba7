"""Calls of a model as CUDA graphs: hundreds of small kernels launched at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from modelmill.core import log
from modelmill.runtime.graph import NotRecordable, aside, rehearsed

_log = log.get(__name__)
Tensors = tuple[torch.Tensor, ...]
MOST = 24  # graphs that are kept; what was replayed longest ago goes first


@dataclass(frozen=True)
class _Graph:
    """given, out: where it reads and writes."""

    graph: torch.cuda.CUDAGraph
    given: Tensors
    out: Tensors


class Recorded:
    """Calls by name, as graphs for each combination of their arguments' shapes.

    What is asked for once is called as it is; from the second time on a graph is recorded and replayed. All graphs
    share one pool of memory, so that what a replay puts out holds until the next one. on: False never records.
    """

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if on else None

    def __len__(self) -> int:
        """Graphs that were recorded and are kept."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, name: str, call: Callable[..., Tensors], *given: torch.Tensor) -> Tensors:
        """call(*given), tensors of the device in and out; the same name must mean the same call."""
        if not self.on:
            return call(*given)
        key = (name, *((tuple(t.shape), t.dtype) for t in given))
        if key not in self._graphs:
            self._keep(key, None)
            return call(*given)
        found = self._graphs[key]
        if found is None:
            try:
                found = self._record(call, given)
            except NotRecordable as error:
                _log.warning("pictures are segmented without CUDA graphs: %s", error)
                self.on = False
                return call(*given)
        self._keep(key, found)
        for place, tensor in zip(found.given, given, strict=True):
            place.copy_(tensor)
        found.graph.replay()
        return found.out

    def _keep(self, key: Hashable, graph: _Graph | None) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > MOST:
            self._graphs.popitem(last=False)

    def _record(self, call: Callable[..., Tensors], given: Tensors) -> _Graph:
        """Raises NotRecordable where an op waits for the host."""
        places = tuple(t.clone() for t in given)
        with aside(torch.cuda.Stream()):
            rehearsed(lambda: call(*places))
        graph = torch.cuda.CUDAGraph()
        # other threads (a second engine) go on meanwhile: only what this one does is recorded
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = call(*places)
        return _Graph(graph, places, out)
