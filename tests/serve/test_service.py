"""Large bodies are parsed beside small ones, and only so many wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from modelmill.serve.errors import ApiError
from modelmill.serve.service import LARGE_BODY, QUEUED_BODIES, Limits, Service
from tests.patience import PATIENCE


def test_a_large_body_holds_up_no_small_one_and_the_queue_is_bounded() -> None:
    async def main() -> None:
        service, go = Service({}, Limits(body=2 * LARGE_BODY)), threading.Event()
        try:
            large = [
                asyncio.create_task(service.beside(lambda data: go.wait(PATIENCE), bytearray(2 * LARGE_BODY)))
                for _ in range(QUEUED_BODIES)
            ]
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as refused:
                await service.beside(len, bytearray(LARGE_BODY))
            assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
            large.pop().cancel()
            async with asyncio.timeout(PATIENCE):
                while True:  # one that was given up makes room
                    try:
                        assert await service.beside(len, bytearray(LARGE_BODY)) == LARGE_BODY, (
                            "in the lane of small ones"
                        )
                        break
                    except ApiError:
                        await asyncio.sleep(0.001)
            go.set()
            assert all(await asyncio.gather(*large))
        finally:
            go.set()
            service.close()

    asyncio.run(main())
