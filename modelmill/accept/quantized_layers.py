"""Compares an engine's quantized layers while the reference runs, reading their weights once.

Three results need a layer's checkpoint weights: the comparison with the engine's weights, the error
of its outputs, and the checkpoint's own residual streams, the baseline of a low-bit engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from modelmill.accept.quantization_error import layer_matrix_quantization_errors
from modelmill.accept.quantized_reference import (
    Scales,
    compare_layer_weights,
    dequantize_engine_layer_weights,
    override_with_engine_weights,
    reference_with_engine_norms_and_head,
)
from modelmill.accept.reference import LayerTrace, LayerWeights, ReferenceModel
from modelmill.accept.reference_trace import ReferenceSequence
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.nn.layer_spec import layer_spec


class QuantizedLayersCheck:
    """Compares a quantized engine with ``checkpoint_reference``, which has its original weights.

    Attributes:
        uses_engine_weights: arithmetic and weights are checked apart (accept.quantized_reference).
        folded_scales: a recipe's scales by layer.
        findings: the engine's weights against the checkpoint's.
        quantization_errors: the result of ``accept.quantization_error``, if requested.
        checkpoint_residual_streams: the checkpoint's residual streams [T, H]; after the run those
            behind the last layer.
    """

    def __init__(
        self,
        checkpoint_reference: ReferenceModel,
        model: Any,
        weight_formats: Mapping[str, str],
        dtype: str,
        sequences: Sequence[tuple[Sequence[int], int]],
        *,
        uses_engine_weights: bool,
        folded_scales: Mapping[int, Scales],
        has_stored_errors: bool,
    ) -> None:
        """Prepare the comparison.

        sequences: (ids, length of the prompt). has_stored_errors: whether the engine stores its
        quantization errors.
        """
        self.checkpoint_reference = checkpoint_reference
        self.model = model
        self.weight_formats = weight_formats
        self.dtype = dtype
        self.uses_engine_weights, self._has_stored_errors = uses_engine_weights, has_stored_errors
        self._folded_scales = {
            layer: _scales_to_device(scales, checkpoint_reference.device)
            for layer, scales in folded_scales.items()
        }
        # without this split, the reference in use is the checkpoint's
        followed = sequences if uses_engine_weights else [] if has_stored_errors else sequences[:1]
        self._followed = [
            ReferenceSequence.from_ids(checkpoint_reference, ids, prompt)
            for ids, prompt in followed
        ]
        self.findings: list[ToleranceCheckResult] = []
        self.quantization_errors: list[dict[str, Any]] = []
        self._layers_done = 0

    def reference_with_weight_check(self) -> ReferenceModel:
        """Return the reference for module checks; reading a layer's weights compares that layer.

        If arithmetic and weights are checked apart, it computes with the engine's weights.
        """
        made = (
            reference_with_engine_norms_and_head(
                self.checkpoint_reference, self.model, self.weight_formats
            )
            if self.uses_engine_weights
            else copy.copy(self.checkpoint_reference)
        )
        made.layer_weights = self._layer_weights_with_check  # type: ignore[method-assign]
        return made

    def reference_with_engine_weights(self) -> ReferenceModel:
        """Return the reference that computes with the engine's weights."""
        made = reference_with_engine_norms_and_head(
            self.checkpoint_reference, self.model, self.weight_formats
        )

        def layer_weights(index: int) -> LayerWeights:
            plain = self.checkpoint_reference.layer_weights(index)
            return override_with_engine_weights(
                plain, dict(dequantize_engine_layer_weights(self.model, index, plain))
            )

        made.layer_weights = layer_weights  # type: ignore[method-assign]
        return made

    @property
    def checkpoint_residual_streams(self) -> list[torch.Tensor]:
        """The checkpoint's residual streams of the sequences."""
        return [each.stream for each in self._followed]

    def check_remaining_layers(self) -> None:
        """Process the layers that have not been read."""
        for index in range(self._layers_done, self.checkpoint_reference.num_layers):
            self._layer_weights_with_check(index)

    def _layer_weights_with_check(self, index: int) -> LayerWeights:
        plain = self.checkpoint_reference.layer_weights(index)
        engine_weights = dict(dequantize_engine_layer_weights(self.model, index, plain))
        if index == self._layers_done:
            self._layers_done += 1
            traces = [each.run_layer(index, plain) for each in self._followed]
            # only a recipe with calibration fits weights to inputs
            fitted_to = traces if self._has_stored_errors else []
            self._compare_weights(index, plain, engine_weights, fitted_to)
            if traces and not self._has_stored_errors:
                self.quantization_errors += layer_matrix_quantization_errors(
                    index, plain, engine_weights, traces[0], self.model, self.weight_formats
                )
        return (
            override_with_engine_weights(plain, engine_weights)
            if self.uses_engine_weights
            else plain
        )

    def _compare_weights(
        self,
        index: int,
        checkpoint_weights: LayerWeights,
        engine_weights: LayerWeights,
        traces: Sequence[LayerTrace],
    ) -> None:
        scales = self._folded_scales.get(index, {})
        for path, module, row, bound in compare_layer_weights(
            checkpoint_weights,
            engine_weights,
            self.weight_formats,
            self.dtype,
            scales,
            index,
            layer_spec(self.model.layers[index]),
            traces,
        ):
            self.findings.append(ToleranceCheckResult(path, index, module, row, bound))


def _scales_to_device(scales: Scales, device: torch.device) -> Scales:
    return {site: vector.to(device) for site, vector in scales.items()}
