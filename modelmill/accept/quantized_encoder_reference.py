"""Splits the check of a quantized image encoder into arithmetic and weights.

It is the counterpart of accept.quantized_reference. Arithmetic: the reference computes with the
engine's matrices, and rounds activations where the engine does. Weights: the stored matrices
against the checkpoint's own, with batch norms folded in, matrix by matrix, row by row and tile by
tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from modelmill.accept.blockwise import compare_matrix
from modelmill.accept.finding import Finding
from modelmill.accept.quantized_reference import input_quantizer
from modelmill.accept.reference import Affine
from modelmill.accept.tolerances import block_bound, weight_bound
from modelmill.nn.linear import Linear

# (layer or None, name of the path within it)
LocatePath: TypeAlias = Callable[[str], tuple[int | None, str]]


class EngineMatrices(Mapping[str, Affine]):
    """The dequantized matrices of quantized linear layers by path, on the CPU in float32.

    Each is dequantized when it is read, since ViT-H's together are 2.5 GB. Biases are excluded:
    they are never quantized, and the reference's own are compared.
    """

    def __init__(self, model: nn.Module, path_prefix: str = "") -> None:
        """Find the quantized linear layers.

        path_prefix: prefix of their paths.
        """
        self._weights: dict[str, Any] = {
            path: module.weight
            for path, module in model.named_modules()
            if path.startswith(path_prefix)
            and isinstance(module, Linear)
            and module.weight.format != "dense"
        }

    def __getitem__(self, path: str) -> Affine:
        weight = self._weights[path].to("cpu")
        return Affine(weight.dense(), None, input_quantizer(weight))

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
    """Compare every quantized matrix with the checkpoint's, including its worst row and tile.

    checkpoint_matrix: returns the checkpoint's matrix by the engine's path. locate: returns the
    layer and name of a path.
    """
    for path, matrix in engine_matrices.items():
        layer, module = locate(path)
        linear = model.get_submodule(path)
        assert isinstance(linear, Linear), "the engine's matrices are those of linear layers"
        weight_format = linear.weight.format
        rows = compare_matrix(f"{path}.weight", matrix.weight, checkpoint_matrix(path))
        whole = weight_bound(dtype, weight_format)
        for row, bound in zip(rows, (whole, block_bound(weight_format) or whole), strict=True):
            yield Finding(row.name, layer, f"{module}.weight", row, bound)
