"""A tiny engine with seeded weights and a long context: a token for each byte."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.accept.seeded_checkpoint import llama_layer_shapes

LAYERS, HIDDEN, HEADS, INNER = 2, 32, 2, 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_checkpoint(folder: Path, context: int, seed: int) -> Path:
    """Write a LLaMA checkpoint with random weights.

    Args:
        folder: is made.
        context: maximum tokens.
        seed: of the weights.
    """
    folder.mkdir(parents=True)
    vocab = _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {
        "model.embed_tokens.weight": random(vocab, HIDDEN),
        "lm_head.weight": random(vocab, HIDDEN),
    }
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, shape in llama_layer_shapes(HIDDEN, INNER).items():
            tensors[f"{at}{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer without merges; return its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab)
