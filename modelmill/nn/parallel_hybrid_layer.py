"""A pre-norm layer whose attention and Mamba2 read the same norm, side by side (Falcon-H1).

``x + attention(norm(x)) + mamba(norm(x))``, then an MLP. arXiv:2507.22448, section 2.1.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerComponentSpecs, attention_norm_spec, mlp_norm_spec
from modelmill.nn.layer_spec import LayerSpec, LinearSpec, ModuleSpec, QuantSiteSpec
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.parallel_residual_layer import BranchSum
from modelmill.nn.partition import StateHeadPartition
from modelmill.nn.pre_norm import PRE_NORM_LAYER_OUTPUTS, PreNormLayer
from modelmill.nn.step import Step

STATES_PER_LAYER = 2  # of a layer: the convolution's and the recurrence's
MAMBA_OUT_PROJ_SITE = "mamba_o"
BRANCH_SUM_SPEC = ModuleSpec(
    path="sum", reads=("attn_out", "mamba_out"), writes=("mixed_out",), reference=("branches",),
    arithmetic="residual", op="add",
)  # fmt: skip


class ParallelHybridLayer(PreNormLayer):
    """norm → attention and Mamba2, added → add and norm → MLP.

    Each layer of the model is one, so the place of its states follows from that of its KV cache.
    """

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        """Make the modules; ``index``: the attention's place among the KV caches."""
        super().__init__(parts, index)
        self.mamba = _require_parallel_recurrence(parts).build_module(STATES_PER_LAYER * index)
        self.sum = BranchSum()

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of; qkv and the recurrence share a site."""
        recurrence = _require_parallel_recurrence(parts)
        modules = (
            attention_norm_spec(parts.norm),
            *parts.attention.module_specs(),
            *map(_as_mamba_module_spec, recurrence.module_specs()),
            BRANCH_SUM_SPEC,
            mlp_norm_spec(parts.norm, "mixed_out"),
            *parts.mlp.module_specs(),
        )
        return LayerSpec(
            modules=modules,
            sites=(
                *parts.attention.quant_sites,
                QuantSiteSpec(MAMBA_OUT_PROJ_SITE),
                *parts.mlp.quant_sites(),
            ),
            outputs=PRE_NORM_LAYER_OUTPUTS,
            partitions=(
                parts.attention.partition,
                mamba_partition(recurrence),
                *parts.mlp.partitions,
            ),
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.sum(self.attn(x, rope, step), self.mamba(x, rope, step), step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp(x, step), residual


def mamba_partition(recurrence: Mamba2Spec) -> StateHeadPartition:
    """How ranks divide the heads of the recurrence."""
    return replace(recurrence.partition, module="mamba")


def _require_parallel_recurrence(parts: LayerComponentSpecs) -> Mamba2Spec:
    assert parts.parallel_recurrence is not None, "a recurrence stands beside the attention"
    return parts.parallel_recurrence


def attn_to_mamba_path(path: str) -> str:
    """The path of a recurrence's module beside an attention, from that in its place."""
    return path.replace("attn.", "mamba.", 1)


def _as_mamba_module_spec(module: ModuleSpec) -> ModuleSpec:
    """A module of the recurrence as the layer's ``mamba``."""
    path = attn_to_mamba_path(module.path)
    if not isinstance(module, LinearSpec) or module.site != "o":
        return replace(module, path=path)
    parts = (replace(module.parts[0], name="mamba_o_proj"),)
    return replace(module, path=path, writes=("mamba_out",), site=MAMBA_OUT_PROJ_SITE, parts=parts)
