"""Splits the check of a quantized image encoder into arithmetic and weights.

It is the counterpart of accept.quantized_reference. Arithmetic: the reference computes with the
engine's matrices, and rounds activations where the engine does. Weights: the stored matrices
against the checkpoint's own, with batch norms folded in, matrix by matrix, row by row and tile by
tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from modelmill.accept.quantized_reference import input_fake_quantizer
from modelmill.accept.reference import ModuleWeights
from modelmill.accept.row_and_tile_errors import compare_matrix
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances import weight_bound, worst_block_bound
from modelmill.nn.layer_stack import vision_encoder_linear_specs
from modelmill.nn.linear import Linear


class DequantizedEncoderMatrices(Mapping[str, ModuleWeights]):
    """The dequantized matrices of an encoder's quantized linear layers by path.

    On the CPU in float32. Each is dequantized when it is read, since ViT-H's together are 2.5 GB.
    Biases are excluded: they are never quantized, and the reference's own are compared.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the quantized linear layers of the encoder's layers."""
        self._linears: dict[str, Linear] = {}
        self.places: dict[str, tuple[int, str]] = {}
        for path, layer, spec in vision_encoder_linear_specs(model):
            linear = model.get_submodule(path)
            assert isinstance(linear, Linear), f"{path} is declared as a linear layer"
            if linear.weight.format != "dense":
                self._linears[path] = linear
                self.places[path] = layer, spec.reference[0]

    @property
    def weight_formats(self) -> dict[str, str]:
        """Return the weight formats by path."""
        return {path: linear.weight.format for path, linear in self._linears.items()}

    def __getitem__(self, path: str) -> ModuleWeights:
        weight = self._linears[path].weight.to("cpu")
        return ModuleWeights(weight.dequantize(), None, input_fake_quantizer(weight))

    def __contains__(self, path: object) -> bool:
        return path in self._linears

    def __iter__(self) -> Iterator[str]:
        return iter(self._linears)

    def __len__(self) -> int:
        return len(self._linears)


def check_vision_encoder_weights(
    engine_matrices: DequantizedEncoderMatrices,
    dtype: str,
    checkpoint_matrix: Callable[[str], Tensor],
) -> Iterator[ToleranceCheckResult]:
    """Compare every quantized matrix with the checkpoint's, including its worst row and tile.

    checkpoint_matrix: returns the checkpoint's matrix by the engine's path.
    """
    for path, matrix in engine_matrices.items():
        layer, module = engine_matrices.places[path]
        weight_format = engine_matrices.weight_formats[path]
        rows = compare_matrix(f"{path}.weight", matrix.weight, checkpoint_matrix(path))
        whole = weight_bound(dtype, weight_format)
        for row, bound in zip(
            rows, (whole, worst_block_bound(weight_format) or whole), strict=True
        ):
            yield ToleranceCheckResult(row.name, layer, f"{module}.weight", row, bound)
