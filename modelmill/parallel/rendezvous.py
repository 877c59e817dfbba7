"""Where ranks find each other: torch's store, served by rank 0 to this machine only."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"


class RendezvousServer:
    """Rank 0's side.

    The port is taken by the system and held from here on: nobody else can get it in between.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind((LOOPBACK, 0))
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]

    def serve(self) -> Any:
        """Serve; the server lives as long as what is returned. Called once."""
        return connect(self.port, self._socket.detach())


def connect(port: int, listen_fd: int | None = None) -> Any:
    """The store at a port; listen_fd: the listening socket's descriptor, where this rank serves
    it.
    """
    import torch.distributed as dist

    more: dict[str, Any] = {} if listen_fd is None else {"master_listen_fd": listen_fd}
    return dist.TCPStore(
        LOOPBACK,
        port,
        None,
        listen_fd is not None,
        timedelta(seconds=120),
        wait_for_workers=False,
        **more,
    )
