"""Qwen v1: the dense reference against a second, token-by-token one written from the
specification.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from modelmill.accept.reference import open_reference
from modelmill.accept.reference.qwen import QwenReference
from tests.accept.memory_checkpoint import MemoryCheckpoint, MemoryContainer, memory_checkpoint
from tests.accept.qwen_v1_plain import ntk_alpha, plain_qwen_logits, seeded_qwen
from tests.accept.reference_forward import reference_logits

CONFIG: dict[str, Any] = {
    "model_type": "qwen",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "seq_length": 12,
    "max_position_embeddings": 64,
    "rotary_emb_base": 10000,
    "layer_norm_epsilon": 1e-6,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "no_bias": True,
}


def random_ids(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(61) for _ in range(count)]


@pytest.mark.parametrize("times", [0.5, 1, 1.5, 3, 5])
@pytest.mark.parametrize("decoded", [0, 14])
def test_prompts_around_and_beyond_seq_length(times: float, decoded: int) -> None:
    """Decoding 14 tokens crosses the next boundary of α for the shorter prompts: α must not
    move.
    """
    prompt = int(times * CONFIG["seq_length"])
    ids = random_ids(prompt + decoded)
    tensors = seeded_qwen(CONFIG, 1)
    expected = plain_qwen_logits(tensors, CONFIG, ids, prompt)
    logits = reference_logits(
        open_reference(memory_checkpoint(tensors, CONFIG)), ids, prompt_length=prompt
    )
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)
    if times > 1:
        other = reference_logits(
            open_reference(memory_checkpoint(tensors, CONFIG)), ids, prompt_length=1
        )
        assert (other - logits).abs().max() > 1e-2


@pytest.mark.parametrize("off", ["use_dynamic_ntk", "use_logn_attn"])
def test_either_can_be_off(off: str) -> None:
    config = CONFIG | {off: False, "rotary_emb_base": 100000, "layer_norm_epsilon": 1e-5}
    tensors, ids = seeded_qwen(config, 2), random_ids(40)
    expected = plain_qwen_logits(tensors, config, ids, 40)
    logits = reference_logits(open_reference(memory_checkpoint(tensors, config)), ids)
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)


def test_alpha_of_the_published_sizes() -> None:
    config = CONFIG | {"seq_length": 2048}
    reference = open_reference(memory_checkpoint(seeded_qwen(config, 1), config))
    assert isinstance(reference, QwenReference)
    known = {1: 1, 1024: 1, 2048: 1, 2049: 3, 4096: 3, 4097: 7, 8192: 7, 8193: 15, 16384: 15}
    assert {length: reference.ntk_alpha(length) for length in known} == known
    assert {length: ntk_alpha(length, 2048) for length in known} == known


def test_old_config_keys() -> None:
    old = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "ffn_hidden_size": "intermediate_size",
        "padded_vocab_size": "vocab_size",
    }
    renamed = {v: k for k, v in old.items()}
    config = {renamed.get(key, key): value for key, value in CONFIG.items()}
    tensors, ids = seeded_qwen(CONFIG, 1), random_ids(20)
    logits = reference_logits(open_reference(memory_checkpoint(tensors, config)), ids)
    assert torch.equal(
        logits, reference_logits(open_reference(memory_checkpoint(tensors, CONFIG)), ids)
    )


def test_trace_tells_gate_from_up() -> None:
    tensors = seeded_qwen(CONFIG, 1)
    reference = open_reference(memory_checkpoint(tensors, CONFIG))
    trace = reference.run_layer(
        0, reference.layer_weights(0), reference.embed(torch.tensor([1, 2, 3])), 3
    )
    (x,) = trace["gate"].inputs
    torch.testing.assert_close(trace["gate"].output, x @ tensors["transformer.h.0.mlp.w2.weight"].T)
    torch.testing.assert_close(trace["up"].output, x @ tensors["transformer.h.0.mlp.w1.weight"].T)


def test_gguf_container() -> None:
    tensors, ids = seeded_qwen(CONFIG, 1), random_ids(20)
    parts = {
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
    }
    parts |= {"mlp.w1": "ffn_up", "mlp.w2": "ffn_gate", "mlp.c_proj": "ffn_down"}
    parts |= {
        "transformer.wte": "token_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
    }
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in parts.items():
            name = name.replace(old + ".", new + ".")
        renamed[name.replace("transformer.h.", "blk.")] = tensor
    facts = {
        "general.architecture": "qwen",
        "qwen.block_count": 2,
        "qwen.embedding_length": 32,
        "qwen.context_length": 64,
        "qwen.attention.head_count": 4,
        "qwen.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen.rope.freq_base": 10000.0,
    }
    logits = reference_logits(
        open_reference(MemoryCheckpoint(MemoryContainer(renamed, facts))), ids
    )
    config = CONFIG | {"use_dynamic_ntk": False, "use_logn_attn": False}
    assert torch.equal(
        logits, reference_logits(open_reference(memory_checkpoint(tensors, config)), ids)
    )


def test_llama_relaid_as_qwen_computes_the_same() -> None:
    """c_attn = q | k | v with the key-value heads repeated, w1 = up, w2 = gate, a zero bias."""
    from tests.accept.test_reference import CASES, original, reference_of

    model = original("llama", CASES["llama-theta"][1])
    tensors = {}
    plain = model.state_dict()
    for i in range(3):
        stem, old = f"transformer.h.{i}", f"model.layers.{i}"
        q, k, v = (plain[f"{old}.self_attn.{part}_proj.weight"] for part in "qkv")
        k, v = (t.reshape(2, 8, 48).repeat_interleave(3, 0).reshape(48, 48) for t in (k, v))
        tensors |= {
            f"{stem}.attn.c_attn.weight": torch.cat((q, k, v)),
            f"{stem}.attn.c_attn.bias": torch.zeros(144),
            f"{stem}.attn.c_proj.weight": plain[f"{old}.self_attn.o_proj.weight"],
            f"{stem}.ln_1.weight": plain[f"{old}.input_layernorm.weight"],
            f"{stem}.ln_2.weight": plain[f"{old}.post_attention_layernorm.weight"],
            f"{stem}.mlp.w1.weight": plain[f"{old}.mlp.up_proj.weight"],
            f"{stem}.mlp.w2.weight": plain[f"{old}.mlp.gate_proj.weight"],
            f"{stem}.mlp.c_proj.weight": plain[f"{old}.mlp.down_proj.weight"],
        }
    tensors["transformer.wte.weight"] = plain["model.embed_tokens.weight"]
    tensors["transformer.ln_f.weight"] = plain["model.norm.weight"]
    tensors["lm_head.weight"] = plain["lm_head.weight"]
    config = {
        "model_type": "qwen",
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "kv_channels": 8,
        "rotary_emb_base": 100000.0,
        "layer_norm_epsilon": 1e-5,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
    }
    ids = torch.arange(3, 35)
    logits = reference_logits(open_reference(memory_checkpoint(tensors, config)), ids)
    torch.testing.assert_close(
        logits, reference_logits(reference_of(model), ids), atol=1e-5, rtol=0
    )
