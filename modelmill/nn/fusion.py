"""Fused layers: the plain modules with fewer and larger ops, in the place of ``CausalLM.forward``.

``fuse_model`` makes a second tree of modules beside the plain one. Both share the leaves (linear
layers, norms, their weights), so that it takes no memory. The runtime runs the fused tree; where
forward hooks are attached it runs the plain one, in which every module computes what its name says.

What is fused, each where the chosen backends have the op and its shapes are supported:

* the quantization of a linear layer's input into the norm in front of it (``*_norm_quant``);
* the qkv projection with rotation and the write to the KV cache (``qkv_rope_cache``);
* the norm of latent vectors with rotation and the write to the KV cache (``latent_rope_cache``);
* the gate and up projections with SwiGLU (``linear_swiglu``), or SwiGLU with the quantization of
  the down projection's input (``silu_mul_quant``);
* the output and down projections with the addition to the residual (``linear_add``). A branch of
  None between two fused modules means that it was added;
* the experts of a mixture, whose tokens are grouped (``nn.fused_moe``), and its router into the
  norm in front of it (``nn.fused_router``);
* the factor of a branch, or the sum of two, into the norm behind them (``nn.fused_branch_norms``);
* the last layer's second half for the rows whose logits are needed only
  (``Step.step_of_logit_rows``);
* all layers of a small decode step in one op (``nn.whole_model_decode``).
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from modelmill.nn.attention import Attention, RopeCosSin
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.fused_branch_norms import FusedBranchNormLM, can_fuse_branches_into_norms
from modelmill.nn.fused_module import FusedModule
from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.fused_moe_lm import FusedMoELM, is_moe_layer
from modelmill.nn.fused_router import FusedNormRouter
from modelmill.nn.latent_attention import LatentAttention, apply_position_query_scale
from modelmill.nn.layer_spec import RecurrenceSpec, layer_spec
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import GatedMLP, PlainMLP, SiluMul
from modelmill.nn.moe import MoE
from modelmill.nn.norm import RMSNorm
from modelmill.nn.pre_norm import PRE_NORM_DATAFLOW, PRE_NORM_LAYER_OUTPUTS, PreNormLayer
from modelmill.nn.step import Step
from modelmill.nn.whole_model_decode import (
    MAX_WHOLE_MODEL_DECODE_TOKENS,
    CachedDecoderWeights,
    can_decode_whole_model,
    run_whole_model_decode,
)
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.ops.quant_types import ActQuantSpec, QuantizedInput
from modelmill.ops.rope_cache import RopeCacheInputs

Activation = torch.Tensor | QuantizedInput
FUSION_BLOCKING_ATTENTION_MODULES = frozenset(
    {"attn.difference", "attn.output_gate", "attn.out_norm", "attn.rotation"}
)
"""Modules of attentions that are not fused, beside those with a recurrence."""


def fuse_model(model: nn.Module) -> nn.Module:
    """The fused tree of a language model whose layers have a fused form; any other as it is.

    These are pre-norm layers, those that scale or add branches, and those with experts.
    Recurrences and attentions with one of ``FUSION_BLOCKING_ATTENTION_MODULES`` are kept plain.
    """
    if isinstance(model, CausalLM) and all(
        _is_fusable_pre_norm_layer(layer) or _is_pre_norm_with_unfused_mixer(layer)
        for layer in model.layers
    ):
        return FusedCausalLM(model)
    if isinstance(model, CausalLM) and can_fuse_branches_into_norms(model):
        return FusedBranchNormLM(model)
    if isinstance(model, CausalLM) and any(map(is_moe_layer, model.layers)):
        return FusedMoELM(model)
    return model


def _is_pre_norm_with_unfused_mixer(layer: nn.Module) -> bool:
    """Whether ``FusedLayerWithUnfusedMixer`` computes a layer: pre-norm, with another mixer."""
    return (
        type(layer) is PreNormLayer
        and (
            any(layer.spec.modules_of_type(RecurrenceSpec))
            or not FUSION_BLOCKING_ATTENTION_MODULES.isdisjoint(layer.spec.modules_by_path)
        )
        and isinstance(layer.mlp, GatedMLP | MoE)
    )


def _is_fusable_pre_norm_layer(layer: nn.Module) -> bool:
    """Whether a layer is norm → attention → add and norm → MLP, as in ``FusedDecoderLayer``."""
    spec = layer_spec(layer)
    dataflow = [(m.path, m.reads) for m in spec.modules if not m.path.startswith("mlp.")]
    is_latent = type(layer) is PreNormLayer and isinstance(layer.attn, LatentAttention)
    return (
        (is_latent or dataflow == PRE_NORM_DATAFLOW)
        and spec.outputs == PRE_NORM_LAYER_OUTPUTS
        and isinstance(layer.mlp, GatedMLP | PlainMLP | MoE)
    )


class FusedCausalLM(FusedModule):
    """Token ids → logits, by fused layers."""

    plain: CausalLM

    def __init__(self, plain: CausalLM) -> None:
        super().__init__(plain)
        self.layers = nn.ModuleList(
            FusedLayerWithUnfusedMixer(layer)
            if _is_pre_norm_with_unfused_mixer(layer)
            else FusedDecoderLayer(layer)
            for layer in plain.layers
        )
        self.norm = FusedNormQuant(plain.norm, None)
        self._stacked_weights = (
            CachedDecoderWeights(plain.layers, cast(RMSNorm, plain.norm), plain.head)
            if can_decode_whole_model(plain)
            else None
        )

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [R, V] float32 of the rows ``step.logit_rows``."""
        x, rope = self.plain.embed(step.ids, step), self.plain.compute_rope_cos_sin(step)
        if (
            self._stacked_weights is not None
            and step.tp_group.size == 1
            and step.ops.decode is not None
            and len(x) <= MAX_WHOLE_MODEL_DECODE_TOKENS
            and not step.kv.k_scale
            and not step.layer_steps
        ):
            stack = self._stacked_weights.stack()
            if stack is not None:
                logits = run_whole_model_decode(step.ops.decode, stack, x, rope, step)
                return self.plain.head.scale_and_softcap_logits(logits)
        return self.plain.head(self._run_layers_and_final_norm(x, rope, step), step)

    def hidden_states(self, step: Step) -> torch.Tensor:
        """The input of the head: normed final states [R, H] of the rows ``step.logit_rows``."""
        return self._run_layers_and_final_norm(
            self.plain.embed(step.ids, step), self.plain.compute_rope_cos_sin(step), step
        )

    def _run_layers_and_final_norm(
        self, x: torch.Tensor, rope: RopeCosSin, step: Step
    ) -> torch.Tensor:
        """Embeddings [T, H] through all layers and the last norm, [R, H]."""
        branch: torch.Tensor | None = x
        residual: torch.Tensor | None = None
        step = self.plain.attach_per_layer_inputs(x, step)
        *layers, last_layer = self.layers
        *steps, last_step = islice(step.iter_layer_steps(), len(self.layers))
        for layer, layer_step in zip(layers, steps, strict=True):
            branch, residual = layer(branch, residual, rope, layer_step)
        logit_step = last_step.step_of_logit_rows()
        branch, residual = last_layer(branch, residual, rope, last_step, logit_step)
        assert residual is not None, "a layer returns its residual"
        if logit_step is None and step.logit_rows is not None:
            branch = None if branch is None else branch[step.logit_rows]
            residual = residual[step.logit_rows]
        normed, _ = self.norm(branch, residual, step)
        return normed


class FusedPreNormLayer(FusedModule):
    """A pre-norm layer of which the norms, and the MLP or the experts, are fused."""

    attn: nn.Module
    attn_norm: FusedNormQuant

    def __init__(self, plain: nn.Module) -> None:
        super().__init__(plain)
        mlp = cast(nn.Module, plain.mlp)
        self.gated = type(mlp) is GatedMLP and isinstance(mlp.act, SiluMul)
        self.mlp = make_fused_mlp(mlp) if self.gated or isinstance(mlp, MoE) else mlp
        norm = cast(nn.Module, plain.mlp_norm)
        self.mlp_norm = (
            FusedNormRouter(norm, self.mlp)
            if isinstance(self.mlp, FusedMoE)
            else FusedNormQuant(norm, cast(GatedMLP, mlp).gate_up_proj if self.gated else None)
        )

    @abstractmethod
    def run_mixer(
        self, normed: Any, residual: Any, rope: RopeCosSin, step: Step, logit_step: Step | None
    ) -> tuple[Any, Any]:
        """The mixer's branch and the residual, both of the rows of ``logit_step`` if it is one."""

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        rope: RopeCosSin,
        step: Step,
        logit_step: Step | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(branch, residual), both [T, H], or [R, H] of the rows of ``logit_step``."""
        normed, residual = self.attn_norm(x, residual, step)
        x, residual = self.run_mixer(normed, residual, rope, step, logit_step)
        step = logit_step or step
        normed, residual = self.mlp_norm(x, residual, step)
        if self.gated:
            return self.mlp(normed, residual, step), residual
        return self.mlp(normed, step), residual


class FusedDecoderLayer(FusedPreNormLayer):
    """One pre-norm layer: norm → attention → norm → MLP."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__(plain)
        attn, norm = cast(Attention | LatentAttention, plain.attn), cast(nn.Module, plain.attn_norm)
        # linear_add rounds differently than a LayerNorm's own addition: not fused there
        adds_residual = isinstance(plain.mlp_norm, RMSNorm)
        if isinstance(attn, LatentAttention):
            self.attn_norm = FusedNormQuant(norm, None)
            self.attn = FusedLatentAttention(attn, adds_residual)
        else:
            self.attn_norm = FusedNormQuant(norm, attn.qkv_proj)
            self.attn = FusedAttention(attn, adds_residual)

    def run_mixer(
        self, normed: Any, residual: Any, rope: RopeCosSin, step: Step, logit_step: Step | None
    ) -> tuple[Any, Any]:
        """The branch of the attention, and the residual of its rows."""
        if logit_step is not None:
            residual = residual[step.logit_rows]
        return self.attn(normed, residual, rope, step, logit_step), residual


class FusedLayerWithUnfusedMixer(FusedPreNormLayer):
    """A pre-norm layer whose mixer is plain."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__(plain)
        self.attn_norm = FusedNormQuant(cast(nn.Module, plain.attn_norm), None)

    def run_mixer(
        self, normed: Any, residual: Any, rope: RopeCosSin, step: Step, logit_step: Step | None
    ) -> tuple[Any, Any]:
        """Every token passes the mixer, which advances its state."""
        x = self.attn(normed, rope, step)
        if logit_step is not None:
            return x[step.logit_rows], residual[step.logit_rows]
        return x, residual


def make_fused_mlp(mlp: nn.Module) -> nn.Module:
    """The fused module of a gated MLP or a mixture of experts."""
    return FusedMoE(mlp) if isinstance(mlp, MoE) else FusedGatedMLP(cast(GatedMLP, mlp))


class FusedNormQuant(FusedModule):
    """A norm that puts out the 8-bit input of the linear layer behind it, where that takes one."""

    plain: nn.Module
    next_linear: Linear | None

    def __init__(self, plain: nn.Module, next_linear: Linear | None) -> None:
        super().__init__(plain)
        quantizes = next_linear is not None and isinstance(plain, RMSNorm)
        object.__setattr__(self, "next_linear", next_linear if quantizes else None)
        self._norm, self._add_norm = CachedOpBinding(), CachedOpBinding()

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, step: Step
    ) -> tuple[Activation, torch.Tensor]:
        """x, residual: [T, H]; x None: it was added to the residual before."""
        if x is None:
            x, residual = residual, None
        assert x is not None, "a branch or a residual"
        spec = self._act_quant(step)
        if spec is None:
            return self.plain.forward(x, residual, step)
        norm, ops = cast(RMSNorm, self.plain), step.ops
        if residual is None:
            values, scale = self._norm(ops.rms_norm_quant, x, norm.weight, norm.eps, spec)
            return QuantizedInput(values, scale, x.dtype), x
        values, scale, total = self._add_norm(
            ops.add_rms_norm_quant, x, residual, norm.weight, norm.eps, spec
        )
        return QuantizedInput(values, scale, x.dtype), total

    def _act_quant(self, step: Step) -> ActQuantSpec | None:
        linear = self.next_linear
        if linear is None or step.tp_group.size > 1 or not step.ops.fuses_norm_quant:
            return None
        return linear.weight.input_quant_spec


class FusedMixer(FusedModule):
    """Attention whose output projection may add to the residual at once."""

    plain: Attention | LatentAttention

    def __init__(self, plain: Attention | LatentAttention, adds_residual: bool) -> None:
        super().__init__(plain)
        self.adds_residual = adds_residual

    def _project_or_add_to_residual(
        self, out: torch.Tensor, residual: torch.Tensor, step: Step
    ) -> torch.Tensor | None:
        """The output projection of out; None: added to residual."""
        projection = self.plain.o_proj
        if self.adds_residual and _try_linear_add_in_place(projection, out, residual, step):
            return None
        return projection(out, step)


class FusedAttention(FusedMixer):
    """qkv projection, rotation and KV cache in one op; the output added to the residual."""

    plain: Attention

    def forward(
        self,
        x: Activation,
        residual: torch.Tensor,
        rope: RopeCosSin,
        step: Step,
        logit_step: Step | None = None,
    ) -> torch.Tensor | None:
        """[T, H] → [T, H], or [R, H] of the rows of ``logit_step``; None: added to residual."""
        attn = self.plain
        q = _try_qkv_rope_cache(attn.qkv_proj, x, attn.rope_cache.op_inputs(rope, step), step)
        if q is None:
            q = attn.rope_cache(attn.qkv_proj(x, step), rope, step)
        if logit_step is not None:
            q, step = q[step.logit_rows], logit_step
        return self._project_or_add_to_residual(attn.core(q, step), residual, step)


class FusedLatentAttention(FusedMixer):
    """Latent attention: norm, rotation and KV cache in one op; output added to the residual."""

    plain: LatentAttention

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rope: RopeCosSin,
        step: Step,
        logit_step: Step | None = None,
    ) -> torch.Tensor | None:
        """[T, H] → [T, H], or [R, H] of the rows of ``logit_step``; None: added to residual."""
        attn, op = self.plain, step.ops.latent_rope_cache
        q, latent = attn.project_queries(x, step), attn.kv_a_proj(x, step)
        rotated: torch.Tensor | None = None
        if op is not None:
            queries = q.view(len(q), -1, attn.spec.query_dim)
            rotated = op(queries, latent, attn.op_inputs(rope, step))
        if rotated is None:
            rotated = attn.rope_cache(q, attn.kv_a_norm(latent, step), rope, step)
        else:
            rotated = apply_position_query_scale(rotated, rope)
        # of every row: prompts are expanded whole
        out = attn.core(rotated, step)
        if logit_step is not None:
            out, step = out[step.logit_rows], logit_step
        return self._project_or_add_to_residual(out, residual, step)


class FusedGatedMLP(FusedModule):
    """SwiGLU in the op before or behind it; the output added to the residual."""

    plain: GatedMLP

    def forward(self, x: Activation, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        """[T, H] → [T, H]; None: added to residual."""
        mlp = self.plain
        inner = mlp.gate_up_proj.weight.try_linear_swiglu(x, mlp.gate_up_proj.bias, step.ops)
        if inner is None:
            gate_up = mlp.gate_up_proj(x, step)
            out = _try_swiglu_quant_linear(mlp.down_proj, gate_up, step)
            if out is not None:
                return out
            inner = mlp.act(gate_up, step)
        if _try_linear_add_in_place(mlp.down_proj, inner, residual, step):
            return None
        return mlp.down_proj(inner, step)


def _try_linear_add_in_place(
    linear: Linear, x: torch.Tensor, residual: torch.Tensor, step: Step
) -> bool:
    """Whether x Wᵀ + b was added to ``residual`` [T, N] in place.

    Not where ranks hold partial sums of it.
    """
    if step.tp_group.size > 1:
        return False
    return linear.weight.try_linear_add(x, linear.bias, residual, step.ops) is not None


def _try_qkv_rope_cache(
    linear: Linear, x: Activation, inputs: RopeCacheInputs, step: Step
) -> torch.Tensor | None:
    """The rotated queries; keys and values are in the cache. None: nothing was done."""
    return linear.weight.try_qkv_rope_cache(x, linear.bias, inputs, step.ops)


def _try_swiglu_quant_linear(
    linear: Linear, gate_up: torch.Tensor, step: Step
) -> torch.Tensor | None:
    """The product with silu(gate) · up of [T, 2·K], quantized in the same op; None: no such op."""
    return linear.weight.try_swiglu_quant_linear(gate_up, linear.bias, step.ops)
