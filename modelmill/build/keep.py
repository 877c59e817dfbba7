"""``-q keep``: matrices that a checkpoint stores in few bits stay as they are, number by number.

What reads one input is one matrix in the engine (q, k and v; gate and up): where its parts are stored alike they are
held as one, otherwise each in its own way, one above the other. Everything else is held dense.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.checkpoint.container import TensorInfo
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.packed import Form, Packed
from modelmill.checkpoint.rename import Resolved
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, UsageError
from modelmill.weights import dense, int4, int8, int8_group, stacked
from modelmill.weights.held import HeldWeight, PackedInfo

KEEP = "keep"


@dataclass(frozen=True)
class Kept:
    """A matrix of the engine from parts of the checkpoint, with the form of each; None: a part that is dense.

    kind: how it is held.
    """

    sources: tuple[str, ...]
    forms: tuple[Form | None, ...]
    kind: str

    def stored(self, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> PackedInfo:
        """Shapes and dtypes of what is stored, by suffix. dtype: of dense parts."""
        if self.kind != "stacked":
            first = self.forms[0]
            assert first is not None, "a kept matrix of one form"
            return _info(first, sum(shape[0] for shape in shapes))
        found: PackedInfo = {}
        for number, (form, shape) in enumerate(zip(self.forms, shapes, strict=True)):
            info = {"weight": (shape, dtype)} if form is None else _info(form, shape[0])
            kind = "dense" if form is None else form.kind
            found |= {f"{number}-{kind}-{suffix}": entry for suffix, entry in info.items()}
        return found

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> HeldWeight:
        """The matrix with its values."""
        if self.kind != "stacked":
            parts = [checkpoint.packed(name) for name in self.sources]
            assert self.forms[0] is not None, "a kept matrix of one form"
            return _held(self.forms[0], _joined(parts))
        held: list[HeldWeight] = []
        for name, form in zip(self.sources, self.forms, strict=True):
            if form is None:
                held.append(dense.Held.pack(checkpoint.get(name), dtype))
            else:
                held.append(_held(form, checkpoint.packed(name)))
        return stacked.Held(tuple(held))


def find_kept(resolved: Resolved, checkpoint: Checkpoint) -> Kept | None:
    """How a matrix can be kept; None where nothing of it is stored in few bits, or it is not made of whole rows."""
    forms = [checkpoint.form(name) for name in resolved.sources]
    turned = resolved.how == "transpose"
    if resolved.how not in ("copy", "cat0", "transpose") or any(
        f is not None and f.transposed != turned for f in forms
    ):
        return None
    if not any(forms):
        return None
    first = forms[0]
    same = first is not None and all(form is not None and form.alike == first.alike for form in forms)
    kind = first.kind if first is not None and same else "stacked"
    return Kept(resolved.sources, tuple(forms), kind)


def resolve_keep(checkpoint: Checkpoint, config: BuildConfig) -> tuple[BuildConfig, dict[str, str]]:
    """A checkpoint that is quantized already is kept unless another recipe is asked for; and why, by option.

    Raises UsageError where there is nothing to keep, CheckpointError where the config speaks of what is not there.
    """
    foreign = bool(checkpoint.config.get("quantization_config"))
    if config.quantization != KEEP and not (foreign and config.quantization == "none"):
        return config, {}
    labels: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for name in checkpoint.names():
        form = checkpoint.form(name)
        if form is not None:
            labels[form.label] += 1
        else:
            types[checkpoint.info(name).dtype] += len(checkpoint.info(name).shape) > 1
    if not labels and foreign:
        raise CheckpointError(
            f"{checkpoint.path}: config.json says that the weights are quantized, but none are; remove its "
            "quantization_config, or take the whole checkpoint"
        )
    if not labels:
        held = ", ".join(name for name, count in types.most_common(4) if count)
        raise UsageError(
            f"-q keep: {checkpoint.path} holds no matrix that can be kept as it is (Q4_0, Q4_1, Q8_0, GPTQ, AWQ, "
            f"compressed-tensors), but {held}; build with -q int4 or -q int8"
        )
    told = ", ".join(f"{label} ({count})" for label, count in labels.most_common())
    return replace(config, quantization=KEEP), {"quantization": f"{KEEP}: as the checkpoint has them, {told}"}


def source_shape(info: TensorInfo, form: Form | None) -> tuple[int, int]:
    """[rows, columns] of a part as it will be held."""
    return (form.rows, form.columns) if form is not None else (info.shape[0], info.shape[1])


def _info(form: Form, rows: int) -> PackedInfo:
    shape = (rows, form.columns)
    if form.kind == "int8":
        return int8.Held.packed_info(shape, torch.float32)
    kind: Any = int4.Held if form.kind == "int4" else int8_group.Held
    info: PackedInfo = kind.stored_info(shape, form.group, form.grid, offset=form.offset, order=form.order is not None)
    return info


def _held(form: Form, packed: Packed) -> HeldWeight:
    if form.kind == "int8":
        return int8.Held(packed.codes, packed.scale[:, 0].float().contiguous())
    if form.kind == "int8_group":
        return int8_group.Held.from_codes(packed.codes, packed.scale, packed.offset, form.group, packed.order)
    return int4.Held(
        int4.pack_codes(packed.codes), packed.scale, packed.offset, form.columns, form.group, order=packed.order
    )


def _joined(parts: list[Packed]) -> Packed:
    """Rows above rows."""
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offset for part in parts if part.offset is not None]
    return Packed(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(offsets) if offsets else None,
        parts[0].order,
    )
