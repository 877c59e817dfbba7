"""Quantized image encoders are judged in two halves, as accept.quantized_reference does it for
language models.

Their arithmetic: the reference computes with the matrices that the engine holds, and rounds
activations where the engine does. Their weights: what is held against the checkpoint's own, batch
norms folded in, matrix by matrix,
row by row and tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from modelmill.accept.blockwise import compare_matrix
from modelmill.accept.finding import Finding
from modelmill.accept.reference import Affine
from modelmill.accept.tolerances import BLOCK_BOUNDS, weight_bound
from modelmill.nn.linear import Linear

# the layer, None outside of layers, and the name that stands for a path in there
LocatePath: TypeAlias = Callable[[str], tuple[int | None, str]]


class EngineMatrices(Mapping[str, Affine]):
    """What quantized linear layers hold, by path, on the CPU in float32; none where none is
    quantized.

    Each is expanded when it is asked for: ViT-H's together are 2.5 GB. Without their biases: nobody
    rounds those, and the reference's own are to be compared with.
    """

    def __init__(self, model: nn.Module, path_prefix: str = "") -> None:
        """path_prefix: what their paths begin with."""
        self._weights: dict[str, Any] = {
            path: module.weight
            for path, module in model.named_modules()
            if path.startswith(path_prefix)
            and isinstance(module, Linear)
            and module.weight.format != "dense"
        }

    def __getitem__(self, path: str) -> Affine:
        weight = self._weights[path].to("cpu")
        return Affine(weight.dense(), None, getattr(weight, "fake_quantize", None))

    def __contains__(self, path: object) -> bool:
        return path in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def check_encoder_weights(
    engine_matrices: Mapping[str, Affine],
    model: nn.Module,
    dtype: str,
    checkpoint_matrix: Callable[[str], Tensor],
    locate: LocatePath,
) -> Iterator[Finding]:
    """Every quantized matrix against the checkpoint's: rounding neither turns a matrix, nor swaps
    two, nor scales one, nor does it do so to a row or a tile.

    checkpoint_matrix: by the engine's path; locate: where a path is to be told of.
    """
    for path, matrix in engine_matrices.items():
        layer, module = locate(path)
        kind = model.get_submodule(path).weight.format  # type: ignore[union-attr]
        rows = compare_matrix(f"{path}.weight", matrix.weight, checkpoint_matrix(path))
        for row, bound in zip(rows, (weight_bound(dtype, kind), BLOCK_BOUNDS[kind]), strict=True):  # type: ignore[arg-type, index]
            yield Finding(row.name, layer, f"{module}.weight", row, bound)
