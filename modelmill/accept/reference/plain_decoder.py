"""A decoder of plain parts, from which the references of many families are made.

A family's file sets the sizes, names and switches in its ``__init__``, and overrides what it
computes differently. Each way of joining the parts of a layer is a method here, written from the
papers:

* ``pre_norm_layer``   x + A(norm(x)), then the same with the MLP (GPT-2, LLaMA)
* ``parallel_branch_layer``   x + A(norm(x)) + M(norm(x)) (GPT-J, GPT-NeoX, PaLM: arXiv:2204.02311)
* ``reordered_norm_layer``  x + norm(A(x)), then the same with the MLP (OLMo 2: arXiv:2501.00656)
* ``sandwich_layer``   x + norm(A(norm(x))), then the same with the MLP (Gemma 2: arXiv:2408.00118)

Rows of q and k are presented as the engine stores them, the two channels of each rotated pair half
a head apart; the rotation itself is computed in the checkpoint's own order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import (
    ACTIVATIONS,
    LayerRecorder,
    LayerTrace,
    LayerWeights,
    ModuleWeights,
    ReferenceModel,
    causal_attention,
    layer_norm,
    rms_norm,
)
from modelmill.accept.reference.rope import (
    ReferenceRope,
    partial_rope_from_config,
    rope_from_config,
    rotate_halves,
    rotate_interleaved,
)
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

NORM_PATHS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
PROJECTION_PATHS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ATTENTION_LINEAR_NAMES = ("q", "k", "v", "o_proj")
MLP_LINEAR_NAMES = ("gate", "up", "down")
# An expert that no token has is checked on the first token, with a weight that adds nothing.
UNUSED_EXPERT_PROBE_WEIGHT = 1e-30
RMS_NORM_EPS_KEY = "rms_norm_eps"


@dataclass(frozen=True)
class ReferenceDefaults:
    """Values of a family's original configuration class, where config.json has none.

    Attributes:
        kv_heads: ``num_key_value_heads``; None: as many as heads.
        head_dim: None: hidden_size / heads.
        eps: of the norms; None: 1e-6, or 1e-5 in a family whose key is not ``rms_norm_eps``.
        positions: ``max_position_embeddings``.
        tied: ``tie_word_embeddings``.
        theta: the base of the rotation; None: there is none, or the family's file makes it.
        activation: ``hidden_act``.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    eps: float | None = None
    positions: int = 2048
    tied: bool = False
    theta: float | None = None
    activation: str = "silu"


def reference_factory_by_model_type(
    references: Mapping[str, type[PlainDecoderReference]],
) -> Callable[[TensorSource, dict[str, Any]], PlainDecoderReference]:
    """Return the REFERENCE of a file whose families have a class each."""
    return lambda source, config: references[str(config["model_type"])](source, config)


class PlainDecoderReference(ReferenceModel):
    """A decoder; the attributes set here are what most families have.

    Attributes:
        DEFAULTS: what sizes are where config.json has none.
        EPS_KEY: the key of the norms' epsilon.
        max_position: ``max_position_embeddings``.
        norm_paths, projection_paths: names of a layer's norms and projections in the checkpoint;
            "qkv": one matrix with the rows of q, k and v KV head by KV head.
        biased: projections with a bias.
        score_scale: factor of the attention scores.
        rope, local_rope: the rotation, and that of layers with a window where it is another one.
        has_interleaved_rope: whether channels 2i and 2i+1 form a rotated pair, not i and i + dim/2.
        unrotated: layers without rotation.
        embedding_scale, branch_scale, logit_scale: factors; None: branches are not scaled.
        mlp_norm: in a parallel layer, whether the MLP has a norm of its own.
        score_softcap: bound of the attention scores, or None.
        alibi_slopes: of each head, or None.
    """

    EMBEDDING = "model.embed_tokens.weight"
    FINAL_NORM = "model.norm"
    LAYERS = "model.layers"
    DEFAULTS = ReferenceDefaults()
    EPS_KEY = RMS_NORM_EPS_KEY
    uses_layer_norm = False
    norm_bias = True
    has_interleaved_rope = False

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.hidden_size = self.read_required_config_int("hidden_size")
        self.num_layers = self.read_required_config_int("num_hidden_layers")
        self.num_heads = self.read_required_config_int("num_attention_heads")
        kv_heads = config.get("num_key_value_heads", self.DEFAULTS.kv_heads)
        self.num_kv_heads = int(kv_heads or self.num_heads)
        head_dim = config.get("head_dim", self.DEFAULTS.head_dim)
        self.head_dim = int(head_dim or self.hidden_size // self.num_heads)
        self.max_position = int(config.get("max_position_embeddings") or self.DEFAULTS.positions)
        eps = self.DEFAULTS.eps or (1e-6 if self.EPS_KEY == RMS_NORM_EPS_KEY else 1e-5)
        self.eps = float(config.get(self.EPS_KEY, eps))
        self.activation = self.activation_from_config("hidden_act", self.DEFAULTS.activation)
        self.score_scale = self.head_dim**-0.5
        theta = self.DEFAULTS.theta
        self.rope = None if theta is None else self.build_rope(theta=theta)
        self.local_rope: ReferenceRope | None = None
        self.unrotated: frozenset[int] = frozenset()
        self.windows: list[int | None] = [None] * self.num_layers
        self.norm_paths, self.projection_paths = dict(NORM_PATHS), dict(PROJECTION_PATHS)
        self.biased: frozenset[str] = frozenset()
        self.embedding_scale = self.logit_scale = 1.0
        self.branch_scale: float | None = None
        self.mlp_norm = False
        self.score_softcap: float | None = None
        self.alibi_slopes: list[float] | None = None
        self.layer: Callable[[int, LayerRecorder, Tensor, int], None] = self.pre_norm_layer

    def read_required_config_int(self, *keys: str) -> int:
        """Return the first of these keys that the config has."""
        value = next((self.config[k] for k in keys if self.config.get(k) is not None), None)
        if value is None:
            raise UnknownArchitecture(f"config.json has no {keys[0]}")
        return int(value)

    def projections_with_bias(
        self,
        key: str = "attention_bias",
        names: Iterable[str] = ATTENTION_LINEAR_NAMES,
        *,
        default: bool = False,
    ) -> frozenset[str]:
        """Return these projections if the config says under this key that they have a bias."""
        return frozenset(names if self.config.get(key, default) else ())

    def biased_attention_and_mlp_projections(self) -> frozenset[str]:
        """Return the projections with a bias by ``attention_bias`` and ``mlp_bias``."""
        return self.projections_with_bias() | self.projections_with_bias(
            "mlp_bias", MLP_LINEAR_NAMES
        )

    def build_rope(self, *, theta: float = 10000.0, **changes: Any) -> ReferenceRope:
        """Return the rotation of whole heads, the config changed so; theta: the default base."""
        base = {"rope_theta": self.config.get("rope_theta") or theta}
        return rope_from_config(self.config | base | changes, self.head_dim, self.max_position)

    def set_rope(self, rope: ReferenceRope) -> None:
        """Rotate by another table than config.json's."""
        self.rope = rope

    def build_partial_rope(self, *, factor: float = 1.0, theta: float = 10000.0) -> ReferenceRope:
        """Return the rotation of a part of each head (``rope.partial_rope_from_config``)."""
        return partial_rope_from_config(
            self.config, self.head_dim, self.max_position, factor=factor, theta=theta
        )

    def sliding_windows_by_layer(self, size: int | None, every: int) -> list[int | None]:
        """Return each layer's window; without ``layer_types`` every n-th layer has none."""
        types = self.config.get("layer_types")
        slides = [
            types[layer] == "sliding_attention" if types else (layer + 1) % every != 0
            for layer in range(self.num_layers)
        ]
        return [size if each else None for each in slides]

    def activation_from_config(self, key: str, default: str) -> Callable[[Tensor], Tensor]:
        """Return the activation that the config names."""
        name = str(self.config.get(key) or default)
        if name not in ACTIVATIONS:
            raise UnknownArchitecture(f"{key} {name!r} is not known here")
        return ACTIVATIONS[name]

    # weights

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids."""
        return self.source.rows(self.EMBEDDING, ids) * self.embedding_scale

    @property
    def config_ties_embeddings(self) -> bool:
        """Return whether the output head shares the embedding's matrix."""
        tied = self.config.get("tie_word_embeddings")
        return self.DEFAULTS.tied if tied is None else bool(tied)

    def embedding_table_names(self) -> dict[str, str]:
        """Return the checkpoint's name of each embedding table."""
        return {"weight": self.EMBEDDING}

    def apply_norm(self, x: Tensor, weights: ModuleWeights, eps: float) -> Tensor:
        """Apply the model's norm with these weights."""
        norm = layer_norm if self.uses_layer_norm else rms_norm
        return norm(x, weights, eps)

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return weight and bias of a norm; index None: the final norm."""
        stem = (
            self.FINAL_NORM if index is None else f"{self.LAYERS}.{index}.{self.norm_paths[name]}"
        )
        has_bias = self.uses_layer_norm and self.norm_bias
        bias = self.source.get(f"{stem}.bias") if has_bias else None
        return ModuleWeights(self.source.get(f"{stem}.weight"), bias)

    def norm_module_names(self) -> list[str]:
        """Return the names of a layer's norms."""
        return list(self.norm_paths)

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        weights = {name: self.norm_weights(index, name) for name in self.norm_module_names()}
        for name, affine in self.mixer_and_mlp_weights(index).items():
            weights[name] = self.to_engine_channel_order(affine) if name in ("q", "k") else affine
        return weights

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's projections, in the checkpoint's order of rows."""
        return self.token_mixer_weights(index) | self.mlp_weights(index)

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Read the projections of a layer's attention."""
        names = ("qkv", *ATTENTION_LINEAR_NAMES)
        weights = self._read_projections(index, [n for n in names if n in self.projection_paths])
        fused = weights.pop("qkv", None)
        return weights if fused is None else self.split_qkv_by_kv_head(fused) | weights

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read the projections of a layer's MLP."""
        names = [n for n in self.projection_paths if n not in ("qkv", *ATTENTION_LINEAR_NAMES)]
        return self._read_projections(index, names)

    def _read_projections(self, index: int, names: list[str]) -> LayerWeights:
        return {
            name: self.read_linear(
                f"{self.LAYERS}.{index}.{self.projection_paths[name]}", name in self.biased
            )
            for name in names
        }

    def read_linear(self, stem: str, biased: bool) -> ModuleWeights:
        """Read a projection."""
        bias = self.source.get(f"{stem}.bias") if biased else None
        return ModuleWeights(self.source.get(f"{stem}.weight"), bias)

    def split_qkv_by_kv_head(self, fused: ModuleWeights) -> LayerWeights:
        """Take q, k and v out of the rows of each KV head: its queries, its key, its value."""
        group = self.num_heads // self.num_kv_heads
        parts = {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, None)}

        def rows(stored: Tensor, part: slice) -> Tensor:
            heads = stored.reshape(self.num_kv_heads, group + 2, self.head_dim, *stored.shape[1:])
            return heads[:, part].reshape(-1, *stored.shape[1:])

        weight, bias, _ = fused
        return {
            name: ModuleWeights(rows(weight, part), None if bias is None else rows(bias, part))
            for name, part in parts.items()
        }

    # the order of channels

    def engine_channel_order(self) -> Tensor:
        """Return [dim]: the channel of a head that the engine stores at each place."""
        channels = torch.arange(self.head_dim)
        if self.rope is None:
            return channels
        turned = self.rope.rotary_dim
        rest = channels[turned:].reshape(2, -1)
        pairs = channels[:turned]
        pairs = pairs.reshape(-1, 2).T if self.has_interleaved_rope else pairs.reshape(2, -1)
        return torch.cat((pairs, rest), dim=1).reshape(-1)

    def to_engine_channel_order(self, affine: ModuleWeights) -> ModuleWeights:
        """Order the rows of q or k as the engine stores them."""
        order = self.engine_channel_order()

        def reorder(rows: Tensor) -> Tensor:
            heads = rows.reshape(-1, self.head_dim, *rows.shape[1:])
            return heads[:, order].reshape(rows.shape)

        bias = None if affine.bias is None else reorder(affine.bias)
        return affine._replace(weight=reorder(affine.weight), bias=bias)

    # a layer

    def apply_rope_to_heads(self, index: int, flat: Tensor, prompt_length: int) -> Tensor:
        """Rotate [T, heads·dim], both sides in the engine's order of channels."""
        slides = self.windows[index] is not None and self.local_rope is not None
        rope = self.local_rope if slides else self.rope_for_prompt_length(prompt_length)
        assert rope is not None, "a rotated layer"
        order = self.engine_channel_order()
        x = flat.reshape(len(flat), -1, self.head_dim)
        natural = torch.empty_like(x)
        natural[..., order] = x
        # always computed on the CPU: the last bit of a frequency changes an angle
        tables = rope.cos_sin(len(x), prompt_length, x.dtype)
        cos, sin = (table.to(x.device) for table in tables)
        turn = rotate_interleaved if self.has_interleaved_rope else rotate_halves
        return turn(natural, cos, sin)[..., order].reshape(flat.shape)

    def rope_for_prompt_length(self, prompt_length: int) -> ReferenceRope | None:
        """Return the rotation; dynamic scaling is part of its tables, Qwen v1's is not."""
        del prompt_length
        return self.rope

    def query_scaling_by_position(self, count: int) -> Tensor | None:
        """Return [count]: factors of the rotated queries, by position; None: 1."""
        del count
        return None

    def norm_qk_before_rope(self, r: LayerRecorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k before the rotation; families with norms there override it."""
        del r
        return q, k

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention up to its output projection."""
        q, k, v = (r.linear(name, normed) for name in ("q", "k", "v"))
        q_turned, k_turned = self.norm_qk_before_rope(r, q, k)
        if self.qkv_bound is not None:
            q, k, v = self._clip_qkv(r, q_turned, k_turned, v)
            q_turned, k_turned = q, k
        if self.rope is not None and index not in self.unrotated:
            q_turned = self.apply_rope_to_heads(index, q_turned, prompt_length)
            k_turned = self.apply_rope_to_heads(index, k_turned, prompt_length)
        scale = self.query_scaling_by_position(len(q))
        if scale is not None:
            q_turned = q_turned * scale[:, None]
        r.record("q_rot", q_turned, q)
        r.record("k_rot", k_turned, k)
        attended = self.run_and_record_attention(index, r, q_turned, k_turned, v)
        return r.linear("o_proj", self.gate_attention(r, normed, attended))

    def gate_attention(self, r: LayerRecorder, normed: Tensor, attended: Tensor) -> Tensor:
        """Return what the output projection reads: with gates, each channel times its own.

        All channels of a head may have the same.
        """
        if "attn_gate" not in r.weights:
            return attended
        gate = r.linear("attn_gate", normed)
        factors = gate.sigmoid().repeat_interleave(attended.shape[1] // gate.shape[1], dim=1)
        return r.record("gated_attn", attended * factors, attended, gate)

    def _clip_qkv(self, r: LayerRecorder, *parts: Tensor) -> list[Tensor]:
        assert self.qkv_bound is not None, "only called where there is a bound"
        low, high = -self.qkv_bound, self.qkv_bound
        return [
            r.record(f"{name}_clipped", part.clamp(low, high), part)
            for name, part in zip("qkv", parts, strict=True)
        ]

    def run_and_record_attention(
        self, index: int, r: LayerRecorder, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Run and record causal attention of q, k and v [T, heads·dim] → [T, heads·dim]."""

        def attend(*flat: Tensor) -> Tensor:
            q, k, v = (x.reshape(len(x), -1, self.attention_head_dim(index)) for x in flat)
            return self.run_attention_core(index, q, k, v)

        return r.compute("attn", attend, q, k, v)

    def attention_head_dim(self, index: int) -> int:
        """Return the head size of a layer's attention; families with several override it."""
        del index
        return self.head_dim

    def run_attention_core(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Run causal attention [T, heads, dim] → [T, heads·dim]."""
        return causal_attention(
            q,
            k,
            v,
            self.score_scale,
            self.windows[index],
            softcap=self.score_softcap,
            slopes=self.alibi_slopes,
            sinks=self.attention_sinks(index),
        )

    def attention_sinks(self, index: int) -> Tensor | None:
        """Return the sinks [heads] of a layer; families that have them override it."""
        del index
        return None

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a gated MLP, or one of two matrices."""
        if "fc" in r.weights:
            wide = r.linear("fc", normed)
            return r.linear("down", r.record("act", self.activation(wide), wide))
        gate, up = r.linear("gate", normed), r.linear("up", normed)
        return r.linear("down", r.record("act", self.activation(gate) * up, gate, up))

    def run_and_combine_experts(
        self,
        r: LayerRecorder,
        x: Tensor,
        routing: Tensor,
        scores: Tensor,
        expert: Callable[[LayerRecorder, str, Tensor], Tensor],
    ) -> Tensor:
        """Return the sum of the experts' outputs [T, hidden] by their weights ``routing`` [T, E].

        scores: what the router's choice was made from. Weights named "routing" are those of another
        run, whose choice this one takes.
        """
        if "routing" in r.weights:
            routing = r.weights["routing"].weight
        for column in routing.T:
            if not bool((column != 0).any()):
                column[0] = UNUSED_EXPERT_PROBE_WEIGHT
        r.record("routing", routing, scores)
        total = torch.zeros_like(x)
        for number, column in enumerate(routing.T):
            tokens = (column != 0).nonzero()[:, 0]
            total[tokens] += expert(r, f"experts.{number}", x[tokens]) * column[tokens, None]
        return total

    def apply_and_record_norm(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        """Apply and record a norm."""
        return r.record(name, self.apply_norm(x, r.weights[name], self.eps), x)

    @torch.no_grad()
    def run_layer(
        self, index: int, weights: LayerWeights, x: Tensor, prompt_length: int
    ) -> LayerTrace:
        """Run one decoder layer."""
        r = LayerRecorder(weights)
        self.layer(index, r, x, prompt_length)
        return r.trace

    def pre_norm_layer(self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int) -> None:
        """X + A(norm(x)), then the same with the MLP; branches times ``branch_scale``."""
        self._attention_then_mlp(index, r, x, prompt_length, self.scale_branch)

    def sandwich_layer(self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int) -> None:
        """X + norm(A(norm(x))), then the same with the MLP."""
        self._attention_then_mlp(index, r, x, prompt_length, self.apply_and_record_norm)

    def _attention_then_mlp(
        self,
        index: int,
        r: LayerRecorder,
        x: Tensor,
        prompt_length: int,
        behind: Callable[[LayerRecorder, str, Tensor], Tensor],
    ) -> None:
        """Add two branches, each with a norm in front, and ``behind`` it a norm or a factor."""
        branch = self.run_token_mixer(
            index, r, self.apply_and_record_norm(r, "input_norm", x), prompt_length
        )
        branch = behind(r, "attn_post", branch)
        middle = r.record("post_attn_residual", x + branch, x, branch)
        branch = self.run_mlp_or_experts(
            index, r, self.apply_and_record_norm(r, "mlp_norm", middle)
        )
        branch = behind(r, "mlp_post", branch)
        r.record("output", middle + branch, middle, branch)

    def run_mlp_or_experts(self, index: int, r: LayerRecorder, normed: Tensor) -> Tensor:  # noqa: ARG002  the layers are alike
        """Run a layer's MLP, or what stands in its place."""
        return self.mlp(r, normed)

    def scale_branch(self, r: LayerRecorder, name: str, branch: Tensor) -> Tensor:
        """Return the branch times its factor, if there is one."""
        if self.branch_scale is None:
            return branch
        return r.record(name, branch * self.branch_scale, branch)

    def parallel_branch_layer(
        self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int
    ) -> None:
        """X + A(norm(x)) + M(norm(x)), the norm shared or not."""
        normed = self.apply_and_record_norm(r, "input_norm", x)
        own = self.apply_and_record_norm(r, "mlp_norm", x) if self.mlp_norm else normed
        attention = self.run_token_mixer(index, r, normed, prompt_length)
        mlp = self.mlp(r, own)
        both = r.record("branches", attention + mlp, attention, mlp)
        r.record("output", x + both, x, both)

    def reordered_norm_layer(
        self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int
    ) -> None:
        """X + norm(A(x)), then the same with the MLP."""
        r.record("input", x)
        branch = self.apply_and_record_norm(
            r, "attn_post", self.run_token_mixer(index, r, x, prompt_length)
        )
        middle = r.record("post_attn_residual", x + branch, x, branch)
        branch = self.apply_and_record_norm(r, "mlp_post", self.mlp(r, middle))
        r.record("output", middle + branch, middle, branch)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Apply the factor of the logits."""
        return logits * self.logit_scale
