"""Memory that every GPU of a host can write, and the exchanges through it that a decode step makes.

NCCL needs 10 to 15 µs for the 8 KB of one token; a decode step has two such sums a layer. Here a
sum is one kernel (``ops.triton.custom_all_reduce``) that takes a little more than the way over
NVLink, and adds the residual and normalises as well. NVLink multicast is not used: it needs the
host's fabric in an order that many do not have. NCCL stays outside of graphs: its communicator
cannot be ended while a graph that holds a call of it exists.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from modelmill.core import log
from modelmill.parallel import cuda_ipc
from modelmill.parallel.shard import range_starts

# of an exchange: all that a graph of a decode step holds, so that no graph holds a call of NCCL
MAX_ROWS = 512
ROW_WORDS = 4096  # words of 32 bits in a row: 8,192 values of 16 bits, 4,096 of 32
_log = log.get_logger(__name__)


class PeerBuffers:
    """This rank's buffer and the addresses of the others'."""

    def __init__(self, rank: int, addresses: tuple[int, ...], device: torch.device) -> None:
        from modelmill.ops.triton import custom_all_reduce

        self._kernels = custom_all_reduce
        self._abort_flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        count = torch.zeros(custom_all_reduce.MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._buffers = custom_all_reduce.AllReduceBuffers(
            rank, addresses, count, self._abort_flag, ROW_WORDS
        )
        self._device = device
        others = [address for other, address in enumerate(addresses) if other != rank]
        # not at the end of the process: the system takes everything back there
        weakref.finalize(self, cuda_ipc.release, addresses[rank], others).atexit = False

    @staticmethod
    def connect(
        rank: int,
        size: int,
        rendezvous: Any,
        device: torch.device,
        all_agree: Callable[[bool], bool],
    ) -> PeerBuffers | None:
        """Collective. None, with a line in the log, where GPUs cannot reach each other's memory or
        Triton is absent.

        all_agree: whether all ranks say so.
        """
        addresses: tuple[int, ...] | None = None
        try:
            from modelmill.ops.triton.custom_all_reduce import AllReduceBuffers

            own = cuda_ipc.allocate(8 * AllReduceBuffers.words(size, ROW_WORDS))
            rendezvous.set(f"peer {rank}", cuda_ipc.export_handle(own))
            handles = [bytes(rendezvous.get(f"peer {other}")) for other in range(size)]
            addresses = tuple(
                own if other == rank else cuda_ipc.map_handle(handles[other])
                for other in range(size)
            )
        except (RuntimeError, ImportError) as error:
            rendezvous.set(f"peer {rank}", b"")
            _log.warning("sums of decode steps go through NCCL: %s", str(error).splitlines()[0])
        return (
            PeerBuffers(rank, addresses, device)
            if all_agree(addresses is not None) and addresses is not None
            else None
        )

    def supports_all_reduce(self, x: torch.Tensor, *, decode: bool) -> bool:
        """Whether x [T, H] is small and regular enough; of a prompt, so small that NCCL would be
        slower.
        """
        max_rows = MAX_ROWS if decode else self._kernels.MAX_PROGRAMS
        width = x.shape[-1] * x.element_size()
        fits = 0 < x.shape[0] <= max_rows and width <= 4 * ROW_WORDS and width % 4 == 0
        return x.dim() == 2 and fits and x.is_contiguous() and x.element_size() in (2, 4)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As ``TPGroup.all_reduce``."""
        return self._kernels.all_reduce_rows(x, None, self._buffers)[0]

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``TPGroup.all_reduce_add_rms_norm``, in one kernel; the residual is overwritten."""
        return self._kernels.all_reduce_rows(x, (residual, weight, eps), self._buffers)

    def supports_all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> bool:
        """Whether ``all_gather`` takes them."""
        even = all(width * x.element_size() % 4 == 0 for width in widths)
        return (
            even and 0 < x.shape[0] <= MAX_ROWS and x.is_contiguous() and x.element_size() in (2, 4)
        )

    def all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """As ``TPGroup.all_gather``."""
        return self._kernels.all_gather_columns(
            x, _starts(widths, self._device), widths, self._buffers
        )

    def abort(self) -> None:
        """Nobody waits any more; results are worthless from here on."""
        self._abort_flag.fill_(1)


@functools.lru_cache
def _starts(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(range_starts(widths), dtype=torch.int32, device=device)
