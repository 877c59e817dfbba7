"""From an artifact to a model: modules are built without memory, then filled tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from modelmill.artifact.store import Artifact
from modelmill.core.errors import CorruptArtifact, IncompatibleArtifact
from modelmill.core.find import find, names
from modelmill.nn.linear import Linear
from modelmill.nn.split import split
from modelmill.parallel.mesh import ALONE, Mesh
from modelmill.weights import held

ALIASES = {"head.weight": "embed.weight"}
"""What an engine with a tied head shares."""


def build(model_type: str, config: Mapping[str, object]) -> nn.Module:
    """The model of a family, its weights without memory. Raises IncompatibleArtifact for an unknown family."""
    module = find("modelmill.models", model_type)
    if module is None:
        known = ", ".join(names("modelmill.models"))
        raise IncompatibleArtifact(f"the engine is of family {model_type!r}, known here are {known}; update modelmill")
    return module.Model(module.configure(config))


def load(artifact: Artifact, device: str, mesh: Mesh = ALONE) -> nn.Module:
    """The engine's model with its weights on ``device``; on the CPU they stay views of the files.

    mesh: only this rank's part is read. Raises CorruptArtifact where tensors are missing, left over or of a wrong
    shape, UsageError where the model cannot be split so often.
    """
    model, manifest = part_of(artifact, mesh), artifact.manifest
    if manifest.aliases not in ({}, ALIASES):
        raise CorruptArtifact(f"{artifact.path} shares other tensors than head and embedding; rebuild the engine")
    computed = {name for name, buffer in model.named_buffers() if not buffer.is_meta}
    fill(model, artifact.tensor, artifact.names(), manifest.weights, manifest.aliases, device)
    _check_types(model, artifact, computed)
    return model


def _check_types(model: nn.Module, artifact: Artifact, computed: set[str]) -> None:
    """Raise CorruptArtifact for a tensor of another dtype than the build's: kernels read what they are told to.

    computed: buffers that come from no file.
    """
    manifest = artifact.manifest
    kept = getattr(find("modelmill.models", manifest.model_type), "KEPT", ())
    told = {str(dtype).removeprefix("torch."): dtype for dtype in held.FLOATS}.get(str(manifest.build.get("dtype")))
    stored = {name: buffer for name, buffer in model.named_buffers() if name not in computed}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            parts: tuple[Any, ...] = getattr(module.held, "parts", (module.held,))
            stored |= {f"{name}.weight": part.weight for part in parts if part.kind == "dense"}
    for name, tensor in stored.items():
        expected = torch.float32 if any(re.fullmatch(pattern, name) for pattern in kept) else told
        if tensor.dtype != expected:
            found = str(tensor.dtype).removeprefix("torch.")
            raise CorruptArtifact(
                f"{artifact.path}: {name} is stored as {found} in an engine of {manifest.build.get('dtype')!r}; "
                "rebuild the engine"
            )


def part_of(artifact: Artifact, mesh: Mesh) -> nn.Module:
    """What a rank computes of the engine's model, without memory. Raises UsageError where it cannot be split so."""
    manifest = artifact.manifest
    model = build(manifest.model_type, manifest.config)
    split(model, mesh, lambda name: _grain(artifact, name))
    return model


def _grain(artifact: Artifact, linear: str) -> int:
    """At which multiples the columns of a stored weight may be cut."""
    prefix = linear + "."
    suffixes = [n.removeprefix(prefix) for n in artifact.names() if n.startswith(prefix) and n != f"{linear}.bias"]
    views = {s: artifact.tensor(prefix + s) for s in suffixes}
    kind = artifact.manifest.weights.get(linear, "dense")
    try:
        return held.from_tensors(kind, views).grain if views else 1
    except KeyError as missing:
        raise CorruptArtifact(f"the engine lacks the tensor {prefix}{missing.args[0]}; rebuild it") from None


def fill(
    model: nn.Module,
    weights: Callable[[str], torch.Tensor],
    names: Iterable[str],
    kinds: Mapping[str, str],
    aliases: Mapping[str, str],
    device: str,
) -> None:
    """Put every tensor in its place, one at a time.

    weights: tensor by name. names: all that there are. kinds: linear module → how its weight is held ("dense" where it
    is not named). aliases: tensor name → the tensor whose memory it shares.
    """
    store = _Store(weights, set(names), aliases, device)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            _fill_linear(name, module, store, kinds.get(name, "dense"))
    for name, buffer in list(model.named_buffers()):
        _fill_buffer(model, name, buffer, store)
    left = sorted(store.names - store.used)
    if left:
        raise CorruptArtifact(f"the engine holds tensors that the model does not know: {_few(left)}; rebuild it")
    model.eval().requires_grad_(False)


class _Store:
    """Tensors by name on the device; those that others share are kept to be handed out again."""

    def __init__(
        self, weights: Callable[[str], torch.Tensor], names: set[str], aliases: Mapping[str, str], device: str
    ) -> None:
        self.weights, self.names, self.aliases, self.device = weights, names, aliases, device
        self.used: set[str] = set()
        self._shared: dict[str, torch.Tensor] = {}
        self._lent = set(aliases.values())

    def suffixes(self, module: str) -> list[str]:
        """What is stored for a module, without its bias."""
        prefix = module + "."
        all_names = [*self.names, *(a for a in self.aliases if a not in self.names)]
        found = [n.removeprefix(prefix) for n in all_names if n.startswith(prefix)]
        return [s for s in found if s != "bias" and "." not in s]

    def get(self, name: str, *, lazy: bool = False) -> torch.Tensor:
        """lazy: leave a tensor that nobody shares where it is stored."""
        source = name if name in self.names else self.aliases.get(name, name)
        if source in self._shared:
            return self._shared[source]
        if source not in self.names:
            raise CorruptArtifact(f"the engine lacks the tensor {name}; rebuild it")
        self.used.add(source)
        tensor = self.weights(source)
        if lazy and source not in self._lent:
            return tensor
        tensor = tensor.to(self.device)
        if source in self._lent:
            self._shared[source] = tensor
        return tensor


def _fill_linear(name: str, module: Linear, store: _Store, kind: str) -> None:
    part = module.part
    tensors = {s: store.get(f"{name}.{s}", lazy=part is not None) for s in store.suffixes(name)}
    if "weight" not in tensors and kind != "stacked":
        raise CorruptArtifact(f"the engine lacks the tensor {name}.weight; rebuild it")
    try:
        module.held = weight = held.from_tensors(kind, tensors)
    except KeyError as missing:
        raise CorruptArtifact(f"the engine lacks the tensor {name}.{missing.args[0]}; rebuild it") from None
    whole = module.shape if part is None else part.whole
    if tuple(weight.shape) != tuple(whole):
        raise CorruptArtifact(f"{name} has shape {tuple(weight.shape)} instead of {tuple(whole)}; rebuild the engine")
    if part is not None:
        if not part.bias:
            store.used.add(f"{name}.bias")  # another rank adds it
        module.held = weight.slice(part.rows, part.columns).to(store.device)


def _fill_buffer(model: nn.Module, name: str, buffer: torch.Tensor, store: _Store) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if not buffer.is_meta:
        # computed, not stored: rotary frequencies
        setattr(module, leaf, buffer.to(store.device))
        return
    tensor = store.get(name)
    part = module.part if isinstance(module, Linear) else None
    if part is not None and len(tensor) == part.whole[0]:
        tensor = held.cut(tensor, part.rows)
    if tensor.shape != buffer.shape:
        raise CorruptArtifact(
            f"{name} has shape {tuple(tensor.shape)} instead of {tuple(buffer.shape)}; rebuild the engine"
        )
    setattr(module, leaf, tensor)


def _few(found: list[str]) -> str:
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
