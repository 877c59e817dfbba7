"""Small checkpoints for these tests, and GGUF files written by the independent `gguf` package."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from modelmill.checkpoint.container import ShardedFiles
from modelmill.core.errors import CheckpointError

LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

TOKENS = [f"<{i}>" for i in range(18)] + ["é", "\U0001f600"]


def llama_state(seed: int = 0, vocabulary: int = 20) -> dict[str, torch.Tensor]:
    """Random values under every name a two-layer LLaMA of LLAMA_CONFIG has."""
    made = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (vocabulary, 32),
    }
    for i in range(2):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (32,),
            prefix + "post_attention_layernorm.weight": (32,),
            prefix + "self_attn.q_proj.weight": (32, 32),
            prefix + "self_attn.k_proj.weight": (16, 32),
            prefix + "self_attn.v_proj.weight": (16, 32),
            prefix + "self_attn.o_proj.weight": (32, 32),
            prefix + "mlp.gate_proj.weight": (48, 32),
            prefix + "mlp.up_proj.weight": (48, 32),
            prefix + "mlp.down_proj.weight": (32, 48),
        }
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def write_folder(
    folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    """A Hugging Face folder with one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or LLAMA_CONFIG))
    return folder


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k (facts of convert_hf_to_gguf.py,
    LlamaModel.permute).
    """
    half = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def gguf_names(arch: int, layers: int) -> Any:
    """The gguf package's own table from Hugging Face names to GGUF names."""
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH(arch), layers)


def write_tensors(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")


def write_llama_gguf(
    path: Path,
    state: dict[str, torch.Tensor],
    arch: str = "llama",
    extra: dict[str, tuple[str, Any]] | None = None,
    more: dict[str, np.ndarray] | None = None,
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """LLAMA_CONFIG's model the way llama.cpp's converter lays it out, by the gguf package.

    extra: more keys without the architecture's prefix, as (GGUFWriter method, value). more: more
    tensors.
    raw: more tensors as stored blocks.
    """
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    for key, (method, value) in (extra or {}).items():
        getattr(writer, method)(f"{arch}.{key}", value)
    write_vocabulary(writer)
    architectures = {
        "llama": gguf.MODEL_ARCH.LLAMA,
        "qwen2": gguf.MODEL_ARCH.QWEN2,
        "qwen3": gguf.MODEL_ARCH.QWEN3,
    }
    names = gguf_names(architectures[arch], 2)
    for name, tensor in state.items():
        values = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permute(values, 4 if "q_proj" in name else 2)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values)
        )
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    for name, (blocks, ggml_type) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=ggml_type)
    write_tensors(writer)
    return path


def opens_or_fails_in_one_line(
    open_files: Callable[[Sequence[Path]], ShardedFiles], path: Path, nbytes: int
) -> None:
    """Open a file of bytes that may be damaged: its tensors fit in it, or one line says what is
    wrong.
    """
    line = ""
    try:
        files: Any = open_files([path])
        assert sum(files.tensor_info(name).nbytes for name in files.names()) <= nbytes
    except CheckpointError as error:
        line = str(error)
    assert "\n" not in line
