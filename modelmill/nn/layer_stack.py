"""Where a model's layers are, as it declares it: stacks of layers that each have a spec.

A decoder has one. A model that reads images has further ones for its vision encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from torch import nn

from modelmill.nn.kv import NO_KV, ModelKVCacheSpec
from modelmill.nn.layer_spec import (
    LayerSpec,
    LinearSpec,
    QuantSiteSpec,
    RecurrenceSpec,
    RopeCacheSpec,
    SharedKVQuerySpec,
    layer_spec,
)
from modelmill.nn.recurrent_state import NO_STATE, ModelStateSpec

NON_LAYER_WEIGHT_FILE = "embedding_and_head"  # of the tensors outside the layers


@dataclass(frozen=True)
class LayerStack:
    """Layers that a model computes one after another.

    Attributes:
        path: Their list in the model.
        weight_file_template: Where a layer's tensors are stored; "{:04d}" is the layer's number.
        recipe: The build option that names the recipe of their linear layers; empty: none does,
            and they stay dense.
        reads_images: Whether they belong to a vision encoder.
    """

    path: str
    weight_file_template: str = "layer-{:04d}"
    recipe: str = "quantization"
    reads_images: bool = False


class ModuleLocation(NamedTuple):
    """Where a module inside a layer is."""

    stack: LayerStack
    layer: int
    module: str


DECODER_STACK = LayerStack("layers")


def layer_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """The stacks that a model declares as ``layer_stacks``; without it, those of a decoder."""
    stacks: tuple[LayerStack, ...] = getattr(model, "layer_stacks", (DECODER_STACK,))
    return stacks


def locate_module_in_stacks(model: nn.Module, path: str) -> ModuleLocation | None:
    """The place of a module by its path in the model; None outside the layers."""
    for stack in layer_stacks(model):
        if path.startswith(f"{stack.path}."):
            number, _, module = path.removeprefix(f"{stack.path}.").partition(".")
            return ModuleLocation(stack, int(number), module)
    return None


def stack_layer_specs(model: nn.Module, stack: LayerStack) -> list[LayerSpec]:
    """The specs of a stack's layers."""
    return [layer_spec(layer) for layer in model.get_submodule(stack.path).children()]


def vision_encoder_stacks(model: nn.Module) -> tuple[LayerStack, ...]:
    """The stacks of a model's vision encoder."""
    return tuple(stack for stack in layer_stacks(model) if stack.reads_images)


def vision_encoder_linear_specs(model: nn.Module) -> Iterator[tuple[str, int, LinearSpec]]:
    """(path in the model, layer, spec) of each linear layer in a vision encoder's layers."""
    for stack in vision_encoder_stacks(model):
        for index, spec in enumerate(stack_layer_specs(model, stack)):
            for linear in spec.linears:
                yield f"{stack.path}.{index}.{linear.path}", index, linear


def module_weight_file(model: nn.Module, module: str) -> str:
    """The weight file of a module's tensors, without its folder and suffix.

    A model lists parts with a file of their own as ``own_weight_files``.
    """
    place = locate_module_in_stacks(model, module)
    if place is not None:
        return place.stack.weight_file_template.format(place.layer)
    part = module.partition(".")[0]
    return part if part in getattr(model, "own_weight_files", ()) else NON_LAYER_WEIGHT_FILE


def linear_quant_site(model: nn.Module, path: str) -> QuantSiteSpec | None:
    """The site that a linear of a model reads by its path; None outside the layers."""
    place = locate_module_in_stacks(model, path)
    if place is None:
        return None
    layer = model.get_submodule(f"{place.stack.path}.{place.layer}")
    return layer_spec(layer).site_of_linear(place.module)


def kv_shape(layers: Iterable[nn.Module]) -> ModelKVCacheSpec:
    """The KV cache of those layers whose specs have one."""
    specs = [layer_spec(layer) for layer in layers]
    caches = [cache for spec in specs for cache in spec.modules_of_type(RopeCacheSpec)]
    if not caches:
        return NO_KV
    keys_serve_as_values = {cache.keys_serve_as_values for cache in caches}
    assert len(keys_serve_as_values) == 1, "values are the keys in all layers or in none"
    sizes = tuple((cache.kv_heads, cache.head_dim) for cache in caches)
    read_later = frozenset(
        module.cache for spec in specs for module in spec.modules_of_type(SharedKVQuerySpec)
    )
    windows = [cache.window for cache in caches if cache.window is not None]
    # a hybrid's prefix cache goes by the snapshots of its states
    is_hybrid = any(True for spec in specs for _ in spec.modules_of_type(RecurrenceSpec))
    all_windows = len(windows) == len(caches) and not is_hybrid
    mixed = bool(windows) and not all_windows and not is_hybrid
    shape = ModelKVCacheSpec(
        0, 0, 0, keys_serve_as_values.pop(), max(windows) if all_windows else None,
        read_later=read_later,
        layer_windows=tuple(cache.window for cache in caches) if mixed else (),
        caches=_cache_index_per_layer(specs) if read_later and mixed else (),
    )  # fmt: skip
    return kv_shape_with_sizes(shape, sizes)


def _cache_index_per_layer(specs: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Of each layer the place, among those with a cache, of the one that it reads."""
    own = count()
    return tuple(
        module.cache if isinstance(module, SharedKVQuerySpec) else next(own)
        for spec in specs
        for module in spec.modules
        if isinstance(module, (RopeCacheSpec, SharedKVQuerySpec))
    )


def kv_shape_with_sizes(
    shape: ModelKVCacheSpec, sizes: tuple[tuple[int, int], ...]
) -> ModelKVCacheSpec:
    """The same shape of layers with these (KV heads, channels of a head)."""
    kv_heads, head_dim = max(sizes, key=math.prod)
    differ = len(set(sizes)) > 1
    return replace(
        shape,
        layers=len(sizes),
        kv_heads=kv_heads,
        head_dim=head_dim,
        sizes=sizes if differ else (),
    )


def state_shape(layers: Iterable[nn.Module]) -> ModelStateSpec:
    """The recurrent state of those layers whose specs have one, as this rank keeps it."""
    return ModelStateSpec(
        tuple(
            layer.get_submodule(module.path).state_spec  # type: ignore[misc]
            for layer in layers
            for module in layer_spec(layer).modules_of_type(RecurrenceSpec)
        )
    )


def model_state_shape(model: nn.Module) -> ModelStateSpec:
    """The recurrent state that a language model needs of each sequence."""
    shape = getattr(model, "state", None)
    return shape if isinstance(shape, ModelStateSpec) else NO_STATE
