"""Large bodies are parsed beside small ones, and only so many wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from modelmill.serve.errors import ApiError
from modelmill.serve.service import (
    MAX_QUEUED_BODIES_OF_MAX_SIZE,
    MIN_LARGE_BODY_BYTES,
    Service,
    ServiceLimits,
)
from tests.wait import TIMEOUT_SECONDS


def test_a_large_body_holds_up_no_small_one_and_the_queue_is_bounded() -> None:
    async def main() -> None:
        service, go = (
            Service({}, ServiceLimits(max_body_bytes=2 * MIN_LARGE_BODY_BYTES)),
            threading.Event(),
        )
        try:
            large = [
                asyncio.create_task(
                    service.parse_in_thread(
                        lambda data: go.wait(TIMEOUT_SECONDS), bytearray(2 * MIN_LARGE_BODY_BYTES)
                    )
                )
                for _ in range(MAX_QUEUED_BODIES_OF_MAX_SIZE)
            ]
            await asyncio.sleep(0)
            with pytest.raises(ApiError) as refused:
                await service.parse_in_thread(len, bytearray(MIN_LARGE_BODY_BYTES + 1))
            assert (
                await service.parse_in_thread(len, bytearray(MIN_LARGE_BODY_BYTES))
                == MIN_LARGE_BODY_BYTES
            ), "in the lane of small ones"
            assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")
            large.pop().cancel()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while (
                    sum(service._parsing_bytes.values())
                    > (MAX_QUEUED_BODIES_OF_MAX_SIZE - 1) * 2 * MIN_LARGE_BODY_BYTES
                ):
                    await asyncio.sleep(0)  # one that was given up makes room
            large.append(
                asyncio.create_task(
                    service.parse_in_thread(lambda _: True, bytearray(MIN_LARGE_BODY_BYTES + 1))
                )
            )
            go.set()
            assert all(await asyncio.gather(*large))
        finally:
            go.set()
            service.close()

    asyncio.run(main())
