"""A decoder's modules as the one op that runs all layers: the weights that ``ops.decode`` asks for, gathered."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import cast

import torch
from torch import nn

from modelmill.nn.attention import Attention, Rope
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import GatedMLP
from modelmill.nn.norm import RMSNorm
from modelmill.nn.step import Step
from modelmill.ops.decode import Layer, Matrix, Stack, Tokens

# Tokens of a step up to which one call is worth it: beyond, the time goes into the products.
MOST_TOKENS = 16
# The kinds of weight that the op reads.
_READ = ("dense", "int8", "int4", "int8_group")


class Gathered:
    """The stack of a list of layers; gathered again where a linear layer has come to hold another weight."""

    def __init__(self, layers: nn.ModuleList, norm: RMSNorm, head: Linear) -> None:
        self._parts = (layers, norm, head)
        self._linears = [m for part in self._parts for m in part.modules() if isinstance(m, Linear)]
        self._held: list[object] = []
        self._stack: Stack | None = None

    def stack(self) -> Stack | None:
        """None where a weight is held in a form that the op does not read."""
        held: list[object] = [m.held for m in self._linears]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._held = held
            readable = all(m.held.kind in _READ and "order" not in m.held.tensors() for m in self._linears)
            self._stack = _gather(*self._parts) if readable else None
        return self._stack


def decode(op: Callable[..., torch.Tensor], stack: Stack, x: torch.Tensor, rope: Rope, step: Step) -> torch.Tensor:
    """x: [T, H] embeddings → logits [R, V] float32 of the rows that the step asks for."""
    tokens = Tokens(
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


def _gather(layers: nn.ModuleList, norm: RMSNorm, head: Linear) -> Stack:
    found = tuple(_layer(layer) for layer in layers)
    heads = cast(Attention, layers[0].attn).rotate.heads
    return Stack(found, norm.weight, _matrix(head), heads, norm.eps)


def _layer(layer: nn.Module) -> Layer:
    attn, mlp = cast(Attention, layer.attn), cast(GatedMLP, layer.mlp)
    q_norm, k_norm = attn.rotate.q_norm, attn.rotate.k_norm
    return Layer(
        cast(RMSNorm, layer.attn_norm).weight,
        _matrix(attn.qkv_proj),
        _matrix(attn.o_proj),
        cast(RMSNorm, layer.mlp_norm).weight,
        _matrix(mlp.gate_up_proj),
        _matrix(mlp.down_proj),
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        attn.mix.window,
    )


def _matrix(linear: Linear) -> Matrix:
    parts = linear.held.tensors()
    sizes = parts.pop("sizes", None)
    columns, group = (0, 0) if sizes is None else (int(n) for n in sizes.tolist())
    return Matrix(**parts, bias=linear.bias, group=group, columns=columns)
