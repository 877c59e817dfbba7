"""bitnet: SubLN (arXiv:2210.06423), the square of ReLU (arXiv:2504.12285, section 2).

x + W_o norm(attention(norm(x))), then x + W_d norm(relu(W_g n)² · W_u n) with n = norm(x).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class BitNetReference(PlainDecoderReference):
    """BitNetForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=5, eps=1e-5)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.activation = self.activation_from_config("hidden_act", "relu2")
        self.rope = self.build_rope(theta=500000.0)
        self.biased = self.projections_with_bias()
        self.norm_paths["attn_sub_norm"] = "self_attn.attn_sub_norm"
        self.norm_paths["mlp_sub_norm"] = "mlp.ffn_sub_norm"

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention, its norm, and the output projection."""
        q, k, v = (r.linear(name, normed) for name in ("q", "k", "v"))
        q_turned = r.record("q_rot", self.apply_rope_to_heads(index, q, prompt_length), q)
        k_turned = r.record("k_rot", self.apply_rope_to_heads(index, k, prompt_length), k)
        mixed = self.run_and_record_attention(index, r, q_turned, k_turned, v)
        return r.linear("o_proj", self.apply_and_record_norm(r, "attn_sub_norm", mixed))

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a gated MLP with a norm in front of its second product."""
        gate, up = r.linear("gate", normed), r.linear("up", normed)
        inner = r.record("act", self.activation(gate) * up, gate, up)
        return r.linear("down", self.apply_and_record_norm(r, "mlp_sub_norm", inner))


REFERENCE = BitNetReference
