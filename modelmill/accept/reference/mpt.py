"""mpt: ALiBi, clipped q, k and v, LayerNorm without bias (MosaicML's blog of MPT-7B, 2023)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.base import ACTIVATIONS, LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

NAME_PREFIX = "transformer."


class MptReference(Gpt2NamesReference):
    """MptForCausalLM."""

    DEFAULTS = ReferenceDefaults(tied=True)
    FINAL_NORM = "transformer.norm_f"
    LAYERS = "transformer.blocks"
    OLDER_KEYS = (
        ("hidden_size", "d_model"),
        ("num_hidden_layers", "n_layers"),
        ("num_attention_heads", "n_heads"),
    )
    norm_bias = False

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config | {"num_key_value_heads": None, "head_dim": None})
        attention = config.get("attn_config") or {}
        if not attention.get("alibi", True) or attention.get("qk_ln"):
            raise UnknownArchitecture("learned positions and norms of q and k are not known here")
        self.activation = ACTIVATIONS["gelu"]
        self.projection_paths = {
            "o_proj": "attn.out_proj",
            "fc": "ffn.up_proj",
            "down": "ffn.down_proj",
        }
        self.norm_paths = {"input_norm": "norm_1", "mlp_norm": "norm_2"}
        if attention.get("softmax_scale") is not None:
            self.score_scale = float(attention["softmax_scale"])
        self.qkv_bound = attention.get("clip_qkv")
        self.alibi_slopes = alibi_slopes(
            self.num_heads, float(attention.get("alibi_bias_max") or 8)
        )

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Split the fused matrix."""
        parts = self.source.get(f"{self.LAYERS}.{index}.attn.Wqkv.weight").chunk(3)
        qkv = {name: ModuleWeights(rows) for name, rows in zip("qkv", parts, strict=True)}
        return qkv | super().token_mixer_weights(index)

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention; q, k and v may be bounded."""
        del prompt_length
        parts = [r.linear(name, normed) for name in "qkv"]
        if self.qkv_bound is not None:
            bound = float(self.qkv_bound)
            parts = [
                r.record(f"{name}_clipped", part.clamp(-bound, bound), part)
                for name, part in zip("qkv", parts, strict=True)
            ]
        return r.linear("o_proj", self.run_and_record_attention(index, r, *parts))


REFERENCE = MptReference
