"""``-q keep``: matrices that a checkpoint stores in few bits stay as they are, number by number.

What reads one input is one matrix in the engine (q, k and v; gate and up): where its parts are
stored alike they are held as one, otherwise each in its own way, one above the other. Everything
else is held dense.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.quant_layout import PackedMatrix, QuantLayout
from modelmill.checkpoint.rename import ResolvedRule
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, UsageError
from modelmill.weights import dense, int4, int8, int8_group, mixed_rows
from modelmill.weights.base import PackedInfo, WeightFormat

KEEP = "keep"


@dataclass(frozen=True)
class KeptWeight:
    """A matrix of the engine from parts of the checkpoint, with the layout of each; None: a part
    that is dense.

    weight_format: how it is held.
    """

    sources: tuple[str, ...]
    layouts: tuple[QuantLayout | None, ...]
    weight_format: str

    def stored_info(self, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> PackedInfo:
        """Shapes and dtypes of what is stored, by suffix. dtype: of dense parts."""
        if self.weight_format != "mixed_rows":
            first = self.layouts[0]
            assert first is not None, "a kept matrix of one form"
            return _packed_info(first, sum(shape[0] for shape in shapes))
        found: PackedInfo = {}
        for number, (form, shape) in enumerate(zip(self.layouts, shapes, strict=True)):
            info = {"weight": (shape, dtype)} if form is None else _packed_info(form, shape[0])
            kind = "dense" if form is None else form.weight_format
            found |= {f"{number}-{kind}-{suffix}": entry for suffix, entry in info.items()}
        return found

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> WeightFormat:
        """The matrix with its values."""
        if self.weight_format != "mixed_rows":
            parts = [checkpoint.read_packed(name) for name in self.sources]
            assert self.layouts[0] is not None, "a kept matrix of one form"
            return _unpack(self.layouts[0], _concat_rows(parts))
        rows: list[WeightFormat] = []
        for name, form in zip(self.sources, self.layouts, strict=True):
            if form is None:
                rows.append(dense.DenseWeight.pack(checkpoint.get(name), dtype))
            else:
                rows.append(_unpack(form, checkpoint.read_packed(name)))
        return mixed_rows.MixedRowsWeight(tuple(rows))


def find_kept_weight(resolved: ResolvedRule, checkpoint: Checkpoint) -> KeptWeight | None:
    """How a matrix can be kept; None where nothing of it is stored in few bits, or it is not made
    of whole rows.
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
    kind = first.weight_format if first is not None and same else "mixed_rows"
    return KeptWeight(resolved.sources, tuple(forms), kind)


def resolve_keep(checkpoint: Checkpoint, config: BuildConfig) -> tuple[BuildConfig, dict[str, str]]:
    """A checkpoint that is quantized already is kept unless another recipe is asked for; and why,
    by option.

    Raises UsageError where there is nothing to keep, CheckpointError where the config speaks of
    what is not there.
    """
    foreign = bool(checkpoint.config.get("quantization_config"))
    if config.quantization != KEEP and not (foreign and config.quantization == "none"):
        return config, {}
    labels: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for name in checkpoint.names():
        form = checkpoint.quant_layout(name)
        if form is not None:
            labels[form.label] += 1
        else:
            types[checkpoint.info(name).dtype] += len(checkpoint.info(name).shape) > 1
    if not labels and foreign:
        raise CheckpointError(
            f"{checkpoint.path}: config.json says that the weights are quantized, but none are; "
            "remove its "
            "quantization_config, or take the whole checkpoint"
        )
    if not labels:
        type_names = ", ".join(name for name, count in types.most_common(4) if count)
        raise UsageError(
            f"-q keep: {checkpoint.path} holds no matrix that can be kept as it is (Q4_0, Q4_1, "
            "Q8_0, GPTQ, AWQ, "
            f"compressed-tensors), but {type_names}; build with -q int4 or -q int8"
        )
    label_counts = ", ".join(f"{label} ({count})" for label, count in labels.most_common())
    return replace(config, quantization=KEEP), {
        "quantization": f"{KEEP}: as the checkpoint has them, {label_counts}"
    }


def source_shape(info: TensorInfo, layout: QuantLayout | None) -> tuple[int, int]:
    """[rows, columns] of a part as it will be held."""
    return (layout.rows, layout.columns) if layout is not None else (info.shape[0], info.shape[1])


def _packed_info(layout: QuantLayout, rows: int) -> PackedInfo:
    shape = (rows, layout.columns)
    if layout.weight_format == "int8":
        return int8.Int8Weight.packed_info(shape, torch.float32)
    kind: Any = int4.Int4Weight if layout.weight_format == "int4" else int8_group.Int8GroupWeight
    info: PackedInfo = kind.stored_info(
        shape,
        layout.group_size,
        layout.scale_dtype,
        has_offset=layout.has_offset,
        has_perm=layout.perm_digest is not None,
    )
    return info


def _unpack(layout: QuantLayout, packed: PackedMatrix) -> WeightFormat:
    if layout.weight_format == "int8":
        return int8.Int8Weight(packed.codes, packed.scale[:, 0].float().contiguous())
    if layout.weight_format == "int8_group":
        return int8_group.Int8GroupWeight.from_codes(
            packed.codes, packed.scale, packed.offset, layout.group_size, packed.perm
        )
    return int4.Int4Weight(
        int4.pack_codes(packed.codes),
        packed.scale,
        packed.offset,
        layout.columns,
        layout.group_size,
        perm=packed.perm,
    )


def _concat_rows(matrices: list[PackedMatrix]) -> PackedMatrix:
    """Rows above rows."""
    if len(matrices) == 1:
        return matrices[0]
    offsets = [part.offset for part in matrices if part.offset is not None]
    return PackedMatrix(
        torch.cat([part.codes for part in matrices]),
        torch.cat([part.scale for part in matrices]),
        torch.cat(offsets) if offsets else None,
        matrices[0].perm,
    )
