"""Whether a head that a config calls tied really is the embedding.

Merging an adapter that changed the head leaves ``tie_word_embeddings: true`` beside a head of its own
(huggingface/peft#2777). The tensors decide, as they do in transformers 5: equal ones are one, different ones are two.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from modelmill.checkpoint.container import listed
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import find_source

BLOCK_ROWS = 4096
"""Rows compared at once: a vocabulary is never widened as a whole."""


def settled_head(checkpoint: Checkpoint, family: ModuleType, sizes: Any) -> tuple[Any, list[str]]:
    """The sizes with ``tied`` as the tensors have it, and what there is to say of that.

    Both matrices are read where the config ties them and the checkpoint holds both; one storage under two names
    (PyTorch files) is seen without reading.
    """
    if not getattr(sizes, "tied", False):
        return sizes, []
    untied = replace(sizes, tied=False)
    sources = {rule.target: rule.sources for rule in family.rules(untied)}
    names = checkpoint.names()
    [head], [embed] = (
        [find_source(source, names, family.PREFIXES) for source in sources[target]]
        for target in ("head.weight", "embed.weight")
    )
    if head is None or embed is None or same_values(checkpoint.get(head), checkpoint.get(embed)):
        return sizes, []
    return untied, [
        f"config.json says tie_word_embeddings=true, but {listed([head])} differs from {listed([embed])}: "
        "the head of its own is used"
    ]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, whatever their dtypes; a NaN equals nothing."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    one, other = torch.atleast_1d(one), torch.atleast_1d(other)
    blocks = zip(one.split(BLOCK_ROWS), other.split(BLOCK_ROWS), strict=True)
    return all(bool((a.float() == b.float()).all()) for a, b in blocks)
