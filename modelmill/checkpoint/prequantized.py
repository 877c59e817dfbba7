"""Checkpoints in few bits, by weights' names: GPTQ, AWQ, compressed-tensors, floats, ternary.

``config.json`` contains the method (``quantization_config``); older ones have quantize_config.json
(AutoGPTQ) or quant_config.json (AutoAWQ) beside it. A stem's packed tensors become one matrix
"<stem>.weight", which is expanded only when its values are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from modelmill.checkpoint import awq_format, bitnet_format, compressed_tensors, gptq_format
from modelmill.checkpoint.container import Container, ConvertedContainer, TensorInfo
from modelmill.checkpoint.fp8_format import (
    SUPPORTED_METHODS,
    DequantizingFp8Container,
    read_settings,
)
from modelmill.checkpoint.quant_layout import QuantizedMatrix, QuantLayout
from modelmill.core.errors import CheckpointError

QUANT_METHOD_BY_CONFIG_FILE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
SCHEME_MODULES = {"gptq": gptq_format, "awq": awq_format, "compressed-tensors": compressed_tensors}
UNSUPPORTED_ADVICE = "take the original checkpoint and build it with -q int4 or -q int8"


class QuantScheme(Protocol):
    """One format with one checkpoint's settings.

    Attributes:
        label: for messages.
        suffixes: those of a packed matrix's tensors.
        marker_suffix: the one that identifies a packed matrix.
    """

    label: str
    suffixes: tuple[str, ...]
    marker_suffix: str

    def quant_layout(self, raw: Container, stem: str) -> QuantLayout:
        """Return how this matrix is stored.

        Raises:
            CheckpointError: for unsupported settings, with advice.
        """

    def read_quantized_matrix(
        self, raw: Container, stem: str, layout: QuantLayout
    ) -> QuantizedMatrix:
        """Return its values; raises CorruptCheckpoint if they contradict the layout."""


def as_prequantized_container(
    raw: Container, settings: Any, path: Path, *, transposed: bool = False
) -> Container:
    """Return the view of a quantized checkpoint that has the weights' names.

    Raises:
        CheckpointError: for a method or settings that cannot be read.
    """
    fp8 = read_settings(settings, path)
    if fp8 is not None:
        return DequantizingFp8Container(raw, fp8)
    ternary = bitnet_format.read_settings(settings, path)
    if ternary is not None:
        return bitnet_format.DequantizingBitNetContainer(raw, ternary)
    return PrequantizedContainer(raw, find_scheme(settings, path), transposed=transposed)


def find_scheme(settings: Any, path: Path) -> QuantScheme:
    """Return the scheme of a ``quantization_config``.

    Raises:
        CheckpointError: for an unknown method.
    """
    if not isinstance(settings, Mapping):
        raise CheckpointError(
            f"{path}: quantization_config in config.json is no object; {UNSUPPORTED_ADVICE}"
        )
    method = str(settings.get("quant_method", "")).lower()
    module = SCHEME_MODULES.get(method)
    if module is None:
        named, methods = (
            method or "an unnamed method",
            (*SUPPORTED_METHODS, bitnet_format.QUANT_METHOD),
        )
        known = ", ".join((*SCHEME_MODULES, *methods))
        raise CheckpointError(
            f"{path} is quantized by {named}, which is not supported (known are {known}); "
            f"{UNSUPPORTED_ADVICE}"
        )
    scheme: QuantScheme = module.parse_scheme(settings, path)
    return scheme


class PrequantizedContainer(ConvertedContainer):
    """Shows packed matrices as "<stem>.weight" [N, K]; other tensors are unchanged.

    transposed: the family stores its matrices as [K, N] (GPT-2's Conv1D), so the names refer to the
    transposes.
    """

    def __init__(self, raw: Container, scheme: QuantScheme, *, transposed: bool = False) -> None:
        super().__init__(raw)
        self.scheme = scheme
        self._transposed = transposed
        self._stems: dict[str, str] = {}
        self._layouts: dict[str, QuantLayout] = {}
        everything = raw.names()
        stems = {
            name.removesuffix(f".{scheme.marker_suffix}")
            for name in everything
            if name.endswith(f".{scheme.marker_suffix}")
        }
        self._names = []
        for name in everything:
            stem, _, suffix = name.rpartition(".")
            if stem not in stems or suffix not in scheme.suffixes:
                self._names.append(name)
            elif suffix == scheme.marker_suffix:
                self._stems[f"{stem}.weight"] = stem
                self._names.append(f"{stem}.weight")

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        if name not in self._stems:
            return self._raw.tensor_info(name)
        form, stem = self.quant_layout(name), self._stems[name]
        assert form is not None, "a packed matrix"
        shape = (form.columns, form.rows) if form.transposed else (form.rows, form.columns)
        here = set(self._raw.names())
        stored = [f"{stem}.{part}" for part in self.scheme.suffixes if f"{stem}.{part}" in here]
        return TensorInfo(
            name, shape, form.label, sum(self._raw.tensor_info(part).nbytes for part in stored)
        )

    def get(self, name: str) -> torch.Tensor:
        """Return the values, of a packed matrix in float32."""
        form = self.quant_layout(name)
        if form is None:
            return self._raw.get(name)
        dense = self.read_quantized_matrix(name).dequantize(form.group_size)
        return dense.t().contiguous() if form.transposed else dense

    def quant_layout(self, name: str) -> QuantLayout | None:
        """Return how a matrix is stored; None if it is not packed."""
        if name not in self._stems:
            return None
        if name not in self._layouts:
            layout = self.scheme.quant_layout(self._raw, self._stems[name])
            if self._transposed:
                layout = QuantLayout(**{**vars(layout), "transposed": True})
            self._layouts[name] = layout
        return self._layouts[name]

    def read_quantized_matrix(self, name: str) -> QuantizedMatrix:
        """Return the values of a packed matrix as stored."""
        form = self.quant_layout(name)
        assert form is not None, "a packed matrix"
        return self.scheme.read_quantized_matrix(self._raw, self._stems[name], form)
