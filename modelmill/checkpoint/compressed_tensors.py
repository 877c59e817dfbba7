"""compressed-tensors checkpoints: pack-quantized (4, 8 bits) and int-quantized (8 bits).

Scales are by group, channel or tensor. weight_packed [N, ⌈K/8⌉] int32 holds value + 8 in order, the
lowest nibble first (8 bits: [N, ⌈K/4⌉], value + 128), and weight_shape contains N and K; or weight
[N, K] int8. weight_scale [N, G]; weight_zero_point [N, G] int8, or packed along N like the weight;
weight_g_idx [K]. weight = scale · (value − zero_point).

Activation quantization in a config (8 bits, per token) is ignored: activations stay in the engine's
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container
from modelmill.checkpoint.quant_layout import (
    GROUP_SIZE_MULTIPLE,
    QuantizedMatrix,
    QuantLayout,
    checked_packed_words_shape,
    perm_digest,
    perm_from_group_index,
    read_group_index,
    unpack_fields,
)
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quoting import quote
from modelmill.weights.int4 import resolve_group_size

SUPPORTED_FORMATS = ("pack-quantized", "int-quantized")
UNSUPPORTED_ADVICE = "take the original checkpoint and build it with -q int4, int8 or fp8"
SUPPORTED_STRATEGIES = ("group", "channel", "tensor")


def parse_scheme(settings: Mapping[str, Any], path: Path) -> CompressedTensorsScheme:
    """Parse a ``quantization_config``.

    Raises:
        CheckpointError: for unsupported settings.
    """
    groups = settings.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or any(not isinstance(each, Mapping) for each in groups.values())
    ):
        raise CheckpointError(
            f"{path}: its quantization_config names no config_groups; {UNSUPPORTED_ADVICE}"
        )
    sparse: Any = settings.get("sparsity_config") or {}
    sparsity = sparse.get("format", "dense") if isinstance(sparse, Mapping) else sparse
    if sparsity != "dense":
        raise CheckpointError(
            f"{path} is stored sparse ({quote(sparsity, 60)}), which cannot be read; "
            f"{UNSUPPORTED_ADVICE}"
        )
    if settings.get("kv_cache_scheme"):
        raise CheckpointError(
            f"{path} brings scales for its KV cache, which cannot be used; {UNSUPPORTED_ADVICE}"
        )
    activations = set()
    for each in groups.values():
        _check_config_group(each, str(each.get("format") or settings.get("format")), path)
        input_activations: Any = each.get("input_activations") or {}
        if not isinstance(input_activations, Mapping):
            raise CheckpointError(
                f"{path}: its input_activations are {quote(input_activations, 60)}, "
                f"no object; {UNSUPPORTED_ADVICE}"
            )
        if input_activations:
            activations.add(
                f"{input_activations.get('num_bits', 8)} bits, "
                f"{'per token' if input_activations.get('dynamic') else 'static'}"
            )
    weights = {_describe_weights(each["weights"]) for each in groups.values()}
    return CompressedTensorsScheme(
        path, " and ".join(sorted(weights)), " and ".join(sorted(activations))
    )


def _check_config_group(group: Mapping[str, Any], format_name: str, path: Path) -> None:
    weights = group.get("weights")
    if format_name not in SUPPORTED_FORMATS or not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{path} is a compressed-tensors checkpoint of format {format_name}, "
            f"known are {', '.join(SUPPORTED_FORMATS)}; {UNSUPPORTED_ADVICE}"
        )
    bits = weights.get("num_bits", 8)
    kind = weights.get("type", "int")
    strategy = weights.get("strategy") or "tensor"
    if (
        kind != "int"
        or type(bits) is not int
        or bits not in (4, 8)
        or strategy not in SUPPORTED_STRATEGIES
    ):
        raise CheckpointError(
            f"{path} is a compressed-tensors checkpoint of {quote(bits, 60)}-bit {kind} weights "
            f"by {strategy}; "
            f"int weights of 4 or 8 bits by {', '.join(SUPPORTED_STRATEGIES)} can be read; "
            f"{UNSUPPORTED_ADVICE}"
        )
    size = weights.get("group_size")
    if strategy == "group" and (
        not isinstance(size, int) or size < GROUP_SIZE_MULTIPLE or size % GROUP_SIZE_MULTIPLE
    ):
        raise CheckpointError(
            f"{path} is a compressed-tensors checkpoint in groups of {size}; "
            f"multiples of {GROUP_SIZE_MULTIPLE} can be kept; {UNSUPPORTED_ADVICE}"
        )


def _describe_weights(weights: Mapping[str, Any]) -> str:
    strategy = weights.get("strategy") or "tensor"
    where = f"in groups of {weights.get('group_size')}" if strategy == "group" else f"a {strategy}"
    return f"{weights.get('num_bits', 8)} bits {where}"


@dataclass(frozen=True)
class CompressedTensorsScheme:
    """compressed-tensors with one checkpoint's settings.

    weights, activations: descriptions for messages.
    """

    path: Path
    weights: str
    activations: str
    suffixes: tuple[str, ...] = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
    )
    marker_suffix: str = "weight_scale"

    @property
    def label(self) -> str:
        """Return the format's name and bits, for messages."""
        activations = (
            f"; activations of {self.activations} are ignored, activations stay floating point"
            if self.activations
            else ""
        )
        return f"compressed-tensors, {self.weights}{activations}"

    def quant_layout(self, raw: Container, stem: str) -> QuantLayout:
        """Return the quantization layout of the matrix called stem."""
        here = set(raw.names())
        if f"{stem}.weight_packed" in here:
            rows, columns = self._read_weight_shape(raw, stem)
            stored = checked_packed_words_shape(raw.tensor_info(f"{stem}.weight_packed"), self.path)
            known = {(rows, -(-columns // 8)): 4, (rows, -(-columns // 4)): 8}
            if stored not in known:
                raise CheckpointError(
                    f"{self.path}: {stem}.weight_packed {list(stored)} holds no {rows} × "
                    f"{columns} codes of 4 or 8 "
                    f"bits; {UNSUPPORTED_ADVICE}"
                )
            bits = known[stored]
        else:
            info = raw.tensor_info(f"{stem}.weight")
            if info.dtype != "int8" or len(info.shape) != 2 or 0 in info.shape:
                description = f"{info.dtype} {list(info.shape)}"
                raise CheckpointError(
                    f"{self.path}: {stem}.weight is {description}, only int8 matrices "
                    f"can be read; "
                    f"{UNSUPPORTED_ADVICE}"
                )
            (rows, columns), bits = info.shape, 8
        groups = self._count_scale_groups(raw, stem, rows)
        group = -(-columns // groups)
        whole = resolve_group_size(-1, columns)
        if groups == 1:
            group = whole
        elif group % GROUP_SIZE_MULTIPLE or -(-columns // group) != groups:
            raise CheckpointError(
                f"{self.path}: {stem} has {groups} groups for {columns} columns; "
                f"{UNSUPPORTED_ADVICE}"
            )
        offset = f"{stem}.weight_zero_point" in here
        if offset and raw.tensor_info(f"{stem}.weight_zero_point").dtype not in ("int8", "int32"):
            found = raw.tensor_info(f"{stem}.weight_zero_point").dtype
            raise CorruptCheckpoint(
                f"{self.path}: {stem}.weight_zero_point is {found}, int8 and int32 can be read"
            )
        half = raw.tensor_info(f"{stem}.weight_scale").dtype == "float16" and not offset
        order = perm_digest(self._read_column_perm(raw, stem, columns, group))
        return QuantLayout(
            self.label,
            bits,
            rows,
            columns,
            group,
            offset,
            torch.float16 if half else torch.float32,
            order,
        )

    def read_quantized_matrix(
        self, raw: Container, stem: str, layout: QuantLayout
    ) -> QuantizedMatrix:
        """Read the matrix's integers, scales and offsets as stored."""
        here = set(raw.names())
        middle = 1 << (layout.bits - 1)
        if f"{stem}.weight_packed" in here:
            codes = unpack_fields(raw.get(f"{stem}.weight_packed"), layout.bits)[
                :, : layout.columns
            ]
            codes = codes if layout.bits == 4 else (codes.to(torch.int16) - middle).to(torch.int8)
        else:
            codes = raw.get(f"{stem}.weight")
        groups = -(-layout.columns // layout.group_size)
        scale = raw.get(f"{stem}.weight_scale").reshape(-1, groups).expand(layout.rows, groups)
        order = self._read_column_perm(raw, stem, layout.columns, layout.group_size)
        if order is not None:
            codes = codes[:, order]
        offset = None
        if layout.has_offset:
            zero = self._read_zero_points(raw, stem, layout)
            # a 4-bit code is value + 8, an 8-bit one the value itself
            offset = scale.float() * (-(zero + 8) if layout.bits == 4 else -zero)
        return QuantizedMatrix(
            codes.contiguous(), scale.to(layout.scale_dtype).contiguous(), offset, order
        )

    def _read_weight_shape(self, raw: Container, stem: str) -> tuple[int, int]:
        """Return the rows and columns in weight_shape."""
        name = f"{stem}.weight_shape"
        stated = raw.get(name).flatten().tolist() if raw.tensor_info(name).numel == 2 else []
        if len(stated) != 2 or not all(
            isinstance(n, (int, float)) and 1 <= n < 2**31 and n % 1 == 0 for n in stated
        ):
            raise CorruptCheckpoint(
                f"{self.path}: {name} does not contain rows and columns; "
                "download the checkpoint again"
            )
        return int(stated[0]), int(stated[1])

    def _count_scale_groups(self, raw: Container, stem: str, rows: int) -> int:
        info = raw.tensor_info(f"{stem}.weight_scale")
        count, shape = info.numel, info.shape
        if (
            not info.decoded_dtype.is_floating_point
            or count == 0
            or (count != 1 and (count % rows or shape[0] != rows))
        ):
            raise CorruptCheckpoint(
                f"{self.path}: {stem}.weight_scale, {info.dtype} {list(shape)}, does not fit "
                f"{rows} rows"
            )
        return max(count // rows, 1)

    def _read_zero_points(self, raw: Container, stem: str, layout: QuantLayout) -> torch.Tensor:
        """Return the zero points [N, G] int32."""
        groups = -(-layout.columns // layout.group_size)
        stored = raw.get(f"{stem}.weight_zero_point")
        if stored.dtype is torch.int32 and stored.shape == (
            -(-layout.rows * layout.bits // 32),
            groups,
        ):
            fields = unpack_fields(stored.t().contiguous(), layout.bits).t()[: layout.rows]
            return fields.to(torch.int32) - (1 << (layout.bits - 1))
        if stored.numel() not in (1, layout.rows * groups):
            raise CorruptCheckpoint(
                f"{self.path}: {stem}.weight_zero_point {list(stored.shape)} does not fit"
            )
        return (
            stored.to(torch.int32)
            .reshape(-1, 1 if stored.numel() == 1 else groups)
            .expand(layout.rows, groups)
        )

    def _read_column_perm(
        self, raw: Container, stem: str, num_columns: int, group_size: int
    ) -> torch.Tensor | None:
        name = f"{stem}.weight_g_idx"
        if name not in set(raw.names()):
            return None
        groups = read_group_index(raw, name, num_columns, self.path)
        # written for every module, used only if columns were reordered
        if bool((groups < 0).any()):
            return None
        try:
            return perm_from_group_index(groups, group_size)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: {name} has groups of uneven size, which cannot be kept; "
                f"{UNSUPPORTED_ADVICE}"
            ) from None
