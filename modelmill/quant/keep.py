"""keep: matrices that a checkpoint stores in few bits are kept, integer by integer.

Matrices that read one input are one matrix in the engine (q, k and v; gate and up): parts with the
same layout form one weight, otherwise they form row blocks in several formats. All other weights
are dense. Nothing is rounded, so there is no ``RECIPE``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.checkpoint.bitnet_format import DequantizingBitNetContainer
from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.fp8_format import DequantizingFp8Container
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.quant_layout import QuantizedMatrix, QuantLayout
from modelmill.checkpoint.rename import ResolvedRule
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, UsageError
from modelmill.core.recipe_declaration import RecipeDeclaration
from modelmill.ops.int4_linear import pack_codes
from modelmill.weights import dense, int4, int8, int8_group, mixed_rows, mxfp4
from modelmill.weights.base import PackedTensorSpecs, WeightFormat

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=98,
    weight_format="mixed_rows",
    docs=(
        "what the file has",
        "a GGUF of Q4_0, Q4_1 or Q8_0 and the experts of gpt-oss (MXFP4) stay unchanged instead of "
        "being expanded",
    ),
)

KEEP_RECIPE_NAME = "keep"
GROUPWISE_WEIGHT_CLASSES = {
    "int4": int4.Int4Weight,
    "int8_group": int8_group.Int8GroupWeight,
    "mxfp4": mxfp4.Mxfp4Weight,
}


@dataclass(frozen=True)
class PrequantizedWeightPlan:
    """A matrix of the engine from parts of the checkpoint, with the layout of each part.

    Attributes:
        layouts: None for a dense part.
        weight_format: the format in the engine.
    """

    sources: tuple[str, ...]
    layouts: tuple[QuantLayout | None, ...]
    weight_format: str

    def stored_tensor_specs(self, checkpoint: Checkpoint, dtype: torch.dtype) -> PackedTensorSpecs:
        """Return shapes and dtypes of the stored tensors, by suffix.

        dtype: of dense parts.
        """
        shapes = [
            _source_shape(checkpoint.tensor_info(name), layout)
            for name, layout in zip(self.sources, self.layouts, strict=True)
        ]
        if self.weight_format != "mixed_rows":
            first = self.layouts[0]
            assert first is not None, "a kept matrix of one form"
            return _packed_tensor_specs(first, sum(shape[0] for shape in shapes))
        tensors: PackedTensorSpecs = {}
        for number, (form, shape) in enumerate(zip(self.layouts, shapes, strict=True)):
            info = (
                {"weight": (shape, dtype)} if form is None else _packed_tensor_specs(form, shape[0])
            )
            weight_format = "dense" if form is None else form.weight_format
            tensors |= {
                f"{number}-{weight_format}-{suffix}": entry for suffix, entry in info.items()
            }
        return tensors

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> WeightFormat:
        """Read the matrix from its source tensors, in the weight format it is kept in."""
        if self.weight_format != "mixed_rows":
            parts = [checkpoint.read_quantized_matrix(name) for name in self.sources]
            assert self.layouts[0] is not None, "a kept matrix of one form"
            return _weight_from_quantized_matrix(self.layouts[0], _concat_quantized_rows(parts))
        rows: list[WeightFormat] = []
        for name, form in zip(self.sources, self.layouts, strict=True):
            if form is None:
                rows.append(dense.DenseWeight.pack(checkpoint.get(name), dtype))
            else:
                rows.append(
                    _weight_from_quantized_matrix(form, checkpoint.read_quantized_matrix(name))
                )
        return mixed_rows.MixedRowsWeight(tuple(rows))


def plan_prequantized_weight(
    resolved: ResolvedRule, checkpoint: Checkpoint
) -> PrequantizedWeightPlan | None:
    """Return how a matrix can be kept.

    It is None if no part is stored in few bits, or the matrix is not made of whole rows.
    """
    forms = [checkpoint.quant_layout(name) for name in resolved.sources]
    turned = resolved.how == "transpose"
    if resolved.how not in ("copy", "cat0", "transpose") or any(
        f is not None and f.transposed != turned for f in forms
    ):
        return None
    if not any(forms):
        return None
    first = forms[0]
    same = first is not None and all(
        form is not None and form.merge_key == first.merge_key for form in forms
    )
    weight_format = first.weight_format if first is not None and same else "mixed_rows"
    return PrequantizedWeightPlan(resolved.sources, tuple(forms), weight_format)


DEQUANTIZED_FP8_NOTE = (
    "the checkpoint's 8-bit floats are expanded, so that the engine is larger than the checkpoint; "
    "-q fp8 and int8 store 8 bits"
)


DEQUANTIZED_TERNARY_NOTE = (
    "the checkpoint's ternary weights are expanded, so that the engine is larger than the "
    "checkpoint; -q int4 and int8 store 4 and 8 bits; activations, which the original rounds to 8 "
    "bits, stay in --dtype"
)


def dequantization_note(checkpoint: Checkpoint) -> str:
    """What is said of matrices that no weight format keeps; empty where there are none."""
    view = checkpoint.view
    if isinstance(view, DequantizingBitNetContainer) and view.has_quantized_matrices:
        return DEQUANTIZED_TERNARY_NOTE
    return (
        DEQUANTIZED_FP8_NOTE
        if isinstance(view, DequantizingFp8Container) and view.has_quantized_matrices
        else ""
    )


def resolve_keep_config(
    checkpoint: Checkpoint, config: BuildConfig
) -> tuple[BuildConfig, dict[str, str]]:
    """Return the config of a build that keeps matrices, and the reason by option.

    Raises:
        UsageError: if there is nothing to keep.
        CheckpointError: if the config describes a quantization that the tensors do not have.
    """
    labels: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for name in checkpoint.names():
        form = checkpoint.quant_layout(name)
        if form is not None:
            labels[form.label] += 1
        else:
            types[checkpoint.tensor_info(name).dtype] += len(checkpoint.tensor_info(name).shape) > 1
    if dequantization_note(checkpoint):
        is_ternary = isinstance(checkpoint.view, DequantizingBitNetContainer)
        stored = "ternary weights" if is_ternary else "8-bit floats"
        raise UsageError(
            f"{checkpoint.path} holds {stored}, which are expanded when they are read and "
            "cannot be kept; build it with -q fp8, int8 or none"
        )
    if not labels and checkpoint.config.get("quantization_config"):
        raise CheckpointError(
            f"{checkpoint.path}: config.json describes quantized weights, but none are; "
            "remove its "
            "quantization_config, or use the whole checkpoint"
        )
    if not labels:
        type_names = ", ".join(name for name, count in types.most_common(4) if count)
        raise UsageError(
            f"-q keep: {checkpoint.path} has no matrix that can be kept (Q4_0, Q4_1, "
            "Q8_0, MXFP4, GPTQ, AWQ, "
            f"compressed-tensors), but {type_names}; build with -q int4 or -q int8"
        )
    label_counts = ", ".join(f"{label} ({count})" for label, count in labels.most_common())
    return replace(config, quantization=KEEP_RECIPE_NAME), {
        "quantization": f"{KEEP_RECIPE_NAME}: as the checkpoint has them, {label_counts}"
    }


def _source_shape(info: TensorInfo, layout: QuantLayout | None) -> tuple[int, int]:
    """Return [rows, columns] of a part in the engine."""
    return (layout.rows, layout.columns) if layout is not None else (info.shape[0], info.shape[1])


def _packed_tensor_specs(layout: QuantLayout, rows: int) -> PackedTensorSpecs:
    shape = (rows, layout.columns)
    if layout.weight_format == "int8":
        return int8.Int8Weight.packed_tensor_specs(shape, torch.float32)
    cls: Any = GROUPWISE_WEIGHT_CLASSES[layout.weight_format]
    info: PackedTensorSpecs = cls.stored_tensor_specs(
        shape,
        layout.group_size,
        layout.scale_dtype,
        has_offset=layout.has_offset,
        has_perm=layout.perm_digest is not None,
    )
    return info


def _weight_from_quantized_matrix(layout: QuantLayout, packed: QuantizedMatrix) -> WeightFormat:
    if layout.weight_format == "int8":
        return int8.Int8Weight(packed.codes, packed.scale[:, 0].float().contiguous())
    if layout.weight_format == "mxfp4":
        return mxfp4.Mxfp4Weight.from_codes(packed.codes, packed.scale)
    if layout.weight_format == "int8_group":
        return int8_group.Int8GroupWeight.from_codes(
            packed.codes, packed.scale, packed.offset, layout.group_size, packed.perm
        )
    return int4.Int4Weight(
        pack_codes(packed.codes),
        packed.scale,
        packed.offset,
        layout.columns,
        layout.group_size,
        perm=packed.perm,
    )


def _concat_quantized_rows(matrices: list[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate matrices by rows."""
    if len(matrices) == 1:
        return matrices[0]
    offsets = [part.offset for part in matrices if part.offset is not None]
    return QuantizedMatrix(
        torch.cat([part.codes for part in matrices]),
        torch.cat([part.scale for part in matrices]),
        torch.cat(offsets) if offsets else None,
        matrices[0].perm,
    )
