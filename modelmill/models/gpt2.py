"""GPT-2, small to XL: learned positions, LayerNorm, tied head, weights stored as [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.models import _transformer_h_names
from modelmill.models._hf_config import (
    boolean,
    non_negative_float,
    num_layers,
    positive_int,
    require_value,
)
from modelmill.models._layer_rules import head_rules, stacked_rules
from modelmill.nn.attention import Attention, AttentionSpec
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.decoder import PreNormLayer, pre_norm_layer
from modelmill.nn.embedding import LMHead, TokenEmbedding
from modelmill.nn.layer_spec import LayerSpec
from modelmill.nn.layer_stack import kv_shape
from modelmill.nn.mlp import PlainMLP
from modelmill.nn.norm import LayerNorm
from modelmill.nn.step import Step

CHECKPOINT_PREFIXES = _transformer_h_names.PREFIXES
CHECKPOINT_NAMES = {**_transformer_h_names.LAYER_NAMES, "mlp.fc_proj": ("mlp.c_fc",)}
UNUSED_CONFIG_KEYS = ("reorder_and_upcast_attn", "n_special", "predict_special_tokens")


@dataclass(frozen=True)
class Gpt2Config:
    """Sizes; max_len is the number of learned positions."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocab: int
    eps: float
    max_len: int
    tied: bool
    max_extended_len: int | None = None

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """GPT-2 shares no heads."""
        return self.heads

    @property
    def attention_spec(self) -> AttentionSpec:
        """The attention of each layer."""
        return AttentionSpec(
            self.hidden, self.heads, self.heads, self.head_dim, qkv_bias=True, out_bias=True
        )

    @property
    def layer_spec(self) -> LayerSpec:
        """What each layer is made of."""
        return pre_norm_layer(
            self.attention_spec,
            self.inner,
            PlainMLP.module_specs(self.hidden, self.inner),
            PlainMLP.site_specs(),
            ("weight", "bias"),
            rotates=False,
        )


def config_from_hf(raw: Mapping[str, Any]) -> Gpt2Config:
    """Convert a Hugging Face config.json."""
    require_value(raw, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    require_value(raw, "scale_attn_weights", (True,), True)
    require_value(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    require_value(raw, "add_cross_attention", (False,), False)
    hidden, heads = (
        positive_int(raw, "n_embd", "hidden_size"),
        positive_int(raw, "n_head", "num_attention_heads"),
    )
    if hidden % heads:
        raise CheckpointError(f"config.json: n_embd={hidden} is not a multiple of n_head={heads}")
    return Gpt2Config(
        hidden=hidden,
        inner=positive_int(raw, "n_inner", default=4 * hidden),
        layers=num_layers(raw, "n_layer", "num_hidden_layers"),
        heads=heads,
        vocab=positive_int(raw, "vocab_size"),
        eps=non_negative_float(raw, "layer_norm_epsilon", default=1e-5),
        # n_ctx only fills in for the others
        max_len=positive_int(
            raw,
            "n_positions",
            "max_position_embeddings",
            default=positive_int(raw, "n_ctx", default=1024),
        ),
        tied=boolean(raw, "tie_word_embeddings", True),
    )


def rules(config: Gpt2Config) -> list[Rule]:
    """Conv1D stores [in, out]: transposed here, once."""
    out = [
        Rule("embed.weight", ("transformer.wte.weight",)),
        Rule("embed.positions", ("transformer.wpe.weight",)),
        *_affine("norm", "transformer.ln_f"),
        *head_rules(tied=config.tied),
    ]
    specs = [config.layer_spec] * config.layers
    return out + stacked_rules(
        specs, CHECKPOINT_NAMES, _transformer_h_names.LAYERS, transposed=True
    )


def ignored_tensors(config: Gpt2Config) -> tuple[str, ...]:
    """The causal mask buffers, and the copy of a tied head."""
    masks = (r".*\.attn\.bias", r".*\.attn\.masked_bias")
    return (*masks, r"lm_head\.weight") if config.tied else masks


def _affine(target: str, source: str) -> list[Rule]:
    return [
        Rule(f"{target}.weight", (f"{source}.weight",)),
        Rule(f"{target}.bias", (f"{source}.bias",)),
    ]


class Gpt2Embedding(TokenEmbedding):
    """Token rows plus learned position rows."""

    positions: torch.Tensor

    def __init__(self, rows: int, width: int, num_positions: int) -> None:
        super().__init__(rows, width)
        self.register_buffer("positions", torch.empty(num_positions, width, device="meta"))

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        """[T] → [T, H]."""
        return super().forward(ids, step) + F.embedding(step.positions, self.positions)


class Gpt2Layer(PreNormLayer):
    """A layer with LayerNorm and a plain MLP."""

    def __init__(self, config: Gpt2Config, index: int) -> None:
        super().__init__()
        self.spec = config.layer_spec
        self.attn_norm = LayerNorm(config.hidden, config.eps)
        self.attn = Attention(config.attention_spec, index)
        self.mlp_norm = LayerNorm(config.hidden, config.eps)
        self.mlp = PlainMLP(config.hidden, config.inner)


class Model(CausalLM):
    """Token ids → logits."""

    rope_length_source = "fixed"

    def __init__(self, config: Gpt2Config) -> None:
        super().__init__()
        self.config = config
        self.embed = Gpt2Embedding(config.vocab, config.hidden, config.max_len)
        self.layers = nn.ModuleList(Gpt2Layer(config, i) for i in range(config.layers))
        self.kv = kv_shape(self.layers)
        self.norm = LayerNorm(config.hidden, config.eps)
        self.head = LMHead(config.hidden, config.vocab)

    def rope_key(self, length: int) -> int:  # noqa: ARG002  positions are learned, nothing rotates
        """The key of the rotary frequencies: 0, as positions are learned."""
        return 0
