"""gemma4_text: layers of two kinds, shared keys and values, layer inputs, experts beside the MLP.

Written from Google's description of Gemma 4 and the definition of its parts:

* q and k have an RMSNorm of each head with a weight, v one without; scores are not scaled;
* layers with a window and layers with full attention have their own head size, KV heads and
  rotation; in the latter the values may be the projection of the keys, before their norm;
* the last layers attend to the keys and values of the last layer of their type that has some;
* x + norm(A(norm(x))), x + norm(F(norm(x))), x + norm(up(act(gate(x)) · e)), then x times a number;
* e is the layer's part of (norm(P x₀ / √hidden) + √width · E[id]) / √2, x₀ the token's embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import (
    ExtraModuleTrace,
    LayerRecorder,
    LayerTrace,
    LayerWeights,
    ModuleWeights,
    NonLayerModuleIO,
    rms_norm,
)
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.rope import ReferenceRope, layer_type_rope, rotate_halves
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("gemma4_text",)
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
DEFAULT_ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    FULL_ATTENTION: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING_ATTENTION: {"rope_type": "default", "rope_theta": 1e4},
}
NORM_PATHS = {
    "input_norm": "input_layernorm",
    "attn_post": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post": "post_feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
}
EXPERT_NORM_PATHS = {
    "mlp_post_1": "post_feedforward_layernorm_1",
    "moe_norm": "pre_feedforward_layernorm_2",
    "mlp_post_2": "post_feedforward_layernorm_2",
}
VALUE_NORM = "value_norm"
PER_LAYER_PROJECTION_NORM = "layer_inputs.norm"
PER_LAYER_PROJECTION_TENSOR = "model.per_layer_model_projection.weight"
PER_LAYER_EMBEDDING_TENSOR = "model.embed_tokens_per_layer.weight"


class Gemma4Reference(PlainDecoderReference):
    """Gemma4ForCausalLM of one sequence at a time (``bind_to_sequence``).

    Attributes:
        full: of each layer, whether it has full attention.
        first_shared: the first layer without keys and values of its own.
        input_width: channels of a layer's input beside the stream; 0: there is none.
        experts: how many there are; 0: none.
    """

    DEFAULTS = ReferenceDefaults(kv_heads=4, head_dim=256, positions=131072, tied=True)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        if config.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise UnknownArchitecture("attention to later tokens is not known here")
        self.embedding_scale = self.hidden_size**0.5
        self.activation = self.activation_from_config("hidden_activation", "gelu_pytorch_tanh")
        self.softcap = config.get("final_logit_softcapping")
        self.score_scale = 1.0
        self.biased = self.projections_with_bias()
        windows = self.sliding_windows_by_layer(int(config.get("sliding_window", 512)), 6)
        self.windows = [*windows[:-1], None]
        self.full = [window is None for window in self.windows]
        self.first_shared = self.num_layers - int(config.get("num_kv_shared_layers") or 0)
        width = config.get("hidden_size_per_layer_input", 256)
        self.input_width = int(width or 0)
        moe = bool(config.get("enable_moe_block"))
        self.experts = self.read_required_config_int("num_experts") if moe else 0
        self.top_k = self.read_required_config_int("top_k_experts") if moe else 0
        self.keys_are_values = bool(config.get("attention_k_eq_v"))
        self.norm_paths = NORM_PATHS | (EXPERT_NORM_PATHS if moe else {})
        if self.input_width:
            self.norm_paths |= {"input_post": "post_per_layer_input_norm"}
        self.ids: Tensor | None = None
        self.keys_and_values: dict[bool, tuple[Tensor, Tensor]] = {}

    # sizes by layer

    @cached_property
    def full_attention_kv_heads_and_head_dim(self) -> tuple[int, int]:
        """KV heads and channels of a head of layers with full attention."""
        config = self.config
        own = config.get("per_layer_config")
        if own is not None:
            sizes = own.get(str(self.full.index(True)), {})
            heads = int(sizes.get("num_key_value_heads", self.num_kv_heads))
            return heads, int(sizes.get("head_dim", self.head_dim))
        few = config.get("num_global_key_value_heads") if self.keys_are_values else None
        return int(few or self.num_kv_heads), int(config.get("global_head_dim") or 512)

    def kv_heads_and_head_dim(self, index: int) -> tuple[int, int]:
        """KV heads and channels of a head of a layer."""
        return (
            self.full_attention_kv_heads_and_head_dim
            if self.full[index]
            else (self.num_kv_heads, self.head_dim)
        )

    def build_layer_rope(self, index: int) -> ReferenceRope:
        """The rotation of a layer."""
        ropes: Mapping[str, Any] = self.config.get("rope_parameters") or DEFAULT_ROPE_PARAMETERS
        own = ropes[FULL_ATTENTION if self.full[index] else SLIDING_ATTENTION]
        return layer_type_rope(own, self.kv_heads_and_head_dim(index)[1], self.max_position)

    # one sequence

    def bind_to_sequence(self, ids: Sequence[int]) -> Gemma4Reference:
        """Return the reference of one sequence, with its ids and its keys and values."""
        made = copy.copy(self)
        made.ids, made.keys_and_values = torch.tensor(list(ids)), {}
        return made

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of ids, which layers read later on as well."""
        self.ids, self.keys_and_values = ids, {}
        return super().embed(ids)

    def extra_module_trace(self) -> ExtraModuleTrace:
        """Return the modules that make the layers' inputs, of the sequence."""
        if not self.input_width or self.ids is None:
            return {}
        start = self.source.rows(self.EMBEDDING, self.ids) * self.embedding_scale
        rows = self.source.rows(PER_LAYER_EMBEDDING_TENSOR, self.ids) * self.input_width**0.5
        weight = self.source.get(PER_LAYER_PROJECTION_TENSOR)
        projected = start @ weight.T / self.hidden_size**0.5
        split = projected.reshape(-1, self.input_width)
        normed = self.run_norm(None, PER_LAYER_PROJECTION_NORM, split)
        flat = normed.reshape(rows.shape)
        return {
            "layer_inputs.table": NonLayerModuleIO((), rows, "embedding"),
            "layer_inputs.projection": NonLayerModuleIO((start,), projected, "linear"),
            PER_LAYER_PROJECTION_NORM: NonLayerModuleIO((split,), normed, "norm"),
            "layer_inputs.sum": NonLayerModuleIO(
                (flat, rows), (flat + rows) / 2**0.5, "activation"
            ),
        }

    def slice_per_layer_input(self, index: int) -> Tensor:
        """Return [T, width]: what a layer reads beside the stream."""
        whole = self.extra_module_trace()["layer_inputs.sum"].output
        return whole.reshape(len(whole), self.num_layers, -1)[:, index]

    def extra_embedding_table_names(self) -> dict[str, str]:
        """Return the checkpoint's name of the table of the layers' inputs."""
        return {"layer_inputs.table.weight": PER_LAYER_EMBEDDING_TENSOR} if self.input_width else {}

    # weights

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return the projections of layers that attend to another layer's keys and values."""
        layers = "|".join(map(str, range(self.first_shared, self.num_layers)))
        parts = r"self_attn\.(k_proj|v_proj|k_norm)|attn_(k|v|k_norm)"
        name = rf"(model\.layers|blk)\.({layers})\.({parts})\.(weight|bias)"
        return {name: "keys and values of layers that share another layer's"} if layers else {}

    def norm_eps(self, index: int | None, name: str) -> float:
        """Return the epsilon, one for all norms."""
        return self.eps if name == PER_LAYER_PROJECTION_NORM else super().norm_eps(index, name)

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; that of the values has none."""
        if name == PER_LAYER_PROJECTION_NORM:
            return ModuleWeights(self.source.get("model.per_layer_projection_norm.weight"))
        stem = f"{self.LAYERS}.{index}"
        if name == "router_norm":
            return ModuleWeights(self.source.get(f"{stem}.router.scale"))
        if name == "k_norm":
            return ModuleWeights(self.source.get(f"{stem}.self_attn.k_norm.weight"))
        return super().norm_weights(index, name)

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        stem, shared = f"{self.LAYERS}.{index}", index >= self.first_shared
        weights = {name: self.norm_weights(index, name) for name in self.norm_paths}
        own = ["q", "o_proj", "gate", "up", "down"]
        if not shared:
            weights["k_norm"] = self.norm_weights(index, "k_norm")
            own += ["k"] if self.full[index] and self.keys_are_values else ["k", "v"]
        for name in own:
            path = f"{stem}.{self.projection_paths[name]}"
            weights[name] = self.read_linear(path, name in self.biased)
        if self.input_width:
            weights["input_gate"] = self.read_linear(f"{stem}.per_layer_input_gate", False)
            weights["input_up"] = self.read_linear(f"{stem}.per_layer_projection", False)
        if self.experts:
            weights["router_norm"] = self.norm_weights(index, "router_norm")
            weights |= self._expert_weights(stem)
        return weights | {"scale": ModuleWeights(self.source.get(f"{stem}.layer_scalar"))}

    def _expert_weights(self, stem: str) -> LayerWeights:
        weights = {
            "router": self.read_linear(f"{stem}.router.proj", False),
            "expert_scale": ModuleWeights(self.source.get(f"{stem}.router.per_expert_scale")),
        }
        for expert in range(self.experts):
            for name in ("gate", "up", "down"):
                path = f"{stem}.experts.{expert}.{name}_proj"
                weights[f"experts.{expert}.{name}"] = self.read_linear(path, False)
        return weights

    # a layer

    @torch.no_grad()
    def run_norm(self, index: int | None, name: str, x: Tensor) -> Tensor:
        """Run the reference norm on any input; of the values on q, k and v side by side."""
        if name != VALUE_NORM:
            return super().run_norm(index, name, x)
        assert index is not None, "a layer's norm"
        x = x.to(self.device, self.dtype)
        kv_heads, dim = self.kv_heads_and_head_dim(index)
        kv = kv_heads * dim
        keeps = self.full[index] and self.keys_are_values
        return torch.cat((x if keeps else x[:, :-kv], self.norm_values(x[:, -kv:], dim)), -1)

    def norm_values(self, flat: Tensor, dim: int) -> Tensor:
        """Norm each head of v [T, heads·dim], without a weight."""
        heads = flat.reshape(len(flat), -1, dim)
        return rms_norm(heads, ModuleWeights(heads.new_ones(dim)), self.eps).reshape(flat.shape)

    def norm_and_rope(self, index: int, flat: Tensor, weights: ModuleWeights) -> Tensor:
        """Norm and rotate each head of q or k [T, heads·dim]."""
        heads = flat.reshape(len(flat), -1, self.kv_heads_and_head_dim(index)[1])
        normed = rms_norm(heads, weights, self.eps)
        # on the CPU: the last bit of a frequency changes an angle
        tables = self.build_layer_rope(index).cos_sin(len(flat), len(flat), flat.dtype)
        cos, sin = (table.to(flat.device) for table in tables)
        return rotate_halves(normed, cos, sin).reshape(flat.shape)

    @torch.no_grad()
    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor:
        """Return queries [T, heads·dim] after their norm and rotation."""
        x = flat.to(self.device, self.dtype)
        return self.norm_and_rope(index, x, self.norm_weights(index, "q_norm"))

    def compute_own_keys_and_values(
        self, index: int, r: LayerRecorder, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer with its own, [T, kv_heads·dim] each."""
        k = r.linear("k", x)
        v = r.linear("v", x) if "v" in r.weights else k
        normed = r.record("v_normed", self.norm_values(v, self.kv_heads_and_head_dim(index)[1]), v)
        parts = [r.trace[name].output for name in ("q", "k", "v") if name in r.trace]
        rest = parts if "v" not in r.weights else parts[:2]
        r.record(VALUE_NORM, torch.cat((*rest, normed), -1), *parts)
        return r.record("k_rot", self.norm_and_rope(index, k, r.weights["k_norm"]), k), normed

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention up to its output projection."""
        del prompt_length
        q = r.linear("q", normed)
        if index < self.first_shared:
            self.keys_and_values[self.full[index]] = self.compute_own_keys_and_values(
                index, r, normed
            )
        k, v = self.keys_and_values[self.full[index]]
        q_rot = r.record("q_rot", self.norm_and_rope(index, q, r.weights["q_norm"]), q)
        return r.linear("o_proj", self.run_and_record_attention(index, r, q_rot, k, v))

    def attention_head_dim(self, index: int) -> int:
        """Return the head size of a layer's attention."""
        return self.kv_heads_and_head_dim(index)[1]

    def add_experts_to_mlp(self, r: LayerRecorder, mlp_out: Tensor, stream: Tensor) -> Tensor:
        """Return the normed MLP's output and the normed experts' together."""
        mlp = self.apply_and_record_norm(r, "mlp_post_1", mlp_out)
        read = self.apply_and_record_norm(r, "router_norm", stream)
        logits = r.record("router", read @ r.weights["router"].weight.T / self.hidden_size**0.5)
        routing = torch.stack(
            [
                self._routing_weights_for_one_token(row, r.weights["expert_scale"].weight)
                for row in logits
            ]
        )
        x = self.apply_and_record_norm(r, "moe_norm", stream)
        total = r.record(
            "moe_out", self.run_and_combine_experts(r, x, routing, logits, self._run_expert), x
        )
        return r.record(
            "both_out", mlp + self.apply_and_record_norm(r, "mlp_post_2", total), mlp, total
        )

    def _routing_weights_for_one_token(self, logits: Tensor, scale: Tensor) -> Tensor:
        """[E]: the weights of one token's experts, 0 for the others."""
        chosen = sorted(range(len(logits)), key=lambda e: -float(logits[e]))[: self.top_k]
        weights = torch.zeros_like(logits)
        weights[chosen] = logits[chosen].softmax(-1) * scale[chosen]
        return weights

    def _run_expert(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        r.record(f"{name}.input", x)
        gate, up = r.linear(f"{name}.gate", x), r.linear(f"{name}.up", x)
        return r.linear(f"{name}.down", r.record(f"{name}.act", self.activation(gate) * up, gate))

    @torch.no_grad()
    def run_layer(
        self, index: int, weights: LayerWeights, x: Tensor, prompt_length: int
    ) -> LayerTrace:
        """Run a layer."""
        r = LayerRecorder(weights)
        branch = self.run_token_mixer(
            index, r, self.apply_and_record_norm(r, "input_norm", x), prompt_length
        )
        branch = self.apply_and_record_norm(r, "attn_post", branch)
        x = r.record("post_attn_residual", x + branch, x, branch)
        branch = self.mlp(r, self.apply_and_record_norm(r, "mlp_norm", x))
        if self.experts:
            branch = self.add_experts_to_mlp(r, branch, x)
        branch = self.apply_and_record_norm(r, "mlp_post", branch)
        x = r.record("post_mlp_residual", x + branch, x, branch)
        if self.input_width:
            gate = r.linear("input_gate", x)
            mixed = self.activation(gate) * self.slice_per_layer_input(index)
            out = r.linear("input_up", r.record("input_gated", mixed, gate))
            x = x + self.apply_and_record_norm(r, "input_post", out)
        r.record("output", x * r.weights["scale"].weight, x)
        return r.trace

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Bound the logits."""
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


REFERENCE = Gemma4Reference
