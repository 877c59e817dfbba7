"""The tensor-parallel group: the ranks that run one model together, passed as an object.

``TPGroup`` is a single rank: its all_reduce returns its input, and it does not import
torch.distributed. ``DistributedTPGroup`` is one of several processes, each with a GPU of one host
(NCCL, and a custom all-reduce for the small messages of a decode step) or with the CPU (gloo).
Every rank must make the same calls in the same order. All ranks receive identical values, so that
norms, logits and sampled ids are identical too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from modelmill.core import log
from modelmill.core.errors import MissingDependency
from modelmill.parallel.peer_buffers import PeerBuffers

AddRmsNormOp = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_log = log.get_logger(__name__)
_NO_TIMEOUT = timedelta(days=30)  # waits are ended by the watcher of the processes, not by time


class TPGroup:
    """A single rank.

    With another rank and size it serves only to compute the shards of such a rank.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.peer_buffers: PeerBuffers | None = None

    def all_reduce(self, x: torch.Tensor, *, captured: bool = False) -> torch.Tensor:  # noqa: ARG002
        """The sum of x over the ranks, the same on all; x may be overwritten.

        ``captured``: within a step that may be captured in a CUDA graph, which NCCL stays out of.
        """
        return x

    def all_reduce_add_rms_norm(
        self,
        op: AddRmsNormOp,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        captured: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``op`` (add_rms_norm) on the sum of x [T, H] over the ranks.

        One kernel with the all-reduce for small messages.
        """
        if (
            self.peer_buffers is not None
            and residual.is_contiguous()
            and residual.dtype == weight.dtype == x.dtype
            and self.peer_buffers.should_all_reduce(x, captured=captured)
        ):
            return self.peer_buffers.all_reduce_add_rms_norm(x, residual, weight, eps)
        return op(self.all_reduce(x, captured=captured), residual, weight, eps)

    def all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        """Gather columns: [T, widths[rank]] → [T, sum(widths)], in the order of the ranks."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor; the others pass one of its shape and dtype, which is overwritten."""
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def abort(self) -> None:
        """End all waiting and later collectives without a result, because a rank has ended."""


SINGLE_RANK = TPGroup()


class DistributedTPGroup(TPGroup):
    """One of several ranks, each a process."""

    def __init__(
        self, rank: int, size: int, rendezvous: Any, device: str, seconds: float = 120.0
    ) -> None:
        """Connect to the other ranks.

        Args:
            rank: This rank.
            size: Number of ranks.
            rendezvous: A torch store that all ranks reach.
            device: Of this rank.
            seconds: How long to wait for the others.

        Raises:
            RuntimeError: They did not connect in time.
            MissingDependency: torch was built without NCCL.
        """
        import torch.distributed as dist

        super().__init__(rank, size)
        self.device = torch.device(device)
        store = dist.PrefixStore("group", rendezvous)
        store.set_timeout(timedelta(seconds=seconds))
        self._min_options = dist.AllreduceOptions()
        self._min_options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        if self.device.type == "cuda":
            if not dist.is_nccl_available():
                raise MissingDependency(
                    "--tp on GPUs needs a torch that is built with NCCL; use one GPU"
                )
            torch.cuda.set_device(self.device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NO_TIMEOUT
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            # NCCL creates the communicator at the first use, which must not be in a graph
            self.all_reduce_min(0)
            self.peer_buffers = PeerBuffers.connect(
                rank, size, rendezvous, self.device, lambda yes: bool(self.all_reduce_min(int(yes)))
            )
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
            self._group.set_timeout(_NO_TIMEOUT)

    def all_reduce(self, x: torch.Tensor, *, captured: bool = False) -> torch.Tensor:
        """All-reduce: custom kernel for small messages, else NCCL or gloo."""
        if self.peer_buffers is not None and self.peer_buffers.should_all_reduce(
            x, captured=captured
        ):
            return self.peer_buffers.all_reduce(x)
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """All-gather of columns: custom kernel for small messages, else NCCL or gloo."""
        if self.peer_buffers is not None and self.peer_buffers.supports_all_gather(x, widths):
            return self.peer_buffers.all_gather(x, widths)
        widest = max(widths)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        gathered = torch.empty((self.size, *padded.shape), dtype=x.dtype, device=x.device)
        if x.is_cuda:
            self._group._allgather_base(gathered, padded).wait()
        else:
            self._group.allgather([list(gathered)], [padded]).wait()
        return torch.cat([part[:, :width] for part, width in zip(gathered, widths, strict=True)], 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's tensor; overwrites x on the others."""
        self._group.broadcast(x, 0).wait()
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest value of all ranks; waits for the device."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        self._group.allreduce([tensor], self._min_options).wait()
        return int(tensor.item())

    def abort(self) -> None:
        """End all waiting and later collectives without a result."""
        if self.peer_buffers is not None:
            self.peer_buffers.abort()
        try:
            self._group.abort()
        except RuntimeError as error:
            _log.debug("the process group could not be aborted: %s", error)
