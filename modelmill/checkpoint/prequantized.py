"""Checkpoints that GPTQ, AWQ or compressed-tensors have quantized, under the names of the weights they stand for.

``config.json`` says which (``quantization_config``); older ones have quantize_config.json (AutoGPTQ) or
quant_config.json (AutoAWQ) beside it. A stem's packed tensors become one matrix "<stem>.weight", which is expanded only
where somebody asks for its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from modelmill.checkpoint import awq_format, compressed_format, gptq_format
from modelmill.checkpoint.container import Container, TensorInfo
from modelmill.checkpoint.packed import Form, Packed
from modelmill.core.errors import CheckpointError

SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
FORMATS = {"gptq": gptq_format, "awq": awq_format, "compressed-tensors": compressed_format}
INSTEAD = "take the original checkpoint and build it with -q int4 or -q int8"


class Scheme(Protocol):
    """One format with one checkpoint's settings.

    label: for people. parts: the suffixes that a packed matrix consists of. main: the one that tells that it is one.
    """

    label: str
    parts: tuple[str, ...]
    main: str

    def form(self, raw: Container, stem: str) -> Form:
        """How this matrix is stored. Raises CheckpointError for what cannot be read, naming what to do."""

    def packed(self, raw: Container, stem: str, form: Form) -> Packed:
        """Its values. Raises CorruptCheckpoint where they contradict the form."""


def scheme_of(config: Mapping[str, Any], where: Path) -> Scheme | None:
    """The scheme of a ``quantization_config``; None where there is none. Raises CheckpointError for one not known."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{where}: quantization_config in config.json is no object; {INSTEAD}")
    method = str(settings.get("quant_method", "")).lower()
    found = FORMATS.get(method)
    if found is None:
        named, known = method or "an unnamed method", ", ".join(FORMATS)
        raise CheckpointError(f"{where} is quantized by {named}, which is not supported (known are {known}); {INSTEAD}")
    scheme: Scheme = found.make(settings, where)
    return scheme


class Prequantized:
    """A container whose packed matrices appear as "<stem>.weight", [N, K]; all else as it is.

    transposed: the family stores its matrices as [K, N] (GPT-2's Conv1D), so the names mean the transposes.
    """

    def __init__(self, raw: Container, scheme: Scheme, *, transposed: bool = False) -> None:
        self._raw, self.scheme, self._transposed = raw, scheme, transposed
        self.metadata = raw.metadata
        self._stems: dict[str, str] = {}
        self._forms: dict[str, Form] = {}
        everything = raw.names()
        stems = {name.removesuffix(f".{scheme.main}") for name in everything if name.endswith(f".{scheme.main}")}
        self._names: list[str] = []
        for name in everything:
            stem, _, suffix = name.rpartition(".")
            if stem not in stems or suffix not in scheme.parts:
                self._names.append(name)
            elif suffix == scheme.main:
                self._stems[f"{stem}.weight"] = stem
                self._names.append(f"{stem}.weight")

    def names(self) -> list[str]:
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        if name not in self._stems:
            return self._raw.info(name)
        form, stem = self.form(name), self._stems[name]
        assert form is not None, "a packed matrix"
        shape = (form.columns, form.rows) if form.transposed else (form.rows, form.columns)
        here = set(self._raw.names())
        stored = [f"{stem}.{part}" for part in self.scheme.parts if f"{stem}.{part}" in here]
        return TensorInfo(name, shape, form.label, sum(self._raw.info(part).nbytes for part in stored))

    def get(self, name: str) -> torch.Tensor:
        """The values, of a packed matrix in float32."""
        form = self.form(name)
        if form is None:
            return self._raw.get(name)
        dense = self.packed(name).dense(form.group)
        return dense.t().contiguous() if form.transposed else dense

    def files(self) -> list[Path]:
        return self._raw.files()

    def form(self, name: str) -> Form | None:
        """How a matrix is stored; None for what is not packed."""
        if name not in self._stems:
            return None
        if name not in self._forms:
            found = self.scheme.form(self._raw, self._stems[name])
            if self._transposed:
                found = Form(**{**vars(found), "transposed": True})
            self._forms[name] = found
        return self._forms[name]

    def packed(self, name: str) -> Packed:
        """The values of a packed matrix as they are stored."""
        form = self.form(name)
        assert form is not None, "a packed matrix"
        return self.scheme.packed(self._raw, self._stems[name], form)
