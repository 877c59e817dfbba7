"""Rank 0's side of tensor parallelism: starts, commands, watches and ends the other ranks.

Rank 0 runs in the caller's process and schedules and samples as a single rank does. Before each
step it sends the step's packed integers to the other ranks (``step_commands``), which run the same
step. A socket pair per rank carries the commands. It also shows each side that the other has ended:
the operating system closes the socket however a process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.core import env, log
from modelmill.core.config import RunConfig, config_to_dict
from modelmill.core.errors import ModelmillError, RankError
from modelmill.parallel.rendezvous import RendezvousServer
from modelmill.parallel.tp_group import DistributedTPGroup, TPGroup
from modelmill.runtime.batch import PackedBatch
from modelmill.runtime.batch_buffer_layout import BatchBufferLayout, BatchViews
from modelmill.runtime.cuda_graphs import (
    GREEDY_GRAPH_OUTPUT,
    LOGITS_GRAPH_OUTPUT,
    SAMPLED_GRAPH_OUTPUT,
    PaddedStepAction,
)
from modelmill.runtime.graph_sizes import PaddedStepShape

FORWARD_COMMAND = "forward"
COPY_PAGES_COMMAND = "copy"
COPY_STATES_COMMAND = "copy state"
END_COMMAND = "end"
PING_COMMAND = "ping"
GATHER_SIZES_COMMAND = "gather sizes"
GATHER_PAGES_COMMAND = "gather pages"
SCATTER_PAGES_COMMAND = "scatter pages"
GATHER_STATE_COMMAND = "gather state"
SCATTER_STATE_COMMAND = "scatter state"
SLEEP_COMMAND = "sleep"
WAKE_UP_COMMAND = "wake up"
SLEEP_AND_WAKE_COMMANDS = (SLEEP_COMMAND, WAKE_UP_COMMAND)
SESSION_COMMANDS = (
    GATHER_SIZES_COMMAND,
    GATHER_PAGES_COMMAND,
    SCATTER_PAGES_COMMAND,
    GATHER_STATE_COMMAND,
    SCATTER_STATE_COMMAND,
)
PADDED_COMMANDS = tuple(use.value for use in PaddedStepAction)
COMMANDS = (
    FORWARD_COMMAND, *PADDED_COMMANDS, GREEDY_GRAPH_OUTPUT, SAMPLED_GRAPH_OUTPUT,
    LOGITS_GRAPH_OUTPUT, COPY_PAGES_COMMAND, COPY_STATES_COMMAND, END_COMMAND, PING_COMMAND,
    *SESSION_COMMANDS, *SLEEP_AND_WAKE_COMMANDS,
)  # fmt: skip
_HEADER_STRUCT = struct.Struct("<17q")
HEADER_BYTES = _HEADER_STRUCT.size
_EMPTY_LAYOUT = BatchBufferLayout(0, 0, 0, 0)


@dataclass(frozen=True)
class WorkerCommand:
    """A command to the other ranks.

    Attributes:
        command: FORWARD_COMMAND runs the model; PADDED_COMMANDS run it on a batch that is padded
            for a prefill graph; GREEDY_GRAPH_OUTPUT, SAMPLED_GRAPH_OUTPUT and LOGITS_GRAPH_OUTPUT
            replay a decode graph with that output; COPY_PAGES_COMMAND copies pages,
            COPY_STATES_COMMAND slots of recurrent state; END_COMMAND ends the rank; PING_COMMAND
            requests a reply; SESSION_COMMANDS copy pages and states of saved sessions;
            SLEEP_COMMAND and WAKE_UP_COMMAND give the rank's memory back and take it again.
        num_words: 64-bit words that follow.
        num_kept_ids: Ids that rank 0 broadcasts after the step, stored for the next one.
        embed_width: Columns of the image embeddings that are broadcast before the step; 0: none.
        num_pooled_rows: The last so many logit rows return hidden states instead of logits.
        num_decodes: As in the ``Step``; −1: None.
        num_prompt_keys: As in the ``Step``.
    """

    command: str
    num_words: int = 0
    layout: BatchBufferLayout = _EMPTY_LAYOUT
    all_rows: bool = False
    max_query: int = 0
    max_context: int = 0
    uses_last_ids: bool = False
    num_kept_ids: int = 0
    embed_width: int = 0
    num_pooled_rows: int = 0
    num_decodes: int = -1
    num_prompt_keys: int = 0

    @staticmethod
    def from_batch(
        batch: PackedBatch, command: str, num_kept_ids: int = 0, num_pooled_rows: int = 0
    ) -> WorkerCommand:
        """The command that runs this batch."""
        embed_width = 0 if batch.embeds is None else batch.embeds.shape[1]
        views = batch.views
        fields = (
            batch.all_rows,
            batch.max_query,
            batch.max_context,
            batch.uses_last_ids,
            num_kept_ids,
            embed_width,
            num_pooled_rows,
            -1 if batch.num_decodes is None else batch.num_decodes,
            batch.num_prompt_keys,
        )
        return WorkerCommand(command, views.num_words, views.layout, *fields)

    @property
    def padded_shape(self) -> PaddedStepShape:
        """The size of a batch that is padded for a prefill graph."""
        return PaddedStepShape(self.layout.tokens, self.layout.seqs, self.max_context)

    def batch(self, views: BatchViews) -> PackedBatch:
        """The batch of this command; ``views``: its integers."""
        return PackedBatch(
            views,
            self.layout.tokens,
            self.all_rows,
            self.max_query,
            self.max_context,
            self.uses_last_ids,
            num_decodes=None if self.num_decodes < 0 else self.num_decodes,
            num_prompt_keys=self.num_prompt_keys,
            is_padded=self.command in PADDED_COMMANDS,
        )

    def pack(self) -> bytes:
        """The header: HEADER_BYTES bytes."""
        layout = self.layout
        return _HEADER_STRUCT.pack(
            COMMANDS.index(self.command), self.num_words,
            layout.tokens, layout.seqs, layout.num_logit_rows, layout.table_columns,
            layout.has_state, layout.page_groups,
            self.all_rows, self.max_query, self.max_context, self.uses_last_ids, self.num_kept_ids,
            self.embed_width,
            self.num_pooled_rows, self.num_decodes, self.num_prompt_keys,
        )  # fmt: skip

    @staticmethod
    def unpack(header: bytes) -> WorkerCommand:
        """The inverse of ``pack``."""
        code, words, t, b, r, p, has_state, groups, *rest = _HEADER_STRUCT.unpack(header)
        all_rows, query, context, uses_last_ids, *counts = rest
        return WorkerCommand(
            COMMANDS[code],
            words,
            BatchBufferLayout(t, b, r, p, bool(has_state), groups),
            bool(all_rows),
            query,
            context,
            bool(uses_last_ids),
            *counts,
        )


START_TIMEOUT_SECONDS = 300.0
# seconds between an error caused by the end of a process and the notice of that end
_EXIT_GRACE_SECONDS = 2.0
_FAILURE_SETTLE_SECONDS = 0.5  # seconds to find out which of several ranks ended first
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent.parent
_log = log.get_logger(__name__)


class TPWorkerPool:
    """The other ranks' processes."""

    def __init__(self, engine: Path, config: RunConfig, devices: list[str]) -> None:
        """Start a process for each device but the first; ``connect`` waits for them."""
        self._tp_group: TPGroup | None = None
        self._failed: RankError | None = None
        self._closed = False
        self._abort_lock = threading.Lock()
        self._status_changed = threading.Condition()
        self._num_ready = self._num_alive = 0
        self._rendezvous = RendezvousServer()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._size, self._device = len(devices), devices[0]
        for rank in range(1, self._size):
            startup = {
                "rank": rank, "size": self._size, "port": self._rendezvous.port,
                "device": devices[rank],
                "engine": str(engine), "config": config_to_dict(config), "parent": os.getpid(),
                # the parent death signal follows the starting thread, which must live as long as
                # the process
                "bound": threading.current_thread() is threading.main_thread(),
            }  # fmt: skip
            self._start_worker(startup)
        self._watcher = threading.Thread(
            target=self._watch_workers, name="modelmill-ranks", daemon=True
        )
        self._watcher.start()

    def connect(self) -> TPGroup:
        """Wait until all ranks are ready and connect them. Raises RankError if one fails."""
        with self._status_changed:
            self._status_changed.wait_for(
                lambda: self._failed or self._num_ready == self._size - 1, START_TIMEOUT_SECONDS
            )
            if not self._failed and self._num_ready < self._size - 1:
                self._failed = RankError(
                    f"{self._size - 1 - self._num_ready} ranks did not start in "
                    f"{START_TIMEOUT_SECONDS:.0f} s"
                )
        self.raise_if_failed()
        with self.translate_errors():
            self._tp_group = DistributedTPGroup(
                0, self._size, self._rendezvous.start_store(), self._device
            )
        return self._tp_group

    def broadcast(self, command: WorkerCommand, payload: memoryview | bytes = b"") -> None:
        """Send a command and its payload to every rank. Raises RankError if one has ended."""
        self.raise_if_failed()
        header = command.pack()
        try:
            for link in self._sockets:
                sent = link.sendmsg((header, payload))
                if sent < len(header) + len(payload):
                    link.sendall((header + bytes(payload))[sent:])
        except OSError:
            self.raise_if_failed(_EXIT_GRACE_SECONDS)
            raise

    def ping(self) -> None:
        """Wait until every rank has replied, without a timeout: that is the caller's watchdog.

        Raises RankError if one has ended.
        """
        with self._status_changed:
            self._num_alive = 0
        self.broadcast(WorkerCommand(PING_COMMAND))
        with self._status_changed:
            self._status_changed.wait_for(lambda: self._failed or self._num_alive == self._size - 1)
        self.raise_if_failed()

    def raise_if_failed(self, wait_seconds: float = 0.0) -> None:
        """Raise RankError if a rank has ended, or ends within ``wait_seconds``."""
        if wait_seconds:
            with self._status_changed:
                self._status_changed.wait_for(lambda: self._failed is not None, wait_seconds)
        if self._failed is not None:
            raise RankError(str(self._failed))

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Within the block, an error caused by the end of a rank becomes a RankError."""
        try:
            yield
        except ModelmillError:
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self.raise_if_failed(_EXIT_GRACE_SECONDS)
            # the ranks may be at different steps now
            self.fail_and_kill_workers("a step was interrupted on rank 0; open the engine again")
            raise
        self.raise_if_failed()

    def fail_and_kill_workers(self, reason: str) -> None:
        """End all ranks; every later call raises RankError with this reason."""
        with self._status_changed:
            if self._failed is None:
                self._failed = RankError(reason)
            self._status_changed.notify_all()
        self._kill_workers()

    def close(self) -> None:
        """End all ranks; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        for link in self._sockets:
            with contextlib.suppress(OSError):
                link.sendall(WorkerCommand(END_COMMAND).pack())
        deadline = time.monotonic() + _EXIT_GRACE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
        if self._failed is None:
            self._failed = RankError("the engine was closed")
        self._kill_workers()
        # the watcher thread ends with the first rank
        self._watcher.join(_EXIT_GRACE_SECONDS)
        for link in self._sockets:
            link.close()

    def _kill_workers(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        # a second thread does not wait for the lock: aborting a group is slow while a GPU is busy
        if self._tp_group is not None and self._abort_lock.acquire(blocking=False):
            self._tp_group.abort()
        for process in self._processes:
            process.wait()

    def _start_worker(self, startup: dict[str, Any]) -> None:
        own_end, worker_end = socket.socketpair()
        with worker_end:
            path = f"import sys; sys.path.insert(0, {str(_PACKAGE_ROOT)!r})"
            code = f"{path}; from modelmill.runtime.tp_worker_process import main; main()"
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(worker_end.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=(worker_end.fileno(),), env=env.worker_env(),
                start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        self._sockets.append(own_end)
        own_end.sendall(json.dumps(startup).encode() + b"\n")

    def _watch_workers(self) -> None:
        """Receive the ranks' messages (ready, alive, error) until one of them ends."""
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self._sockets, 1):
                selector.register(link, selectors.EVENT_READ, rank)
            partial_lines = [b""] * self._size
            while not self._closed:
                for key, _ in selector.select():
                    received = _receive(self._sockets[key.data - 1])
                    *lines, partial_lines[key.data] = (partial_lines[key.data] + received).split(
                        b"\n"
                    )
                    messages = [json.loads(line) for line in lines]
                    errors = [message.get("error") for message in messages]
                    with self._status_changed:
                        self._num_ready += sum("ready" in message for message in messages)
                        self._num_alive += sum("alive" in message for message in messages)
                        self._status_changed.notify_all()
                    if not received or any(errors):
                        self._diagnose_and_kill_workers(key.data, next(filter(None, errors), None))
                        return

    def _diagnose_and_kill_workers(self, rank: int, error: str | None) -> None:
        """Fail because a rank has ended.

        If a rank was killed, errors of others are consequences: the message names the killed one.
        """
        deadline = time.monotonic() + _FAILURE_SETTLE_SECONDS
        code = None
        while time.monotonic() < deadline and not self._closed:
            codes = [process.poll() for process in self._processes]
            killed = next((i for i, c in enumerate(codes, 1) if c is not None and c < 0), None)
            code = codes[rank - 1]
            if killed is not None:
                rank = killed
                error = None
                code = codes[killed - 1]
            if killed is not None or (error is None and code is not None):
                break
            time.sleep(0.01)
        if self._closed:
            return
        if error is None:
            reason = (
                f"was killed by signal {-code}"
                if code is not None and code < 0
                else f"ended with status {code}"
            )
        else:
            reason = f"ended: {error}"
        self.fail_and_kill_workers(f"rank {rank} of {self._size} {reason}; open the engine again")


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 16)
    except OSError:
        return b""
