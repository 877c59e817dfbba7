"""A service with two engines, one that writes and one that sees, and pictures to send it."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from modelmill.serve.engine_client import EngineClient
from modelmill.serve.service import Service, ServiceLimits
from modelmill.serve.worker_messages import OpenEngine
from tests.serve.service_thread import RUN, ServiceThread, with_long_stats_timeout


class SegmentService(ServiceThread):
    """``engine`` is the one that writes, ``segment_engine`` the one that sees.

    The latter takes pictures of up to 2 megapixels and caches a megabyte of embeddings.
    """

    def __init__(self, stories: Path, sam: Path) -> None:
        self._sam = sam
        super().__init__(stories)
        self.segment_engine = self.service.engines["sam"]

    async def _make_service(
        self, path: Path, limits: ServiceLimits, template: str | None, run: dict[str, Any]
    ) -> Service:
        service = await super()._make_service(path, limits, template, run)
        order = OpenEngine(str(self._sam), {}, RUN, max_pixels=1 << 21, image_cache_bytes=1 << 20)
        client = with_long_stats_timeout(EngineClient("sam", order, max_waiting=16))
        self._second = asyncio.create_task(client.supervise_worker())
        await client.load_finished.wait()
        assert client.error is None, client.error
        return Service({**service.engines, "sam": client}, limits)

    def close(self) -> None:
        async def end() -> None:
            await self.segment_engine.close()
            await self._second

        self.run(end())
        super().close()


def random_photo(seed: int = 0, size: tuple[int, int] = (120, 80)) -> PIL.Image.Image:
    """Blurred noise, (width, height)."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return PIL.Image.fromarray(noise).resize(size, PIL.Image.Resampling.BICUBIC)


def encode_image(picture: PIL.Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, image_format, **options)
    return out.getvalue()


def data_url(data: bytes, mime_type: str = "image/png") -> str:
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"
