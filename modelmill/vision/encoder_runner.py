"""Runs the vision encoder on the images of requests before they are queued, with an LRU cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from modelmill.core import log
from modelmill.core.errors import RequestError
from modelmill.core.image_embedding_cache import ImageEmbeddingCache
from modelmill.core.types import ImageEmbeddingSpan, Request
from modelmill.ops import cuda_graph
from modelmill.ops.registry import Ops

_log = log.get_logger(__name__)
# images per encoder call: more are not faster on a GPU, and take memory beside the KV pages
MAX_BATCH = 16
GRAPH_BATCH_SIZES = (1, 2, 4, 8, MAX_BATCH)
EMBEDDING_CACHE_BYTES = 64 << 20
MAX_DEVICE_EMBEDDING_BYTES = 192 << 20
EmbeddingKey = tuple[str, str]
"""A request's cache_salt and an image's digest."""


@dataclass
class _VisionGraph:
    """A captured encoder call for a batch size; ``images``: its input buffer."""

    graph: cuda_graph.CapturedGraph[torch.Tensor]
    images: torch.Tensor

    def replay(self, batch: torch.Tensor) -> torch.Tensor:
        """Encode a batch; rows after the batch's images are stale and must not be read."""
        self.images[: len(batch)].copy_(batch)
        return self.graph.replay()


class VisionEncoderRunner:
    """Encodes images with a model that has ``encode_images``, ``image_size`` and ``image_tokens``.

    Requests with different cache salts share no embeddings: the response time would reveal that
    another client has sent the same image. ``graphs``: use CUDA graphs, captured at the first use
    of a batch size.
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
        # the output of a replay is copied before the next one, so all graphs share one pool
        self._capturer = cuda_graph.GraphCapturer() if graphs else None
        self._cache: ImageEmbeddingCache[EmbeddingKey, torch.Tensor] = ImageEmbeddingCache(
            cache_bytes
        )
        self._device_embeddings: list[weakref.ref[torch.Tensor]] = []

    def set_ops(self, ops: Ops) -> None:
        """Use other ops from now on."""
        self._ops = ops

    @property
    def cached_bytes(self) -> int:
        """Bytes of the cached embeddings."""
        return self._cache.nbytes

    def replace_images_with_embeddings(self, requests: Sequence[Request]) -> list[Request]:
        """Replace images [S, S, 3] uint8 in the requests by embeddings [length, H].

        Raises RequestError if an image has a wrong shape or the engine has no vision encoder.
        """
        images: dict[EmbeddingKey, Any] = {}
        for request in requests:
            for span in request.embedding_spans:
                if not isinstance(span.handle, torch.Tensor):
                    self._check_image(span)
                    images[request.cache_salt, span.digest] = span.handle
        embeddings = {key: cached for key in images if (cached := self._cache.get(key)) is not None}
        missing = [key for key in images if key not in embeddings]
        for start in range(0, len(missing), MAX_BATCH):
            keys = missing[start : start + MAX_BATCH]
            encoded = self.encode_images([images[key] for key in keys])
            for key, embedding in zip(keys, encoded, strict=True):
                embeddings[key] = embedding
                self._cache.put(key, embedding)
        return [_with_image_embeddings(request, embeddings) for request in requests]

    def warm_up(self, max_batch: int = MAX_BATCH) -> None:
        """Capture the graphs of up to ``max_batch`` images now instead of at first use."""
        side = getattr(self._model, "image_size", 0)
        # the largest first: the others reuse its memory
        for count in (
            size
            for size in reversed(GRAPH_BATCH_SIZES)
            if size <= max_batch and side and self._graphs is not None
        ):
            self.encode_images([torch.zeros(side, side, 3, dtype=torch.uint8)] * count)

    @torch.inference_mode()
    def encode_images(self, images: Sequence[Any]) -> list[torch.Tensor]:
        """Encode images [S, S, 3] uint8 to embeddings [length, H].

        They stay on the device, without synchronization, up to MAX_DEVICE_EMBEDDING_BYTES; further
        ones go to the CPU, since many requests may be waiting.
        """
        # np.stack copies: arrays from another process may be read-only
        batch = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        output = self._encode_batch(batch)[: len(images)]
        self._device_embeddings = [ref for ref in self._device_embeddings if ref() is not None]
        size = output[0].numel() * output.itemsize
        if (len(self._device_embeddings) + len(images)) * size > MAX_DEVICE_EMBEDDING_BYTES:
            return list(output.cpu())
        # a view would keep the memory of the whole batch
        embeddings = [row.clone() for row in output]
        self._device_embeddings += map(weakref.ref, embeddings)
        return embeddings

    def _encode_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Encode images [B, S, S, 3] uint8 to [at least B, 32, hidden] on the device."""
        if self._graphs is not None:
            size = next(size for size in GRAPH_BATCH_SIZES if size >= len(batch))
            try:
                if size not in self._graphs:
                    self._graphs[size] = self._capture_graph(size, batch)
                return self._graphs[size].replay(batch)
            except cuda_graph.NotCapturable as error:
                _log.warning("vision encoder without CUDA graphs: %s", error)
                self._graphs = None
        return self._run_model(batch.to(self._device))

    def _run_model(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._model.encode_images(batch.permute(0, 3, 1, 2), self._ops)
        return output

    def _capture_graph(self, size: int, batch: torch.Tensor) -> _VisionGraph:
        """Capture a graph; raises cuda_graph.NotCapturable if an op synchronizes with the host."""
        images = torch.zeros(size, *batch.shape[1:], dtype=torch.uint8, device=self._device)
        assert self._capturer is not None
        with cuda_graph.run_on_side_stream(torch.cuda.Stream()):
            self._run_model(images)  # compiles kernels and allocates workspaces
            cuda_graph.run_without_host_sync(lambda: self._run_model(images))
        return _VisionGraph(self._capturer.capture(lambda: self._run_model(images)), images)

    def _check_image(self, span: ImageEmbeddingSpan) -> None:
        size = getattr(self._model, "image_size", None)
        if size is None:
            raise RequestError("this engine reads no images; it has no vision encoder")
        shape = tuple(span.handle.shape)
        if shape != (size, size, 3) or span.length != self._model.image_tokens:
            raise RequestError(
                f"an image for this engine must have shape [{size}, {size}, 3], not {list(shape)}"
            )


def _with_image_embeddings(
    request: Request, embeddings: dict[EmbeddingKey, torch.Tensor]
) -> Request:
    def with_embedding(span: ImageEmbeddingSpan) -> ImageEmbeddingSpan:
        return replace(span, handle=embeddings.get((request.cache_salt, span.digest), span.handle))

    spans = tuple(map(with_embedding, request.embedding_spans))
    return replace(request, embedding_spans=spans) if spans else request
