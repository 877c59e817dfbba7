"""Pinned memory of the host for a sleeping engine's weights, in blocks.

``cuMemHostAlloc`` fills pages with zeros on one thread, some 2.5 GB/s: of a 7B model in 16 bits it
takes most of the time to go to sleep. Here the pages are huge where the system has them, several
threads touch them, and each block is pinned as soon as its pages are there, while later ones are
touched and earlier ones filled by the GPU.

Unpinning takes seconds, too, during which the driver lets no other call in. So blocks are freed one
by one, with pauses, once an engine that has woken up has had time to answer; one that sleeps again
before that uses those that are left.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from modelmill.core.byte_size import format_bytes
from modelmill.core.errors import CapacityError
from modelmill.core.memory_limits import read_memory_info
from modelmill.loader.cuda_vmm import CudaDriver

BLOCK_BYTES = 256 << 20
PAGE_FAULT_THREADS = 8
PAGE_BYTES = mmap.PAGESIZE
FIRST_RELEASE_PAUSE_SECONDS, RELEASE_PAUSE_SECONDS = 2.0, 0.05
"""Seconds before the first block is freed, and between two: freeing one takes some 30 ms."""


class HostBlock:
    """Pages of the host, pinned or not yet.

    Attributes:
        address: of the first byte.
        nbytes: of the block.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.nbytes = nbytes
        self._pages = mmap.mmap(-1, nbytes, flags=flags)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                _madvise(self._pages, getattr(mmap, advice))
        self.address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()

    def fault_in_pages(self) -> None:
        """Have the system put memory behind every page; other threads run meanwhile."""
        torch.frombuffer(self._pages, dtype=torch.uint8)[::PAGE_BYTES].zero_()

    def close(self) -> None:
        """Give the pages back; they are not pinned."""
        self._pages.close()


class PinnedBlocks:
    """As many blocks as a number of bytes takes; none has memory at the begin."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver = driver
        self._sizes = [min(BLOCK_BYTES, nbytes - first) for first in range(0, nbytes, BLOCK_BYTES)]
        self._blocks: list[HostBlock] = []
        # of _blocks, which a thread empties from its end; where a garbage collection begins there,
        # it may close the memory of these blocks, and so release them
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def pin_and_yield_blocks(self) -> Iterator[HostBlock]:
        """Pin all blocks and yield each as soon as it can be filled, in order.

        Raises:
            CapacityError: the host has not so much left; all blocks are free again.
        """
        self._stop_releasing()
        missing = self._sizes[len(self._blocks) :]
        free = read_memory_info().free
        if sum(missing) > free:
            self.release()
            raise CapacityError(
                f"the host has no memory left to pin: {format_bytes(sum(missing))} are needed, "
                f"{format_bytes(free)} are free"
            )
        yield from list(self._blocks)
        with ThreadPoolExecutor(PAGE_FAULT_THREADS, "modelmill-pin") as pool:
            touched = [
                (block, pool.submit(block.fault_in_pages)) for block in map(HostBlock, missing)
            ]
            yield from self._pin_touched_blocks(touched)

    def pinned_blocks(self) -> list[HostBlock]:
        """The blocks that ``pin_and_yield_blocks`` has pinned."""
        return list(self._blocks)

    def release_in_background(self) -> None:
        """Free the blocks on a thread of its own, with pauses."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._release_with_pauses, args=(self._stop,), daemon=True
        )
        self._thread.start()

    def release(self) -> None:
        """Free the blocks now."""
        self._stop_releasing()
        while self._release_last():
            pass

    def _pin_touched_blocks(
        self, touched: list[tuple[HostBlock, Future[None]]]
    ) -> Iterator[HostBlock]:
        while touched:
            block, done = touched.pop(0)
            done.result()
            try:
                self._driver.pin(block.address, block.nbytes)
            except CapacityError:
                block.close()
                for other, unused in touched:
                    unused.cancel() or unused.result()
                    other.close()
                self._driver.synchronize()  # blocks before it may be being filled
                self.release()
                raise
            self._blocks.append(block)
            yield block

    def _release_with_pauses(self, stop: threading.Event) -> None:
        self._driver.make_current()
        pause = FIRST_RELEASE_PAUSE_SECONDS
        while not stop.wait(pause) and self._release_last():
            pause = RELEASE_PAUSE_SECONDS

    def _release_last(self) -> bool:
        """Free one block; false if there is none."""
        with self._lock:
            block = self._blocks.pop() if self._blocks else None
            if block is not None:
                self._driver.unpin(block.address)
                block.close()
        return block is not None

    def _stop_releasing(self) -> None:
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _madvise(pages: mmap.mmap, advice: int) -> None:
    """Give advice that the system may not know, as without huge pages."""
    try:
        pages.madvise(advice)
    except OSError:
        return
