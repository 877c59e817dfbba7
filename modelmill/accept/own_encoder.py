"""Quantized image encoders are judged in two halves, as accept.own does it for language models.

Their arithmetic: the reference computes with the matrices that the engine holds, and rounds activations where the
engine does. Their weights: what is held against the checkpoint's own, batch norms folded in, matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from modelmill.accept.finding import Finding
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.own import central_gain
from modelmill.accept.reference import Affine
from modelmill.accept.reference.sam import SamReference, layer_of
from modelmill.accept.tolerances import weight_bound


class OwnMatrices(Mapping[str, Affine]):
    """What quantized linear layers hold, by path, on the CPU in float32; none where none is quantized.

    Each is expanded when it is asked for: ViT-H's together are 2.5 GB. Without their biases: nobody rounds those, and
    the reference's own are to be compared with.
    """

    def __init__(self, model: nn.Module, within: str = "") -> None:
        """within: what their paths begin with."""
        self._held: dict[str, Any] = {
            path: module.held
            for path, module in model.named_modules()
            if path.startswith(within) and getattr(module, "held", None) is not None and module.held.kind != "dense"
        }

    def __getitem__(self, path: str) -> Affine:
        held = self._held[path].to("cpu")
        return Affine(held.dense(), None, getattr(held, "seen", None))

    def __contains__(self, path: object) -> bool:
        return path in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def weight_findings(true: SamReference, model: nn.Module, own: Mapping[str, Affine], dtype: str) -> Iterator[Finding]:
    """Every quantized matrix against the checkpoint's: rounding neither turns a matrix, nor swaps two, nor scales one.

    true: the reference with the checkpoint's own weights.
    """
    for path, held in own.items():
        layer, module = layer_of(path)
        expected = true.matrix(path).weight
        kind = model.get_submodule(path).held.kind  # type: ignore[union-attr]
        row = compare_tensors(f"{path}.weight", held.weight, expected)
        if row.finite:
            row = replace(row, gain=central_gain(held.weight, expected))
        yield Finding(f"{path}.weight", layer, f"{module}.weight", row, weight_bound(dtype, kind))  # type: ignore[arg-type]
