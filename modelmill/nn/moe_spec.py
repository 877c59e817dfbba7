"""What a mixture of experts is made of, as data: its modules, sites and partitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from modelmill.nn.layer_spec import (
    LinearSpec,
    ModuleSpec,
    QuantSiteSpec,
    RoutingSpec,
    ScaleFoldRows,
    linear_tensor_names,
)
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import MoE, RouterConfig
from modelmill.nn.partition import ChannelPartition, ExpertPartition


@dataclass(frozen=True)
class MoESpec:
    """Sizes and switches of one layer's mixture of experts; takes the place of an ``MLPSpec``.

    Attributes:
        router: How experts are chosen.
        expert: Each expert.
        shared: The expert that every token has; None: there is none.
        shared_gate: Whether a gate weights it.
    """

    router: RouterConfig
    expert: MLPSpec
    shared: MLPSpec | None = None
    shared_gate: bool = False

    @property
    def partitions(self) -> tuple[ChannelPartition, ...]:
        """How ranks divide the inner channels of each expert, or the experts."""
        own = self.expert_partition("inner", "mlp")
        if self.shared is None:
            return (own,)
        return own, ChannelPartition("shared_inner", self.shared.inner)

    def expert_partition(self, name: str, module: str) -> ExpertPartition:
        """How ranks divide the experts of the mixture at the path ``module``."""
        return ExpertPartition(name, self.expert.inner, module, self.router.experts)

    def build_module(self) -> MoE:
        """The module."""
        return MoE(self.router, self.expert, self.shared, shared_gate=self.shared_gate)

    @lru_cache(maxsize=8)  # noqa: B019  of 512 experts it takes half a second, alike in all layers
    def module_specs(self, reads: str = "mlp_input", site: str = "up") -> tuple[ModuleSpec, ...]:
        """The modules of a layer's ``mlp``, ``reads`` → "mlp_out"."""
        router = self.router
        owns = {"selection_bias": router.selection_bias, "expert_scale": router.expert_scale}
        tensors = tuple(name for name, present in owns.items() if present)
        modules: list[ModuleSpec] = [
            ModuleSpec(
                path="mlp.router", reads=(reads,), writes=("router_logits",),
                reference=("router",), arithmetic="linear",
                tensors=linear_tensor_names(self.router.bias),
            ),
            RoutingSpec(
                path="mlp.routing", reads=("router_logits",), writes=("routing",),
                reference=("routing",), tensors=tensors, op="softmax",
            ),
        ]  # fmt: skip
        for index in range(self.router.experts):
            modules += self._expert_specs(index, reads, site)
        outputs = tuple(f"experts.{index}.mlp_out" for index in range(self.router.experts))
        if self.shared is not None:
            modules += self._shared_specs(self.shared, reads, site)
            outputs += ("shared_expert.gated_out" if self.shared_gate else "shared_expert.mlp_out",)
        modules.append(
            ModuleSpec(
                path="mlp.combine", reads=("routing", *outputs), writes=("mlp_out",),
                reference=("mlp_out",), op="index_add",
            )
        )  # fmt: skip
        return tuple(modules)

    def _expert_specs(self, index: int, reads: str, site: str) -> Iterator[ModuleSpec]:
        """One expert's modules, behind the choice of its tokens."""
        name = f"experts.{index}"
        yield ModuleSpec(
            path=f"mlp.{name}.tokens", reads=(reads, "routing"), writes=(f"{name}.input",),
            reference=(f"{name}.input",), op="index_select",
        )  # fmt: skip
        for module in self.expert.module_specs(f"{name}.input", site):
            nested = prefixed_module_spec(module, name, "inner")
            yield replace(nested, expert=index) if isinstance(nested, LinearSpec) else nested

    def _shared_specs(self, shared: MLPSpec, reads: str, site: str) -> Iterator[ModuleSpec]:
        """The shared expert's modules and its gate."""
        for module in shared.module_specs(reads, site):
            yield prefixed_module_spec(module, "shared_expert", "shared_inner", {reads})
        if self.shared_gate:
            yield ModuleSpec(
                path="mlp.shared_gate", reads=(reads, "shared_expert.mlp_out"),
                writes=("shared_expert.gated_out",), reference=("shared_expert_gate",),
                tensors=("weight",), op="shared_expert_gate",
            )  # fmt: skip

    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of each expert's products, in the order of computation."""
        names = [f"experts.{index}" for index in range(self.router.experts)]
        names += ["shared_expert"] if self.shared is not None else []
        return tuple(
            each
            for name in names
            for each in (
                QuantSiteSpec(f"{name}.up"),
                QuantSiteSpec(
                    f"{name}.down",
                    ScaleFoldRows(f"mlp.{name}.gate_up_proj", f"{name}.up")
                    if self.expert.is_linear_in_up
                    else None,
                    heavy_tailed=True,
                ),
            )
        )


def prefixed_module_spec(
    module: ModuleSpec, name: str, partition: str, outside: frozenset[str] | set[str] = frozenset()
) -> ModuleSpec:
    """A module of an MLP as that of one of several: its names begin with ``name``.

    Args:
        module: A module of ``MLPSpec.module_specs``.
        name: The MLP's name in ``mlp``.
        partition: The partition that divides its inner channels.
        outside: Values that it reads from outside.
    """

    def with_prefix(value: str) -> str:
        return value if value in outside or value.startswith(f"{name}.") else f"{name}.{value}"

    module = replace(
        module,
        path=module.path.replace("mlp.", f"mlp.{name}.", 1),
        reads=tuple(map(with_prefix, module.reads)),
        writes=tuple(map(with_prefix, module.writes)),
    )
    if not isinstance(module, LinearSpec):
        return replace(module, reference=tuple(map(with_prefix, module.reference)))
    parts = tuple(
        replace(part, name=with_prefix(part.name), split=partition if part.split else "")
        for part in module.parts
    )
    return replace(
        module,
        site=with_prefix(module.site),
        parts=parts,
        split_columns=partition if module.split_columns else "",
    )
