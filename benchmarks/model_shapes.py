"""Shapes of published models: config.json, tensors, and the bytes that a step has to read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
TensorShapes = dict[str, tuple[int, ...]]

QWEN_7B: Config = {
    "model_type": "qwen", "architectures": ["QWenLMHeadModel"], "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "kv_channels": 128,
    "intermediate_size": 22016,
    "seq_length": 8192, "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 151643, "eos_token_id": 151643, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2_MEDIUM: Config = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "bos_token_id": 50256, "eos_token_id": 50256, "torch_dtype": "float16",
}  # fmt: skip


def _llama_like(
    model_type: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int,
    **more: Any,
) -> Config:  # fmt: skip
    """A config.json of LLaMA's form; more: fields that differ from LLaMA 2's."""
    architecture = {"llama": "Llama"}.get(model_type, model_type.capitalize())
    config = {
        "model_type": model_type, "architectures": [f"{architecture}ForCausalLM"],
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    return config | more


_QWEN = {"rope_theta": 1e6, "max_position_embeddings": 32768, "use_sliding_window": False}
SHAPES: Mapping[str, Config] = {
    "smollm2-135m": _llama_like(
        "llama", 576, 1536, 30, 9, 3, 49152,
        rope_theta=1e5, rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),
    "gpt2-medium": GPT2_MEDIUM,
    "qwen2.5-0.5b": _llama_like(
        "qwen2", 896, 4864, 24, 14, 2, 151936, **_QWEN, tie_word_embeddings=True
    ),
    "qwen2.5-1.5b": _llama_like(
        "qwen2", 1536, 8960, 28, 12, 2, 151936, **_QWEN, tie_word_embeddings=True
    ),
    "llama-7b": _llama_like("llama", 4096, 11008, 32, 32, 32, 32000),
    "qwen2.5-7b": _llama_like("qwen2", 3584, 18944, 28, 28, 4, 152064, **_QWEN),
    "qwen-7b": QWEN_7B,
    "llama-3-8b": _llama_like(
        "llama", 4096, 14336, 32, 32, 8, 128256, rope_theta=5e5, rms_norm_eps=1e-5
    ),
    "qwen3-8b": _llama_like("qwen3", 4096, 12288, 36, 32, 8, 151936, **_QWEN, head_dim=128),
}  # fmt: skip
"""Smallest first."""
MOE_SHAPES: Mapping[str, Config] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "swiglu_limit": 7.0, "vocab_size": 201088, "max_position_embeddings": 131072,
        "rope_theta": 150000, "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rope_theta": 1e6, "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "topk_method": "greedy",
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "vocab_size": 102400,
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    },
    "qwen3-next-12-layers": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_theta": 1e7, "vocab_size": 151936,
        "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
"""Of mixtures of experts: for steps without a checkpoint (``model_step.py``).

Qwen3-Next-80B-A3B is cut to 12 of its 48 layers, so that it fits one GPU in 16 bits.
"""


def with_num_layers(shape: str, layers: int | None = None) -> Config:
    """Return the config of a shape, with ``layers`` layers if given."""
    config = {**SHAPES[shape]}
    if layers is not None:
        config["n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"] = layers
    return config


def tensors(config: Mapping[str, Any]) -> Iterator[TensorShapes]:
    """Shapes by name, one dict a shard: the embeddings, final norm and head, then one a layer."""
    by_type = {"gpt2": _gpt2_tensors, "qwen": _qwen_tensors}
    yield from by_type.get(config["model_type"], _llama_tensors)(config)


def _qwen_tensors(config: Mapping[str, Any]) -> Iterator[TensorShapes]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    inner = config["intermediate_size"] // 2
    yield {
        "transformer.wte.weight": (vocab, hidden), "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        stem = f"transformer.h.{i}"
        yield {
            f"{stem}.ln_1.weight": (hidden,), f"{stem}.ln_2.weight": (hidden,),
            f"{stem}.attn.c_attn.weight": (3 * hidden, hidden),
            f"{stem}.attn.c_attn.bias": (3 * hidden,),
            f"{stem}.attn.c_proj.weight": (hidden, hidden),
            f"{stem}.mlp.w1.weight": (inner, hidden),
            f"{stem}.mlp.w2.weight": (inner, hidden),
            f"{stem}.mlp.c_proj.weight": (hidden, inner),
        }  # fmt: skip


def _llama_tensors(config: Mapping[str, Any]) -> Iterator[TensorShapes]:
    hidden, vocab, inner = (
        config[name] for name in ("hidden_size", "vocab_size", "intermediate_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    head = {} if config["tie_word_embeddings"] else {"lm_head.weight": (vocab, hidden)}
    yield {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), **head}
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for i in range(config["num_hidden_layers"]):
        stem = f"model.layers.{i}"
        layer: TensorShapes = {
            f"{stem}.self_attn.{n}_proj.weight": (size, hidden) for n, size in rows.items()
        }
        if config["model_type"] == "qwen2":
            layer |= {f"{stem}.self_attn.{n}_proj.bias": (size,) for n, size in rows.items()}
        if config["model_type"] == "qwen3":
            layer |= {f"{stem}.self_attn.{n}_norm.weight": (head_dim,) for n in "qk"}
        yield {
            f"{stem}.input_layernorm.weight": (hidden,),
            f"{stem}.post_attention_layernorm.weight": (hidden,),
            **layer, f"{stem}.self_attn.o_proj.weight": (hidden, rows["q"]),
            f"{stem}.mlp.gate_proj.weight": (inner, hidden),
            f"{stem}.mlp.up_proj.weight": (inner, hidden),
            f"{stem}.mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip


def _gpt2_tensors(config: Mapping[str, Any]) -> Iterator[TensorShapes]:
    hidden, vocab, places = (config[name] for name in ("n_embd", "vocab_size", "n_positions"))
    yield {
        "wte.weight": (vocab, hidden),
        "wpe.weight": (places, hidden),
        "ln_f.weight": (hidden,),
        "ln_f.bias": (hidden,),
    }
    for i in range(config["n_layer"]):
        shapes: TensorShapes = {
            f"h.{i}.{n}.{p}": (hidden,) for n in ("ln_1", "ln_2") for p in ("weight", "bias")
        }
        for name, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden), ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden), ("mlp.c_proj", 4 * hidden, hidden),
        ):  # fmt: skip
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
        yield shapes


@dataclass(frozen=True)
class ShapeCost:
    """What a shape costs in 16 bits.

    Attributes:
        weight_bytes: of all tensors.
        step_bytes: of the tensors that every step reads whole: not of an embedding table of its
            own, of which a token reads a row.
        kv_bytes: of keys and values of a token, in all layers.
        layer_weights: elements of the matrices of all layers; a prompt's token multiplies each
            once.
        head_weights: elements of the head's matrix; of a prompt only the last token needs it.
    """

    weight_bytes: int
    step_bytes: int
    kv_bytes: int
    layer_weights: int
    head_weights: int

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes that one step of ``batch`` sequences of ``context`` tokens reads."""
        return self.step_bytes + batch * context * self.kv_bytes

    def prefill_operations(self, tokens: int) -> float:
        """Multiplications and additions of the matrices for one prompt; attention is left out."""
        return 2.0 * (tokens * self.layer_weights + self.head_weights)


def shape_cost(config: Mapping[str, Any]) -> ShapeCost:
    """Count a config's tensors."""
    ends, *layers = tensors(config)
    table_names = ("embed_tokens.weight", "wte.weight", "wpe.weight")
    tables = {name: shape for name, shape in ends.items() if name.endswith(table_names)}
    largest = max(map(math.prod, tables.values()))
    tied = "lm_head.weight" not in ends
    num_weights = sum(math.prod(shape) for shard in (ends, *layers) for shape in shard.values())
    num_tables = sum(map(math.prod, tables.values()))
    if config["model_type"] == "gpt2":
        num_layers, kv_width = config["n_layer"], config["n_embd"]
    else:
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        head_dim = config.get("head_dim", config["hidden_size"] // heads)
        num_layers, kv_width = config["num_hidden_layers"], kv_heads * head_dim
    matrices = (shape for layer in layers for shape in layer.values() if len(shape) == 2)
    return ShapeCost(
        weight_bytes=2 * num_weights,
        step_bytes=2 * (num_weights - num_tables + (largest if tied else 0)),
        kv_bytes=2 * 2 * num_layers * kv_width,
        layer_weights=sum(map(math.prod, matrices)),
        head_weights=largest,
    )
