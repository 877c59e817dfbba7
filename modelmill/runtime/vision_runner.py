"""Pictures of requests become embeddings, before the engine queues them; those of pictures seen
lately are kept.
"""

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
from modelmill.core.types import EmbeddingSpan, Request
from modelmill.ops.registry import Ops
from modelmill.runtime.decode_graphs import NotCapturable, dry_run

_log = log.get_logger(__name__)
# pictures through the eyes at once: more gain nothing on a GPU, and take memory beside the KV pages
MAX_BATCH = 16
GRAPH_BATCH_SIZES = (1, 2, 4, 8, MAX_BATCH)
EMBEDDING_CACHE_BYTES = 64 << 20
MAX_DEVICE_EMBEDDING_BYTES = 192 << 20
EmbeddingKey = tuple[str, str]
"""A request's cache_salt and a picture's digest."""


@dataclass
class _VisionGraph:
    """Recorded for a number of pictures, which stand in ``images``."""

    graph: torch.cuda.CUDAGraph
    images: torch.Tensor
    out: torch.Tensor

    def replay(self, batch: torch.Tensor) -> torch.Tensor:
        """What stands behind the batch's pictures is left from before, and nobody reads what
        becomes of it.
        """
        self.images[: len(batch)].copy_(batch)
        self.graph.replay()
        return self.out


class VisionEncoderRunner:
    """What a model with eyes (``encode_images``, ``image_size``, ``image_tokens``) makes of
    pictures.

    Requests of different salts share no embeddings: how fast a picture is answered would tell that
    it was seen.
    graphs: launch them as CUDA graphs, which are recorded when a number of pictures is first met.
    """

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        device: str,
        cache_bytes: int = EMBEDDING_CACHE_BYTES,
        *,
        graphs: bool = False,
    ) -> None:
        self._model: Any = model
        self._ops, self._device = ops, device
        self._graphs: dict[int, _VisionGraph] | None = {} if graphs else None
        # what a replay puts out is copied at once, so that all graphs may use the same memory
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._cache: OrderedDict[EmbeddingKey, torch.Tensor] = OrderedDict()
        self._max_cache_bytes = cache_bytes
        self._device_embeddings: list[weakref.ref[torch.Tensor]] = []

    def set_ops(self, ops: Ops) -> None:
        """Compute with other ops from now on."""
        self._ops = ops

    @property
    def cached_bytes(self) -> int:
        """Embeddings kept, in bytes."""
        return sum(e.numel() * e.itemsize for e in self._cache.values())

    def embed_images(self, requests: Sequence[Request]) -> list[Request]:
        """The requests with embeddings [length, H] in place of pictures [S, S, 3] uint8.

        Raises RequestError.
        """
        images: dict[EmbeddingKey, Any] = {}
        for request in requests:
            for insert in request.embedding_spans:
                if not isinstance(insert.handle, torch.Tensor):
                    self._check_image(insert)
                    images[request.cache_salt, insert.digest] = insert.handle
        found = {key: self._cache[key] for key in images if key in self._cache}
        new = [key for key in images if key not in found]
        for start in range(0, len(new), MAX_BATCH):
            some = new[start : start + MAX_BATCH]
            found.update(zip(some, self.encode_images([images[key] for key in some]), strict=True))
        self._cache_embeddings(found)
        return [_with_embeddings(request, found) for request in requests]

    def warm_up(self, max_batch: int = MAX_BATCH) -> None:
        """Record the graphs of up to ``max_batch`` pictures now, not when they are first needed."""
        side = getattr(self._model, "image_size", 0)
        # the largest first: the others find room in its memory
        for count in (
            size
            for size in reversed(GRAPH_BATCH_SIZES)
            if size <= max_batch and side and self._graphs is not None
        ):
            self.encode_images([torch.zeros(side, side, 3, dtype=torch.uint8)] * count)

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Pictures [S, S, 3] uint8 → embeddings [length, H].

        They stay on the device, so that nobody waits for them, up to MAX_DEVICE_EMBEDDING_BYTES;
        more go to the CPU: requests that wait may be many.
        """
        # a stack is a copy: pictures that came from another process may not be written to
        batch = torch.from_numpy(np.stack([np.asarray(picture) for picture in images]))
        found = self._encode_batch(batch)[: len(images)]
        self._device_embeddings = [each for each in self._device_embeddings if each() is not None]
        size = found[0].numel() * found.itemsize
        if (len(self._device_embeddings) + len(images)) * size > MAX_DEVICE_EMBEDDING_BYTES:
            return list(found.cpu())
        # each by itself: a view would keep the whole batch
        embeddings = [each.clone() for each in found]
        self._device_embeddings += map(weakref.ref, embeddings)
        return embeddings

    def _encode_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Pictures [B, S, S, 3] uint8 → embeddings [at least B, 32, hidden] on the device."""
        if self._graphs is not None:
            size = next(size for size in GRAPH_BATCH_SIZES if size >= len(batch))
            try:
                if size not in self._graphs:
                    self._graphs[size] = self._capture(size, batch)
                return self._graphs[size].replay(batch)
            except NotCapturable as error:
                _log.warning("pictures are read without CUDA graphs: %s", error)
                self._graphs = None
        return self._run_model(batch.to(self._device))

    def _run_model(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._model.encode_images(batch.permute(0, 3, 1, 2), self._ops)
        return found

    def _capture(self, size: int, batch: torch.Tensor) -> _VisionGraph:
        """Raises NotCapturable where an op waits for the host."""
        given = torch.zeros(size, *batch.shape[1:], dtype=torch.uint8, device=self._device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run_model(given)  # what compiles or allocates at first
            dry_run(lambda: self._run_model(given))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._run_model(given)
        return _VisionGraph(graph, given, out)

    def _check_image(self, insert: EmbeddingSpan) -> None:
        size = getattr(self._model, "image_size", None)
        if size is None:
            raise RequestError("this engine reads no pictures")
        shape = tuple(insert.handle.shape)
        if shape != (size, size, 3) or insert.length != self._model.image_tokens:
            raise RequestError(
                f"a picture for this engine is {size} × {size} of 3 bytes, not {list(shape)}"
            )

    def _cache_embeddings(self, new_embeddings: dict[EmbeddingKey, torch.Tensor]) -> None:
        """The latest stay, as many as there is room for."""
        for key, embeddings in new_embeddings.items():
            self._cache[key] = embeddings
            self._cache.move_to_end(key)
        while self._cache and self.cached_bytes > self._max_cache_bytes:
            self._cache.popitem(last=False)


def _with_embeddings(request: Request, embeddings: dict[EmbeddingKey, torch.Tensor]) -> Request:
    def embedded(insert: EmbeddingSpan) -> EmbeddingSpan:
        return replace(
            insert, handle=embeddings.get((request.cache_salt, insert.digest), insert.handle)
        )

    spans = tuple(map(embedded, request.embedding_spans))
    return replace(request, embedding_spans=spans) if spans else request
