"""What a model file may define beside its model: the one place that reads it from the module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

LANGUAGE_ENGINE_TYPE = "language"
"""The engine type of models of text; see ``ModelFamilyOptions.ENGINE_TYPE``."""
ConfigFromShapes = Callable[[Mapping[str, Sequence[int]]], dict[str, Any] | None]


@dataclass(frozen=True)
class ModelFamilyOptions:
    """The optional constants of a file ``models/<model_type>.py``, with their defaults.

    Attributes:
        ENGINE_TYPE: "language" or "segmentation".
        FLOAT32_TENSORS: regular expressions for tensors that stay float32.
        SUPPORTED_VALUES: config key → values that change nothing.
        UNUSED_CONFIG_KEYS: config keys that may stay unread.
        config_from_shapes: derives a raw config from the tensors of a file without config.json.
    """

    ENGINE_TYPE: str = LANGUAGE_ENGINE_TYPE
    FLOAT32_TENSORS: tuple[str, ...] = ()
    SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    UNUSED_CONFIG_KEYS: tuple[str, ...] = ()
    config_from_shapes: ConfigFromShapes | None = None

    def is_kept_in_float32(self, tensor_name: str) -> bool:
        """Return whether a tensor of the model is stored in float32, whatever the build's dtype."""
        return any(re.fullmatch(pattern, tensor_name) for pattern in self.FLOAT32_TENSORS)


FAMILY_OPTIONS = tuple(ModelFamilyOptions.__dataclass_fields__)


def read_family_options(family: ModuleType | None) -> ModelFamilyOptions:
    """Return the options of a model file; the defaults without a file."""
    defined = {} if family is None else vars(family)
    return ModelFamilyOptions(**{name: defined[name] for name in FAMILY_OPTIONS if name in defined})


class CheckpointTensorRules(NamedTuple):
    """Which tensors of a checkpoint a family reads.

    Attributes:
        prefixes: what names may begin with in some files and not in others.
        rules: the rename rules of every tensor of the model, from its config.
        ignored_tensors: regular expressions of tensors that are not used, likewise.
    """

    prefixes: tuple[str, ...]
    rules: Callable[[Any], list[Any]]
    ignored_tensors: Callable[[Any], Sequence[str]]


def checkpoint_tensor_rules(family: ModuleType) -> CheckpointTensorRules:
    """Return what a file's ``CHECKPOINT_LAYOUT`` says; functions of its own have precedence.

    ``CHECKPOINT_LAYOUT`` is a ``models._rename_rules.CheckpointLayout``. A file without one has
    ``CHECKPOINT_PREFIXES``, ``rename_rules`` and ``ignored_tensors`` by themselves.
    """
    layout: Any = getattr(family, "CHECKPOINT_LAYOUT", None)
    own = vars(family)
    return CheckpointTensorRules(
        own["CHECKPOINT_PREFIXES"] if layout is None else layout.prefixes,
        own.get("rename_rules") or layout.rename_rules,
        own.get("ignored_tensors") or layout.ignored_tensors,
    )
