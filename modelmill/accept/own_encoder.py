"""Quantized image encoders are judged in two halves, as accept.own does it for language models.

Their arithmetic: the reference computes with the matrices that the engine holds, and rounds activations where the
engine does. Their weights: what is held against the checkpoint's own, batch norms folded in, matrix by matrix,
row by row and tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from modelmill.accept.finding import Finding
from modelmill.accept.parts import compare_matrix
from modelmill.accept.reference import Affine
from modelmill.accept.tolerances import PARTS, weight_bound

# the layer, None outside of layers, and the name that stands for a path in there
Place: TypeAlias = Callable[[str], tuple[int | None, str]]


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


def weight_findings(
    own: Mapping[str, Affine], model: nn.Module, dtype: str, matrix: Callable[[str], Tensor], place: Place
) -> Iterator[Finding]:
    """Every quantized matrix against the checkpoint's: rounding neither turns a matrix, nor swaps two, nor scales one,
    nor does it do so to a row or a tile.

    matrix: the checkpoint's, by the engine's path; place: where a path is to be told of.
    """
    for path, held in own.items():
        layer, module = place(path)
        kind = model.get_submodule(path).held.kind  # type: ignore[union-attr]
        rows = compare_matrix(f"{path}.weight", held.weight, matrix(path))
        for row, bound in zip(rows, (weight_bound(dtype, kind), PARTS[kind]), strict=True):  # type: ignore[arg-type, index]
            yield Finding(row.name, layer, f"{module}.weight", row, bound)
