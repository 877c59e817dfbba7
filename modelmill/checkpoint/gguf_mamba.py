"""The GGUF architecture of Mamba2: its keys, and tensors whose values or shape are others there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from modelmill.checkpoint.gguf_config import ArchitectureKeys
from modelmill.checkpoint.gguf_families import GgufArchitecture
from modelmill.core.errors import UnknownArchitecture

Shape = tuple[int, ...]
MAMBA2_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm",
    "blk.ssm_in": "mixer.in_proj",
    "blk.ssm_conv1d": "mixer.conv1d",
    "blk.ssm_dt.bias": "mixer.dt_bias",
    "blk.ssm_a": "mixer.A_log",
    "blk.ssm_d": "mixer.D",
    "blk.ssm_norm": "mixer.norm",
    "blk.ssm_out": "mixer.out_proj",
}


@dataclass(frozen=True)
class RestoredTensor:
    """How a tensor was before the converter changed it.

    Attributes:
        shape: Its shape there, from that in the file.
        values: Its values, from those in the file, in either shape.
    """

    shape: Callable[[Shape], Shape]
    values: Callable[[torch.Tensor], torch.Tensor]


def _flat(shape: Shape) -> Shape:
    return (torch.Size(shape).numel(),)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


RESTORED_TENSORS: Mapping[str, RestoredTensor] = MappingProxyType(
    {
        # A itself, a column; a value that is no decay becomes NaN, which a build refuses
        "blk.ssm_a": RestoredTensor(_flat, lambda tensor: (-tensor.float()).log()),
        "blk.ssm_d": RestoredTensor(_flat, _unchanged),
        "blk.ssm_norm": RestoredTensor(_flat, _unchanged),
        "blk.ssm_conv1d": RestoredTensor(
            lambda shape: (shape[0], 1, shape[1]) if len(shape) == 2 else shape, _unchanged
        ),
    }
)
"""By GGUF's name without the layer's number."""


def _mamba2(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Mamba2; it is the file's converter that knows no bound of the time steps."""
    hidden, inner = keys.get_count("embedding_length"), keys.get_count("ssm.inner_size")
    heads = keys.get_count("ssm.time_step_rank")
    if inner % hidden or inner % heads:
        raise UnknownArchitecture(
            f"{keys.raw.path}: has ssm.inner_size {inner}, which is no multiple of "
            f"embedding_length {hidden} and of the {heads} heads of ssm.time_step_rank"
        )
    for idle in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        keys.view.get(f"{keys.arch}.{idle}")  # the model has none
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.get_count("block_count"),
        "expand": inner // hidden,
        "num_heads": heads,
        "head_dim": inner // heads,
        "state_size": keys.get_count("ssm.state_size"),
        "n_groups": keys.get_count("ssm.group_count", 1),
        "conv_kernel": keys.get_count("ssm.conv_kernel"),
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "use_bias": keys.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": keys.has_tensor("blk.0.ssm_conv1d.bias"),
    }


MAMBA_ARCHITECTURES = {
    "mamba2": GgufArchitecture(MAMBA2_NAMES, "backbone.layers", read_config=_mamba2)
}
