"""Checks whether a head that a config calls tied equals the embedding.

Merging an adapter that changed the head leaves ``tie_word_embeddings: true`` beside a separate head
(huggingface/peft#2777). The tensors decide, as in transformers 5: equal ones are tied, different
ones are not.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from modelmill.checkpoint.container import list_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import find_source_name

COMPARE_ROWS = 4096
"""Rows compared at a time, so that a vocabulary is never converted as a whole."""


def resolve_tied_head(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any
) -> tuple[Any, list[str]]:
    """Return the config with ``tied`` as the tensors have it, and warnings about it.

    Both matrices are read if the config ties them and the checkpoint has both; one storage under
    two names (PyTorch files) is detected without reading.
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
    """Return whether two tensors have the same values in any dtype; a NaN equals nothing."""
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
