"""Memory that every GPU of a host can write, and the exchanges through it that a decode step makes.

NCCL needs 10 to 15 µs for the 8 KB of one token; a decode step has two such sums a layer. Here a sum is one kernel
(``ops.triton.exchange``) that takes a little more than the way over NVLink, and adds the residual and normalises as
well. NVLink multicast is not used: it needs the host's fabric in an order that many do not have. NCCL stays outside of
graphs: its communicator cannot be ended while a graph that holds a call of it exists.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from modelmill.core import log
from modelmill.parallel import ipc
from modelmill.parallel.shard import starts_of

ROWS = 512  # of an exchange: all that a graph of a decode step holds, so that no graph holds a call of NCCL
REGION = 4096  # words of 32 bits in a row: 8,192 values of 16 bits, 4,096 of 32
_log = log.get(__name__)


class Peers:
    """This rank's buffer and the addresses of the others'."""

    def __init__(self, rank: int, addresses: tuple[int, ...], device: torch.device) -> None:
        from modelmill.ops.triton import exchange

        self._exchange = exchange
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        count = torch.zeros(exchange.PROGRAMS, dtype=torch.int32, device=device)
        self._buffers = exchange.Buffers(rank, addresses, count, self._stop, REGION)
        self._device = device
        others = [address for other, address in enumerate(addresses) if other != rank]
        # not at the end of the process: the system takes everything back there
        weakref.finalize(self, ipc.release, addresses[rank], others).atexit = False

    @staticmethod
    def meet(
        rank: int, size: int, rendezvous: Any, device: torch.device, agree: Callable[[bool], bool]
    ) -> Peers | None:
        """Collective. None, with a line in the log, where GPUs cannot reach each other's memory or Triton is absent.

        agree: whether all ranks say so.
        """
        addresses: tuple[int, ...] | None = None
        try:
            from modelmill.ops.triton.exchange import Buffers

            own = ipc.allocate(8 * Buffers.words(size, REGION))
            rendezvous.set(f"peer {rank}", ipc.handle_of(own))
            handles = [bytes(rendezvous.get(f"peer {other}")) for other in range(size)]
            addresses = tuple(own if other == rank else ipc.mapped(handles[other]) for other in range(size))
        except (RuntimeError, ImportError) as error:
            rendezvous.set(f"peer {rank}", b"")
            _log.warning("sums of decode steps go through NCCL: %s", str(error).splitlines()[0])
        return Peers(rank, addresses, device) if agree(addresses is not None) and addresses is not None else None

    def takes(self, x: torch.Tensor, *, decode: bool) -> bool:
        """Whether x [T, H] is small and regular enough; of a prompt, so small that NCCL would be slower."""
        most = ROWS if decode else self._exchange.PROGRAMS
        width = x.shape[-1] * x.element_size()
        fits = 0 < x.shape[0] <= most and width <= 4 * REGION and width % 4 == 0
        return x.dim() == 2 and fits and x.is_contiguous() and x.element_size() in (2, 4)

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
        even = all(width * x.element_size() % 4 == 0 for width in widths)
        return even and 0 < x.shape[0] <= ROWS and x.is_contiguous() and x.element_size() in (2, 4)

    def gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """As ``Mesh.gather``."""
        return self._exchange.gather_columns(x, _starts(widths, self._device), widths, self._buffers)

    def stop(self) -> None:
        """Nobody waits any more; results are worthless from here on."""
        self._stop.fill_(1)


@functools.lru_cache
def _starts(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(starts_of(widths), dtype=torch.int32, device=device)
