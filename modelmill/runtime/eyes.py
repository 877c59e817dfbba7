"""Pictures of requests become embeddings, before the loop queues them; those of pictures seen lately are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import RequestError
from modelmill.core.types import Insert, Request
from modelmill.ops.shelf import Ops

# pictures through the eyes at once: more gain nothing on a GPU, and take memory beside the KV pages
BATCH = 8
KEPT_BYTES = 64 << 20
Key = tuple[str, str]
"""A request's cache_salt and a picture's digest."""


class Eyes:
    """What a model with eyes (``read``, ``image_size``, ``image_tokens``) makes of pictures.

    Requests of different salts share no embeddings: how fast a picture is answered would tell that it was seen.
    """

    def __init__(self, model: nn.Module, ops: Ops, device: str, kept_bytes: int = KEPT_BYTES) -> None:
        self._model: Any = model
        self._ops, self._device = ops, device
        self._kept: OrderedDict[Key, torch.Tensor] = OrderedDict()
        self._room = kept_bytes

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
            found.update(zip(some, self._read([wanted[key] for key in some]), strict=True))
        self._keep(found)
        return [_with(request, found) for request in requests]

    def _read(self, pictures: list[Any]) -> Iterable[torch.Tensor]:
        """Embeddings on the CPU, where the packer takes them from."""
        batch = torch.stack([torch.as_tensor(picture) for picture in pictures]).permute(0, 3, 1, 2)
        with torch.inference_mode():
            return list(self._model.read(batch.to(self._device), self._ops).cpu())

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
