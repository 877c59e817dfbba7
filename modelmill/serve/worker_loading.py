"""Opens an engine in its worker: builds, verifies and loads it, and reports the progress."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelmill.artifact.store import Artifact, is_engine_folder, open_artifact
from modelmill.artifact.verify import verify_file_hashes
from modelmill.core.config import BuildConfig, RunConfig, config_from_dict
from modelmill.core.errors import UsageError
from modelmill.core.progress_callback import Progress
from modelmill.loader.cache_split import with_split_cache_bytes
from modelmill.loader.capacity import cpu_kv_cache_budget
from modelmill.loader.device import resolve_device
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve import memory_budget
from modelmill.serve.worker_inbox import MessageChannel
from modelmill.serve.worker_messages import (
    LoadingUpdate,
    OpenEngine,
)

PROGRESS_INTERVAL_SECONDS = 0.1


def open_or_build_artifact(open_engine: OpenEngine, on_progress: Progress) -> Artifact:
    """Open and verify the engine; a checkpoint is first built into the cache.

    Raises:
        ModelmillError: the engine cannot be opened or built.
    """
    path = Path(open_engine.model)
    # a folder named *.engine gets the error message of an engine, not of a checkpoint
    if not is_engine_folder(path) and not (path.is_dir() and path.suffix == ".engine"):
        if not path.exists():
            raise UsageError(f"{path} does not exist; give an engine folder or a checkpoint")
        from modelmill.llm import ensure_cached_engine

        path = ensure_cached_engine(
            path, config_from_dict(BuildConfig, open_engine.build, "build"), on_progress, None
        )
    elif open_engine.build:
        raise UsageError(
            f"{', '.join(open_engine.build)}: options of a build, and {path} is already built"
        )
    artifact = open_artifact(path)
    verify_file_hashes(artifact, on_progress=on_progress)
    return _ProgressArtifact(artifact, on_progress)


def load_engine_core(
    open_engine: OpenEngine, artifact: Artifact, on_progress: Progress
) -> EngineCore:
    """Load the engine core of an engine that generates text.

    Raises:
        ModelmillError: the engine cannot be loaded.
    """
    config = config_from_dict(RunConfig, open_engine.run, "run")
    if open_engine.caps_length and config.max_model_len is not None:
        length = min(config.max_model_len, artifact.manifest.max_model_len)
        config = replace(config, max_model_len=length)
    config = _with_memory_budget(config, artifact, open_engine)
    core = EngineCore.open(artifact, config)
    core.scheduler.optimize_inter_token_latency(
        config.max_mixed_tokens,
        on_gpu=core.device != "cpu",
        step_sizes=core.model_runner.mixed_graph_token_counts,
    )
    if open_engine.warm_up:
        on_progress("warming up", 0, 1)
        core.warm_up(all_specializations=True)
    return core


def _with_memory_budget(
    config: RunConfig, artifact: Artifact, open_engine: OpenEngine
) -> RunConfig:
    """``config`` with this engine's share of the memory, for KV pages and recurrent states.

    Raises:
        CapacityError: not even one sequence's recurrent state fits.
    """
    plain = Artifact(artifact.path, artifact.manifest)
    sizes = (config.kv_cache_bytes, config.state_cache_bytes)
    if open_engine.cache_bytes is not None and None in sizes:
        return with_split_cache_bytes(config, plain, open_engine.cache_bytes // config.tp)
    device = resolve_device(config.device)
    if device == "cpu":
        num_other_engines = open_engine.num_loaded_before + len(open_engine.later_weight_bytes)
        shared = memory_budget.with_cpu_cache_budget(
            config,
            cpu_kv_cache_budget(config.tp, open_engine.segment_bytes),
            num_other_engines,
            open_engine.segment_bytes,
        )
        if shared is config or shared.kv_cache_bytes is None:
            return config
        return with_split_cache_bytes(shared, plain, shared.kv_cache_bytes)
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    return memory_budget.with_gpu_memory_share(
        config,
        free,
        total,
        artifact.nbytes(),
        open_engine.later_weight_bytes,
        open_engine.segment_bytes,
    )


class _ProgressArtifact(Artifact):
    """An artifact that reports how many of its bytes have been read."""

    def __init__(self, artifact: Artifact, on_progress: Progress) -> None:
        super().__init__(artifact.path, artifact.manifest)
        self._on_progress = on_progress
        self._done_bytes = 0
        self._total_bytes = artifact.nbytes()

    def tensor(self, name: str) -> Any:
        tensor = super().tensor(name)
        self._done_bytes += tensor.numel() * tensor.element_size()
        self._on_progress("loading", min(self._done_bytes, self._total_bytes), self._total_bytes)
        return tensor


def make_loading_reporter(channel: MessageChannel) -> Progress:
    """Make a callback that sends LoadingUpdate, at most ten times a second for each stage."""
    last: dict[str, float] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - last.get(stage, 0.0) >= PROGRESS_INTERVAL_SECONDS or done >= total:
            last[stage] = now
            channel.send(LoadingUpdate(stage, done, total))

    return on_progress


def announce_progress(on_progress: Progress, stage: str, done: int, total: int) -> None:
    """Report progress to the server and to the terminal.

    Used for a stage that takes long and comes before everything else.
    """
    sys.stderr.write(f"modelmill: {stage}\n")
    on_progress(stage, done, total)
