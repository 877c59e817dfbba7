"""A checkpoint that lives in memory: what the reference reads, without a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class MemoryContainer:
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor_info(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(shape=tuple(self.tensors[name].shape))

    def get(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name]


@dataclass
class MemoryCheckpoint:
    raw_container: MemoryContainer
    config: dict[str, Any] = field(default_factory=dict)


def memory_checkpoint(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> MemoryCheckpoint:
    """A Hugging Face checkpoint of these tensors."""
    return MemoryCheckpoint(
        MemoryContainer({k: v.detach() for k, v in tensors.items()}), dict(config)
    )
