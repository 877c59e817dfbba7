"""The rename rules of a layer, from its spec and the checkpoint's names of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modelmill.checkpoint.rename import Rule
from modelmill.nn.layer_spec import LayerSpec, LinearSpec, ModuleSpec, NormSpec

CheckpointNames = Mapping[str, tuple[str, ...]]
"""Module inside the layer → its sources inside the checkpoint's layer; several are concatenated by
rows.
"""


def layer_rules(
    spec: LayerSpec,
    names: CheckpointNames,
    target: str,
    source: str,
    *,
    transposed: bool = False,
) -> list[Rule]:
    """Every tensor of a layer: its norms, its linear layers, then what else has tensors.

    Args:
        spec: The layer.
        names: The checkpoint's names.
        target: The layer in the model, "layers.3".
        source: The layer in the checkpoint, "model.layers.3".
        transposed: Whether matrices of linear layers are stored as [in, out].
    """
    rules = []
    for module in sorted(spec.modules, key=_kind):
        for tensor in module.tensors:
            path, _, leaf = f"{module.path}.{tensor}".rpartition(".")
            sources = tuple(f"{source}.{name}.{leaf}" for name in names[path])
            how = "cat0" if len(sources) > 1 else "copy"
            if transposed and isinstance(module, LinearSpec) and leaf == "weight":
                how = "transpose"
            rules.append(Rule(f"{target}.{path}.{leaf}", sources, how))
    return rules


def stacked_rules(
    specs: Iterable[LayerSpec], names: CheckpointNames, source: str, *, transposed: bool = False
) -> list[Rule]:
    """Every tensor of a decoder's layers; source: their list in the checkpoint."""
    return [
        rule
        for i, spec in enumerate(specs)
        for rule in layer_rules(spec, names, f"layers.{i}", f"{source}.{i}", transposed=transposed)
    ]


def _kind(module: ModuleSpec) -> int:
    return 0 if isinstance(module, NormSpec) else 1 if isinstance(module, LinearSpec) else 2
