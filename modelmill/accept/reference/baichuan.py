"""baichuan: q, k and v in one matrix; Baichuan 2 norms the head's rows (arXiv:2309.10305).

The 13B models have ALiBi.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "model."


class BaichuanReference(PlainDecoderReference):
    """BaichuanForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        is_second = config.get("z_loss_weight") is not None or config["vocab_size"] == 125696
        super().__init__(_NormalizedHeadSource(source) if is_second else source, config)
        length = config.get("max_position_embeddings")
        if length is None:
            self.alibi_slopes = alibi_slopes(self.num_heads)
            return
        length = int(length)
        self.rope = rope_from_config(config, self.head_dim, length)

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Split the fused matrix."""
        stem = f"{self.LAYERS}.{index}"
        parts = self.source.get(f"{stem}.self_attn.W_pack.weight").chunk(3)
        fused = {name: ModuleWeights(rows) for name, rows in zip("qkv", parts, strict=True)}
        return fused | {
            name: self.read_linear(f"{stem}.{path}", False)
            for name, path in self.projection_paths.items()
            if name not in fused
        }


class _NormalizedHeadSource(TensorSource):
    """A source whose head has rows of norm 1."""

    def __init__(self, source: TensorSource) -> None:
        super().__init__(source.container, source.dtype, NAME_PREFIX, device=source.device)

    def row_blocks(self, name: str) -> Iterator[Tensor]:
        """Yield a matrix in blocks of rows."""
        for block in super().row_blocks(name):
            yield block / block.norm(dim=-1, keepdim=True) if name == "lm_head.weight" else block


REFERENCE = BaichuanReference
