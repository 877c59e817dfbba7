"""The server's side of saving and restoring sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from modelmill.core.errors import RequestError
from modelmill.core.types import Request
from modelmill.serve.worker_calls import WorkerCalls
from modelmill.serve.worker_messages import KvSessionReply, Message, RestoreKvSession, SaveKvSession


class KvSessionClient(WorkerCalls[KvSessionReply]):
    """Sessions that are being saved or restored by one worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__(send, RequestError)

    async def save(self, path: Path, prompt: Request, max_bytes: int) -> KvSessionReply:
        """Save the cached pages of a prompt.

        Args:
            path: of the file.
            prompt: the request that computed it.
            max_bytes: that the pages may take.

        Raises:
            RequestError: the worker refuses it.
            ModelmillError: the worker is lost.
        """
        images = [(each.position, each.length, each.digest) for each in prompt.embedding_spans]
        ids, salt = list(prompt.prompt), prompt.cache_salt
        return await self.call(
            lambda number: SaveKvSession(number, str(path), ids, salt, max_bytes, images)
        )

    async def restore(self, path: Path, cache_salt: str) -> KvSessionReply:
        """Restore a saved session; raises as ``save``."""
        return await self.call(lambda number: RestoreKvSession(number, str(path), cache_salt))
