"""mpt: ALiBi, clipped q, k and v, LayerNorm without bias (MosaicML's blog of MPT-7B, 2023)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.base import ACTIVATIONS, Affine, LayerRecorder, LayerWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("mpt",)
NAME_PREFIX = "transformer."


class MptReference(PlainDecoderReference):
    """MptForCausalLM."""

    EMBEDDING = "transformer.wte.weight"
    FINAL_NORM = "transformer.norm_f"
    LAYERS = "transformer.blocks"
    TIED_BY_DEFAULT = True
    uses_layer_norm = True
    norm_bias = False

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        names = {"hidden_size": "d_model", "num_hidden_layers": "n_layers"}
        names["num_attention_heads"] = "n_heads"
        own = {name: config[old] for name, old in names.items() if config.get(old) is not None}
        super().__init__(source, config | own | {"num_key_value_heads": None, "head_dim": None})
        attention = config.get("attn_config") or {}
        if not attention.get("alibi", True) or attention.get("qk_ln"):
            raise UnknownArchitecture("learned positions and norms of q and k are not known here")
        self.eps = float(config.get("layer_norm_epsilon", 1e-5))
        self.activation = ACTIVATIONS["gelu"]
        self.norm_paths = {"input_norm": "norm_1", "mlp_norm": "norm_2"}
        if attention.get("softmax_scale") is not None:
            self.score_scale = float(attention["softmax_scale"])
        self.clip = attention.get("clip_qkv")
        self.alibi_slopes = alibi_slopes(
            self.num_heads, float(attention.get("alibi_bias_max") or 8)
        )

    def projections(self, index: int) -> LayerWeights:
        """Split the fused matrix."""
        stem = f"{self.LAYERS}.{index}"
        parts = self.source.get(f"{stem}.attn.Wqkv.weight").chunk(3)
        return {name: Affine(rows) for name, rows in zip("qkv", parts, strict=True)} | {
            "o_proj": self.read_affine(f"{stem}.attn.out_proj", False),
            "fc": self.read_affine(f"{stem}.ffn.up_proj", False),
            "down": self.read_affine(f"{stem}.ffn.down_proj", False),
        }

    def attention(self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int) -> Tensor:
        """Run a layer's attention; q, k and v may be bounded."""
        del prompt_length
        parts = [r.linear(name, normed) for name in "qkv"]
        if self.clip is not None:
            bound = float(self.clip)
            parts = [
                r.record(f"{name}_clipped", part.clamp(-bound, bound), part)
                for name, part in zip("qkv", parts, strict=True)
            ]
        q, k, v = (part.reshape(len(part), -1, self.head_dim) for part in parts)
        return r.linear("o_proj", r.record("attn", self.attend(index, q, k, v), *parts))


REFERENCE = MptReference
