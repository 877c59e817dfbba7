"""olmo: LayerNorm without weights, q, k and v clipped in some (arXiv:2402.00838, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import Affine, LayerRecorder
from modelmill.accept.reference.plain_decoder import Defaults, PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource


class OlmoReference(PlainDecoderReference):
    """OlmoForCausalLM."""

    DEFAULTS = Defaults(theta=10000.0)
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.eps = 1e-5
        self.biased = self.projections_with_bias()
        self.clip = config.get("clip_qkv")

    def norm_weights(self, index: int | None, name: str) -> Affine:
        """A norm has no weights."""
        del index, name
        return Affine(torch.ones(self.hidden_size))

    def attention(self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int) -> Tensor:
        """Run a layer's attention; q, k and v may be bounded before the rotation."""
        q, k, v = self._bounded(r, [r.linear(name, normed) for name in "qkv"])
        q_turned = r.record("q_rot", self.rotate(index, q, prompt_length), q)
        k_turned = r.record("k_rot", self.rotate(index, k, prompt_length), k)
        heads = (each.reshape(len(each), -1, self.head_dim) for each in (q_turned, k_turned, v))
        mixed = self.attend(index, *heads)
        return r.linear("o_proj", r.record("attn", mixed, q_turned, k_turned, v))

    def _bounded(self, r: LayerRecorder, parts: list[Tensor]) -> list[Tensor]:
        if self.clip is None:
            return parts
        bound = float(self.clip)
        return [
            r.record(f"{name}_clipped", part.clamp(-bound, bound), part)
            for name, part in zip("qkv", parts, strict=True)
        ]


REFERENCE = OlmoReference
