"""Saves and restores sessions in the worker: pages between two steps, files on a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from modelmill.core.errors import ModelmillError
from modelmill.core.types import EmbeddingSpan
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.session_file import read_session, write_session
from modelmill.runtime.session_pages import (
    SessionPages,
    export_session,
    import_session,
    session_layout,
)
from modelmill.serve.worker_messages import Message, RestoreSession, SaveSession, SessionReply


@dataclass(frozen=True)
class LoadedSession:
    """A session whose file was read, on its way to the thread of the engine."""

    message: RestoreSession
    session: SessionPages


class SessionWorker:
    """Handles SaveSession and RestoreSession."""

    def __init__(
        self,
        core: EngineCore,
        send: Callable[[Message], None],
        enqueue: Callable[[LoadedSession], None],
    ) -> None:
        """Start without work.

        Args:
            core: the engine core.
            send: sends a message to the server; called from any thread.
            enqueue: queues a session for ``finish_restore``, on the engine's thread.
        """
        self._core, self._send, self._enqueue = core, send, enqueue
        self._layout = session_layout(core)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-session")

    def save(self, message: SaveSession) -> None:
        """Copy the pages, and write them on the thread."""
        try:
            session = export_session(
                self._core,
                message.tokens,
                message.cache_salt,
                message.max_bytes,
                [EmbeddingSpan(*each) for each in message.images],
            )
        except ModelmillError as error:
            self._refuse(message.number, str(error))
            return
        self._pool.submit(self._write, message, session)

    def restore(self, message: RestoreSession) -> None:
        """Read the file on the thread; ``finish_restore`` follows."""
        self._pool.submit(self._read, message)

    def finish_restore(self, loaded: LoadedSession) -> None:
        """Put the pages of a file that was read into the prefix cache."""
        message = loaded.message
        try:
            tokens = import_session(self._core, loaded.session, message.cache_salt)
        except ModelmillError as error:
            self._refuse(message.number, str(error))
            return
        self._send(SessionReply(message.number, tokens, loaded.session.nbytes))

    def _write(self, message: SaveSession, session: SessionPages) -> None:
        try:
            nbytes = write_session(Path(message.path), self._layout, session)
        except OSError as error:
            self._refuse(message.number, f"the session cannot be written: {error.strerror}")
        except Exception as error:
            self._refuse(message.number, f"the session cannot be written: {type(error).__name__}")
        else:
            self._send(SessionReply(message.number, len(session.tokens), nbytes))

    def _read(self, message: RestoreSession) -> None:
        try:
            session = read_session(Path(message.path), self._layout)
        except ModelmillError as error:
            self._refuse(message.number, str(error))
        except OSError as error:
            self._refuse(message.number, f"the session cannot be read: {error.strerror}")
        except Exception as error:
            self._refuse(message.number, f"the session cannot be read: {type(error).__name__}")
        else:
            self._enqueue(LoadedSession(message, session))

    def _refuse(self, number: int, reason: str) -> None:
        self._send(SessionReply(number, 0, 0, reason))
