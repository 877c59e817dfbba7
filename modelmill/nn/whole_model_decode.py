"""Gathers a decoder's weights for ``ops.decode``, the op that runs all layers of a small step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import is_
from typing import cast

import torch
from torch import nn

from modelmill.nn.attention import Attention, AttentionSpec, RopeCosSin
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.kv import QUANTIZED_KV_DTYPES, ModelKVCacheSpec
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import GatedMLP, SiluMul
from modelmill.nn.norm import RMSNorm
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.step import Step
from modelmill.ops.decode import (
    DecodeInputs,
    DecodeLayerWeights,
    DecodeLinearWeights,
    DecoderStackWeights,
)

# Tokens of a step up to which one call is worth it: beyond, the time goes into the products.
MAX_WHOLE_MODEL_DECODE_TOKENS = 16
DECODE_OP_WEIGHT_FORMATS = frozenset(("dense", "int8", "int4", "int8_group"))
"""The weight formats that the op reads."""


class CachedDecoderWeights:
    """The weights of a list of layers, gathered again where a weight was replaced."""

    def __init__(self, layers: nn.ModuleList, norm: RMSNorm, head: Linear) -> None:
        self._modules = (layers, norm, head)
        self._linears = [
            m for part in self._modules for m in part.modules() if isinstance(m, Linear)
        ]
        self._weights: list[object] = []
        self._stack: DecoderStackWeights | None = None

    def stack(self) -> DecoderStackWeights | None:
        """None where a weight is held in a form that the op does not read."""
        weights: list[object] = [m.weight for m in self._linears]
        if len(weights) != len(self._weights) or not all(map(is_, weights, self._weights)):
            self._weights = weights
            self._stack = (
                _stack_weights(*self._modules) if _supports_linears(self._linears) else None
            )
        return self._stack


def can_decode_whole_model(model: CausalLM) -> bool:
    """Whether the op computes what this model's layers compute."""
    return isinstance(model.norm, RMSNorm) and all(map(_supports_layer, model.layers))


def decode_op_reads_weights(model: CausalLM) -> bool:
    """Whether the op reads the weights of a loaded model."""
    parts = (model.layers, model.head)
    return _supports_linears(m for part in parts for m in part.modules() if isinstance(m, Linear))


def _supports_linears(linears: Iterable[Linear]) -> bool:
    return all(
        m.weight.format in DECODE_OP_WEIGHT_FORMATS and "perm" not in m.weight.tensors()
        for m in linears
    )


def _supports_layer(layer: nn.Module) -> bool:
    if type(layer) is not PreNormLayer or not isinstance(layer.mlp, GatedMLP):
        return False
    if not isinstance(layer.attn, Attention):
        return False
    spec = layer.attn.spec
    return (
        isinstance(spec, AttentionSpec)
        and isinstance(layer.attn_norm, RMSNorm)
        and isinstance(layer.mlp.act, SiluMul)
        and spec.rotates
        and spec.qkv_norm is None
        and spec.scale is None
        and not spec.local_rope
        and not spec.gated
        and not spec.modifies_scores
        and not spec.rotates_first
        and not spec.out_norm
    )


def run_whole_model_decode(
    op: Callable[..., torch.Tensor],
    stack: DecoderStackWeights,
    x: torch.Tensor,
    rope: RopeCosSin,
    step: Step,
) -> torch.Tensor:
    """x: [T, H] embeddings → logits [R, V] float32 of the rows ``step.logit_rows``."""
    tokens = DecodeInputs(
        step.kv.k,
        step.kv.v,
        step.slots,
        step.block_tables,
        step.query_start,
        step.context_lens,
        step.max_query,
        step.max_context,
        step.logit_rows,
        rope.cos,
        rope.sin,
        rope.q_scale,
    )
    return op(x, stack, tokens)


def _stack_weights(layers: nn.ModuleList, norm: RMSNorm, head: Linear) -> DecoderStackWeights:
    layer_weights = tuple(_layer_weights(layer) for layer in layers)
    heads = cast(Attention, layers[0].attn).rope_cache.heads
    return DecoderStackWeights(layer_weights, norm.weight, _matrix_weights(head), heads, norm.eps)


def _layer_weights(layer: nn.Module) -> DecodeLayerWeights:
    attn, mlp = cast(Attention, layer.attn), cast(GatedMLP, layer.mlp)
    q_norm, k_norm = attn.rope_cache.q_norm, attn.rope_cache.k_norm
    return DecodeLayerWeights(
        cast(RMSNorm, layer.attn_norm).weight,
        _matrix_weights(attn.qkv_proj),
        _matrix_weights(attn.o_proj),
        cast(RMSNorm, layer.mlp_norm).weight,
        _matrix_weights(mlp.gate_up_proj),
        _matrix_weights(mlp.down_proj),
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        attn.core.window,
    )


def _matrix_weights(linear: Linear) -> DecodeLinearWeights:
    parts = linear.weight.tensors()
    sizes = parts.pop("sizes", None)
    columns, group = (0, 0) if sizes is None else (int(n) for n in sizes.tolist())
    return DecodeLinearWeights(**parts, bias=linear.bias, group_size=group, in_features=columns)


def model_kv_shape(
    model: nn.Module,
    max_model_len: int,
    decode_op: object | None,
    kv_dtype: torch.dtype,
    ranks: int = 1,
    *,
    formats: Collection[str] | None = None,
) -> ModelKVCacheSpec:
    """The KV cache of a model, with page groups where they save memory.

    The op ``decode`` computes all layers of some models at once, with one page table: where it
    runs, there are no page groups.

    Args:
        model: The model.
        max_model_len: Most tokens of a sequence.
        decode_op: The op, if there is one.
        kv_dtype: Of the cache; the op reads no pages of 8 bits.
        ranks: That compute a step together; the op runs on one.
        formats: Of the weights of a model that is not loaded; None: the model has its weights.
    """
    shape = model.kv
    assert isinstance(shape, ModelKVCacheSpec)
    runs = decode_op is not None and ranks == 1 and kv_dtype not in QUANTIZED_KV_DTYPES.values()
    if (
        runs
        and shape.layer_windows
        and isinstance(model, CausalLM)
        and can_decode_whole_model(model)
    ):
        loaded = formats is None
        if (
            decode_op_reads_weights(model)
            if loaded
            else DECODE_OP_WEIGHT_FORMATS.issuperset(formats or ())
        ):
            return shape
    return shape.with_page_groups(max_model_len)
