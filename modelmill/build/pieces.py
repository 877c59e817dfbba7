"""Every tensor that an engine will hold: where it comes from, and how it is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from modelmill.build.keep import KEEP, Kept, find_kept, source_shape
from modelmill.build.kinds import dtype_of
from modelmill.checkpoint.container import listed
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import Resolved, Rule, plan_renames, result_info
from modelmill.core.config import BuildConfig
from modelmill.core.errors import TensorMismatch
from modelmill.nn.linear import Linear
from modelmill.quant.recipe import Recipe
from modelmill.quant.still import Rounded
from modelmill.weights.held import PackedInfo, packed_info

KEPT = ("head",)
TOWER = "reader.visual_encoder.blocks."


@dataclass(frozen=True)
class Piece:
    """One tensor of the model: where it comes from and how it is stored.

    held: the kind of a linear's weight, None for everything else. stored: shape and dtype by full name. kept: where the
    checkpoint's own whole numbers are stored.
    """

    module: str
    resolved: Resolved
    held: str | None
    shape: tuple[int, ...]
    stored: PackedInfo
    kept: Kept | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the engine."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.stored.values())

    @property
    def dtype(self) -> torch.dtype:
        """The type that a tensor which no recipe changes is stored in."""
        return next(iter(self.stored.values()))[1]


def renames_of(checkpoint: Checkpoint, family: ModuleType, sizes: Any) -> list[Resolved]:
    """The family's rules with this checkpoint's names. Raises TensorMismatch for missing and left-over tensors."""
    rules = family.rules(sizes)
    drops = [*family.drops(sizes), *map(re.escape, _surplus(checkpoint, rules, family.PREFIXES))]
    return plan_renames(rules, drops, checkpoint.names(), family.PREFIXES)


def _surplus(checkpoint: Checkpoint, rules: Sequence[Rule], prefixes: Sequence[str]) -> list[str]:
    """Biases of zeros that nobody reads: AutoGPTQ writes one beside each packed matrix, of the model's or not.

    Raises TensorMismatch where such a bias holds something else.
    """
    read = {source for rule in rules for source in rule.sources if source.endswith(".bias")}
    read |= {source.removeprefix(prefix) for source in read for prefix in prefixes}
    read |= {prefix + source for source in read for prefix in prefixes}
    here = set(checkpoint.names())
    found = []
    for name in checkpoint.names():
        matrix = name.removesuffix("bias") + "weight"
        if not name.endswith(".bias") or name in read or matrix not in here or checkpoint.form(matrix) is None:
            continue
        if bool((checkpoint.get(name) != 0).any()):
            raise TensorMismatch(
                f"{listed([name])} beside a packed matrix is a bias that {checkpoint.model_type} has not, and not "
                "zero; does config.json belong to these weights (model_type, attention_bias)?"
            )
        found.append(name)
    return found


def quantized_of(model: nn.Module, config: BuildConfig) -> set[str]:
    """Names of the linears that the recipe changes."""
    if config.quantization == "none":
        return set()
    kept = getattr(model, "unquantized", ())
    linears = {n for n, module in model.named_modules() if isinstance(module, Linear) and not n.startswith(kept)}
    return linears if config.quantize_head else linears - set(KEPT)


def pieces_of(
    checkpoint: Checkpoint, config: BuildConfig, recipe: Recipe | None, model: nn.Module, renames: Sequence[Resolved],
    family: ModuleType,
) -> list[Piece]:  # fmt: skip
    """Every tensor of the model. Raises TensorMismatch where the config asks for another shape than a tensor has."""
    quantized = quantized_of(model, config)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    expected = {name: tuple(buffer.shape) for name, buffer in model.named_buffers(remove_duplicate=False)}
    expected = {n: s for n, s in expected.items() if n.rpartition(".")[2] != "inv_freq"}
    expected |= {f"{name}.weight": module.shape for name, module in linears.items()}
    out = []
    for resolved in renames:
        module, _, suffix = resolved.target.rpartition(".")
        held: Recipe | str | None = None
        if module in linears and suffix == "weight":
            held = how_held(recipe, config, module) if module in quantized else "dense"
            if config.tower != "none" and module.startswith(TOWER):
                held = Rounded(config)
        dtype = dtype_of(family, resolved.target, getattr(torch, config.dtype))
        piece = piece_of(checkpoint, config, resolved, module, held, dtype)
        if piece.shape != expected[resolved.target]:
            raise TensorMismatch(
                f"{', '.join(resolved.sources)}: shape {list(piece.shape)} where the config asks for "
                f"{list(expected[resolved.target])}; config.json and weights do not belong together"
            )
        out.append(piece)
    return out


def how_held(recipe: Recipe | None, config: BuildConfig, module: str) -> Recipe | str:
    """What to do with a weight that is quantized: the recipe, or "keep"."""
    if recipe is not None and hasattr(recipe, "of"):
        found: Recipe = recipe.of(module)
        return found
    return KEEP if recipe is None and config.quantization == KEEP else recipe or "dense"


def piece_of(
    checkpoint: Checkpoint, config: BuildConfig, resolved: Resolved, module: str, held: Recipe | str | None,
    dtype: torch.dtype | None = None,
) -> Piece:  # fmt: skip
    """held: "dense", "keep" or a recipe for a linear's weight, None for everything else.

    dtype: None means the activations'. What cannot be kept becomes dense. Raises TensorMismatch for whole numbers.
    """
    info = result_info(resolved, checkpoint.info)
    dtype = dtype or getattr(torch, config.dtype)
    if not info.torch_dtype.is_floating_point:
        raise TensorMismatch(
            f"{', '.join(resolved.sources)} holds {info.dtype} where numbers with a fraction are needed"
        )
    if held is None:
        return Piece(module, resolved, None, info.shape, {resolved.target: (info.shape, dtype)})
    shape = (info.shape[0], info.shape[1]) if len(info.shape) == 2 else (0, 0)
    if held == KEEP:
        kept = find_kept(resolved, checkpoint)
        if kept is not None:
            parts = tuple(source_shape(checkpoint.info(s), f) for s, f in zip(kept.sources, kept.forms, strict=True))
            stored = {f"{module}.{suffix}": entry for suffix, entry in kept.stored(parts, dtype).items()}
            return Piece(module, resolved, kept.kind, info.shape, stored, kept)
        held = "dense"
    kind, layout = (held, {}) if isinstance(held, str) else (held.kind, held.layout)
    stored = {f"{module}.{suffix}": entry for suffix, entry in packed_info(kind, shape, dtype, **layout).items()}
    return Piece(module, resolved, kind, info.shape, stored)
