"""Memory that the server plans for a model that is loaded on demand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.artifact.store import open_artifact
from modelmill.cli.serve import Args
from modelmill.cli.serve_catalogue import (
    estimate_sequence_kv_bytes,
    make_catalogue_manager_and_watch,
)
from modelmill.core.config import RunConfig
from modelmill.loader.capacity import activation_dtype
from modelmill.loader.model_loader import build_rank_model
from modelmill.parallel.tp_group import SINGLE_RANK
from modelmill.serve.catalogue.entries import CatalogueEntry


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_model_len": 100},
        {"max_model_len": 4096},
        {"page_size": 32},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_the_estimate_is_what_a_worker_needs(stories: Path, options: dict[str, Any]) -> None:
    run = RunConfig(**options)
    artifact = open_artifact(stories)
    model = build_rank_model(artifact, SINGLE_RANK)
    dtype = torch.int8 if run.kv_cache_dtype == "int8" else activation_dtype(model)
    longest = artifact.manifest.max_model_len
    tokens = min(run.max_model_len or longest, longest)
    pages = -(-tokens // run.page_size) + 1
    actual = pages * model.kv.page_bytes(run.page_size, dtype)
    assert estimate_sequence_kv_bytes(artifact.manifest, run) == actual


@pytest.mark.parametrize(("flag", "length"), [(4096, 512), (100, 100)])
def test_the_engines_of_a_catalogue_may_be_shorter_than_the_flag(
    stories: Path, flag: int, length: int
) -> None:
    args = Args(run=RunConfig(max_model_len=flag), memory_budget=1 << 30)
    manager, _ = make_catalogue_manager_and_watch(
        args, [CatalogueEntry("stories", stories)], [], None
    )
    (model,) = manager.models
    engine = model.engine
    assert engine._open_engine.caps_length
    assert engine.max_model_len == length


def test_a_config_of_other_names_has_no_estimate() -> None:
    manifest: Any = SimpleNamespace(
        config={"d_model": 64}, build={"dtype": "bfloat16"}, max_model_len=128
    )
    assert estimate_sequence_kv_bytes(manifest, RunConfig()) == 0
