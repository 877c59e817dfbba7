"""What a decoder layer is made of, as data: modules, sites, parallel splits, reference names.

A layer has a ``spec``. Calibration, quantization, acceptance and tensor parallelism walk it, so
that a layer of another shape needs no edit there. Modules stand in the order of computation, and
name the values that they read and write. The layer takes (branch, residual) and returns
``outputs``, whose sum is its output.

A *site* is an input that one or more linear layers share. Its statistics are collected once, and a
recipe treats its linears together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.partition import HeadGroups, Partition
from modelmill.nn.recurrent_state import StateSpec
from modelmill.parallel.shard import Range

LAYER_INPUTS = ("branch", "residual")
ROPE_VALUE_NAME = "rope"  # the step's rotation, a value that modules may read
_Spec = TypeVar("_Spec", bound="ModuleSpec")


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """A module that is called with the values ``reads`` and the step.

    Attributes:
        path: The module inside the layer.
        reads: Names of its arguments before the step.
        writes: Names of its results.
        reference: The reference's outputs whose concatenation is the first result; empty: not
            compared.
        arithmetic: Chooses the acceptance bound: norm, linear, rotary, attention, activation or
            residual.
        tensors: The tensors that it reads from a checkpoint.
        op: The op that computes it, for hints.
    """

    path: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reference: tuple[str, ...] = ()
    arithmetic: str = "activation"
    tensors: tuple[str, ...] = ()
    op: str = "linear"


@dataclass(frozen=True, kw_only=True)
class NormSpec(ModuleSpec):
    """A norm, [T, H] → [T, H].

    With two values read it adds a branch to the stream, and writes (normed, stream).

    Attributes:
        stream_reference: The reference's output that the written stream equals; empty: the
            stream that enters the layer.
    """

    arithmetic: str = "norm"
    tensors: tuple[str, ...] = ("weight",)
    op: str = "add_rms_norm"
    stream_reference: str = ""


@dataclass(frozen=True, kw_only=True)
class QueryRopeSpec(ModuleSpec):
    """Norm and rotation of q, with or without those of k; it returns q."""

    arithmetic: str = "rotary"


@dataclass(frozen=True, kw_only=True)
class SharedKVQuerySpec(QueryRopeSpec):
    """The queries of a layer that attends to an earlier layer's keys and values.

    Attributes:
        cache: The place of that layer among those with a KV cache.
    """

    cache: int


@dataclass(frozen=True, kw_only=True)
class RopeCacheSpec(QueryRopeSpec):
    """Rotation of q and k, and the write of k and v to the KV cache; it returns q.

    Attributes:
        cache_reference: The reference's names of the keys and of the values in the cache.
        kv_heads: KV heads.
        head_dim: Channels of each.
        keys_serve_as_values: Whether values are the keys, stored once.
        window: Tokens that a query attends to; None: all.
    """

    cache_reference: tuple[str, str]
    kv_heads: int
    head_dim: int
    keys_serve_as_values: bool = False
    window: int | None = None
    op: str = "rope_cache"


@dataclass(frozen=True, kw_only=True)
class RecurrenceSpec(ModuleSpec):
    """A module that keeps a recurrent state of each sequence; it has an attribute ``state_spec``.

    Attributes:
        state: What it keeps, of all heads or channels.
        state_reference: The reference's name of the state behind the last token, flattened [1, …].
    """

    state: StateSpec
    state_reference: str


@dataclass(frozen=True, kw_only=True)
class RoutingSpec(ModuleSpec):
    """The choice of experts: logits → weights [T, E], 0 for the experts that a token does not have.

    Where modules are compared, the reference's choice is taken: near a tie rounding decides, and
    another expert is another function.
    """


@dataclass(frozen=True)
class LinearRowBlock:
    """Consecutive rows of a linear layer.

    Attributes:
        name: Its output in the reference.
        rows: How many.
        split: The partition by which ranks divide the rows; empty: every rank has all of them.
    """

    name: str
    rows: int
    split: str = ""


@dataclass(frozen=True, kw_only=True)
class LinearSpec(ModuleSpec):
    """A linear layer.

    Attributes:
        site: The site that it reads.
        parts: Its rows.
        split_columns: The partition by which ranks divide the columns, which makes the outputs
            partial sums; empty: every rank has all of them.
        expert: The number of the expert that it belongs to; None: every token is multiplied.
    """

    site: str
    parts: tuple[LinearRowBlock, ...]
    split_columns: str = ""
    expert: int | None = None
    arithmetic: str = "linear"
    tensors: tuple[str, ...] = ("weight",)

    def __post_init__(self) -> None:
        """Its outputs in the reference are its parts."""
        object.__setattr__(self, "reference", tuple(part.name for part in self.parts))

    def part_row_range(self, name: str) -> Range:
        """The rows [first, last) of a part."""
        first = 0
        for part in self.parts:
            if part.name == name:
                return first, first + part.rows
            first += part.rows
        raise KeyError(name)


@dataclass(frozen=True)
class ScaleFoldRows:
    """Rows of a linear layer in which a site's input is linear: scales can be folded into them.

    Attributes:
        linear: Path of the linear layer.
        part: The rows.
        groups: Where several channels of the input come from one row; None: one each.
    """

    linear: str
    part: str
    groups: HeadGroups | None = None


@dataclass(frozen=True)
class QuantSiteSpec:
    """An input that linear layers share.

    Attributes:
        name: Stored with the scales folded at the site.
        producer: The rows that produce it. A norm that writes the input is found by itself.
        heavy_tailed: Products of an activation, whose largest values are many times the others.
    """

    name: str
    producer: ScaleFoldRows | None = None
    heavy_tailed: bool = False


@dataclass(frozen=True)
class CompositeSpec:
    """A module that contains others, compared with the reference as a whole as well.

    Attributes:
        path: The module inside the layer; empty: the layer itself.
        reference: The reference's name of its output.
        tensors: Its own tensors, beside those of the modules inside.
    """

    path: str
    reference: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerSpec:
    """A layer.

    Attributes:
        modules: In the order of computation; the first reads the layer's (branch, residual). A
            value that none writes is computed between them.
        sites: In the order of computation.
        outputs: The values that the layer returns: in a decoder (branch, residual), or the stream.
        partitions: What ranks divide, or ``NO_PARTITIONS``.
        composites: Modules around several of ``modules`` that the reference knows.
    """

    modules: tuple[ModuleSpec, ...]
    sites: tuple[QuantSiteSpec, ...]
    outputs: tuple[str, ...]
    partitions: tuple[Partition, ...]
    composites: tuple[CompositeSpec, ...] = ()

    @cached_property
    def modules_by_path(self) -> dict[str, ModuleSpec]:
        """The modules by path."""
        return {module.path: module for module in self.modules}

    @cached_property
    def writer_by_value(self) -> dict[str, ModuleSpec]:
        """By value, the module that writes it."""
        return {value: module for module in self.modules for value in module.writes}

    def modules_of_type(self, kind: type[_Spec]) -> Iterator[_Spec]:
        """The modules of one type."""
        return (module for module in self.modules if isinstance(module, kind))

    @cached_property
    def critical_path_length(self) -> int:
        """The number of modules on the longest path through the layer."""
        return max(self.path_lengths.values())

    @cached_property
    def path_lengths(self) -> dict[str, int]:
        """The number of modules on the longest path from the layer's inputs to each value."""
        lengths: dict[str, int] = {}
        for module in self.modules:
            longest = 1 + max((lengths.get(value, 0) for value in module.reads), default=0)
            lengths |= dict.fromkeys(module.writes, longest)
        return lengths

    @property
    def linears(self) -> Iterator[LinearSpec]:
        """The linear layers."""
        return self.modules_of_type(LinearSpec)

    @property
    def norms(self) -> Iterator[NormSpec]:
        """The norms."""
        return self.modules_of_type(NormSpec)

    @property
    def site_names(self) -> tuple[str, ...]:
        """The sites' names."""
        return tuple(site.name for site in self.sites)

    def find_site(self, name: str) -> QuantSiteSpec:
        """A site by its name."""
        return next(site for site in self.sites if site.name == name)

    def site_of_linear(self, path: str) -> QuantSiteSpec | None:
        """The site that a module reads; None for a module that is no linear layer."""
        linear = self.modules_by_path.get(path)
        return self.find_site(linear.site) if isinstance(linear, LinearSpec) else None

    def linear_at_path(self, path: str) -> LinearSpec:
        """A linear layer by its path."""
        linear = self.modules_by_path[path]
        assert isinstance(linear, LinearSpec), f"{path} is no linear layer"
        return linear

    def site_linears(self, name: str) -> tuple[LinearSpec, ...]:
        """The linear layers that read a site."""
        return tuple(linear for linear in self.linears if linear.site == name)

    def site_value_name(self, name: str) -> str:
        """The value that a site is."""
        return self.site_linears(name)[0].reads[0]

    def scale_fold_target(self, name: str) -> NormSpec | ScaleFoldRows | None:
        """What produces a site's input linearly; None: scales cannot be folded into it.

        Nor can they where something else reads the same value.
        """
        value = self.site_value_name(name)
        readers = [module for module in self.modules if value in module.reads]
        if any(not isinstance(m, LinearSpec) or m.site != name for m in readers):
            return None
        writer = self.writer_by_value.get(value)
        return writer if isinstance(writer, NormSpec) else self.find_site(name).producer

    @property
    def scale_fold_order(self) -> tuple[str, ...]:
        """The sites whose scales can be folded, those of rows before those of norms.

        Folding into rows changes weights that read a norm's output.
        """
        producers = {name: self.scale_fold_target(name) for name in self.site_names}
        rows = [name for name, each in producers.items() if isinstance(each, ScaleFoldRows)]
        return (*rows, *(name for name, each in producers.items() if isinstance(each, NormSpec)))

    def check_module_tree(self, layer: nn.Module) -> None:
        """Compare with the modules of a layer.

        A linear's bias is left out: whether there is one follows from the checkpoint, and
        acceptance compares it with the reference's.

        Raises:
            ValueError: A tensor of the layer is not declared, or a declared one is missing.
        """
        linears = [name for name, each in layer.named_modules() if isinstance(each, Linear)]
        biases = {f"{name}.bias" for name in linears}
        modules: tuple[ModuleSpec | CompositeSpec, ...] = (*self.modules, *self.composites)
        declared = {f"{module.path}.{name}" for module in modules for name in module.tensors}
        present = {name for name, _ in layer.named_buffers()} | {f"{n}.weight" for n in linears}
        declared, present = declared - biases, present - biases
        if declared != present:
            names = ", ".join(sorted(declared ^ present))
            raise ValueError(
                f"{type(layer).__name__}: its spec and its modules differ in {names}; declare "
                "every tensor of the layer"
            )
        sites = [linear.site for linear in self.linears]
        if list(dict.fromkeys(sites)) != list(self.site_names):
            raise ValueError(
                f"{type(layer).__name__}: the linears read the sites {sites}, which are declared "
                f"as {list(self.site_names)}; declare each, in the order of computation"
            )


def linear_tensor_names(bias: bool) -> tuple[str, ...]:
    """The tensors of a linear layer."""
    return ("weight", "bias") if bias else ("weight",)


def layer_spec(layer: nn.Module) -> LayerSpec:
    """The spec of a layer of a language model."""
    spec = vars(layer).get("spec")
    assert isinstance(spec, LayerSpec), f"{type(layer).__name__} has no spec"
    return spec
