"""Common options of the verbs that run an engine, and opening the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.options import inherit_option
from modelmill.cli.output import show_progress
from modelmill.core import env
from modelmill.core.config import BuildConfig, RunConfig, non_default_fields

if TYPE_CHECKING:
    from modelmill.llm import LLM

ENGINE_HELP = (
    "an engine folder, or a checkpoint or a hub's org/name (it is built into the cache first)"
)

ENGINE_GPU_FRACTION_BESIDE_REFERENCE = 0.45
"""Share of the GPU's memory for an engine if transformers runs on the same GPU."""


@dataclass(frozen=True, kw_only=True)
class ImplicitBuildOptions:
    """How to build a checkpoint that is passed instead of an engine."""

    dtype: str = inherit_option(BuildConfig, "dtype", help="for a checkpoint: dtype to build it in")
    quantization: str = inherit_option(
        BuildConfig, "quantization", help="for a checkpoint: weight recipe to build it with"
    )


def resolve_or_pull_model(model: Path) -> Path:
    """Return an engine's or checkpoint's path; a hub's org/name is fetched into the cache first.

    Raises:
        CheckpointError: if there is no such path, or the model cannot be fetched.
    """
    if model.exists():
        return model
    from modelmill.checkpoint.pull import (
        is_pullable_model_name,
        missing_model_error,
        pull_if_missing,
    )

    if not is_pullable_model_name(model):
        raise missing_model_error(model)
    name = model.as_posix()
    with show_progress(f"pulling {name}", lines=True) as on_progress:
        return pull_if_missing(name, env.cache_dir() / "models", on_progress)


def open_llm(model: Path, build: ImplicitBuildOptions, run: RunConfig, **llm_options: Any) -> LLM:
    """Open an LLM for an engine; a checkpoint is built into the cache first, with a note on stderr.

    LLM rejects a dtype or recipe for an engine.

    Args:
        model: an engine, a checkpoint, or a hub's org/name.
        build: how to build a checkpoint.
        run: how to start the engine.
        llm_options: LLM's own options; those that are None are not passed.
    """
    model = resolve_or_pull_model(model)
    with show_progress(f"opening {model.name}", lines=True) as on_progress:
        from modelmill.llm import LLM  # inside, since torch takes seconds to import

        options = {name: value for name, value in llm_options.items() if value is not None}
        return LLM(
            model,
            progress=on_progress,
            **non_default_fields(build),
            **non_default_fields(run),
            **options,
        )


def share_gpu_with_reference(run: RunConfig) -> RunConfig:
    """Leave half of the GPU's memory to transformers, unless the user has set a share."""
    user_set = (
        run.gpu_memory_utilization != RunConfig().gpu_memory_utilization
        or run.kv_cache_bytes is not None
    )
    return (
        run
        if user_set
        else replace(run, gpu_memory_utilization=ENGINE_GPU_FRACTION_BESIDE_REFERENCE)
    )
