"""SmolLM2 in other clothes: as a QWenLMHeadModel checkpoint, and as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.verify.context import VerifyContext
from tools.verify.item_1_tokens import PROMPTS, TOKENS, encode_questions, greedy_ids
from tools.verify.result import Fact, VerifyResult, make_result

TITLE = "SmolLM2 re-laid as Qwen v1, and its GGUF against its safetensors: the same tokens"


def run(context: VerifyContext) -> VerifyResult:
    """Three checkpoints of the same weights, three engines, one set of tokens."""
    llm = context.llm("float32")
    prompts, eos = encode_questions(llm, context.questions(PROMPTS))
    expected = greedy_ids(llm, prompts, eos)
    del llm
    rows = []
    for what, lay in (
        ("QWenLMHeadModel folder", write_qwen_checkpoint),
        ("Hugging Face llama folder (safetensors)", write_llama_checkpoint),
    ):
        folder = context.out / "models" / lay.__name__.removeprefix("lay_")
        if not (folder / "config.json").exists():
            context.log(f"  laying {what}")
            lay(context.gguf, folder)
        other = context.llm("float32", checkpoint=folder)
        model_type = other.engine_core.artifact.manifest.model_type
        actual = greedy_ids(other, prompts, eos)
        same = sum(a == b for a, b in zip(actual, expected, strict=True))
        tokens = sum(map(len, expected))
        summary = (
            f"{same} of {len(expected)} answers equal, {tokens} tokens; accepted as model_type "
            f"{model_type}"
        )
        rows.append(Fact(f"as a {what}: the tokens of the GGUF", summary, same == len(expected)))
    return make_result(
        rows,
        [f"The prompts of item 1 as ids, {TOKENS} greedy tokens each, float32; ids in, ids out."],
    )


def write_llama_checkpoint(gguf: Path, folder: Path) -> None:
    """The checkpoint's tensors under their Hugging Face names, float32."""
    from modelmill.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(gguf)
    tensors = {name: checkpoint.get(name).float() for name in checkpoint.names()}
    config = {**checkpoint.config, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    _save(folder, tensors, config)


def write_qwen_checkpoint(gguf: Path, folder: Path) -> None:
    """Convert to Qwen v1.

    c_attn = q | k | v with each KV head repeated and no bias, w1 = up, w2 = gate, c_proj = down,
    untied head.
    """
    import torch

    from modelmill.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(gguf)
    raw = checkpoint.config
    heads, groups = (
        raw["num_attention_heads"],
        raw["num_attention_heads"] // raw["num_key_value_heads"],
    )
    hidden, dim = raw["hidden_size"], raw["hidden_size"] // heads

    def get(name: str) -> torch.Tensor:
        return checkpoint.get(name).float()

    def repeated(name: str) -> torch.Tensor:
        return get(name).reshape(-1, dim, hidden).repeat_interleave(groups, 0).reshape(-1, hidden)

    embed = get("model.embed_tokens.weight")
    tied = "lm_head.weight" not in checkpoint.names()
    tensors = {
        "transformer.wte.weight": embed,
        "transformer.ln_f.weight": get("model.norm.weight"),
        "lm_head.weight": embed.clone() if tied else get("lm_head.weight"),
    }
    for i in range(raw["num_hidden_layers"]):
        qwen_layer, llama_layer = f"transformer.h.{i}", f"model.layers.{i}"
        attn = f"{llama_layer}.self_attn"
        qkv = [
            get(f"{attn}.q_proj.weight"),
            repeated(f"{attn}.k_proj.weight"),
            repeated(f"{attn}.v_proj.weight"),
        ]
        tensors |= {
            f"{qwen_layer}.ln_1.weight": get(f"{llama_layer}.input_layernorm.weight"),
            f"{qwen_layer}.ln_2.weight": get(f"{llama_layer}.post_attention_layernorm.weight"),
            f"{qwen_layer}.attn.c_attn.weight": torch.cat(qkv),
            f"{qwen_layer}.attn.c_attn.bias": torch.zeros(3 * hidden),
            f"{qwen_layer}.attn.c_proj.weight": get(f"{attn}.o_proj.weight"),
            f"{qwen_layer}.mlp.w1.weight": get(f"{llama_layer}.mlp.up_proj.weight"),
            f"{qwen_layer}.mlp.w2.weight": get(f"{llama_layer}.mlp.gate_proj.weight"),
            f"{qwen_layer}.mlp.c_proj.weight": get(f"{llama_layer}.mlp.down_proj.weight"),
        }
    _save(folder, tensors, qwen_config(raw, len(embed)))


def qwen_config(raw: dict[str, Any], vocab: int) -> dict[str, Any]:
    """config.json of the re-laid checkpoint."""
    return {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "hidden_size": raw["hidden_size"],
        "intermediate_size": 2 * raw["intermediate_size"],
        "kv_channels": raw["hidden_size"] // raw["num_attention_heads"],
        "layer_norm_epsilon": raw["rms_norm_eps"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "no_bias": True,
        "num_attention_heads": raw["num_attention_heads"],
        "num_hidden_layers": raw["num_hidden_layers"],
        "rotary_emb_base": raw["rope_theta"],
        "rotary_pct": 1.0,
        "seq_length": raw["max_position_embeddings"],
        "tie_word_embeddings": False,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "vocab_size": vocab,
    }


def _save(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
