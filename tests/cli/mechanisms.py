"""A small seeded checkpoint of each mechanism, with a tokenizer of bytes, as a user has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS = {
    "head_dim": 16,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
# mechanism → model_type, and what differs from SIZES
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("mixtral", EXPERTS),
    "experts with sinks": (
        "gpt_oss",
        {**EXPERTS, **WINDOWS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "gated delta rule": (
        "qwen3_next",
        {
            "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "windows": ("gemma3_text", {**WINDOWS, "query_pre_attn_scalar": 16}),
    "shared keys and layer inputs": (
        "gemma4_text",
        {
            **WINDOWS, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32,
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "enable_moe_block": True,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
    ),
    "ALiBi": ("bloom", {"n_head": 4, "n_layer": 2, "seq_length": 512}),
    "latent attention": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": None,
            "topk_group": None, "topk_method": "greedy",
        },
    ),
    "state space": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2},
    ),
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_checkpoint(mechanism: str, folder: Path) -> Path:
    """Write the checkpoint with ``save_pretrained``, float32 weights drawn with a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _byte_tokenizer()
    model_type, more = MECHANISMS[mechanism]
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        model_type,
        **(SIZES | {"vocab_size": len(tokenizer), "bos_token_id": None} | special | more),
    )
    model = AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08, generator=draw)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(alphabet)}
    tokens = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
