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

SMALLEST_MATRIX = 1 << 16
"""Codes of a quantized matrix of the benchmarks' shapes, at least."""


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


VLLM_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "int4": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}},
    "int8": {"weights": {"num_bits": 8, "strategy": "channel"}},
    "smoothquant": {
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    },
}
"""Formats of ``weight_formats.py`` as compressed-tensors names them, which vLLM reads; its kernel
for each (Machete or Marlin, CUTLASS) is its own choice. fp8 it quantizes itself."""


def vllm_quantization(weight_format: str) -> dict[str, Any]:
    """Return ``quantization_config`` of a config.json in compressed-tensors' form.

    Raises KeyError for a format that is not in ``VLLM_FORMATS``.
    """
    group: dict[str, Any] = {"targets": ["Linear"], "input_activations": None}
    for name, scheme in VLLM_FORMATS[weight_format].items():
        group[name] = {"type": "int", "symmetric": True, "dynamic": False, **scheme}
    packed = group["input_activations"] is None
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if packed else "int-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def write_synthetic_config(
    raw: Mapping[str, Any], folder: Path, weight_format: str | None = None
) -> Path:
    """Write ``folder/config.json``; the folder. weight_format: one of ``VLLM_FORMATS``."""
    config = synthetic_config(raw)
    if weight_format is not None:
        config["quantization_config"] = vllm_quantization(weight_format)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def randomize_weights(model: Any, weights: str = "normal", seed: int = 0) -> int:
    """Randomize every parameter of a torch module in place, as ``make_checkpoint.fill`` does.

    Returns the number of parameters.

    normal: norm weights around 1, biases of spread 0.1, embeddings of unit spread, matrices of
    1/sqrt(inputs). uniform: everything within ``make_checkpoint.UNIFORM_RANGE``. Codes of quantized
    matrices are drawn evenly (fp8: with spread 16) and their scales around 0.001, by either rule.
    """
    import torch

    from benchmarks.make_checkpoint import UNIFORM, UNIFORM_RANGE

    transposed = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D"
    }
    count = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = parameter.data
            torch.manual_seed(seed + count)
            if _is_quantized(name, weight):
                _randomize_quantized(weight)
            elif weights == UNIFORM:
                weight.uniform_(-UNIFORM_RANGE, UNIFORM_RANGE)
            elif weight.dim() == 1:
                weight.normal_(0.0, 0.1)
                if name.endswith("weight"):
                    weight.add_(1.0)
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.normal_(0.0, 1.0)
            else:
                # transformers keeps [in, out] in its Conv1D (GPT-2), vLLM [out, in]
                inputs = weight.shape[0 if name in transposed else -1]
                weight.normal_(0.0, inputs**-0.5)
            count += 1
    return count


def _is_quantized(name: str, weight: Any) -> bool:
    """Whether a parameter holds codes or scales."""
    return bool(
        not weight.is_floating_point() or weight.element_size() == 1 or name.endswith("scale")
    )


def _randomize_quantized(weight: Any) -> None:
    """Draw codes evenly, values of fp8 with spread 16, scales from 0.0005 to 0.0015.

    Small integer tensors are shapes and orders of columns, and stay.
    """
    import torch

    if weight.is_floating_point():
        drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
        one_byte = weight.element_size() == 1
        weight.copy_(drawn.normal_(0.0, 16.0) if one_byte else drawn.uniform_(5e-4, 15e-4))
    elif weight.numel() >= SMALLEST_MATRIX:
        info = torch.iinfo(weight.dtype)
        weight.copy_(torch.randint(info.min, info.max, weight.shape, device=weight.device))
