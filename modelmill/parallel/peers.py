"""Memory that every GPU of a host can write, and the exchanges through it that a decode step makes.

NCCL needs 10 to 15 µs for the 8 KB of one token; a decode step has two such sums a layer. Here a sum is one kernel
(``ops.triton.exchange``) that takes a little more than the way over NVLink, and adds the residual and normalises as
well. NVLink multicast is not used: it needs the host's fabric in an order that many do not have.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import Any

import torch

from modelmill.core import env, log
from modelmill.parallel import ipc
from modelmill.parallel.shard import starts_of

REGION = 4096  # words of 32 bits in a row: 8,192 values of 16 bits, 4,096 of 32
_log = log.get(__name__)


class Peers:
    """This rank's buffer and the addresses of the others'."""

    def __init__(self, rank: int, addresses: tuple[int, ...], device: torch.device, keep: Any = None) -> None:
        from modelmill.ops.triton import exchange

        self._exchange = exchange
        self._keep = keep
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        count = torch.zeros(exchange.PROGRAMS, dtype=torch.int32, device=device)
        self._buffers = exchange.Buffers(rank, addresses, count, self._stop, REGION)
        self._device = device

    @staticmethod
    def meet(
        rank: int, size: int, rendezvous: Any, device: torch.device, agree: Callable[[bool], bool], group: Any
    ) -> Peers | None:
        """Collective. None, with a line in the log, where GPUs cannot reach each other's memory or Triton is absent.

        agree: whether all ranks say so.
        """
        for way in (_mapped, _symmetric):
            found = None
            try:
                found = way(rank, size, rendezvous, device, group)
            except (RuntimeError, ImportError, AttributeError, TypeError) as error:
                _log.warning("%s: %s", way.__name__, str(error).splitlines()[0])
            if agree(found is not None) and found is not None:
                addresses, keep = found
                return Peers(rank, addresses, device, keep)
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


Found = tuple[tuple[int, ...], Any]


def _mapped(rank: int, size: int, rendezvous: Any, device: torch.device, group: Any) -> Found:  # noqa: ARG001
    from modelmill.ops.triton.exchange import Buffers

    own = ipc.allocate(8 * Buffers.words(size, REGION))
    rendezvous.set(f"peer {rank}", ipc.handle_of(own))
    handles = [bytes(rendezvous.get(f"peer {other}")) for other in range(size)]
    addresses = tuple(own if other == rank else ipc.mapped(handles[other]) for other in range(size))
    return addresses, None


def _symmetric(rank: int, size: int, rendezvous: Any, device: torch.device, group: Any) -> Found:
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group
    from torch.distributed import PrefixStore
    from torch.distributed._symmetric_memory import _SymmetricMemory

    from modelmill.ops.triton.exchange import Buffers

    env.forgo_multicast()
    if rank == 0:
        rendezvous.set("peers", uuid.uuid4().hex)
    # torch takes a name once in the life of a process
    name = "modelmill-" + rendezvous.get("peers").decode()
    store = PrefixStore(name, rendezvous)
    whole = ProcessGroup(store, rank, size)
    whole._register_backend(device, ProcessGroup.BackendType.NCCL, group)
    whole._set_group_name(name)
    _register_process_group(name, whole)
    _SymmetricMemory.set_group_info(name, rank, size, store)
    buffer = _SymmetricMemory.empty_strided_p2p((Buffers.words(size, REGION),), (1,), torch.int64, device, name)
    buffer.zero_()
    torch.cuda.synchronize(device)
    handle = _SymmetricMemory.rendezvous(buffer)
    handle.barrier(0, 60_000)
    torch.cuda.synchronize(device)
    offset = buffer.data_ptr() - int(handle.buffer_ptrs[rank])
    return tuple(int(p) + offset for p in handle.buffer_ptrs), (buffer, whole)


@functools.lru_cache
def _starts(widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(starts_of(widths), dtype=torch.int32, device=device)
