"""llama, mistral, ministral, qwen2, qwen3: a pre-norm decoder, RMSNorm, RoPE and a gated MLP."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3")
MISTRAL_MODEL_TYPES = ("mistral", "ministral")
MODEL_DEFAULTS = {
    "llama": ReferenceDefaults(),
    "mistral": ReferenceDefaults(kv_heads=8, positions=131072),
    "ministral": ReferenceDefaults(kv_heads=8, positions=131072),
    "qwen2": ReferenceDefaults(kv_heads=32, positions=32768),
    "qwen3": ReferenceDefaults(kv_heads=32, head_dim=128, positions=32768),
}


class DecoderReference(PerHeadQKNormMixin):
    """The plain decoder.

    A bias rule of None means: if the container has one (GGUF has no flag).
    """

    def __init__(
        self, source: TensorSource, config: dict[str, Any], rope: ReferenceRope | None = None
    ) -> None:
        self.model_type = str(config["model_type"])
        self.DEFAULTS = MODEL_DEFAULTS.get(self.model_type, ReferenceDefaults())
        super().__init__(source, config)
        if not config.get("is_causal", True) or config.get("use_bidirectional_attention"):
            raise UnknownArchitecture("attention to later tokens is not known here")
        self.rope = self.build_rope() if rope is None else rope
        if self.model_type == "qwen3":
            self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        self.has_bias = self._projection_bias_rules()
        self.windows = [self._sliding_window(index) for index in range(self.num_layers)]

    def _projection_bias_rules(self) -> dict[str, bool | None]:
        """Return module → has a bias.

        qwen2 has it on q, k, v always; the others as the config says.
        """
        attention, mlp = (
            self.config.get("attention_bias", False),
            self.config.get("mlp_bias", False),
        )
        if self.model_type in MISTRAL_MODEL_TYPES:
            attention = mlp = attention if attention is None else False
        qkv, out = (True, False) if self.model_type == "qwen2" else (attention, attention)
        if self.model_type in ("qwen2", "qwen3"):
            mlp = mlp if mlp is None else False
        rules = {"q": qkv, "k": qkv, "v": qkv, "o_proj": out, "gate": mlp, "up": mlp, "down": mlp}
        return {name: rule if rule is None else bool(rule) for name, rule in rules.items()}

    def _sliding_window(self, index: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None for full attention.

        A mistral with layer_types is what the originals call ministral: the list decides.
        """
        window = self.config.get("sliding_window", 4096)
        everywhere = self.model_type in MISTRAL_MODEL_TYPES
        if self.model_type == "llama" or not (
            everywhere or self.config.get("use_sliding_window", False)
        ):
            return None
        layer_types = self.config.get("layer_types")
        if layer_types is not None:
            return window if layer_types[index] == "sliding_attention" else None
        return window if everywhere or index >= self.config.get("max_window_layers", 28) else None

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's projections."""
        weights: LayerWeights = {}
        for name, path in self.projection_paths.items():
            stem, rule = f"{self.LAYERS}.{index}.{path}", self.has_bias[name]
            biased = self.source.has(f"{stem}.bias") if rule is None else rule
            weights[name] = self.read_linear(stem, biased)
        return weights


REFERENCE = DecoderReference
