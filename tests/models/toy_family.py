"""A family of another layer shape: its model file and its reference, each one file's text.

Every second layer has attention; the others a gated mixer of channels without a KV cache. A norm
stands behind each branch, and the MLP has three matrices of its own instead of a fused one.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models.tiny_models import save_raw

MODEL = '''
"""toy: a gated mixer or attention, a norm behind it, an MLP of three matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.checkpoint.rename import Rule
from modelmill.models._hf_config import positive_int
from modelmill.models._rename_rules import layer_rename_rules
from modelmill.nn.attention import Attention, AttentionSpec
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.embedding_and_head import LMHead, TokenEmbedding
from modelmill.nn.layer_spec import (
    LAYER_INPUTS,
    LayerSpec,
    LinearSpec,
    ModuleSpec,
    NormSpec,
    LinearRowBlock,
    ScaleFoldRows,
    QuantSiteSpec,
)
from modelmill.nn.layer_stack import kv_shape
from modelmill.nn.partition import ChannelPartition
from modelmill.nn.linear import Linear
from modelmill.nn.norm import RMSNorm

CHECKPOINT_PREFIXES = ("model.",)
CHECKPOINT_NAMES = {
    "attn_norm": ("norm1",), "post_norm": ("norm2",), "mlp_norm": ("norm3",),
    "mix.in_proj": ("mixer.a", "mixer.b"), "mix.out_proj": ("mixer.out",),
    "attn.qkv_proj": ("attn.q", "attn.k", "attn.v"), "attn.o_proj": ("attn.o",),
    "mlp.gate_proj": ("ffn.gate",), "mlp.up_proj": ("ffn.up",), "mlp.down_proj": ("ffn.down",),
}


@dataclass(frozen=True)
class ToyConfig:
    hidden: int
    inner: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    tied: bool = False
    eps: float = 1e-6
    max_extended_len: int | None = None

    def has_attention(self, layer):
        return layer % 2 == 1

    @property
    def attention(self):
        return AttentionSpec(self.hidden, self.heads, self.kv_heads, self.head_dim, rotates=False)

    def layer_spec(self, layer):
        if self.has_attention(layer):
            branch = self.attention.module_specs()
            sites, partition = self.attention.quant_sites, self.attention.partition
        else:
            branch = mixer_modules(self.hidden, self.width)
            partition = ChannelPartition("width", self.width)
            sites = (
                QuantSiteSpec("mix_in"),
                QuantSiteSpec("mix_out", ScaleFoldRows("mix.in_proj", "b")),
            )
        return LayerSpec(
            modules=(
                NormSpec(path="attn_norm", reads=LAYER_INPUTS, writes=("attn_input", "stream"),
                         reference=("norm1",)),
                *branch,
                NormSpec(path="post_norm", reads=("attn_out",), writes=("branch_normed",),
                         reference=("norm2",), op="rms_norm"),
                NormSpec(path="mlp_norm", reads=("branch_normed", "stream"),
                         writes=("mlp_input", "mix.residual"), reference=("norm3",),
                         stream_reference="middle"),
                *mlp_modules(self.hidden, self.inner),
            ),
            sites=(*sites, QuantSiteSpec("ffn"),
                   QuantSiteSpec("ffn_down", ScaleFoldRows("mlp.up_proj", "up"),
                                 heavy_tailed=True)),
            outputs=("mlp_out", "mix.residual"),
            partitions=(partition, ChannelPartition("inner", self.inner)),
        )


def mixer_modules(hidden, width):
    return (
        LinearSpec(path="mix.in_proj", reads=("attn_input",), writes=("ab",), site="mix_in",
                   parts=(LinearRowBlock("a", width, "width"),
                          LinearRowBlock("b", width, "width"))),
        ModuleSpec(path="mix.gate", reads=("ab",), writes=("mixed",), reference=("mixed",)),
        LinearSpec(path="mix.out_proj", reads=("mixed",), writes=("attn_out",), site="mix_out",
                   parts=(LinearRowBlock("out", hidden),), split_columns="width"),
    )


def mlp_modules(hidden, inner):
    return (
        LinearSpec(path="mlp.gate_proj", reads=("mlp_input",), writes=("gate",), site="ffn",
                   parts=(LinearRowBlock("gate", inner, "inner"),)),
        LinearSpec(path="mlp.up_proj", reads=("mlp_input",), writes=("up",), site="ffn",
                   parts=(LinearRowBlock("up", inner, "inner"),)),
        ModuleSpec(path="mlp.act", reads=("gate", "up"), writes=("act",), reference=("act",)),
        LinearSpec(path="mlp.down_proj", reads=("act",), writes=("mlp_out",), site="ffn_down",
                   parts=(LinearRowBlock("down", hidden),), split_columns="inner"),
    )


KEYS = {
    "hidden": "hidden_size", "width": "mixer_size", "inner": "intermediate_size",
    "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocab": "vocab_size",
    "max_len": "max_position_embeddings",
}


def config_from_hf(raw):
    return ToyConfig(**{name: positive_int(raw, key) for name, key in KEYS.items()})


def rename_rules(config):
    out = [Rule("embed.weight", ("model.embed.weight",)),
           Rule("norm.weight", ("model.norm.weight",)),
           Rule("head.weight", ("lm_head.weight",))]
    for i in range(config.layers):
        names = (f"layers.{i}", f"model.layers.{i}")
        out += layer_rename_rules(config.layer_spec(i), CHECKPOINT_NAMES, *names)
    return out


def ignored_tensors(config):
    return ()


class PostNorm(nn.Module):
    """A norm of a branch, before it is added."""

    def __init__(self, width, eps):
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(width, device="meta"))

    def forward(self, x, step):
        return step.ops.rms_norm(x, self.weight, self.eps)


class SigmoidGate(nn.Module):
    def forward(self, ab, step):
        a, b = ab.chunk(2, -1)
        return torch.sigmoid(a) * b


class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.in_proj = Linear(config.hidden, 2 * config.width)
        self.gate = SigmoidGate()
        self.out_proj = Linear(config.width, config.hidden)

    def forward(self, x, step):
        return self.out_proj(self.gate(self.in_proj(x, step), step), step)


class GateMul(nn.Module):
    def forward(self, gate, up, step):
        return F.silu(gate) * up


class ThreeMatrixMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.inner)
        self.up_proj = Linear(config.hidden, config.inner)
        self.act = GateMul()
        self.down_proj = Linear(config.inner, config.hidden)

    def forward(self, x, step):
        return self.down_proj(self.act(self.gate_proj(x, step), self.up_proj(x, step), step), step)


class ToyLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.spec = config.layer_spec(index)
        self.has_attention = config.has_attention(index)
        self.attn_norm = RMSNorm(config.hidden, config.eps)
        if self.has_attention:
            self.attn = Attention(config.attention, index // 2)
        else:
            self.mix = Mixer(config)
        self.post_norm = PostNorm(config.hidden, config.eps)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = ThreeMatrixMLP(config)

    def forward(self, x, residual, rope, step):
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn(x, rope, step) if self.has_attention else self.mix(x, step)
        x, residual = self.mlp_norm(self.post_norm(x, step), residual, step)
        return self.mlp(x, step), residual


class Model(CausalLM):
    rope_length_source = "fixed"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = TokenEmbedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(ToyLayer(config, i) for i in range(config.layers))
        self.kv = kv_shape(self.layers)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = LMHead(config.hidden, config.vocab)

    def rope_frequency_id(self, length):
        return 0
'''
REFERENCE = '''
"""toy: its plain reference."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from modelmill.accept.reference.base import (
    ModuleWeights,
    ModuleIO,
    ReferenceModel,
    causal_attention,
    project,
    rms_norm,
)

MODEL_TYPES = ("toy",)
NAME_PREFIX = "model."
SHARED = {"gate": "ffn.gate", "up": "ffn.up", "down": "ffn.down"}
MIXER = {"a": "mixer.a", "b": "mixer.b", "out": "mixer.out"}
ATTENTION = {"q": "attn.q", "k": "attn.k", "v": "attn.v", "o_proj": "attn.o"}


class ToyReference(ReferenceModel):
    config_ties_embeddings = False

    def __init__(self, source, config):
        super().__init__(source, config)
        self.num_layers, self.hidden_size = config["num_hidden_layers"], config["hidden_size"]
        self.eps = 1e-6

    def embed(self, ids):
        return self.source.rows("model.embed.weight", ids)

    def embedding_table_names(self):
        return {"weight": "model.embed.weight"}

    def apply_norm(self, x, weights, eps):
        return rms_norm(x, weights, eps)

    def norm_weights(self, index, name):
        stem = "model.norm" if index is None else f"model.layers.{index}.{name}"
        return ModuleWeights(self.source.get(f"{stem}.weight"))

    def layer_weights(self, index):
        names = SHARED | (ATTENTION if index % 2 else MIXER)
        weights = {name: self.norm_weights(index, name) for name in ("norm1", "norm2", "norm3")}
        for name, stem in names.items():
            weights[name] = ModuleWeights(self.source.get(f"model.layers.{index}.{stem}.weight"))
        return weights

    @torch.no_grad()
    def run_layer(self, index, weights, x, prompt_length):
        trace = {}

        def record(name, output, *inputs):
            trace[name] = ModuleIO(inputs, output)
            return output

        def linear(name, value):
            return record(name, project(value, weights[name]), value)

        def norm(name, value):
            return record(name, rms_norm(value, weights[name], self.eps), value)

        normed = norm("norm1", x)
        if index % 2:
            dim = self.config["head_dim"]
            q, k, v = (linear(name, normed) for name in ("q", "k", "v"))
            heads = (t.reshape(len(x), -1, dim) for t in (q, k, v))
            branch = linear("o_proj", record("attn", causal_attention(*heads, dim**-0.5), q, k, v))
        else:
            a, b = linear("a", normed), linear("b", normed)
            branch = linear("out", record("mixed", torch.sigmoid(a) * b, a, b))
        branch = norm("norm2", branch)
        middle = record("middle", x + branch, x, branch)
        normed = norm("norm3", middle)
        gate, up = linear("gate", normed), linear("up", normed)
        down = linear("down", record("act", F.silu(gate) * up, gate, up))
        record("output", middle + down, middle, down)
        return trace


REFERENCE = ToyReference
'''
CONFIG = {
    "model_type": "toy", "hidden_size": 48, "mixer_size": 64, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "vocab_size": 120, "max_position_embeddings": 256,
}  # fmt: skip
# name inside a layer → (rows, columns)
_MATRICES = {
    "ffn.gate": ("inner", "hidden"), "ffn.up": ("inner", "hidden"), "ffn.down": ("hidden", "inner"),
}  # fmt: skip
_MIXER = {
    "mixer.a": ("width", "hidden"), "mixer.b": ("width", "hidden"), "mixer.out": ("hidden", "width")
}  # fmt: skip


def save_toy(folder: Path) -> Path:
    """A seeded checkpoint of the family."""
    draw = torch.Generator().manual_seed(3)
    sizes = {"hidden": 48, "width": 64, "inner": 80, "vocab": 120, "q": 48, "kv": 24}
    attention = {
        "attn.q": ("q", "hidden"), "attn.k": ("kv", "hidden"), "attn.v": ("kv", "hidden"),
        "attn.o": ("hidden", "q"),
    }  # fmt: skip

    def matrix(rows: str, columns: str) -> torch.Tensor:
        shape = sizes[rows], sizes[columns]
        return torch.randn(shape, generator=draw) * 1.2 * shape[1] ** -0.5

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(sizes["hidden"], generator=draw)

    tensors = {
        "model.embed.weight": torch.randn(sizes["vocab"], sizes["hidden"], generator=draw),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix("vocab", "hidden"),
    }
    for i in range(3):
        tensors |= {f"model.layers.{i}.norm{n}.weight": norm() for n in (1, 2, 3)}
        shapes = _MATRICES | (attention if i % 2 else _MIXER)
        tensors |= {
            f"model.layers.{i}.{name}.weight": matrix(*shape) for name, shape in shapes.items()
        }
    return save_raw(folder, tensors, CONFIG)
