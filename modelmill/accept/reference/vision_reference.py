"""The stages of a vision reference and the norms that it used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.tensor_source import OpenedCheckpoint, TensorSource

EngineMatrices = Mapping[str, ModuleWeights]
"""Matrices by the engine's paths."""


@dataclass(frozen=True)
class EngineModuleLocation:
    """The engine's module that computes the same.

    Attributes:
        path: the module, or module.method.
        layer: its number in the encoder, None outside.
        module: its name without the layer's number.
    """

    path: str
    layer: int | None
    module: str


@dataclass(frozen=True)
class ReferenceStage(EngineModuleLocation):
    """One stage of a vision reference."""

    inputs: tuple[Any, ...]
    expected: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReferenceNorm(EngineModuleLocation):
    """A norm.

    channels_first: normalizes dimension 1 of an image instead of the last.
    """

    weight: Tensor
    bias: Tensor
    eps: float
    channels_first: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x, from its definition."""
        dim = 1 if self.channels_first else -1
        mean = x.mean(dim, keepdim=True)
        spread = ((x - mean) ** 2).mean(dim, keepdim=True)
        shape = (-1, 1, 1) if self.channels_first else (-1,)
        return (x - mean) / (spread + self.eps).sqrt() * self.weight.view(shape) + self.bias.view(
            shape
        )


class VisionReference(ABC):
    """A checkpoint's vision model, stage by stage; raises TensorMismatch for missing tensors.

    engine_matrices: those that replace the checkpoint's
    (accept.quantized_vision_reference).
    """

    def __init__(
        self, checkpoint: OpenedCheckpoint, engine_matrices: EngineMatrices | None = None
    ) -> None:
        self._engine_matrices = engine_matrices or {}
        self.source = TensorSource(checkpoint.raw_container, torch.float32)
        self.norms: list[ReferenceNorm] = []

    def apply_and_register_norm(self, norm: ReferenceNorm, x: Tensor) -> Tensor:
        """Apply a norm and record it, so that its eps can be checked on small inputs."""
        if all(known.path != norm.path for known in self.norms):
            self.norms.append(norm)
        return norm(x)

    @abstractmethod
    def read_linear(self, name: str) -> ModuleWeights:
        """Return a linear layer of the checkpoint by its name there."""

    def checkpoint_matrix_by_engine_path(self, path: str) -> Tensor:
        """Return the checkpoint's matrix of the engine's module ``path``."""
        return self.read_linear(path).weight

    def engine_or_checkpoint_weights(self, name: str, path: str) -> ModuleWeights:
        """Return the matrix of the engine's module ``path`` if given, else ``read_linear``."""
        plain, own = self.read_linear(name), self._engine_matrices.get(path)
        # biases are never quantized: compare with the checkpoint's
        return plain if own is None else own._replace(bias=plain.bias)
