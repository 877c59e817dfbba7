"""Explains tensors that do not fit the config: the file, the config's fields and their values.

Which fields decide a name or a shape is found by trying: the config is read again with another
value of one field. A value with which everything fits is named, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from modelmill.builder.tensor_plan import (
    is_bias_of_packed_matrix,
    model_tensor_shapes,
    shape_mismatch_message,
)
from modelmill.checkpoint.container import format_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import match_rules, result_tensor_info
from modelmill.checkpoint.safetensors import INDEX_FILE
from modelmill.core.errors import CheckpointError, TensorMismatch
from modelmill.core.model_family import checkpoint_tensor_rules
from modelmill.core.read_tracking_config import ReadTrackingConfig

MAX_MATCHED_NAMES, MAX_COMPARED_SHAPES = 800_000, 120_000
"""Tensors that are looked at for one explanation: large models try fewer values."""
MAX_VALUE_TRIALS = 400
RENAME_ERROR_PREFIXES = ("the model needs", "the checkpoint holds")
"""How ``checkpoint.rename.plan_renames`` begins its messages."""


class ShapeMismatch(NamedTuple):
    """A tensor of another shape; both are empty where a rename step refuses it."""

    message: str
    shape: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()


class Mismatches(NamedTuple):
    """What does not fit: names that are missing or unused, and other shapes by name."""

    missing: tuple[str, ...]
    unused: tuple[str, ...]
    shapes: Mapping[str, ShapeMismatch]

    @property
    def is_empty(self) -> bool:
        """Return whether everything fits."""
        return not (self.missing or self.unused or self.shapes)

    def sibling_layer_names(self, name: str) -> list[str]:
        """Return what is missing or unused and differs from a name in numbers alone."""
        pattern = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", name))))
        return [each for each in (*self.missing, *self.unused) if pattern.fullmatch(each)]


class DecidingField(NamedTuple):
    """A config field that decides a name or shape; fit: a value with which everything fits."""

    name: str
    value: int
    fit: int | None


@contextmanager
def reraise_explained_mismatch(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any
) -> Iterator[None]:
    """Explain a TensorMismatch of what is done inside: the file, the fields and what to do.

    Raises:
        TensorMismatch: in the place of the one that was raised.
    """
    try:
        yield
    except TensorMismatch as error:
        found = find_mismatches(checkpoint, family, model_config)
        if found.is_empty or not (found.shapes or str(error).startswith(RENAME_ERROR_PREFIXES)):
            raise
        fields = [] if _is_gguf(checkpoint) else find_deciding_fields(checkpoint, family, found)
        raise TensorMismatch(_explain(checkpoint, found, fields)) from None


def find_mismatches(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any, *, names_alone: bool = False
) -> Mismatches:
    """Return everything that does not fit a config, without reading values.

    Args:
        checkpoint: what has the tensors.
        family: their model.
        model_config: its sizes.
        names_alone: whether shapes are left out if names do not fit, which is faster.
    """
    tensors = checkpoint_tensor_rules(family)
    resolved, missing, unused = match_rules(
        tensors.rules(model_config),
        tensors.ignored_tensors(model_config),
        checkpoint.names(),
        tensors.prefixes,
    )
    here = set(checkpoint.names())
    unused = [name for name in unused if not is_bias_of_packed_matrix(checkpoint, name, here)]
    shapes: dict[str, ShapeMismatch] = {}
    if names_alone and (missing or unused):
        return Mismatches(tuple(missing), tuple(unused), shapes)
    with torch.device("meta"):
        expected = model_tensor_shapes(family.Model(model_config))
    for rule in resolved:
        try:
            shape = result_tensor_info(rule, checkpoint.tensor_info).shape
        except TensorMismatch as error:
            shapes.setdefault(rule.sources[0], ShapeMismatch(str(error)))
            continue
        needed = expected.get(rule.target, shape)
        if shape != needed:
            message = shape_mismatch_message(rule.sources, shape, needed)
            shapes.setdefault(rule.sources[0], ShapeMismatch(message, shape, needed))
    return Mismatches(tuple(missing), tuple(unused), shapes)


def find_deciding_fields(
    checkpoint: Checkpoint, family: ModuleType, found: Mismatches
) -> list[DecidingField]:
    """Return the fields that change what is first in ``found``; those with a fit alone, if any."""
    first = _first_mismatched_name(found)
    of_names = bool(found.missing or found.unused)
    limit = MAX_MATCHED_NAMES if of_names else MAX_COMPARED_SHAPES
    # of the checkpoint and of the model, which may have many more layers
    num_names = len(checkpoint.names()) + len(found.missing)
    trials = min(MAX_VALUE_TRIALS, limit // (num_names + 1))
    sizes = _read_config_integers(checkpoint, family)
    decides: set[str] = set()
    fits: dict[str, int] = {}
    for values in zip_longest(
        *(_candidate_values(v, found.shapes.get(first)) for v in sizes.values())
    ):
        for key, other in zip(sizes, values, strict=True):
            if other is None or trials == 0:
                continue
            trials -= 1
            tried = _mismatches_with_values(checkpoint, family, {key: other}, names_alone=of_names)
            if tried is None:
                continue
            if tried.is_empty:
                fits[key] = other
            if (
                tried.sibling_layer_names(first) != found.sibling_layer_names(first)
                if of_names
                else (tried.shapes.get(first) != found.shapes.get(first))
            ):
                decides.add(key)
        if fits:
            break
    chosen = [key for key in sizes if key in (fits or decides)]
    return [DecidingField(key, sizes[key], fits.get(key)) for key in chosen]


def _mismatches_with_values(
    checkpoint: Checkpoint, family: ModuleType, changes: Mapping[str, int], *, names_alone: bool
) -> Mismatches | None:
    """Return what does not fit with other values; None if the family refuses them."""
    try:
        config = family.config_from_hf(ReadTrackingConfig({**checkpoint.config, **changes}))
        return find_mismatches(checkpoint, family, config, names_alone=names_alone)
    except (CheckpointError, ArithmeticError, AssertionError, LookupError, ValueError):
        return None  # a value that is tried may be impossible in any way


def _read_config_integers(checkpoint: Checkpoint, family: ModuleType) -> dict[str, int]:
    """Return the integers of the config that the family reads, by key."""
    view = ReadTrackingConfig(checkpoint.config)
    family.config_from_hf(view)
    unread = view.unread()
    return {
        key: value
        for key, value in checkpoint.config.items()
        if type(value) is int and value > 0 and key not in unread
    }


def _candidate_values(value: int, wrong: ShapeMismatch | None) -> list[int]:
    """Return values that a size may have been meant as: by the shape's ratio, then the nearest."""
    nearby = [value + 1, value - 1, 2 * value, value // 2, 4 * value, value // 4]
    nearby += [3 * value, value + 2, value - 2]
    # of another number of dimensions the first ones are compared
    sides = () if wrong is None else zip(wrong.shape, wrong.expected, strict=False)
    ratios = [value * side // needed for side, needed in sides if side != needed and needed]
    return [each for each in dict.fromkeys([*ratios, *nearby]) if each > 0 and each != value]


def _first_mismatched_name(found: Mismatches) -> str:
    return [*found.missing, *found.unused, *found.shapes][0]


def _is_gguf(checkpoint: Checkpoint) -> bool:
    return checkpoint.container.endswith("gguf")


def _file_of_tensor(checkpoint: Checkpoint, name: str) -> Path:
    """Return the file that has a tensor, or else should have it."""
    find = getattr(checkpoint.raw_container, "file_of_tensor", None)
    home: Path | None = None if find is None else find(name)
    if home is not None:
        return home
    files = checkpoint.raw_container.files()
    index = files[0].parent / INDEX_FILE
    if len(files) == 1:
        return files[0]
    return index if index.is_file() else checkpoint.path


def _explain(checkpoint: Checkpoint, found: Mismatches, fields: list[DecidingField]) -> str:
    """Return the message: what does not fit where, which fields decide it, and what to do."""
    home = _file_of_tensor(checkpoint, _first_mismatched_name(found))
    parts = []
    if found.missing:
        parts.append(
            f"the model needs {len(found.missing)} tensor(s) the checkpoint lacks: "
            f"{format_names(found.missing)}"
        )
    if found.unused:
        parts.append(
            f"the checkpoint holds {len(found.unused)} tensor(s) the model has no place for: "
            f"{format_names(found.unused)}"
        )
    if found.shapes and not parts:
        more = f" (and {len(found.shapes) - 1} more tensors)" if len(found.shapes) > 1 else ""
        parts.append(next(iter(found.shapes.values())).message.partition("; config.json")[0] + more)
    return f"{home}: {'; '.join(parts)}; {_advice(checkpoint, found, fields)}"


def _advice(checkpoint: Checkpoint, found: Mismatches, fields: list[DecidingField]) -> str:
    if _is_gguf(checkpoint):
        return "is the download complete, and the file's architecture right?"
    fetch = "fetch the file again, or " if found.missing and not found.unused else ""
    if not fields:
        wrong = "is the download complete, and " if fetch else ""
        return f"{wrong}does config.json belong to these weights (model_type)?"
    shown = ", ".join(f"{field.name}={field.value}" for field in fields)
    if all(field.fit is not None for field in fields):
        fits = " or ".join(f"{field.name}={field.fit}" for field in fields)
        return f"config.json has {shown}; with {fits} every tensor fits: correct it there"
    return (
        f"this follows from {shown} in config.json; {fetch}take the config.json that belongs to "
        "these weights"
    )
