"""gemma, gemma2, vaultgemma, gemma3_text: scaled embeddings, norms stored less 1.

arXiv:2403.08295, 2408.00118 (soft caps, norms around the branches) and 2503.19786.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.base import ACTIVATIONS, ModuleWeights
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.rope import ReferenceRope, rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text", "vaultgemma")


class GemmaReference(PerHeadQKNormMixin):
    """GemmaForCausalLM, Gemma2ForCausalLM, VaultGemmaForCausalLM and Gemma3ForCausalLM."""

    DEFAULTS = ReferenceDefaults(head_dim=256, tied=True)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        is_first, is_vault = (config["model_type"] == name for name in ("gemma", "vaultgemma"))
        is_second = is_vault or config["model_type"] == "gemma2"
        self.num_kv_heads = int(config.get("num_key_value_heads") or (16 if is_first else 4))
        self.embedding_scale = self.hidden_size**0.5
        self.biased = self.projections_with_bias()
        self.third = config["model_type"] == "gemma3_text"
        self.softcap = config.get("final_logit_softcapping", 30.0 if is_second else None)
        if is_second:
            self.score_softcap = config.get("attn_logit_softcapping", 50.0)
        if not is_first:
            self._set_gemma2_options()
            if is_vault:  # norms in front of the branches alone
                del self.norm_paths["attn_post"], self.norm_paths["mlp_post"]
                self.layer = self.pre_norm_layer
            if self.third:
                self._set_gemma3_options()
                return
        self.rope = self._build_rope(dict(config), 10000.0, 8192)
        if is_second:
            return
        name = str(config.get("hidden_act") or "gelu_pytorch_tanh")
        # the first files said gelu and meant its approximation
        self.activation = ACTIVATIONS["gelu_pytorch_tanh" if name == "gelu" else name]

    def _build_rope(self, config: dict[str, Any], base: float, positions: int) -> ReferenceRope:
        length = int(self.config.get("max_position_embeddings") or positions)
        return rope_from_config({"rope_theta": base} | config, self.head_dim, length)

    def _set_gemma2_options(self) -> None:
        """Read what Gemma 2 and 3 share: windows and norms on both sides of a branch."""
        config = self.config
        self.activation = self.activation_from_config("hidden_activation", "gelu_pytorch_tanh")
        self.score_scale = float(config.get("query_pre_attn_scalar", 256)) ** -0.5
        self.norm_paths |= {
            "attn_post": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post": "post_feedforward_layernorm",
        }
        every = int(config.get("sliding_window_pattern") or 6) if self.third else 2
        self.windows = self.sliding_windows_by_layer(int(config.get("sliding_window", 4096)), every)
        self.layer = self.sandwich_layer

    def _set_gemma3_options(self) -> None:
        """Read Gemma 3's two rotations and norms of q and k."""
        config = self.config
        parameters = config.get("rope_parameters") or {}
        full = {"rope_theta": config.get("rope_theta") or 1000000.0}
        full |= parameters.get("full_attention") or {}
        full |= config.get("rope_scaling") or {}
        slow = {"rope_theta": config.get("rope_local_base_freq") or 10000.0}
        slow |= parameters.get("sliding_attention") or {}
        self.rope = self._build_rope({"rope_parameters": full}, 0, 131072)
        self.local_rope = self._build_rope({"rope_parameters": slow}, 0, 131072)
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm, which is stored less 1."""
        return ModuleWeights(super().norm_weights(index, name).weight + 1)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Bound the logits."""
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


REFERENCE = GemmaReference
