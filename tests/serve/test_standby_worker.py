"""A worker process that is kept ready for the next load."""

from __future__ import annotations

import asyncio
import socket

from modelmill.serve.standby_worker import StandbyLauncher


class FakeProcess:
    """A process that ends when it is killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = asyncio.Event()

    def kill(self) -> None:
        self.ended.set()

    async def wait(self) -> int:
        await self.ended.wait()
        return -9


class FakeLauncher:
    """Starts processes with numbers; ``error`` fails the next start."""

    def __init__(self) -> None:
        self.processes: list[FakeProcess] = []
        self.error: OSError | None = None

    async def __call__(self) -> tuple[socket.socket, FakeProcess]:
        if self.error is not None:
            raise self.error
        self.processes.append(FakeProcess(len(self.processes)))
        return socket.socket(), self.processes[-1]


async def take(standby: StandbyLauncher) -> int:
    """The number of the launched process."""
    sock, process = await standby()
    sock.close()
    return process.pid


def test_the_waiting_process_is_used_and_replaced() -> None:
    async def main() -> None:
        launch = FakeLauncher()
        standby = StandbyLauncher(launch, delay=0.0)
        await standby.refill()
        await standby.refill()
        assert len(launch.processes) == 1
        assert await take(standby) == 0
        async with asyncio.timeout(50):
            while len(launch.processes) < 2:
                await asyncio.sleep(0.001)
        assert await take(standby) == 1
        await standby.close()
        assert not launch.processes[0].ended.is_set(), "it belongs to its engine"
        assert all(each.ended.is_set() for each in launch.processes[2:])

    asyncio.run(main())


def test_without_a_waiting_process_one_is_started() -> None:
    async def main() -> None:
        launch = FakeLauncher()
        standby = StandbyLauncher(launch, delay=1e6)
        assert [await take(standby), await take(standby)] == [0, 1]
        await standby.close()

    asyncio.run(main())


def test_a_killed_process_is_not_used() -> None:
    async def main() -> None:
        launch = FakeLauncher()
        standby = StandbyLauncher(launch, delay=1e6)
        await standby.refill()
        launch.processes[0].kill()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await take(standby) == 1
        await standby.close()

    asyncio.run(main())


def test_a_process_that_cannot_be_started_is_started_when_it_is_needed() -> None:
    async def main() -> None:
        launch = FakeLauncher()
        launch.error = OSError(11, "Resource temporarily unavailable")
        standby = StandbyLauncher(launch, delay=1e6)
        await standby.refill()
        launch.error = None
        assert await take(standby) == 0
        await standby.close()

    asyncio.run(main())
