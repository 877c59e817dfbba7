"""Pictures of requests become embeddings, before the loop queues them; those of pictures seen lately are kept."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from modelmill.core import log
from modelmill.core.errors import RequestError
from modelmill.core.types import Insert, Request
from modelmill.ops.shelf import Ops
from modelmill.runtime.graph import NotRecordable, rehearsed

_log = log.get(__name__)
# pictures through the eyes at once: more gain nothing on a GPU, and take memory beside the KV pages
BATCH = 16
SIZES = (1, 2, 4, 8, BATCH)
KEPT_BYTES = 64 << 20
LENT_BYTES = 192 << 20
Key = tuple[str, str]
"""A request's cache_salt and a picture's digest."""


@dataclass
class _Graph:
    """Recorded for a number of pictures, which stand in ``given``."""

    graph: torch.cuda.CUDAGraph
    given: torch.Tensor
    out: torch.Tensor

    def replay(self, batch: torch.Tensor) -> torch.Tensor:
        """What stands behind the batch's pictures is left from before, and nobody reads what becomes of it."""
        self.given[: len(batch)].copy_(batch)
        self.graph.replay()
        return self.out


class Eyes:
    """What a model with eyes (``read``, ``image_size``, ``image_tokens``) makes of pictures.

    Requests of different salts share no embeddings: how fast a picture is answered would tell that it was seen.
    graphs: launch them as CUDA graphs, which are recorded when a number of pictures is first met.
    """

    def __init__(
        self, model: nn.Module, ops: Ops, device: str, kept_bytes: int = KEPT_BYTES, *, graphs: bool = False
    ) -> None:
        self._model: Any = model
        self._ops, self._device = ops, device
        self._graphs: dict[int, _Graph] | None = {} if graphs else None
        # what a replay puts out is copied at once, so that all graphs may use the same memory
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._kept: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._room = kept_bytes
        self._lent: list[weakref.ref[torch.Tensor]] = []

    def use_ops(self, ops: Ops) -> None:
        """Compute with other ops from now on."""
        self._ops = ops

    @property
    def kept(self) -> int:
        """Embeddings kept, in bytes."""
        return sum(e.numel() * e.itemsize for e in self._kept.values())

    def see(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with embeddings [length, H] in place of pictures [S, S, 3] uint8. Raises RequestError."""
        wanted: dict[Key, Any] = {}
        for request in requests:
            for insert in request.inserts:
                if not isinstance(insert.handle, torch.Tensor):
                    self._check(insert)
                    wanted[request.cache_salt, insert.digest] = insert.handle
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        new = [key for key in wanted if key not in found]
        for start in range(0, len(new), BATCH):
            some = new[start : start + BATCH]
            found.update(zip(some, self.read([wanted[key] for key in some]), strict=True))
        self._keep(found)
        return [_with(request, found) for request in requests]

    def warm_up(self, largest: int = BATCH) -> None:
        """Record the graphs of up to ``largest`` pictures now, not when they are first needed."""
        side = getattr(self._model, "image_size", 0)
        # the largest first: the others find room in its memory
        for count in (size for size in reversed(SIZES) if size <= largest and side and self._graphs is not None):
            self.read([torch.zeros(side, side, 3, dtype=torch.uint8)] * count)

    @torch.inference_mode()
    def read(self, pictures: Sequence[Any]) -> list[torch.Tensor]:
        """Pictures [S, S, 3] uint8 → embeddings [length, H].

        They stay on the device, so that nobody waits for them, up to LENT_BYTES; more go to the CPU: requests that wait
        may be many.
        """
        # a stack is a copy: pictures that came from another process may not be written to
        batch = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
        found = self._seen(batch)[: len(pictures)]
        self._lent = [each for each in self._lent if each() is not None]
        size = found[0].numel() * found.itemsize
        if (len(self._lent) + len(pictures)) * size > LENT_BYTES:
            return list(found.cpu())
        # each by itself: a view would keep the whole batch
        told = [each.clone() for each in found]
        self._lent += map(weakref.ref, told)
        return told

    def _seen(self, batch: torch.Tensor) -> torch.Tensor:
        """Pictures [B, S, S, 3] uint8 → embeddings [at least B, 32, hidden] on the device."""
        if self._graphs is not None:
            size = next(size for size in SIZES if size >= len(batch))
            try:
                if size not in self._graphs:
                    self._graphs[size] = self._record(size, batch)
                return self._graphs[size].replay(batch)
            except NotRecordable as error:
                _log.warning("pictures are read without CUDA graphs: %s", error)
                self._graphs = None
        return self._call(batch.to(self._device))

    def _call(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._model.read(batch.permute(0, 3, 1, 2), self._ops)
        return found

    def _record(self, size: int, batch: torch.Tensor) -> _Graph:
        """Raises NotRecordable where an op waits for the host."""
        given = torch.zeros(size, *batch.shape[1:], dtype=torch.uint8, device=self._device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._call(given)  # what compiles or allocates at first
            rehearsed(lambda: self._call(given))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._call(given)
        return _Graph(graph, given, out)

    def _check(self, insert: Insert) -> None:
        size = getattr(self._model, "image_size", None)
        if size is None:
            raise RequestError("this engine reads no pictures")
        shape = tuple(insert.handle.shape)
        if shape != (size, size, 3) or insert.length != self._model.image_tokens:
            raise RequestError(f"a picture for this engine is {size} × {size} of 3 bytes, not {list(shape)}")

    def _keep(self, found: dict[Key, torch.Tensor]) -> None:
        """The latest stay, as many as there is room for."""
        for key, embeddings in found.items():
            self._kept[key] = embeddings
            self._kept.move_to_end(key)
        while self._kept and self.kept > self._room:
            self._kept.popitem(last=False)


def _with(request: Request, found: dict[Key, torch.Tensor]) -> Request:
    def seen(insert: Insert) -> Insert:
        return replace(insert, handle=found.get((request.cache_salt, insert.digest), insert.handle))

    return replace(request, inserts=tuple(map(seen, request.inserts))) if request.inserts else request
