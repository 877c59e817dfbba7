"""Reads the tensors of GGUF containers raw: blk.N.* names, q and k rows restored.

A GGUF file of architecture llama stores the rows of q and k so that interleaved RoPE fits: within a
head, row 2j holds channel j and row 2j+1 holds channel j + dim/2. Everything else keeps its values;
gpt2's projections are stored [out, in], where the original has [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelmill.accept.reference.tensor_source import RawContainer, TensorSource

DECODER_TOP_LEVEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
DECODER_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_TOP_LEVEL_TENSORS = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
GPT2_LAYER_TENSORS = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.w1": "ffn_up",
    "mlp.w2": "ffn_gate",
    "mlp.c_proj": "ffn_down",
}
ROUTER_AND_SHARED_EXPERT_TENSORS = {
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
STACKED_EXPERT_TENSORS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
# a family's own names of tensors, each with its GGUF name; the others are LLaMA's
POST_NORM_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA_NORM_TENSORS = {**POST_NORM_TENSORS, "pre_feedforward_layernorm": "ffn_norm"}
GEMMA4_TENSORS = {
    **GEMMA_NORM_TENSORS,
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
}
DEEPSEEK_ROUTER_AND_SHARED_TENSORS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
DEEPSEEK_TENSORS = {
    **DEEPSEEK_ROUTER_AND_SHARED_TENSORS,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
GRANITE_EXPERT_TENSORS = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_exps",
    "block_sparse_moe.up_linear": "ffn_up_exps",  # the second half of input_linear
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_gate_shexp",
    "shared_mlp.up_linear": "ffn_up_shexp",  # the second half of input_linear
    "shared_mlp.output_linear": "ffn_down_shexp",
}
HF_TO_GGUF_TENSORS_BY_MODEL_TYPE: dict[str, dict[str, str]] = {
    "baichuan": {"self_attn.W_pack": "attn_q"},  # and two more
    "granitemoe": GRANITE_EXPERT_TENSORS,
    "granitemoeshared": GRANITE_EXPERT_TENSORS,
    "granitemoehybrid": GRANITE_EXPERT_TENSORS,
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "gemma2": GEMMA_NORM_TENSORS,
    "gemma3_text": GEMMA_NORM_TENSORS,
    "gemma4_text": GEMMA4_TENSORS,
    "falcon_h1": {
        "model.final_layernorm": "output_norm",
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    },
    "lfm2": {
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
        **{f"conv.{name}": f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
    },
    "mamba2": {
        "backbone.embeddings": "token_embd",
        "backbone.norm_f": "output_norm",
        "lm_head": "output",
        "norm": "attn_norm",
    },
    "bitnet": {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"},
    "exaone4": POST_NORM_TENSORS,
    "chatglm": {
        "transformer.embedding.word_embeddings": "token_embd",
        "transformer.encoder.final_layernorm": "output_norm",
        "transformer.output_layer": "output",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "gpt_neox": {
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "falcon": {
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "glm": {"mlp.gate_up_proj": "ffn_up"},
    "glm4": {
        "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "bloom": {
        "transformer.word_embeddings": "token_embd",
        "transformer.word_embeddings_layernorm": "token_embd_norm",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "mpt": {
        "transformer.norm_f": "output_norm",
        "norm_1": "attn_norm",
        "norm_2": "ffn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "ffn.up_proj": "ffn_up",
        "ffn.down_proj": "ffn_down",
    },
    "glm4_moe": {
        "post_attention_layernorm": "post_attention_norm",
        **DEEPSEEK_ROUTER_AND_SHARED_TENSORS,
    },
    "deepseek_v2": DEEPSEEK_TENSORS,
    "deepseek_v3": DEEPSEEK_TENSORS,
    "youtu": DEEPSEEK_TENSORS,
    "phi": {
        "model.final_layernorm": "output_norm",
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
    },
}
HF_LAYER_PREFIX_BY_MODEL_TYPE = {
    "mamba2": "backbone.layers.",
    "chatglm": "transformer.encoder.layers.",
    "gpt_neox": "gpt_neox.layers.",
    "exaone": "transformer.h.",
    "falcon": "transformer.h.",
    "bloom": "transformer.h.",
    "mpt": "transformer.blocks.",
}
SELECTION_BIAS_SUFFIXES = ("e_score_correction_bias", "expert_bias")
# families with rows of q and k in interleaved order
MODEL_TYPES_WITH_PERMUTED_QK = (
    "llama",
    "mixtral",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "baichuan",
    "minicpm",
    "smollm3",
    "xverse",
)


def gguf_tensor_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face name.

    Example: model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight.
    """
    stem, _, suffix = name.rpartition(".")
    for top, head, layer in (
        (DECODER_TOP_LEVEL_TENSORS, "model.layers.", DECODER_LAYER_TENSORS),
        (GPT2_TOP_LEVEL_TENSORS, "transformer.h.", GPT2_LAYER_TENSORS),
    ):
        if stem in top:
            return f"{top[stem]}.{suffix}"
        if stem.startswith(head):
            index, _, part = stem[len(head) :].partition(".")
            if ".experts." in part:
                return f"blk.{index}.{STACKED_EXPERT_TENSORS[part.rpartition('.')[2]]}.{suffix}"
            layer = layer | ROUTER_AND_SHARED_EXPERT_TENSORS if head == "model.layers." else layer
            return f"blk.{index}.{layer[part]}.{suffix}"
    return name


class GgufSource(TensorSource):
    """A GGUF container under Hugging Face names and orientations."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        container: RawContainer,
        dtype: torch.dtype,
        config: Mapping[str, Any],
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(container, dtype, device=device)
        self._config = config
        self._stack: tuple[str, Tensor] | None = None

    def stored_tensor_name(self, name: str) -> str:
        """Return the name that the tensor has in the file."""
        stem, _, suffix = name.rpartition(".")
        if suffix == "sinks":
            return f"blk.{stem.split('.')[2]}.attn_sinks.weight"
        if suffix in SELECTION_BIAS_SUFFIXES:
            return f"blk.{stem.split('.')[2]}.exp_probs_b.bias"
        own = {
            **HF_TO_GGUF_TENSORS_BY_MODEL_TYPE.get(self._config["model_type"], {}),
            **self.HF_TO_GGUF_NAMES,
        }
        if stem in own:
            return f"{own[stem]}.{suffix}"
        layers = HF_LAYER_PREFIX_BY_MODEL_TYPE.get(self._config["model_type"], "model.layers.")
        index, _, part = stem.removeprefix(layers).partition(".")
        return f"blk.{index}.{own[part]}.{suffix}" if part in own else gguf_tensor_name(name)

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor dequantized, in the file's layout."""
        if ".experts." in name:
            return self._read_expert(name)
        if ".kv_b_proj." in name and not self.has(name):  # of newer files
            keys = super().read_uncast_tensor(name.replace("kv_b_proj", "k_b_proj"))
            values = super().read_uncast_tensor(name.replace("kv_b_proj", "v_b_proj"))
            return torch.cat((keys.mT, values), dim=1).reshape(-1, keys.shape[1])
        if ".W_pack." in name:
            parts = (name.replace("W_pack", f"{part}_proj") for part in "qkv")
            return torch.cat([self.read_uncast_tensor(part) for part in parts])
        if ".block_sparse_moe." in name and name.endswith("put_linear.weight"):
            return self._read_granite_experts(name)
        if ".shared_mlp.input_linear." in name:
            up = super().read_uncast_tensor(name.replace("input_linear", "up_linear"))
            return torch.cat((super().read_uncast_tensor(name), up))
        tensor = super().read_uncast_tensor(name)
        if ".shared_expert_gate." in name and tensor.ndim == 1:
            return tensor[None]
        model_type = self._config["model_type"]
        if model_type in MODEL_TYPES_WITH_PERMUTED_QK and ".self_attn.q_proj." in name:
            return undo_llama_qk_permutation(tensor, self._config["num_attention_heads"])
        if model_type in MODEL_TYPES_WITH_PERMUTED_QK and ".self_attn.k_proj." in name:
            return undo_llama_qk_permutation(tensor, self._config["num_key_value_heads"])
        if model_type in ("gpt_neox", "falcon", "bloom") and ".query_key_value." in name:
            return interleave_qkv_by_kv_head(tensor, self._config)
        if model_type in ("gemma", "gemma2", "gemma3_text") and "norm." in name:
            return tensor - 1  # the converter adds 1
        if model_type == "gpt2" and tensor.ndim == 2 and ".h." in name:
            return tensor.T
        return tensor

    def _read_granite_experts(self, name: str) -> Tensor:
        """Return all experts' matrices, gate above up; the last that were read are kept."""
        if self._stack is None or self._stack[0] != name:
            stack = super().read_uncast_tensor(name)
            if "input_linear" in name:
                up = super().read_uncast_tensor(name.replace("input_linear", "up_linear"))
                stack = torch.cat((stack, up), dim=1)
            self._stack = name, stack
        return self._stack[1]

    def _read_expert(self, name: str) -> Tensor:
        """Return one expert's matrix; the last stack that was read is kept."""
        raw = self.stored_tensor_name(name)
        if self._stack is None or self._stack[0] != raw:
            self._stack = raw, super().read_uncast_tensor(name)
        return self._stack[1][int(name.partition(".experts.")[2].partition(".")[0])]


def interleave_qkv_by_kv_head(rows: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Reorder all q, all k, all v: of each KV head its queries' rows, its key's, its value's."""
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_kv_heads"])
    dim = rows.shape[0] // (heads + 2 * kv_heads)
    place = torch.arange(rows.shape[0]).reshape(-1, dim)
    group = heads // kv_heads
    order = [
        place[index]
        for kv in range(kv_heads)
        for index in (
            *range(kv * group, (kv + 1) * group),
            heads + kv,
            heads + kv_heads + kv,
        )
    ]
    return rows[torch.cat(order)]


def undo_llama_qk_permutation(rows: Tensor, heads: int) -> Tensor:
    """Reorder each head's interleaved rows (channel j, j + d/2) to first half, second half."""
    per_head = rows.shape[0] // heads
    place = torch.arange(rows.shape[0]).reshape(heads, per_head)
    return rows[torch.cat((place[:, 0::2], place[:, 1::2]), dim=1).reshape(-1)]


GgufConfigReaderAndSource = tuple[Callable[[RawContainer], dict[str, Any]], type[GgufSource]]
"""How an architecture's files are read: their config, and their tensors."""
