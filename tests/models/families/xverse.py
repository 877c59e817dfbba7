"""XVERSE, dense; transformers has no class of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models import plain_forward as plain
from tests.models.family_cases import LLAMA_FAULTS, SMALL, FamilyCase, GgufCase, rms_facts


def save(raw: dict[str, Any], folder: Path) -> plain.Logits:
    """LLaMA."""
    tensors = plain.save_drawn(folder, plain.llama_shapes(raw), raw)
    parts = plain.llama_parts(raw, tensors)
    frequencies = plain.plain_frequencies(parts["dim"], raw.get("rope_theta", 10000.0))
    return plain.PlainModel(**parts, frequencies=frequencies).logits


CASE = FamilyCase(
    "xverse",
    {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128}, {"rms_norm_eps": 1e-3},
        {"rope_theta": 300.0},
        {"num_key_value_heads": 2}, {"tie_word_embeddings": True},
        {"max_tokenizer_truncation": 100},
    ),
    {"hidden_act": "gelu", "num_key_value_heads": 3, "rope_theta": -1},
    LLAMA_FAULTS,
    make=save,
    gguf=GgufCase("xverse", rms_facts, permuted=True, changes={"rms_norm_eps": 1e-5}),
)  # fmt: skip
