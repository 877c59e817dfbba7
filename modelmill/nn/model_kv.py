"""The KV cache of a model as an engine keeps it: with page groups where they save memory."""

from __future__ import annotations

from torch import nn

from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.fused_decode import can_stack
from modelmill.nn.kv import KVShape


def model_kv_shape(model: nn.Module, max_model_len: int, decode_op: object | None) -> KVShape:
    """The KV cache of a model, with page groups where they save memory.

    Args:
        model: The model.
        max_model_len: Most tokens of a sequence.
        decode_op: The op ``decode``, if there is one: it computes all layers of some models at
            once, with one page table.
    """
    shape = model.kv
    assert isinstance(shape, KVShape)
    if decode_op is not None and isinstance(model, CausalLM) and can_stack(model):
        return shape
    return shape.grouped(max_model_len)
