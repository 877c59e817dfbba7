"""Loads an engine's model: builds the modules on the meta device, then fills in each tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from modelmill.artifact.store import Artifact
from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact
from modelmill.core.model_family import read_family_options
from modelmill.core.module_lookup import import_module_if_exists, list_module_names
from modelmill.nn.linear import Linear
from modelmill.nn.moe import RemoteExpertPlaceholder
from modelmill.nn.shard_model import shard_model
from modelmill.parallel.tp_group import SINGLE_RANK, TPGroup
from modelmill.weights import base

TIED_HEAD_ALIASES = {"head.weight": "embed.weight"}
"""Aliases of an engine with tied embedding and head."""


def build_model(model_type: str, config: Mapping[str, object]) -> nn.Module:
    """Build the model of a family, with weights on the meta device.

    Raises IncompatibleArtifact if the family is unknown.
    """
    module = import_module_if_exists("modelmill.models", model_type)
    if module is None:
        known = ", ".join(list_module_names("modelmill.models"))
        raise IncompatibleArtifact(
            f"the engine is of family {model_type!r}, known here are {known}; update modelmill"
        )
    return module.Model(module.config_from_hf(config))


def load_model(
    artifact: Artifact,
    device: str,
    tp_group: TPGroup = SINGLE_RANK,
    expert_parallel: bool = False,
) -> nn.Module:
    """Load the engine's model to ``device``; on the CPU the weights are views of the files.

    Args:
        artifact: The open engine folder.
        device: Where the weights go.
        tp_group: Only this rank's shards are read.
        expert_parallel: Whether the ranks divide whole experts.

    Raises:
        CorruptArtifact: A tensor is missing, unexpected, or has a wrong shape or dtype.
        UsageError: The model cannot be split over so many ranks.
    """
    model, manifest = build_rank_model(artifact, tp_group, expert_parallel), artifact.manifest
    if manifest.aliases not in ({}, TIED_HEAD_ALIASES):
        raise CorruptArtifact(
            f"{artifact.path} shares other tensors than head and embedding; rebuild the engine"
        )
    computed = {name for name, buffer in model.named_buffers() if not buffer.is_meta}
    fill_weights(
        model, artifact.tensor, artifact.names(), manifest.weight_formats, manifest.aliases, device
    )
    _check_dtypes(model, artifact, computed)
    return model


def _check_dtypes(model: nn.Module, artifact: Artifact, computed: set[str]) -> None:
    """Raise CorruptArtifact if a tensor has another dtype than the build's.

    Kernels do not check dtypes. ``computed``: buffers that are not read from files.
    """
    manifest = artifact.manifest
    family = import_module_if_exists("modelmill.models", manifest.model_type)
    options = read_family_options(family)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in base.FLOAT_DTYPES}
    build_dtype = dtypes.get(str(manifest.build.get("dtype")))
    stored = {name: buffer for name, buffer in model.named_buffers() if name not in computed}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            parts: tuple[Any, ...] = module.weight.row_block_weights()
            stored |= {f"{name}.weight": part.weight for part in parts if part.format == "dense"}
    for name, tensor in stored.items():
        expected = torch.float32 if options.is_kept_in_float32(name) else build_dtype
        if tensor.dtype != expected:
            actual = str(tensor.dtype).removeprefix("torch.")
            raise CorruptArtifact(
                f"{artifact.path}: {name} is stored as {actual} in an engine of "
                f"{manifest.build.get('dtype')!r}; "
                "rebuild the engine"
            )


def build_rank_model(
    artifact: Artifact, tp_group: TPGroup, expert_parallel: bool = False
) -> nn.Module:
    """Build a rank's shard of the engine's model on the meta device.

    Args:
        artifact: The open engine folder.
        tp_group: The rank's group.
        expert_parallel: Whether the ranks divide whole experts.

    Raises:
        UsageError: The model cannot be split over so many ranks, or has no experts to divide.
    """
    manifest = artifact.manifest
    model = build_model(manifest.model_type, manifest.config)
    if tp_group.size > 1:
        alignment_for = functools.partial(_column_alignment, artifact)
        shard_model(model, tp_group, alignment_for, expert_parallel)
    return model


def _column_alignment(artifact: Artifact, linear: str) -> int:
    """Multiple at which the columns of a stored weight may be split."""
    prefix = linear + "."
    suffixes = [
        n.removeprefix(prefix)
        for n in artifact.names()
        if n.startswith(prefix) and n != f"{linear}.bias"
    ]
    views = {s: artifact.tensor(prefix + s) for s in suffixes}
    weight_format = artifact.manifest.weight_formats.get(linear, "dense")
    try:
        return base.from_tensors(weight_format, views).column_slice_alignment if views else 1
    except KeyError as missing:
        raise CorruptArtifact(
            f"the engine lacks the tensor {prefix}{missing.args[0]}; rebuild it"
        ) from None


def fill_weights(
    model: nn.Module,
    read_tensor: Callable[[str], torch.Tensor],
    names: Iterable[str],
    weight_formats: Mapping[str, str],
    aliases: Mapping[str, str],
    device: str,
) -> None:
    """Fill all weights and buffers of a model, one tensor at a time.

    Args:
        model: On the meta device.
        read_tensor: Returns a tensor by name.
        names: All stored tensors.
        weight_formats: Linear module → weight format (default "dense").
        aliases: Tensor name → the tensor whose memory it shares.
        device: Where the tensors go.

    Raises:
        CorruptArtifact: A tensor is missing, unexpected or of a wrong shape.
    """
    store = _TensorStore(read_tensor, set(names), aliases, device)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            _fill_linear(name, module, store, weight_formats.get(name, "dense"))
    store.skip_modules(
        {n for n, m in model.named_modules() if isinstance(m, RemoteExpertPlaceholder)}
    )
    for name, buffer in list(model.named_buffers()):
        _fill_buffer(model, name, buffer, store)
    unused = sorted(store.names - store.used)
    if unused:
        raise CorruptArtifact(
            f"the engine has tensors that the model does not use: {_format_first_names(unused)}; "
            "rebuild it"
        )
    model.eval().requires_grad_(False)


@dataclass
class _TensorStore:
    """Tensors by name on the device; caches those that aliases share."""

    read_tensor: Callable[[str], torch.Tensor]
    names: set[str]
    aliases: Mapping[str, str]
    device: str
    used: set[str] = field(default_factory=set)
    _shared: dict[str, torch.Tensor] = field(default_factory=dict)

    def stored_suffixes(self, module: str) -> list[str]:
        """Suffixes of the tensors stored for a module, without its bias."""
        prefix = module + "."
        all_names = [*self.names, *(a for a in self.aliases if a not in self.names)]
        suffixes = [n.removeprefix(prefix) for n in all_names if n.startswith(prefix)]
        return [s for s in suffixes if s != "bias" and "." not in s]

    def skip_modules(self, modules: Container[str]) -> None:
        """Leave the tensors of these modules to other ranks."""
        for name in self.names:
            parents = accumulate(name.split("."), "{}.{}".format)
            if any(parent in modules for parent in parents):
                self.used.add(name)

    def get_tensor(self, name: str, *, lazy: bool = False) -> torch.Tensor:
        """A tensor by name; ``lazy``: not copied to the device unless it is shared."""
        source = name if name in self.names else self.aliases.get(name, name)
        if source in self._shared:
            return self._shared[source]
        if source not in self.names:
            raise CorruptArtifact(f"the engine lacks the tensor {name}; rebuild it")
        self.used.add(source)
        tensor = self.read_tensor(source)
        if lazy and source not in self.aliases.values():
            return tensor
        tensor = tensor.to(self.device)
        if source in self.aliases.values():
            self._shared[source] = tensor
        return tensor


def _fill_linear(name: str, module: Linear, store: _TensorStore, weight_format: str) -> None:
    shard = module.weight_shard
    tensors = {
        s: store.get_tensor(f"{name}.{s}", lazy=shard is not None)
        for s in store.stored_suffixes(name)
    }
    if "weight" not in tensors and weight_format != "mixed_rows":
        raise CorruptArtifact(f"the engine lacks the tensor {name}.weight; rebuild it")
    try:
        module.weight = weight = base.from_tensors(weight_format, tensors)
    except KeyError as missing:
        raise CorruptArtifact(
            f"the engine lacks the tensor {name}.{missing.args[0]}; rebuild it"
        ) from None
    full_shape = tuple(module.shape if shard is None else shard.full_shape)
    if tuple(weight.shape) != full_shape:
        raise CorruptArtifact(
            f"{name} has shape {tuple(weight.shape)} instead of {full_shape}; rebuild the engine"
        )
    if shard is not None:
        if not shard.has_bias:
            store.used.add(f"{name}.bias")  # another rank adds it
        module.weight = weight.slice(shard.rows, shard.columns).to(store.device)


def _fill_buffer(model: nn.Module, name: str, buffer: torch.Tensor, store: _TensorStore) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if not buffer.is_meta:
        # computed, not stored: rotary frequencies
        setattr(module, leaf, buffer.to(store.device))
        return
    tensor = store.get_tensor(name)
    shard = module.weight_shard if isinstance(module, Linear) else None
    if shard is not None and len(tensor) == shard.full_shape[0]:
        tensor = base.slice_tensor(tensor, shard.rows)
    if tensor.shape != buffer.shape:
        raise CorruptArtifact(
            f"{name} has shape {tuple(tensor.shape)} instead of {tuple(buffer.shape)}; rebuild "
            "the engine"
        )
    setattr(module, leaf, tensor)


def _format_first_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
