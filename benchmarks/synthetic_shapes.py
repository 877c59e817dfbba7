"""The shapes of ``make_checkpoint`` as peers know them, and their weights drawn by the same rule.

Peers have no Qwen of the first version; Qwen2 of the same sizes computes the same products (bias on
q, k and v; NTK
and logn change nothing up to the trained length).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def synthetic_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json for transformers and vLLM with a shape of ``model_shapes.SHAPES``."""
    if raw["model_type"] != "qwen":
        return dict(raw)
    heads = raw["num_attention_heads"]
    same = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "bos_token_id",
        "eos_token_id",
    )
    return {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
        **{name: raw[name] for name in same},
        "num_key_value_heads": heads, "intermediate_size": raw["intermediate_size"] // 2,
        "hidden_act": "silu",
        "max_position_embeddings": raw["max_position_embeddings"],
        "rms_norm_eps": raw["layer_norm_epsilon"],
        "rope_theta": raw["rotary_emb_base"], "tie_word_embeddings": False,
        "torch_dtype": raw["torch_dtype"],
        "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": raw["num_hidden_layers"],
    }  # fmt: skip


def write_synthetic_config(raw: Mapping[str, Any], folder: Path) -> Path:
    """Write ``folder/config.json``; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(synthetic_config(raw), indent=1))
    return folder


def randomize_weights(model: Any, weights: str = "normal", seed: int = 0) -> int:
    """Randomize every parameter of a torch module in place, as ``make_checkpoint.fill`` does.

    Returns the number of parameters.

    normal: norm weights around 1, biases of spread 0.1, embeddings of unit spread, matrices of
    1/sqrt(inputs). uniform: everything within ``make_checkpoint.UNIFORM_RANGE``.
    """
    import torch

    from benchmarks.make_checkpoint import UNIFORM, UNIFORM_RANGE

    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = parameter.data
            torch.manual_seed(seed + count)
            if weights == UNIFORM:
                weight.uniform_(-UNIFORM_RANGE, UNIFORM_RANGE)
            elif weight.dim() == 1:
                weight.normal_(0.0, 0.1)
                if name.endswith("weight"):
                    weight.add_(1.0)
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.normal_(0.0, 1.0)
            else:
                # Conv1D (GPT-2) keeps [in, out]
                inputs = (
                    weight.shape[0]
                    if name.startswith("transformer.h.") and "c_" in name
                    else weight.shape[-1]
                )
                weight.normal_(0.0, inputs**-0.5)
            count += 1
    return count
