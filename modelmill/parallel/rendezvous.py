"""Rendezvous of the ranks: a torch TCPStore on rank 0, reachable from this machine only."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"


class RendezvousServer:
    """Rank 0's side of the rendezvous.

    The socket is bound here and passed to the store, so that no other process can take the port
    in between.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]

    def start_store(self) -> Any:
        """Start the store, which runs as long as the returned object lives. Call it once."""
        return connect_or_serve_store(self.port, self._socket.detach())


def connect_or_serve_store(port: int, listen_fd: int | None = None) -> Any:
    """Connect to the store at a port; ``listen_fd``: serve it, on this listening socket."""
    import torch.distributed as dist

    options: dict[str, Any] = {} if listen_fd is None else {"master_listen_fd": listen_fd}
    return dist.TCPStore(
        LOOPBACK,
        port,
        None,
        listen_fd is not None,
        timedelta(seconds=120),
        wait_for_workers=False,
        **options,
    )
