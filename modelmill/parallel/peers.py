"""Memory that every GPU of a host can write, and the exchanges through it that a decode step makes.

NCCL needs 10 to 15 µs for the 8 KB of one token; a decode step has two such sums a layer. Here a sum is one kernel
(``ops.triton.exchange``) that takes a little more than the way over NVLink, and adds the residual and normalises as
well. NVLink multicast is not used: it needs the host's fabric in an order that many do not have.
"""

from __future__ import annotations

import functools
import uuid
from typing import Any

import torch

from modelmill.core import env, log
from modelmill.parallel.shard import starts_of

REGION = 4096  # words of 32 bits in a row: 8,192 values of 16 bits, 4,096 of 32
_log = log.get(__name__)


class Peers:
    """This rank's buffer and the addresses of the others'."""

    def __init__(self, rank: int, buffer: torch.Tensor, addresses: tuple[int, ...]) -> None:
        from modelmill.ops.triton import exchange

        self._exchange = exchange
        self._keep = buffer
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        count = torch.zeros(exchange.PROGRAMS, dtype=torch.int32, device=buffer.device)
        self._buffers = exchange.Buffers(rank, addresses, count, self._stop, REGION)
        self._device = buffer.device

    @staticmethod
    def meet(rank: int, size: int, rendezvous: Any, device: torch.device) -> Peers | None:
        """Collective. None, with a line in the log, where GPUs cannot reach each other's memory or Triton is absent."""
        from torch.distributed import PrefixStore
        from torch.distributed._symmetric_memory import _SymmetricMemory

        try:
            from modelmill.ops.triton.exchange import Buffers

            env.forgo_multicast()
            if rank == 0:
                rendezvous.set("peers", uuid.uuid4().hex)
            # torch takes a name once in the life of a process
            name = "modelmill-" + rendezvous.get("peers").decode()
            _SymmetricMemory.set_group_info(name, rank, size, PrefixStore(name, rendezvous))
            words = Buffers.words(size, REGION)
            buffer = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int64, device, name)
            buffer.zero_()
            torch.cuda.synchronize(device)
            handle = _SymmetricMemory.rendezvous(buffer)
            handle.barrier(0, 60_000)
            torch.cuda.synchronize(device)
            offset = buffer.data_ptr() - int(handle.buffer_ptrs[rank])
            return Peers(rank, buffer, tuple(int(p) + offset for p in handle.buffer_ptrs))
        except (RuntimeError, ImportError, AttributeError) as error:
            _log.warning("sums of decode steps go through NCCL: %s", str(error).splitlines()[0])
            return None

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x [T, H] is small and regular enough."""
        words = x.shape[-1] * x.element_size()
        small = 0 < x.shape[0] <= self._exchange.PROGRAMS and words <= 4 * REGION
        return x.dim() == 2 and small and words % 4 == 0 and x.is_contiguous() and x.element_size() in (2, 4)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """As ``Mesh.sum``."""
        return self._exchange.sum_rows(x, None, self._buffers)[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``Mesh.add_rms_norm``, in one kernel; the residual is overwritten."""
        return self._exchange.sum_rows(x, (residual, weight, eps), self._buffers)

    def gathers(self, x: torch.Tensor, widths: tuple[int, ...]) -> bool:
        """Whether ``gather`` takes them."""
        blocks = self._exchange.blocks_of(max(widths), x.dtype) * x.shape[0]
        even = all(width * x.element_size() % 4 == 0 for width in widths)
        return even and 0 < blocks <= self._exchange.PROGRAMS and x.is_contiguous() and x.element_size() in (2, 4)

    def gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """As ``Mesh.gather``."""
        return self._exchange.gather_columns(x, _starts(widths, self._device), widths, self._buffers)

    def stop(self) -> None:
        """Nobody waits any more; results are worthless from here on."""
        self._stop.fill_(1)


@functools.lru_cache
def _starts(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(starts_of(widths), dtype=torch.int32, device=device)
