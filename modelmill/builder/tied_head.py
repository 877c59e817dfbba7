"""Whether a head that a config calls tied really is the embedding.

Merging an adapter that changed the head leaves ``tie_word_embeddings: true`` beside a head of its
own (huggingface/peft#2777). The tensors decide, as they do in transformers 5: equal ones are one,
different ones are two."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from modelmill.checkpoint.container import list_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import find_source_name

COMPARE_ROWS = 4096
"""Rows compared at once: a vocabulary is never widened as a whole."""


def resolve_tied_head(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any
) -> tuple[Any, list[str]]:
    """The sizes with ``tied`` as the tensors have it, and what there is to say of that.

    Both matrices are read where the config ties them and the checkpoint holds both; one storage
    under two names (PyTorch files) is seen without reading.
    """
    if not getattr(model_config, "tied", False):
        return model_config, []
    untied = replace(model_config, tied=False)
    sources = {rule.target: rule.sources for rule in family.rules(untied)}
    names = checkpoint.names()
    [head], [embed] = (
        [find_source_name(source, names, family.CHECKPOINT_PREFIXES) for source in sources[target]]
        for target in ("head.weight", "embed.weight")
    )
    if head is None or embed is None or same_values(checkpoint.get(head), checkpoint.get(embed)):
        return model_config, []
    return untied, [
        f"config.json says tie_word_embeddings=true, but {list_names([head])} differs from "
        f"{list_names([embed])}: "
        "the head of its own is used"
    ]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes; a NaN equals nothing."""
    if one.shape != other.shape:
        return False
    if (
        one.dtype == other.dtype
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    ):
        return True
    one, other = torch.atleast_1d(one), torch.atleast_1d(other)
    blocks = zip(one.split(COMPARE_ROWS), other.split(COMPARE_ROWS), strict=True)
    return all(bool((a.float() == b.float()).all()) for a, b in blocks)
