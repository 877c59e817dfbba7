"""Rename rules from what a model declares: its modules, and the checkpoint's names of them.

``CheckpointLayout`` makes those of a whole decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import nn

from modelmill.checkpoint.rename import Rule
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.layer_spec import CompositeSpec, LayerSpec, LinearSpec, ModuleSpec, NormSpec
from modelmill.nn.linear import Linear
from modelmill.nn.parallel_hybrid_layer import attn_to_mamba_path
from modelmill.nn.qkv_norm import SHARED_HEAD_LAYER_NORM

IGNORED_BUFFERS = (r"(.*\.)?rotary_emb\.inv_freq", r".*\.masked_bias")
CheckpointNames = Mapping[str, tuple[str, ...]]
"""Module inside the layer → its sources inside the checkpoint's layer; several are concatenated by
rows. A module that is not listed has the same name there. A ``*`` stands for an expert's number,
on both sides.
"""


@dataclass(frozen=True)
class SourceTensors:
    """What a single tensor is made from, where its module's checkpoint name does not say it.

    Attributes:
        names: Tensors inside the checkpoint's layer.
        how: As ``Rule.how``.
    """

    names: tuple[str, ...]
    how: str = "copy"


SourceTensorsByPath = Mapping[str, SourceTensors]
"""Tensor inside the layer → what it is made from."""
NO_SOURCES: SourceTensorsByPath = MappingProxyType({})


def layer_rename_rules(
    spec: LayerSpec,
    names: CheckpointNames,
    target: str,
    source: str,
    *,
    transposed: bool = False,
    tensors: SourceTensorsByPath = NO_SOURCES,
    steps: Mapping[str, str] | None = None,
) -> list[Rule]:
    """Every tensor of a layer: its norms, its linear layers, then what else has tensors.

    Args:
        spec: The layer.
        names: The checkpoint's names of its modules.
        target: The layer in the model, "layers.3".
        source: The layer in the checkpoint, "model.layers.3".
        transposed: Whether matrices of linear layers are stored as [in, out].
        tensors: Tensors with sources of their own.
        steps: Of modules, the steps behind the first ("ungroup_qkv:…").
    """
    rules = []
    modules: tuple[ModuleSpec | CompositeSpec, ...] = (*spec.modules, *spec.composites)
    for module in sorted(modules, key=_module_sort_key):
        for leaf in module.tensors:
            made = _tensor_source(f"{module.path}.{leaf}", names, tensors)
            how = made.how
            if transposed and isinstance(module, LinearSpec) and leaf == "weight":
                how = "transpose"
            path, number = split_expert_number(f"{module.path}.{leaf}".rpartition(".")[0])
            if steps and path in steps:
                how = f"{how}+{steps[path].replace('*', number)}"
            sources = tuple(f"{source}.{name}" for name in made.names)
            rules.append(Rule(f"{target}.{module.path}.{leaf}", sources, how))
    return rules


def split_expert_number(path: str) -> tuple[str, str]:
    """A module's path with ``*`` in the place of an expert's number, and the number."""
    parts = path.split(".")
    numbers = [part for part in parts if part.isdigit()]
    return ".".join("*" if part.isdigit() else part for part in parts), (*numbers, "")[0]


def layer_stack_rename_rules(
    specs: Iterable[LayerSpec],
    names: CheckpointNames,
    source: str,
    *,
    target: str = "layers",
    tensors: SourceTensorsByPath = NO_SOURCES,
) -> list[Rule]:
    """Every tensor of a stack of layers; target, source: their list in model and checkpoint."""
    return [
        rule
        for i, spec in enumerate(specs)
        for rule in layer_rename_rules(
            spec, names, f"{target}.{i}", f"{source}.{i}", tensors=tensors
        )
    ]


def rename_rules_outside_layers(
    model: nn.Module,
    stacks: Sequence[str],
    names: CheckpointNames,
    tensors: SourceTensorsByPath = NO_SOURCES,
) -> list[Rule]:
    """Every tensor of a model that is in none of its stacks of layers.

    Args:
        model: The model.
        stacks: The paths of its stacks.
        names: The checkpoint's names of modules, by their paths in the model.
        tensors: Tensors with sources of their own, by their paths in the model.
    """
    layers = tuple(f"{path}." for path in stacks)
    rules = []
    for path in _model_tensor_paths(model):
        if not path.startswith(layers):
            made = _tensor_source(path, names, tensors)
            rules.append(Rule(path, made.names, made.how))
    return rules


def _tensor_source(
    path: str, names: CheckpointNames, tensors: SourceTensorsByPath
) -> SourceTensors:
    if path in tensors:
        return tensors[path]
    module, _, leaf = path.rpartition(".")
    named = names.get(module)
    if named is None:
        key, number = split_expert_number(module)
        named = tuple(name.replace("*", number) for name in names.get(key, (module,)))
    sources = tuple(f"{name}.{leaf}" for name in named)
    return SourceTensors(sources, "cat0" if len(sources) > 1 else "copy")


def _model_tensor_paths(model: nn.Module) -> Iterator[str]:
    for name, _ in model.named_buffers():
        yield name
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield f"{name}.weight"


@dataclass(frozen=True)
class CheckpointLayout:
    """Where a checkpoint has a decoder's tensors, and in which order of rows.

    Attributes:
        names: The checkpoint's names of a layer's modules.
        layers, embed, positions, embed_norm, norm, head: Its names outside.
        grouped_qkv: Whether rows of q, k and v are stored by KV head.
        neighbours: Whether channels 2i and 2i + 1 of q and k rotate together.
        norms_less_one: Whether norms are stored less 1 (Gemma).
        ignored: Regular expressions of tensors that are not used.
        experts_stacked: Whether the tensors of all experts are one, [E, …].
        whole_norms: Norms that are stored as they are, where the others are less 1.
        grouped_state: Whether the rows of a recurrence are stored by head of keys.
        tensors: Tensors of a layer with sources of their own.
        transposed: Whether matrices of layers are stored as [in, out].
        has_draft_layer: Whether a layer of multi-token prediction, which is not used, may stand
            behind the others.
        separate_gates: Whether the gates of the attention's output are a matrix of their own, not
            rows beside those of q.
    """

    names: CheckpointNames
    layers: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    grouped_qkv: bool = False
    neighbours: bool = False
    norms_less_one: bool = False
    positions: str = ""
    embed_norm: str = ""
    ignored: tuple[str, ...] = IGNORED_BUFFERS
    experts_stacked: bool = False
    whole_norms: frozenset[str] = frozenset()
    grouped_state: bool = False
    tensors: SourceTensorsByPath = field(default_factory=lambda: NO_SOURCES)
    transposed: bool = False
    has_draft_layer: bool = False
    separate_gates: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What names of tensors may begin with in some files and not in others."""
        return (f"{self.layers.partition('.')[0]}.",)

    def rename_rules(self, config: DecoderConfig) -> list[Rule]:
        """Every tensor of the decoder."""
        out = [Rule("embed.weight", (f"{self.embed}.weight",))]
        if self.positions:
            out.append(Rule("embed.positions", (f"{self.positions}.weight",)))
        if config.embedding_norm:
            tensors = config.norm_config.tensor_names
            out += [Rule(f"embed.norm.{t}", (f"{self.embed_norm}.{t}",)) for t in tensors]
        out += [
            Rule(
                f"norm.{tensor}",
                (f"{self.norm}.{tensor}",),
                "copy+plus_one" if self.norms_less_one else "copy",
            )
            for tensor in config.norm_config.tensor_names
        ]
        if not config.tied:
            how = "copy+unit_rows" if config.normed_head else "copy"
            out.append(Rule("head.weight", (f"{self.head}.weight",), how))
        if config.head_bias:
            out.append(Rule("head.bias", (f"{self.head}.bias",)))
        steps = self._rename_steps_by_module(config)
        for i in range(config.layers):
            places = f"layers.{i}", f"{self.layers}.{i}"
            out += layer_rename_rules(
                config.layer_spec(i),
                self.names,
                *places,
                transposed=self.transposed,
                tensors=self.tensors,
                steps=steps,
            )
        return (
            [_with_separate_expert_sources(rule) for rule in out] if self.experts_stacked else out
        )

    def ignored_tensors(self, config: DecoderConfig) -> tuple[str, ...]:
        """Unused tensors: buffers, the copy of a tied head, a layer of multi-token prediction."""
        unused = [*self.ignored]
        if config.tied:
            unused.append(rf"{re.escape(self.head)}\.weight")
        if self.has_draft_layer:
            unused.append(rf"{re.escape(self.layers)}\.{config.layers}\..*")
        return tuple(unused)

    def _rename_steps_by_module(self, config: DecoderConfig) -> dict[str, str]:
        """The steps that order the rows of q, k and v."""
        steps = []
        heads, dim = config.heads + config.kv_heads, config.head_dim
        gated_queries = config.output_gate and not self.separate_gates
        if gated_queries:
            steps.append(f"drop_gates:{config.heads}/{dim}")
        if self.grouped_qkv:
            steps.append(f"ungroup_qkv:{config.kv_heads}/{config.heads // config.kv_heads}/{dim}")
        rope = ""
        if config.rope is not None and (self.neighbours or config.rope.dim < dim):
            layout = "neighbours" if self.neighbours else "halves"
            rope = f"rope_rows:{heads}/{dim}/{config.rope.dim}/{layout}"
            steps.append(rope)
        out = {"attn.qkv_proj": "+".join(steps)} if steps else {}
        if gated_queries:
            out["attn.gate_proj"] = f"gates:{config.heads}/{dim}"
        if config.recurrence is not None:
            out |= config.recurrence.row_reorder_steps(by_key_head=self.grouped_state)
        if config.parallel_recurrence is not None:
            row_reorder_steps = config.parallel_recurrence.row_reorder_steps()
            out |= {attn_to_mamba_path(path): step for path, step in row_reorder_steps.items()}
        if self.experts_stacked and config.moe is not None:
            step = f"expert:*/{config.moe.router.experts}"
            out |= dict.fromkeys(
                (f"mlp.experts.*.{name}" for name in ("gate_up_proj", "down_proj")), step
            )
        if rope and config.qkv_norm is not None:
            norm_heads = 2 if config.qkv_norm.kind == SHARED_HEAD_LAYER_NORM else heads
            out["attn.qkv_norm"] = rope.replace(f":{heads}/", f":{norm_heads}/")
        if rope and config.qk_norm:
            one_head = rope.replace(f":{heads}/", ":1/")
            out |= dict.fromkeys((f"attn.rope_cache.{each}_norm" for each in "qk"), one_head)
        if self.norms_less_one:
            out |= {
                path: f"{out[path]}+plus_one" if path in out else "plus_one"
                for path in self.names
                if ("norm" in path or "post" in path) and path not in self.whole_norms
            }
        return out


def rename_rules_with_all_ones_norms(
    layout: CheckpointLayout, config: DecoderConfig, matrix: str
) -> list[Rule]:
    """The rules of a decoder whose norms have no weights: as many ones as the stream has channels.

    matrix: a layer's, whose rows are the stream's channels.
    """
    return [
        _all_ones_norm_rule(rule, matrix, layout.embed)
        if rule.target.endswith("norm.weight")
        else rule
        for rule in layout.rename_rules(config)
    ]


def _all_ones_norm_rule(rule: Rule, matrix: str, embed: str) -> Rule:
    if not rule.target.startswith("layers."):
        return replace(rule, sources=(f"{embed}.weight",), how="ones:1")
    layer = rule.sources[0].removesuffix(".weight").rpartition(".")[0]
    return replace(rule, sources=(f"{layer}.{matrix}.weight",), how="ones:0")


def _with_separate_expert_sources(rule: Rule) -> Rule:
    """The rule of one expert of a stack, for files that have each of them by itself."""
    step = re.fullmatch(r"copy\+expert:(\d+)/\d+", rule.how)
    if step is None:
        return rule
    stem, _, leaf = rule.sources[0].rpartition(".")
    parts = ("gate.", "up.") if rule.target.endswith(f"gate_up_proj.{leaf}") else ("",)
    return replace(rule, apart=tuple(f"{stem}.{step[1]}.{part}{leaf}" for part in parts))


def _module_sort_key(module: ModuleSpec | CompositeSpec) -> int:
    return 0 if isinstance(module, NormSpec) else 1 if isinstance(module, LinearSpec) else 2
