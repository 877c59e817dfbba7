"""InternLM2 and 2.5; transformers has no class of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import plain_forward as plain
from tests.models.family_cases import LLAMA_FAULTS, SMALL, FamilyCase, GgufCase, rms_facts


def save(raw: dict[str, Any], folder: Path) -> plain.Logits:
    """wqkv has, for each KV head, the rows of its queries, of its key and of its value."""
    hidden, inner, heads = raw["hidden_size"], raw["intermediate_size"], raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads", heads)
    dim, group, bias = hidden // heads, heads // kv_heads, raw.get("bias", True)
    layer = {
        "attention.wqkv.weight": (kv_heads * (group + 2) * dim, hidden),
        "attention.wo.weight": (hidden, hidden), "feed_forward.w1.weight": (inner, hidden),
        "feed_forward.w3.weight": (inner, hidden), "feed_forward.w2.weight": (hidden, inner),
        "attention_norm.weight": (hidden,), "ffn_norm.weight": (hidden,),
    }  # fmt: skip
    if bias:
        layer |= {f"{n}.bias": layer[f"{n}.weight"][:1] for n in ("attention.wqkv", "attention.wo")}
    shapes: dict[str, Any] = {"model.tok_embeddings.weight": (raw["vocab_size"], hidden)}
    for i in range(raw["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,), "output.weight": (raw["vocab_size"], hidden)}
    tensors = plain.save_drawn(folder, shapes, raw)

    def qkv(i: int) -> list[Any]:
        stem = f"model.layers.{i}.attention.wqkv"
        rows = tensors[f"{stem}.weight"].view(kv_heads, group + 2, dim, hidden)
        parts = [rows[:, :group], rows[:, group], rows[:, group + 1]]
        if not bias:
            return [(part.reshape(-1, hidden), None) for part in parts]
        values = tensors[f"{stem}.bias"].view(kv_heads, group + 2, dim)
        biases = [values[:, :group], values[:, group], values[:, group + 1]]
        return [(p.reshape(-1, hidden), b.flatten()) for p, b in zip(parts, biases, strict=True)]

    names = {
        "embed": "model.tok_embeddings.weight", "norm": "model.norm.weight",
        "head": "output.weight", "layer": "model.layers.{}", "input_norm": "attention_norm",
        "mlp_norm": "ffn_norm", "out": "attention.wo",
    }  # fmt: skip
    scaling, base = raw.get("rope_scaling"), raw.get("rope_theta", 10000.0)
    length = raw["max_position_embeddings"]
    return plain.PlainModel(
        tensors, raw["num_hidden_layers"], heads, kv_heads, dim, raw.get("rms_norm_eps", 1e-6),
        names, qkv,
        lambda i: tuple(tensors[f"model.layers.{i}.feed_forward.w{n}.weight"] for n in (1, 3, 2)),  # type: ignore[arg-type, return-value]
        plain.dynamic_frequencies(dim, base, length, scaling["factor"] if scaling else None),
        out_bias=bias,
    ).logits  # fmt: skip


def split_qkv(raw: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp's converter splits wqkv."""
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    out = {}
    for name, tensor in tensors.items():
        if "wqkv" not in name:
            out[name] = tensor
            continue
        rows = tensor.view(kv_heads, heads // kv_heads + 2, raw["hidden_size"] // heads, -1)
        parts = {"wq": rows[:, :-2], "wk": rows[:, -2], "wv": rows[:, -1]}
        out |= {name.replace("wqkv", n): p.reshape(-1, rows.shape[-1]) for n, p in parts.items()}
    return out


CASE = FamilyCase(
    "internlm2",
    {**SMALL, "bias": False},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128}, {"rms_norm_eps": 1e-3},
        {"rope_theta": 300.0},
        {"num_key_value_heads": 4}, {"num_key_value_heads": None}, {"num_key_value_heads": 1},
        {"bias": True}, {"bias": None}, {"pretraining_tp": 2, "attn_implementation": "sdpa"},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40},
    ),
    {"hidden_act": "gelu", "bias": 1, "num_key_value_heads": 3, "rope_scaling": {"type": "x"}},
    LLAMA_FAULTS,
    make=save,
    gguf=GgufCase(
        "internlm2", rms_facts, permuted=True, changes={"rms_norm_eps": 1e-5}, tensors=split_qkv
    ),
)  # fmt: skip
