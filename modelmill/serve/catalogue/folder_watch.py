"""Notices engines that are added to, removed from or rebuilt in the catalogue's folder.

Every few seconds it compares names, sizes and times of the files, which reads none of them. What
changed is used once it has stayed the same from one look to the next, so that an engine that is
still being copied is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelmill.artifact.manifest import MANIFEST_FILE
from modelmill.core import log
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.serve.catalogue.entries import CatalogueEntry, find_engine_entries
from modelmill.serve.catalogue.managed_model import ManagedModel
from modelmill.serve.catalogue.manager import ModelManager

SCAN_INTERVAL_SECONDS = 3.0
"""Seconds between two looks."""
_log = log.get_logger("serve")
EngineFileStats = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class CatalogueSnapshot:
    """What a look saw.

    Attributes:
        engines: folder of every engine → names, times and sizes of its files.
        entries: of the engines in the catalogue's folder.
    """

    engines: Mapping[Path, EngineFileStats]
    entries: Sequence[CatalogueEntry]


@dataclass
class FolderWatch:
    """Keeps a catalogue in step with its files.

    Attributes:
        manager: of the catalogue.
        folder: of ``--models-dir``; None: engines of a file, which are only rebuilt.
        make_model: makes a model that is not loaded.
        on_add: serves a model from now on; raises UsageError if its name is taken.
        on_remove: serves a model no longer.
        interval: seconds between two looks.
    """

    manager: ModelManager
    folder: Path | None
    make_model: Callable[[CatalogueEntry], ManagedModel]
    on_add: Callable[[ManagedModel], None] = lambda _: None
    on_remove: Callable[[ManagedModel], None] = lambda _: None
    interval: float = SCAN_INTERVAL_SECONDS
    _previous_snapshot: CatalogueSnapshot | None = field(default=None, init=False)
    _rejected_engines: dict[Path, EngineFileStats] = field(default_factory=dict, init=False)

    def set_callbacks(
        self,
        on_add: Callable[[ManagedModel], None],
        on_remove: Callable[[ManagedModel], None],
    ) -> None:
        """Call these for models that come and go."""
        self.on_add, self.on_remove = on_add, on_remove

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(self.interval)
            paths = [model.path for model in self.manager.models]
            self.apply_stable_changes(
                await asyncio.to_thread(scan_engine_files, self.folder, paths)
            )

    def apply_stable_changes(self, files: CatalogueSnapshot) -> None:
        """Use what has stayed the same since the last look."""
        before, self._previous_snapshot = self._previous_snapshot, files
        if before is None:
            return
        for model in list(self.manager.models):
            if model.path in files.engines:
                if files.engines[model.path] == before.engines.get(model.path):
                    self._reload_if_changed(model)
            elif self._is_in_folder(model) and model.path not in before.engines:
                self._remove_model(model)
        served = {model.path for model in self.manager.models}
        for entry in files.entries:
            times = files.engines[entry.path]
            if entry.path not in served and times == before.engines.get(entry.path):
                self._add_model(entry, times)

    def _is_in_folder(self, model: ManagedModel) -> bool:
        return self.folder is not None and model.path.parent == self.folder

    def _reload_if_changed(self, model: ManagedModel) -> None:
        """Load the files of a rebuilt engine, or let its next load do so."""
        if not model.has_changed_files:
            return
        if model.instance is None:
            try:
                model.engine.replace_manifest(model.reread_manifest())
            except ModelmillError as error:
                model.record_load_error(str(error))
        elif model.instance.is_available:
            _log.info("model changed", extra={"data": {"model": model.name}})
            task = self.manager.start_reload(model)
            # its log says why it failed; the former worker goes on
            task.add_done_callback(lambda each: each.cancelled() or each.exception())

    def _add_model(self, entry: CatalogueEntry, times: EngineFileStats) -> None:
        if self._rejected_engines.get(entry.path) == times:
            return
        try:
            model = self.make_model(entry)
            self.on_add(model)
        except ModelmillError as error:
            self._rejected_engines[entry.path] = times
            data = {"model": entry.name, "reason": str(error)}
            _log.warning("model not added", extra={"data": data})
            return
        self.manager.add_model(model)
        _log.info("model added", extra={"data": {"model": entry.name}})

    def _remove_model(self, model: ManagedModel) -> None:
        self.on_remove(model)
        self.manager.remove_model(model)
        _log.info("model removed", extra={"data": {"model": model.name}})


def scan_engine_files(folder: Path | None, paths: Sequence[Path]) -> CatalogueSnapshot:
    """List the files of all engines.

    Args:
        folder: of the catalogue; None: there is none.
        paths: engines that are served already.
    """
    try:
        entries = [] if folder is None else find_engine_entries(folder)
    except (OSError, UsageError):  # it is being moved, or on a disk that has gone
        entries = []
    engines = {}
    for path in dict.fromkeys([*paths, *(entry.path for entry in entries)]):
        times = stat_engine_files(path)
        if times is not None:
            engines[path] = times
    return CatalogueSnapshot(engines, [entry for entry in entries if entry.path in engines])


def stat_engine_files(path: Path) -> EngineFileStats | None:
    """Names, times and sizes of an engine's files; None: there is no engine."""
    times = []
    try:
        for file in sorted(path.iterdir()):
            status = file.stat()
            times.append((file.name, status.st_mtime_ns, status.st_size))
    except OSError:
        return None
    return tuple(times) if any(name == MANIFEST_FILE for name, _, _ in times) else None
