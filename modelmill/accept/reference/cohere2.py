"""cohere2: parallel layers, rotation in layers with a window only (arXiv:2504.00698)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("cohere2",)
NAME_PREFIX = "model."


class Cohere2Reference(PlainDecoderReference):
    """Cohere2ForCausalLM."""

    TIED_BY_DEFAULT = True
    uses_layer_norm = True
    norm_bias = False

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.head_dim = self.hidden_size // self.num_heads
        self.score_scale = self.head_dim**-0.5
        self.eps = float(config.get("layer_norm_eps", 1e-5))
        length = int(config.get("max_position_embeddings") or 8192)
        self.rope = partial_rope(config, self.head_dim, length)
        self.turns_neighbours = True
        self.norm_paths = {"input_norm": "input_layernorm"}
        if config.get("attention_bias"):
            self.biased = frozenset(("q", "k", "v", "o_proj"))
        self.logit_scale = float(config.get("logit_scale", 0.0625))
        every = int(config.get("sliding_window_pattern") or 4)
        types = config.get("layer_types")
        for layer in range(self.num_layers):
            slides = types[layer] == "sliding_attention" if types else (layer + 1) % every != 0
            self.windows[layer] = int(config.get("sliding_window", 4096)) if slides else None
        self.unrotated = frozenset(i for i, size in enumerate(self.windows) if size is None)
        self.layer = self.parallel


REFERENCE = Cohere2Reference
