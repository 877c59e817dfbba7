"""The KV cache of a model as an engine keeps it: with page groups where they save memory."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.fused_decode import SUPPORTED_FORMATS, can_stack, supports_weight_formats
from modelmill.nn.kv import QUANTIZED_KV_DTYPES, KVShape


def model_kv_shape(
    model: nn.Module,
    max_model_len: int,
    decode_op: object | None,
    kv_dtype: torch.dtype,
    ranks: int = 1,
    *,
    formats: Collection[str] | None = None,
) -> KVShape:
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
    assert isinstance(shape, KVShape)
    runs = decode_op is not None and ranks == 1 and kv_dtype not in QUANTIZED_KV_DTYPES.values()
    if runs and shape.layer_windows and isinstance(model, CausalLM) and can_stack(model):
        loaded = formats is None
        if (
            supports_weight_formats(model)
            if loaded
            else SUPPORTED_FORMATS.issuperset(formats or ())
        ):
            return shape
    return shape.with_page_groups(max_model_len)
