"""gpt_neox: parallel layers, q, k and v stored head by head (arXiv:2204.06745)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.bloom import MEGATRON_PROJECTION_PATHS
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.rope import partial_rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "gpt_neox."
IGNORED_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


class GptNeoXReference(PlainDecoderReference):
    """GPTNeoXForCausalLM."""

    DEFAULTS = ReferenceDefaults(activation="gelu")
    EPS_KEY = "layer_norm_eps"
    uses_layer_norm = True
    EMBEDDING = "gpt_neox.embed_in.weight"
    FINAL_NORM = "gpt_neox.final_layer_norm"
    LAYERS = "gpt_neox.layers"
    HEAD = "embed_out.weight"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        # the other families' names count within rope_parameters alone
        self.rope = partial_rope_from_config(
            {key: value for key, value in config.items() if key not in IGNORED_ROPE_KEYS},
            self.head_dim,
            self.max_position,
            factor=float(config.get("rotary_pct", 0.25)),
            theta=float(config.get("rotary_emb_base", 10000.0)),
        )
        self.projection_paths = MEGATRON_PROJECTION_PATHS | {
            "qkv": "attention.query_key_value",
            "o_proj": "attention.dense",
        }
        self.biased = self.projections_with_bias(names=("qkv", "o_proj"), default=True) | {
            "fc",
            "down",
        }
        self.mlp_norm = True
        if config.get("use_parallel_residual", True):
            self.layer = self.parallel_branch_layer


REFERENCE = GptNeoXReference
