"""GPU memory that all ranks of a host map, and the all-reduces of small steps through it.

NCCL needs 10 to 15 µs to all-reduce the 8 KB of one token, twice per layer. Here an all-reduce is
one kernel (``ops.triton.communication.custom_all_reduce``) that takes little longer than the NVLink
transfer, and that is fused with residual add and RMSNorm. NVLink multicast is not used: it needs a
fabric setup that many hosts do not have. NCCL calls are kept out of CUDA graphs, of prompts too: a
communicator cannot be closed while a graph that contains a call of it exists. Only where GPUs do
not reach each other, and of rows that are too wide, graphs contain NCCL's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from modelmill.core import log
from modelmill.parallel import cuda_ipc
from modelmill.parallel.shard import cumulative_offsets

# rows of a transfer: as many as the largest CUDA graph of a step has, so that none needs NCCL
MAX_ROWS = 1024
ROW_WORDS = 4096  # 32-bit words of a row: 8,192 values of 16 bits, 4,096 of 32
_log = log.get_logger(__name__)


class PeerBuffers:
    """This rank's buffer and the mapped addresses of the other ranks' buffers."""

    def __init__(self, rank: int, addresses: tuple[int, ...], device: torch.device) -> None:
        from modelmill.ops.triton.communication import custom_all_reduce

        self._kernels = custom_all_reduce
        self._abort_flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        count = torch.zeros(custom_all_reduce.MAX_PROGRAMS, dtype=torch.int32, device=device)
        self._buffers = custom_all_reduce.AllReduceBuffers(
            rank, addresses, count, self._abort_flag, ROW_WORDS
        )
        self._device = device
        others = [address for other, address in enumerate(addresses) if other != rank]
        # not at process exit, where the operating system frees everything
        weakref.finalize(self, cuda_ipc.unmap_and_free, addresses[rank], others).atexit = False

    @staticmethod
    def connect(
        rank: int,
        size: int,
        rendezvous: Any,
        device: torch.device,
        all_agree: Callable[[bool], bool],
    ) -> PeerBuffers | None:
        """Allocate and map the buffers of all ranks (a collective call).

        Args:
            rank: This rank.
            size: Number of ranks.
            rendezvous: The store through which IPC handles are exchanged.
            device: This rank's GPU.
            all_agree: Collective logical and.

        Returns:
            None, with a warning in the log, if peer access or Triton is missing on any rank.
        """
        addresses: tuple[int, ...] | None = None
        try:
            from modelmill.ops.triton.communication import custom_all_reduce

            reason = custom_all_reduce.unavailable_reason(device.type)
            if reason is not None:
                raise RuntimeError(reason)
            words = custom_all_reduce.AllReduceBuffers.count_buffer_words(size, ROW_WORDS)
            own = cuda_ipc.allocate_zeroed(8 * words)
            rendezvous.set(f"peer {rank}", cuda_ipc.export_handle(own))
            handles = [bytes(rendezvous.get(f"peer {other}")) for other in range(size)]
            addresses = tuple(
                own if other == rank else cuda_ipc.map_handle(handles[other])
                for other in range(size)
            )
        except (RuntimeError, ImportError) as error:
            rendezvous.set(f"peer {rank}", b"")
            _log.warning("all-reduces in CUDA graphs use NCCL: %s", str(error).splitlines()[0])
        return (
            PeerBuffers(rank, addresses, device)
            if all_agree(addresses is not None) and addresses is not None
            else None
        )

    def should_all_reduce(self, x: torch.Tensor, *, captured: bool) -> bool:
        """Whether ``all_reduce`` takes x [T, H]; outside of graphs only if faster than NCCL."""
        max_rows = MAX_ROWS if captured else self._kernels.MAX_PROGRAMS
        width = x.shape[-1] * x.element_size()
        fits = 0 < x.shape[0] <= max_rows and width <= 4 * ROW_WORDS and width % 4 == 0
        return x.dim() == 2 and fits and x.is_contiguous() and x.element_size() in (2, 4)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce; see ``TPGroup.all_reduce``."""
        return self._kernels.all_reduce_rows(x, None, self._buffers)[0]

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``TPGroup.all_reduce_add_rms_norm`` in one kernel; the residual is overwritten."""
        return self._kernels.all_reduce_rows(x, (residual, weight, eps), self._buffers)

    def supports_all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> bool:
        """Whether ``all_gather`` takes x with these widths."""
        even = all(width * x.element_size() % 4 == 0 for width in widths)
        return (
            even and 0 < x.shape[0] <= MAX_ROWS and x.is_contiguous() and x.element_size() in (2, 4)
        )

    def all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """All-gather of columns; see ``TPGroup.all_gather``."""
        return self._kernels.all_gather_columns(
            x, _column_offsets(widths, self._device), widths, self._buffers
        )

    def abort(self) -> None:
        """End all waits of running kernels; their results are invalid from here on."""
        self._abort_flag.fill_(1)


@functools.lru_cache
def _column_offsets(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(cumulative_offsets(widths), dtype=torch.int32, device=device)
