"""falcon: parallel layers, one or few KV heads, rotation or ALiBi (arXiv:2311.16867)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.bloom import MEGATRON_PROJECTION_PATHS, BloomReference
from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "transformer."


class FalconReference(Gpt2NamesReference):
    """FalconForCausalLM."""

    DEFAULTS = ReferenceDefaults(tied=True)
    EMBEDDING = BloomReference.EMBEDDING
    OLDER_KEYS = (*BloomReference.OLDER_KEYS, ("num_kv_heads", "n_head_kv"))

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        config = self.config
        new = bool(config.get("new_decoder_architecture"))
        parallel = bool(config.get("parallel_attn", True))
        self.head_dim = self.hidden_size // self.num_heads
        self.num_kv_heads = self.num_heads
        if new:
            self.num_kv_heads = int(config.get("num_kv_heads") or self.num_heads)
        elif config.get("multi_query", True):
            self.num_kv_heads = 1
        self.activation = self.activation_from_config("activation", "gelu")
        if config.get("alibi"):  # added before the scores are scaled
            self.alibi_slopes = [s * self.score_scale for s in alibi_slopes(self.num_heads)]
        else:
            self.rope = self.build_partial_rope()
        self.projection_paths = MEGATRON_PROJECTION_PATHS
        self.biased = self.projections_with_bias("bias", self.projection_paths)
        self.mlp_norm = int(config.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2
        if parallel:
            self.layer = self.parallel_branch_layer
        self.norm_paths = {"input_norm": "input_layernorm"}
        if parallel and self.mlp_norm:
            self.norm_paths = {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
        elif not parallel:
            self.norm_paths["mlp_norm"] = "post_attention_layernorm"


REFERENCE = FalconReference
