"""The models of ``modelmill serve`` that are loaded on demand: --models-dir and --catalogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelmill.core.config import non_default_fields
from modelmill.core.errors import UsageError
from modelmill.core.memory_limits import read_memory_info

if TYPE_CHECKING:
    from modelmill.artifact.manifest import Manifest
    from modelmill.cli.serve import Args
    from modelmill.core.config import RunConfig
    from modelmill.serve.catalogue.entries import CatalogueEntry
    from modelmill.serve.catalogue.folder_watch import FolderWatch
    from modelmill.serve.catalogue.managed_model import ManagedModel
    from modelmill.serve.catalogue.manager import ModelManager
    from modelmill.serve.engine_client import EngineClient
    from modelmill.serve.standby_worker import StandbyLauncher
    from modelmill.serve.worker_messages import OpenEngine

CPU_MEMORY_BUDGET_FRACTION = 0.8
"""Of the memory that is free at the start, where no budget is set."""
MIN_KV_CACHE_BUDGET_FRACTION = 0.25
"""Of the budget, at least, for KV cache and states of an engine without a size of its own."""
KV_SCALE_BYTES = 4
"""Of a head's keys or values of a token in 8 bits (float32)."""
NVIDIA_DEVICE_FILE = Path("/dev/nvidiactl")


def with_detected_models_dir(args: Args) -> Args:
    """Take a folder of engines among the arguments as --models-dir.

    Raises:
        UsageError: there is more than one such folder.
    """
    from modelmill.serve.catalogue.entries import is_models_folder

    folders = [path for path in args.engines if is_models_folder(path)]
    if not folders:
        return args
    if len(folders) > 1 or args.models_dir is not None:
        raise UsageError("give one folder of engines; a --catalogue file lists those of several")
    engines = tuple(path for path in args.engines if path not in folders)
    return replace(args, engines=engines, models_dir=folders[0])


def read_catalogue_entries(args: Args, used_names: Sequence[str]) -> list[CatalogueEntry]:
    """Read the catalogue; empty without one.

    Args:
        args: of the command line.
        used_names: names and aliases of the engines that are always loaded.

    Raises:
        UsageError: it cannot be read, or does not go together with other flags.
    """
    from modelmill.serve.catalogue.entries import (
        check_entries,
        read_catalogue_file,
        read_models_folder,
    )

    entries = [] if args.models_dir is None else read_models_folder(args.models_dir)
    entries += [] if args.catalogue is None else read_catalogue_file(args.catalogue)
    if not entries:
        if args.memory_budget is not None:
            raise UsageError("--memory-budget is for --models-dir or --catalogue")
        if args.sleep_memory is not None:
            raise UsageError("--sleep-memory is for --models-dir or --catalogue")
        return []
    if args.ray:
        raise UsageError(
            "--ray serves engines that stay loaded: each replica would load others, and the router "
            "could not tell which; leave out the catalogue, or serve it without --ray"
        )
    if args.sleep_memory is not None and args.sleep_memory < 1:
        raise UsageError(f"--sleep-memory must be at least 1, not {args.sleep_memory}")
    if args.memory_budget is not None and args.memory_budget < 1:
        raise UsageError(f"--memory-budget must be at least 1, not {args.memory_budget}")
    check_entries(entries, used_names)
    return entries


def add_catalogue_aliases(
    entries: Sequence[CatalogueEntry], aliases: Mapping[str, str]
) -> list[CatalogueEntry]:
    """Give engines of a catalogue further names.

    Args:
        entries: the catalogue.
        aliases: further name → name of the engine.

    Raises:
        UsageError: there is no such engine, or the name is taken.
    """
    names = {entry.name for entry in entries}
    used = {name for entry in entries for name in (entry.name, *entry.aliases)}
    for alias, name in aliases.items():
        if name not in names:
            raise UsageError(
                f"--alias: no engine is served as {name}; there are {', '.join(sorted(names))}"
            )
        if alias in used:
            raise UsageError(f"--alias: the name {alias!r} is used already; give another")
    return [
        replace(
            entry,
            aliases=(*entry.aliases, *(key for key, name in aliases.items() if name == entry.name)),
        )
        for entry in entries
    ]


def make_catalogue_manager_and_watch(
    args: Args,
    entries: Sequence[CatalogueEntry],
    always_loaded: Sequence[tuple[EngineClient, int]],
    launcher: StandbyLauncher | None,
) -> tuple[ModelManager, FolderWatch | None]:
    """Make the manager of the catalogue's models, and what watches their files.

    Args:
        args: of the command line.
        entries: the catalogue.
        always_loaded: the other engines, each with the bytes of its weights.
        launcher: starts workers; None: each is started when it is needed.

    Raises:
        UsageError: no memory budget is set and it cannot be derived.
        ArtifactError: a manifest is damaged.
    """
    from modelmill.serve.catalogue.folder_watch import FolderWatch
    from modelmill.serve.catalogue.keep_alive import parse_keep_alive
    from modelmill.serve.catalogue.manager import ModelManager
    from modelmill.serve.catalogue.model_loader import ModelLoader

    budget = args.memory_budget or _default_memory_budget(args)
    try:
        keep_alive = parse_keep_alive(args.keep_alive)
    except UsageError as error:
        raise UsageError(str(error).replace("keep_alive", "--keep-alive")) from None
    make = _ModelFactory(args, budget, keep_alive, launcher)

    def fixed_bytes() -> int:
        return sum(weights + engine.cache_bytes for engine, weights in always_loaded)

    loader = ModelLoader(budget, fixed_bytes=fixed_bytes, sleep_bytes=args.sleep_memory or 0)
    manager = ModelManager(
        [make.make_managed_model(entry) for entry in entries],
        loader,
        args.max_waiting + args.run.max_num_seqs,
        lambda model, manifest: make.make_client(model.entry, manifest),
    )
    watch = (
        FolderWatch(manager, args.models_dir, make.make_managed_model)
        if args.watch_models
        else None
    )
    return manager, watch


def _default_memory_budget(args: Args) -> int:
    if args.run.device != "cpu" and NVIDIA_DEVICE_FILE.exists():
        raise UsageError(
            "a catalogue on a GPU needs --memory-budget: the bytes that all loaded engines may take"
        )
    return int(read_memory_info().free * CPU_MEMORY_BUDGET_FRACTION)


def estimate_sequence_kv_bytes(manifest: Manifest, run: RunConfig) -> int:
    """Estimate the KV cache of the longest sequence, from the names that most configs use.

    The worker computes it exactly; here no tensors are at hand. 0: the config has other names.
    """
    config = manifest.config
    config = config.get("text_config") or config

    def first(*names: str) -> int:
        return next((config[name] for name in names if isinstance(config.get(name), int)), 0)

    heads = first("num_attention_heads", "n_head")
    kv_heads = first("num_key_value_heads") or heads
    dim = first("head_dim") or (first("hidden_size", "n_embd") // heads if heads else 0)
    lengths = (run.max_model_len, manifest.max_model_len)
    tokens = min((length for length in lengths if length), default=0)
    kv_dtype = run.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = manifest.build.get("kv_cache_dtype", "auto")
    if kv_dtype in ("int8", "fp8"):
        head_bytes = dim + KV_SCALE_BYTES
    else:
        head_bytes = dim * (4 if manifest.build["dtype"] == "float32" else 2)
    per_token = 2 * first("num_hidden_layers", "n_layer") * kv_heads * head_bytes
    return per_token * (-(-tokens // run.page_size) + 1) * run.page_size


class _ModelFactory:
    """Makes the models of a catalogue and their clients."""

    def __init__(
        self, args: Args, budget: int, keep_alive: float, launcher: StandbyLauncher | None
    ) -> None:
        self._args, self._budget = args, budget
        self._keep_alive, self._launcher = keep_alive, launcher

    def make_managed_model(self, entry: CatalogueEntry) -> ManagedModel:
        """A model that is not loaded.

        Raises:
            ArtifactError: its manifest is damaged.
        """
        from modelmill.serve.catalogue.entries import read_manifest
        from modelmill.serve.catalogue.managed_model import ManagedModel
        from modelmill.serve.memory_budget import segmentation_engine_bytes
        from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE

        manifest = read_manifest(entry.path)
        planned = manifest.weight_bytes + self._estimate_cache_bytes(entry, manifest)
        if manifest.engine_type == SEGMENTATION_ENGINE_TYPE:
            planned = segmentation_engine_bytes(manifest.weight_bytes, self._args.image_cache_bytes)
        idle = self._keep_alive if entry.idle_timeout is None else entry.idle_timeout
        return ManagedModel(entry, self.make_client(entry, manifest), idle, planned, entry.pinned)

    def make_client(self, entry: CatalogueEntry, manifest: Manifest) -> EngineClient:
        """A client that is not loaded."""
        from modelmill.serve.engine_client import EngineClient
        from modelmill.serve.worker_process import launch_worker

        return EngineClient(
            entry.name,
            self._make_open_message(entry, manifest),
            max_waiting=self._args.max_waiting,
            launch=self._launcher or launch_worker,
            manifest=manifest,
        )

    def _estimate_cache_bytes(self, entry: CatalogueEntry, manifest: Manifest) -> int:
        """Bytes of KV cache and recurrent states of an engine: one sequence fits if it can."""
        kv_bytes = entry.kv_cache_bytes or self._args.run.kv_cache_bytes
        if kv_bytes is not None:
            return kv_bytes + (self._args.run.state_cache_bytes or 0)
        cache_bytes = max(
            int(self._budget * MIN_KV_CACHE_BUDGET_FRACTION),
            estimate_sequence_kv_bytes(manifest, self._args.run),
        )
        return max(min(cache_bytes, self._budget - manifest.weight_bytes), 1)

    def _make_open_message(self, entry: CatalogueEntry, manifest: Manifest) -> OpenEngine:
        from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE
        from modelmill.serve.worker_messages import OpenEngine

        args = self._args
        run = args.run
        if run.state_cache_bytes is None:
            # the worker divides the memory between KV pages and states
            run = replace(run, kv_cache_bytes=None)
        elif entry.kv_cache_bytes is not None:
            run = replace(run, kv_cache_bytes=entry.kv_cache_bytes)
        if args.sleep_memory is not None and manifest.engine_type != SEGMENTATION_ENGINE_TYPE:
            run = replace(run, enable_sleep_mode=True)
        return OpenEngine(
            str(entry.path), {}, non_default_fields(run), args.warm_up, args.chat_template,
            image_cache_bytes=args.image_cache_bytes, max_pixels=args.max_image_pixels,
            watchdog_seconds=args.watchdog_timeout,
            answer_history_bytes=args.answer_history_bytes, parse_special=args.parse_special,
            cache_bytes=self._estimate_cache_bytes(entry, manifest), caps_length=True,
        )  # fmt: skip
