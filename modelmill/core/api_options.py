"""The keyword options of the Python API: the fields of RunConfig and BuildConfig.

Editors and mypy see the types below; ``show_options_in_signature`` gives their names to ``help()``
and to completion. A test keeps both equal to the configs. Options that the caller does not pass are
absent, so that a default differs from an explicit value.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import TypedDict, TypeVar

from modelmill.core.config import BuildConfig, RunConfig

Init = TypeVar("Init", bound=Callable[..., None])


class RunOptions(TypedDict, total=False):
    """How an engine is started: the fields of RunConfig."""

    device: str
    tp: int
    enable_expert_parallel: bool
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_mixed_tokens: int | None
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    prefix_cache_bytes: int | None
    state_cache_bytes: int | None
    kv_cache_dtype: str
    page_size: int
    enable_prefix_caching: bool
    cuda_graphs: bool
    enable_sleep_mode: bool
    threads: int | None
    kernels: Mapping[str, str]
    seed: int


class BuildOptions(TypedDict, total=False):
    """How a checkpoint is built: the fields of BuildConfig that RunConfig does not have."""

    dtype: str
    quantization: str
    quantize_head: bool
    tower: str
    method: str
    group_size: int
    symmetric: bool
    max_kl: float | None
    max_ppl_increase: float | None
    layer_recipes: Mapping[str, str]
    bits: str
    mode: str
    splits_per_channel: int | None
    activation_scales: str
    weight_scales: str
    alpha: str
    max_layer_error: float | None
    calibration: str | None
    calibration_samples: int
    calibration_length: int
    target: str


class EngineOptions(RunOptions, BuildOptions, total=False):
    """Options of starting an engine, and of building one from a checkpoint."""


class SegmenterOptions(BuildOptions, total=False):
    """Options of building a segmentation engine from a checkpoint: all of BuildConfig."""

    max_model_len: int | None
    kv_cache_dtype: str
    seed: int


RUN_CONFIG_FIELDS = tuple(each.name for each in fields(RunConfig))
BUILD_ONLY_FIELDS = tuple(
    each.name for each in fields(BuildConfig) if each.name not in RUN_CONFIG_FIELDS
)
"""Options that only the build uses."""


def show_options_in_signature(*configs: type) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` with ``**options``: its signature shows the fields of ``configs``.

    Args:
        configs: dataclasses whose fields are the options.
    """

    def set_signature(init: Init) -> Init:
        signature = inspect.signature(init)
        own = [
            p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        known = {p.name for p in own}
        for config in configs:
            hints = typing.get_type_hints(config)
            for each in fields(config):
                if each.name in known:
                    continue
                known.add(each.name)
                default = (
                    each.default if each.default_factory is MISSING else each.default_factory()
                )
                own.append(
                    inspect.Parameter(
                        each.name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=default,
                        annotation=hints[each.name],
                    )
                )
        init.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return init

    return set_signature


def copy_signature_from(other: Callable[..., None]) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` that passes its options on: it shows the signature of ``other``."""

    def set_signature(init: Init) -> Init:
        init.__signature__ = inspect.signature(other)  # type: ignore[attr-defined]
        return init

    return set_signature


def describe_options(config: type, exclude: Iterable[str] = ()) -> str:
    """Make a docstring line for each field of a config: its name, its help text, its default."""
    lines = []
    for each in fields(config):
        if each.name not in exclude:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            help_text = each.metadata.get("help", "")
            lines.append(
                f"    {each.name}: {help_text}."
                + ("" if "default:" in help_text else f" Default: {default!r}.")
            )
    return "\n".join(lines)
