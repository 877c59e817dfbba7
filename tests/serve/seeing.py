"""A service with two engines, one that writes and one that sees, and pictures to send it."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from modelmill.serve.engine import Engine
from modelmill.serve.message import Open
from modelmill.serve.service import Limits, Service
from tests.serve.running import RUN, Running, patient


class Seeing(Running):
    """``engine`` is the one that writes, ``eye`` the one that sees."""

    def __init__(self, stories: Path, sam: Path, limits: Limits | None = None, **order: Any) -> None:
        self._sam, self._order = sam, order
        super().__init__(stories, limits)
        self.eye = self.service.engines["sam"]

    async def _make(self, path: Path, limits: Limits, template: str | None, run: dict[str, Any]) -> Service:
        service = await super()._make(path, limits, template, run)
        order = Open(str(self._sam), {}, RUN, **{"most_pixels": 1 << 20, **self._order})
        eye = patient(Engine("sam", order, queue=16))
        self._second = asyncio.create_task(eye.run())
        await eye.settled.wait()
        assert eye.error is None, eye.error
        return Service({**service.engines, "sam": eye}, limits)

    def close(self) -> None:
        async def end() -> None:
            await self.eye.close()
            await self._second

        self.do(end())
        super().close()


def photo(seed: int = 0, size: tuple[int, int] = (120, 80)) -> PIL.Image.Image:
    """Blurred noise, (width, height)."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return PIL.Image.fromarray(noise).resize(size, PIL.Image.Resampling.BICUBIC)


def encoded(picture: PIL.Image.Image, form: str = "PNG", **how: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **how)
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
