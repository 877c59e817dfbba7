"""Checkpoints that GPTQ, AWQ or compressed-tensors have quantized, under the names of the weights
they stand for.

``config.json`` says which (``quantization_config``); older ones have quantize_config.json
(AutoGPTQ) or quant_config.json (AutoAWQ) beside it. A stem's packed tensors become one matrix
"<stem>.weight", which is expanded only where somebody asks for its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from modelmill.checkpoint import awq_format, compressed_tensors, gptq_format
from modelmill.checkpoint.container import Container, TensorInfo
from modelmill.checkpoint.quant_layout import PackedMatrix, QuantLayout
from modelmill.core.errors import CheckpointError

SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
SCHEME_MODULES = {"gptq": gptq_format, "awq": awq_format, "compressed-tensors": compressed_tensors}
ADVICE = "take the original checkpoint and build it with -q int4 or -q int8"


class QuantScheme(Protocol):
    """One format with one checkpoint's settings.

    label: for people. suffixes: those that a packed matrix consists of. marker_suffix: the one that
    tells that it is one.
    """

    label: str
    suffixes: tuple[str, ...]
    marker_suffix: str

    def quant_layout(self, raw: Container, stem: str) -> QuantLayout:
        """How this matrix is stored.

        Raises CheckpointError for what cannot be read, naming what to do.
        """

    def read_packed(self, raw: Container, stem: str, layout: QuantLayout) -> PackedMatrix:
        """Its values. Raises CorruptCheckpoint where they contradict the form."""


def find_scheme(config: Mapping[str, Any], path: Path) -> QuantScheme | None:
    """The scheme of a ``quantization_config``; None where there is none.

    Raises CheckpointError for one not known.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{path}: quantization_config in config.json is no object; {ADVICE}")
    method = str(settings.get("quant_method", "")).lower()
    found = SCHEME_MODULES.get(method)
    if found is None:
        named, known = method or "an unnamed method", ", ".join(SCHEME_MODULES)
        raise CheckpointError(
            f"{path} is quantized by {named}, which is not supported (known are {known}); {ADVICE}"
        )
    scheme: QuantScheme = found.make(settings, path)
    return scheme


class PrequantizedContainer:
    """A container whose packed matrices appear as "<stem>.weight", [N, K]; all else as it is.

    transposed: the family stores its matrices as [K, N] (GPT-2's Conv1D), so the names mean the
    transposes.
    """

    def __init__(self, raw: Container, scheme: QuantScheme, *, transposed: bool = False) -> None:
        self._raw, self.scheme, self._transposed = raw, scheme, transposed
        self.metadata = raw.metadata
        self._stems: dict[str, str] = {}
        self._layouts: dict[str, QuantLayout] = {}
        everything = raw.names()
        stems = {
            name.removesuffix(f".{scheme.marker_suffix}")
            for name in everything
            if name.endswith(f".{scheme.marker_suffix}")
        }
        self._names: list[str] = []
        for name in everything:
            stem, _, suffix = name.rpartition(".")
            if stem not in stems or suffix not in scheme.suffixes:
                self._names.append(name)
            elif suffix == scheme.marker_suffix:
                self._stems[f"{stem}.weight"] = stem
                self._names.append(f"{stem}.weight")

    def names(self) -> list[str]:
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        if name not in self._stems:
            return self._raw.info(name)
        form, stem = self.quant_layout(name), self._stems[name]
        assert form is not None, "a packed matrix"
        shape = (form.columns, form.rows) if form.transposed else (form.rows, form.columns)
        here = set(self._raw.names())
        stored = [f"{stem}.{part}" for part in self.scheme.suffixes if f"{stem}.{part}" in here]
        return TensorInfo(
            name, shape, form.label, sum(self._raw.info(part).nbytes for part in stored)
        )

    def get(self, name: str) -> torch.Tensor:
        """The values, of a packed matrix in float32."""
        form = self.quant_layout(name)
        if form is None:
            return self._raw.get(name)
        dense = self.read_packed(name).dequantize(form.group_size)
        return dense.t().contiguous() if form.transposed else dense

    def files(self) -> list[Path]:
        return self._raw.files()

    def quant_layout(self, name: str) -> QuantLayout | None:
        """How a matrix is stored; None for what is not packed."""
        if name not in self._stems:
            return None
        if name not in self._layouts:
            found = self.scheme.quant_layout(self._raw, self._stems[name])
            if self._transposed:
                found = QuantLayout(**{**vars(found), "transposed": True})
            self._layouts[name] = found
        return self._layouts[name]

    def read_packed(self, name: str) -> PackedMatrix:
        """The values of a packed matrix as they are stored."""
        form = self.quant_layout(name)
        assert form is not None, "a packed matrix"
        return self.scheme.read_packed(self._raw, self._stems[name], form)
