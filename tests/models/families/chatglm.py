"""ChatGLM2, ChatGLM3 and the first GLM-4; transformers has no class of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import plain_forward as plain
from tests.models.family_cases import LLAMA_FAULTS, QK, VOCAB, FamilyCase, GgufCase, fault, with_dim


def save(raw: dict[str, Any], folder: Path) -> plain.Logits:
    """q, k and v in one matrix, gate and up in another; half of each head rotates by neighbours."""
    hidden, inner, heads = raw["hidden_size"], raw["ffn_hidden_size"], raw["num_attention_heads"]
    dim, vocab = raw["kv_channels"], raw["padded_vocab_size"]
    kv_heads = raw["multi_query_group_num"] if raw.get("multi_query_attention") else heads
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    layer: dict[str, Any] = {
        "self_attention.query_key_value.weight": (sum(sizes), hidden),
        "self_attention.dense.weight": (hidden, heads * dim),
        "mlp.dense_h_to_4h.weight": (2 * inner, hidden),
        "mlp.dense_4h_to_h.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    if raw.get("add_qkv_bias"):
        layer["self_attention.query_key_value.bias"] = (sum(sizes),)
    shapes: dict[str, Any] = {"transformer.embedding.word_embeddings.weight": (vocab, hidden)}
    for i in range(raw["num_layers"]):
        shapes |= {f"transformer.encoder.layers.{i}.{n}": shape for n, shape in layer.items()}
    shapes["transformer.encoder.final_layernorm.weight"] = (hidden,)
    shapes["transformer.output_layer.weight"] = (vocab, hidden)
    tensors = plain.save_drawn(folder, shapes, raw)

    def get(i: int, name: str) -> Any:
        return tensors.get(f"transformer.encoder.layers.{i}.{name}")

    def qkv(i: int) -> list[Any]:
        weights = get(i, "self_attention.query_key_value.weight").split(sizes)
        bias = get(i, "self_attention.query_key_value.bias")
        return list(zip(weights, [None] * 3 if bias is None else bias.split(sizes), strict=True))

    up = "mlp.dense_h_to_4h"
    names = {
        "embed": "transformer.embedding.word_embeddings.weight",
        "norm": "transformer.encoder.final_layernorm.weight",
        "head": "transformer.output_layer.weight", "layer": "transformer.encoder.layers.{}",
        "input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "out": "self_attention.dense",
    }  # fmt: skip
    return plain.PlainModel(
        tensors, raw["num_layers"], heads, kv_heads, dim, raw.get("layernorm_epsilon", 1e-5),
        names, qkv,
        lambda i: (*get(i, f"{up}.weight").chunk(2), get(i, "mlp.dense_4h_to_h.weight")),
        plain.plain_frequencies(dim // 2, 10000.0 * raw.get("rope_ratio", 1.0)),
        neighbours=True,
    ).logits  # fmt: skip


CASE = FamilyCase(
    "chatglm",
    {"vocab_size": VOCAB, "padded_vocab_size": VOCAB, "hidden_size": 48, "num_layers": 2,
     "num_attention_heads": 4, "kv_channels": 12, "ffn_hidden_size": 80, "seq_length": 128,
     "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True,
     "rmsnorm": True, "post_layer_norm": True, "original_rope": True},
    (
        {"vocab_size": 96, "padded_vocab_size": 96}, {"hidden_size": 64}, {"num_layers": 3},
        {"ffn_hidden_size": 72}, {"seq_length": 72}, {"kv_channels": 16},
        {"multi_query_group_num": 1}, {"multi_query_attention": False}, {"add_qkv_bias": False},
        {"rope_ratio": 50}, {"layernorm_epsilon": 1e-3},
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True,
         "bias_dropout_fusion": True, "fp32_residual_connection": False, "quantization_bit": 0},
    ),
    {"post_layer_norm": False, "apply_residual_connection_post_layernorm": True,
     "original_rope": False, "quantization_bit": 4, "interleaved_qkv": True, "pre_seq_len": 128,
     "multi_query_group_num": 3, "rope_ratio": 0, "kv_channels": 6, "rmsnorm": 1},
    {**LLAMA_FAULTS, "half the rotated channels": fault(QK, rope=with_dim(4))},
    make=save,
    gguf=GgufCase(
        "chatglm",
        lambda raw: {
            "block_count": raw["num_layers"], "feed_forward_length": raw["ffn_hidden_size"],
            "context_length": raw["seq_length"], "rope.freq_base": 10000.0 * raw["rope_ratio"],
            "attention.head_count_kv": raw["multi_query_group_num"],
            "attention.layer_norm_rms_epsilon": raw["layernorm_epsilon"],
            "attention.key_length": raw["kv_channels"],
            "rope.dimension_count": raw["kv_channels"] // 2,
        },
        changes={"layernorm_epsilon": 1e-5, "rope_ratio": 5.0},
    ),
)  # fmt: skip
