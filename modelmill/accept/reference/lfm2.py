"""lfm2: gated short convolutions and attention with normed heads (arXiv:2511.23404, section 2.1).

A convolution layer is W_o(C · conv(B · x)) with B, C, x = W_i h, each channel convolved by itself.
The MLP's width is two thirds of the config's, times a factor, rounded up to a multiple.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.causal_convolution import causal_convolution
from modelmill.accept.reference.hybrid_layers import HybridLayersMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

MLP_MATRIX_PATHS = {"gate": "w1", "up": "w3", "down": "w2"}


class Lfm2Reference(HybridLayersMixin, PerHeadQKNormMixin):
    """Lfm2ForCausalLM."""

    FINAL_NORM = "model.embedding_norm"
    DEFAULTS = ReferenceDefaults(kv_heads=8, eps=1e-5, positions=128_000, tied=True, theta=1e6)
    EPS_KEY = "norm_eps"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.norm_paths = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}
        self.norm_paths |= {
            name: f"self_attn.{name[0]}_layernorm" for name in PER_HEAD_QK_NORM_PATHS
        }
        self.projection_paths["o_proj"] = "self_attn.out_proj"
        self.projection_paths |= {
            name: f"feed_forward.{matrix}" for name, matrix in MLP_MATRIX_PATHS.items()
        }
        self.conv_bias = bool(config.get("conv_bias", False))
        types = config.get("layer_types")
        attention = config.get("full_attn_idxs")
        self.recurrent = [
            types[layer] == "conv" if types else attention is not None and layer not in attention
            for layer in range(self.num_layers)
        ]

    @property
    def config_ties_embeddings(self) -> bool:
        """Return whether the output head is the embedding; the key has an older name."""
        older = self.config.get("tie_embedding")
        return super().config_ties_embeddings if older is None else bool(older)

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        if not self.recurrent[index]:
            return super().layer_weights(index)
        names = (name for name in self.norm_module_names() if name not in PER_HEAD_QK_NORM_PATHS)
        norms = {name: self.norm_weights(index, name) for name in names}
        return norms | self.conv_weights(f"{self.LAYERS}.{index}.conv") | self.mlp_weights(index)

    def conv_weights(self, stem: str) -> LayerWeights:
        """Read a convolution; the rows of its projection are B, C and x."""
        weight, bias, _ = self.read_linear(f"{stem}.in_proj", self.conv_bias)
        biases: Any = (None,) * 3 if bias is None else bias.chunk(3)
        parts = zip(("B", "C", "x"), weight.chunk(3), biases, strict=True)
        conv = self.read_linear(f"{stem}.conv", self.conv_bias)
        return {
            **{name: ModuleWeights(rows, own) for name, rows, own in parts},
            "conv": conv._replace(weight=conv.weight[:, 0]),
            "o_proj": self.read_linear(f"{stem}.out_proj", self.conv_bias),
        }

    def run_recurrent_mixer(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's convolution, with its output projection."""
        b, c, x = (r.linear(name, normed) for name in ("B", "C", "x"))
        mixed = self.apply_causal_convolution(r, r.record("conv_input", b * x, b, c, x))
        return r.linear("o_proj", r.record("conv_output", c * mixed, mixed, b, c, x))

    def apply_causal_convolution(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Convolve each channel with its weights over the tokens before."""
        weight, bias, _ = r.weights["conv"]
        return r.record("conv", causal_convolution(r, x, weight, bias), x)


REFERENCE = Lfm2Reference
