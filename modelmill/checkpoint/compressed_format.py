"""compressed-tensors checkpoints: pack-quantized (4 and 8 bits) and int-quantized (8 bits), by group, channel, tensor.

weight_packed [N, ⌈K/8⌉] int32 holds value + 8 in order, the lowest nibble first (8 bits: [N, ⌈K/4⌉], value + 128),
and weight_shape tells N and K; or weight [N, K] int8 as it is. weight_scale [N, G]; weight_zero_point [N, G] int8, or
packed along N like the weight; weight_g_idx [K]. weight = scale · (value − zero_point).

What a config asks of activations (8 bits, per token) is not part of a weight: they stay in the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelmill.checkpoint.container import Container
from modelmill.checkpoint.packed import RUN, Form, Packed, digest_of, nibbles, numbers_of, order_of, words
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from modelmill.core.quote import quoted

FORMATS = ("pack-quantized", "int-quantized")
INSTEAD = "take the original checkpoint and build it with -q int4, int8 or fp8"
STRATEGIES = ("group", "channel", "tensor")


def make(settings: Mapping[str, Any], where: Path) -> Compressed:
    """The scheme of a ``quantization_config``. Raises CheckpointError for settings that cannot be read."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or any(not isinstance(each, Mapping) for each in groups.values()):
        raise CheckpointError(f"{where}: its quantization_config names no config_groups; {INSTEAD}")
    sparse: Any = settings.get("sparsity_config") or {}
    sparsity = sparse.get("format", "dense") if isinstance(sparse, Mapping) else sparse
    if sparsity != "dense":
        raise CheckpointError(f"{where} is stored sparse ({quoted(sparsity, 60)}), which cannot be read; {INSTEAD}")
    if settings.get("kv_cache_scheme"):
        raise CheckpointError(f"{where} brings scales for its KV cache, which cannot be used; {INSTEAD}")
    activations = set()
    for each in groups.values():
        _check(each, str(each.get("format") or settings.get("format")), where)
        given: Any = each.get("input_activations") or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{where}: its input_activations are {quoted(given, 60)}, no object; {INSTEAD}")
        if given:
            activations.add(f"{given.get('num_bits', 8)} bits, {'per token' if given.get('dynamic') else 'static'}")
    weights = {_told(each["weights"]) for each in groups.values()}
    return Compressed(where, " and ".join(sorted(weights)), " and ".join(sorted(activations)))


def _check(group: Mapping[str, Any], form: str, where: Path) -> None:
    weights = group.get("weights")
    if form not in FORMATS or not isinstance(weights, Mapping):
        raise CheckpointError(
            f"{where} is a compressed-tensors checkpoint of format {form}, known are {', '.join(FORMATS)}; {INSTEAD}"
        )
    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy") or "tensor"
    if kind != "int" or type(bits) is not int or bits not in (4, 8) or strategy not in STRATEGIES:
        raise CheckpointError(
            f"{where} is a compressed-tensors checkpoint of {quoted(bits, 60)}-bit {kind} weights by {strategy}; "
            f"int weights of 4 or 8 bits by {', '.join(STRATEGIES)} can be read; {INSTEAD}"
        )
    size = weights.get("group_size")
    if strategy == "group" and (not isinstance(size, int) or size < RUN or size % RUN):
        raise CheckpointError(
            f"{where} is a compressed-tensors checkpoint in groups of {size}; multiples of {RUN} can be kept; {INSTEAD}"
        )


def _told(weights: Mapping[str, Any]) -> str:
    strategy = weights.get("strategy") or "tensor"
    where = f"in groups of {weights.get('group_size')}" if strategy == "group" else f"a {strategy}"
    return f"{weights.get('num_bits', 8)} bits {where}"


@dataclass(frozen=True)
class Compressed:
    """weights, activations: what the config says of them, for people."""

    where: Path
    weights: str
    activations: str
    parts: tuple[str, ...] = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
    )
    main: str = "weight_scale"

    @property
    def label(self) -> str:
        asked = f"; activations of {self.activations} are asked for and stay whole" if self.activations else ""
        return f"compressed-tensors, {self.weights}{asked}"

    def form(self, raw: Container, stem: str) -> Form:
        here = set(raw.names())
        if f"{stem}.weight_packed" in here:
            rows, columns = self._stated(raw, stem)
            stored = words(raw.info(f"{stem}.weight_packed"), self.where)
            known = {(rows, -(-columns // 8)): 4, (rows, -(-columns // 4)): 8}
            if stored not in known:
                raise CheckpointError(
                    f"{self.where}: {stem}.weight_packed {list(stored)} holds no {rows} × {columns} codes of 4 or 8 "
                    f"bits; {INSTEAD}"
                )
            bits = known[stored]
        else:
            info = raw.info(f"{stem}.weight")
            if info.dtype != "int8" or len(info.shape) != 2 or 0 in info.shape:
                told = f"{info.dtype} {list(info.shape)}"
                raise CheckpointError(f"{self.where}: {stem}.weight is {told}, matrices of int8 can be read; {INSTEAD}")
            (rows, columns), bits = info.shape, 8
        groups = self._groups(raw, stem, rows)
        group = -(-columns // groups)
        whole = -(-columns // RUN) * RUN
        if groups == 1:
            group = whole
        elif group % RUN or -(-columns // group) != groups:
            raise CheckpointError(f"{self.where}: {stem} has {groups} groups for {columns} columns; {INSTEAD}")
        offset = f"{stem}.weight_zero_point" in here
        if offset and raw.info(f"{stem}.weight_zero_point").dtype not in ("int8", "int32"):
            found = raw.info(f"{stem}.weight_zero_point").dtype
            raise CorruptCheckpoint(f"{self.where}: {stem}.weight_zero_point is {found}, int8 and int32 can be read")
        half = raw.info(f"{stem}.weight_scale").dtype == "float16" and not offset
        order = digest_of(self._order(raw, stem, columns, group))
        return Form(self.label, bits, rows, columns, group, offset, torch.float16 if half else torch.float32, order)

    def packed(self, raw: Container, stem: str, form: Form) -> Packed:
        here = set(raw.names())
        middle = 1 << (form.bits - 1)
        if f"{stem}.weight_packed" in here:
            codes = nibbles(raw.get(f"{stem}.weight_packed"), form.bits)[:, : form.columns]
            codes = codes if form.bits == 4 else (codes.to(torch.int16) - middle).to(torch.int8)
        else:
            codes = raw.get(f"{stem}.weight")
        groups = -(-form.columns // form.group)
        scale = raw.get(f"{stem}.weight_scale").reshape(-1, groups).expand(form.rows, groups)
        order = self._order(raw, stem, form.columns, form.group)
        if order is not None:
            codes = codes[:, order]
        offset = None
        if form.offset:
            zero = self._zeros(raw, stem, form)
            # a 4-bit code is value + 8, an 8-bit one the value itself
            offset = scale.float() * (-(zero + 8) if form.bits == 4 else -zero)
        return Packed(codes.contiguous(), scale.to(form.grid).contiguous(), offset, order)

    def _stated(self, raw: Container, stem: str) -> tuple[int, int]:
        """Rows and columns as weight_shape tells them."""
        name = f"{stem}.weight_shape"
        stated = raw.get(name).flatten().tolist() if raw.info(name).numel == 2 else []
        if len(stated) != 2 or not all(isinstance(n, (int, float)) and 1 <= n < 2**31 and n % 1 == 0 for n in stated):
            raise CorruptCheckpoint(f"{self.where}: {name} tells no rows and columns; download the checkpoint again")
        return int(stated[0]), int(stated[1])

    def _groups(self, raw: Container, stem: str, rows: int) -> int:
        info = raw.info(f"{stem}.weight_scale")
        count, shape = info.numel, info.shape
        if not info.torch_dtype.is_floating_point or count == 0 or (count != 1 and (count % rows or shape[0] != rows)):
            raise CorruptCheckpoint(
                f"{self.where}: {stem}.weight_scale, {info.dtype} {list(shape)}, does not fit {rows} rows"
            )
        return max(count // rows, 1)

    def _zeros(self, raw: Container, stem: str, form: Form) -> torch.Tensor:
        """[N, G] int32."""
        groups = -(-form.columns // form.group)
        stored = raw.get(f"{stem}.weight_zero_point")
        if stored.dtype is torch.int32 and stored.shape == (-(-form.rows * form.bits // 32), groups):
            fields = nibbles(stored.t().contiguous(), form.bits).t()[: form.rows]
            return fields.to(torch.int32) - (1 << (form.bits - 1))
        if stored.numel() not in (1, form.rows * groups):
            raise CorruptCheckpoint(f"{self.where}: {stem}.weight_zero_point {list(stored.shape)} does not fit")
        return stored.to(torch.int32).reshape(-1, 1 if stored.numel() == 1 else groups).expand(form.rows, groups)

    def _order(self, raw: Container, stem: str, columns: int, group: int) -> torch.Tensor | None:
        name = f"{stem}.weight_g_idx"
        if name not in set(raw.names()):
            return None
        groups = numbers_of(raw, name, columns, self.where)
        if bool((groups < 0).any()):  # written for every module, filled only where columns were reordered
            return None
        try:
            return order_of(groups, group)
        except ValueError:
            raise CheckpointError(
                f"{self.where}: {name} has groups of uneven size, which cannot be kept; {INSTEAD}"
            ) from None
