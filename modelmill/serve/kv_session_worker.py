"""Saves and restores sessions in the worker: pages between two steps, files on a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from modelmill.core.errors import ModelmillError
from modelmill.core.types import ImageEmbeddingSpan
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.session_file import read_session, write_session
from modelmill.runtime.session_pages import (
    SessionPages,
    export_session,
    import_session,
    session_compatibility_layout,
)
from modelmill.serve.worker_messages import KvSessionReply, Message, RestoreKvSession, SaveKvSession


@dataclass(frozen=True)
class LoadedKvSession:
    """A session whose file was read, on its way to the thread of the engine."""

    message: RestoreKvSession
    session: SessionPages


class KvSessionMessageHandler:
    """Handles SaveKvSession and RestoreKvSession."""

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[Message], None],
        enqueue: Callable[[LoadedKvSession], None],
    ) -> None:
        """Start without work.

        Args:
            core: the engine core.
            send: sends a message to the server; called from any thread.
            enqueue: queues a session for ``finish_restore``, on the engine's thread.
        """
        self._core, self._send, self._enqueue = core, send, enqueue
        self._layout = session_compatibility_layout(core)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-session")

    def save(self, message: SaveKvSession) -> None:
        """Copy the pages, and write them on the thread."""
        try:
            session = export_session(
                self._core,
                message.tokens,
                message.cache_salt,
                message.max_bytes,
                [ImageEmbeddingSpan(*each) for each in message.images],
            )
        except ModelmillError as error:
            self._send_failure(message.number, str(error))
            return
        self._pool.submit(self._write_session_file, message, session)

    def restore(self, message: RestoreKvSession) -> None:
        """Read the file on the thread; ``finish_restore`` follows."""
        self._pool.submit(self._read_session_file, message)

    def finish_restore(self, loaded: LoadedKvSession) -> None:
        """Put the pages of a file that was read into the prefix cache."""
        message = loaded.message
        try:
            tokens = import_session(self._core, loaded.session, message.cache_salt)
        except ModelmillError as error:
            self._send_failure(message.number, str(error))
            return
        self._send(KvSessionReply(message.number, tokens, loaded.session.nbytes))

    def _write_session_file(self, message: SaveKvSession, session: SessionPages) -> None:
        try:
            nbytes = write_session(Path(message.path), self._layout, session)
        except Exception as error:
            self._send_file_error(message.number, "written", error)
        else:
            self._send(KvSessionReply(message.number, len(session.tokens), nbytes))

    def _read_session_file(self, message: RestoreKvSession) -> None:
        try:
            session = read_session(Path(message.path), self._layout)
        except ModelmillError as error:
            self._send_failure(message.number, str(error))
        except Exception as error:
            self._send_file_error(message.number, "read", error)
        else:
            self._enqueue(LoadedKvSession(message, session))

    def _send_file_error(self, number: int, action: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        self._send_failure(number, f"the session cannot be {action}: {reason}")

    def _send_failure(self, number: int, reason: str) -> None:
        self._send(KvSessionReply(number, 0, 0, reason))
