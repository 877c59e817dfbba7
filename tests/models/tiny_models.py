"""Small seeded checkpoints of every family, made by transformers (or, for Qwen v1, by its plain
reference).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

COMMON = {"vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 80,
          "max_position_embeddings": 256}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# name → (model_type, what differs from COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt2-numbered": (
        "gpt2",
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
        },
    ),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 40},
    ),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-relu": ("llama", {"hidden_act": "relu"}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def hf_model(name: str, seed: int = 0) -> Any:
    """The transformers model of a family, float32, eager attention, weights spread enough to tell
    faults apart.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, more = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **(COMMON | more))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5
            middle = 1.0 if "norm" in key or "ln_" in key else 0.0
            middle = 0.0 if key.endswith("bias") else middle
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * spread + middle)
    return model


def save_hf(name: str, folder: Path, seed: int = 0) -> Any:
    """Save the family's checkpoint as a Hugging Face folder; returns the transformers model."""
    model = hf_model(name, seed)
    save_model(model, folder)
    return model


def save_model(model: Any, folder: Path) -> None:
    """Write a transformers model as published checkpoints are: without generation defaults."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def save_raw(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    """Save tensors and a config.json as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a folder's config.json in place."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
