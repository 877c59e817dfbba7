"""InternLM (1); transformers has no class of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import plain_forward as plain
from tests.models.family_cases import LLAMA_FAULTS, SMALL, FamilyCase, GgufCase, rms_facts

BIASED = tuple(f"self_attn.{part}_proj" for part in "qkvo")


def save(raw: dict[str, Any], folder: Path) -> plain.Logits:
    """LLaMA with biases; the rotation is in ``rotary``."""
    bias = raw.get("bias", True)
    tensors = plain.save_drawn(folder, plain.llama_shapes(raw, biased=BIASED if bias else ()), raw)
    parts, rotary = plain.llama_parts(raw, tensors), raw.get("rotary", {})
    dim, base = parts["dim"], rotary.get("base", 10000.0)
    factor = rotary.get("scaling_factor", 1.0) if rotary.get("type") == "dynamic" else None
    frequencies = plain.dynamic_frequencies(dim, base, raw["max_position_embeddings"], factor)
    return plain.PlainModel(**parts, frequencies=frequencies, out_bias=bias).logits


CASE = FamilyCase(
    "internlm",
    {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128}, {"rms_norm_eps": 1e-3},
        {"bias": False}, {"tie_word_embeddings": True},
        {"rotary": {"base": 300, "type": "origin"}},
        {"rotary": {"base": 10000, "type": "dynamic"}},
        {"rotary": {"base": 10000, "type": "dynamic", "scaling_factor": 2.0},
         "max_position_embeddings": 40},
    ),
    {"hidden_act": "gelu", "bias": 1, "rotary": {"type": "linear"}},
    LLAMA_FAULTS,
    make=save,
    # llama.cpp has no architecture of its own: its llama has biases where a file has them
    gguf=GgufCase("llama", rms_facts, permuted=True, changes={"rms_norm_eps": 1e-5}),
)  # fmt: skip
