"""Write a checkpoint of a known shape with seeded random weights, in Hugging Face layout.

    python benchmarks/make_checkpoint.py qwen-7b out/qwen7b [--layers N] [--weights normal|uniform]

Every tensor is filled with random values (zeros run faster than real data would). ``normal``:
matrices get a spread of 1/sqrt(inputs), so that activations keep their size and the acceptance
contract has something to see. ``uniform``: everything within 0.001, as vLLM makes weights up; where
power is the limit, what is multiplied decides the time too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

QWEN_7B = {
    "model_type": "qwen", "architectures": ["QWenLMHeadModel"], "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "kv_channels": 128,
    "intermediate_size": 22016,
    "seq_length": 8192, "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 1.0, "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 151643, "eos_token_id": 151643, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_7B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2_MEDIUM = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16, "n_positions": 1024, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "bos_token_id": 50256, "eos_token_id": 50256, "torch_dtype": "float16",
}  # fmt: skip
NORMAL, UNIFORM = "normal", "uniform"
UNIFORM_RANGE = 1e-3
"""Uniform weights are within it: what vLLM's ``load_format="dummy"`` draws, norms and biases as
well.
"""
SHAPES = {"qwen-7b": QWEN_7B, "llama-7b": LLAMA_7B, "gpt2-medium": GPT2_MEDIUM}


def with_num_layers(shape: str, layers: int | None = None) -> dict[str, object]:
    """Return the config of a shape, with ``layers`` layers if given."""
    config: dict[str, object] = {**SHAPES[shape]}
    if layers is not None:
        config["n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"] = layers
    return config


def tensors(config: dict[str, object]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes by name, one dict a shard: the ends, then one a layer."""
    model_type = config["model_type"]
    if model_type == "gpt2":
        yield from _gpt2_tensors(config)
        return
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])  # type: ignore[call-overload]
    inner = int(config["intermediate_size"]) // (2 if model_type == "qwen" else 1)  # type: ignore[call-overload]
    layers = int(config["num_hidden_layers"])  # type: ignore[call-overload]
    if model_type == "qwen":
        yield {
            "transformer.wte.weight": (vocab, hidden), "transformer.ln_f.weight": (hidden,),
            "lm_head.weight": (vocab, hidden),
        }  # fmt: skip
        for i in range(layers):
            stem = f"transformer.h.{i}"
            yield {
                f"{stem}.ln_1.weight": (hidden,), f"{stem}.ln_2.weight": (hidden,),
                f"{stem}.attn.c_attn.weight": (3 * hidden, hidden),
                f"{stem}.attn.c_attn.bias": (3 * hidden,),
                f"{stem}.attn.c_proj.weight": (hidden, hidden),
                f"{stem}.mlp.w1.weight": (inner, hidden),
                f"{stem}.mlp.w2.weight": (inner, hidden),
                f"{stem}.mlp.c_proj.weight": (hidden, inner),
            }  # fmt: skip
        return
    yield {
        "model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden)
    }  # fmt: skip
    for i in range(layers):
        stem = f"model.layers.{i}"
        attention = {f"{stem}.self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
        yield {
            f"{stem}.input_layernorm.weight": (hidden,),
            f"{stem}.post_attention_layernorm.weight": (hidden,),
            **attention, f"{stem}.mlp.gate_proj.weight": (inner, hidden),
            f"{stem}.mlp.up_proj.weight": (inner, hidden),
            f"{stem}.mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip


def _gpt2_tensors(config: dict[str, object]) -> Iterator[dict[str, tuple[int, ...]]]:
    hidden, vocab = int(config["n_embd"]), int(config["vocab_size"])  # type: ignore[call-overload]
    places, layers = int(config["n_positions"]), int(config["n_layer"])  # type: ignore[call-overload]
    yield {
        "wte.weight": (vocab, hidden),
        "wpe.weight": (places, hidden),
        "ln_f.weight": (hidden,),
        "ln_f.bias": (hidden,),
    }
    for i in range(layers):
        shapes = {f"h.{i}.{n}.{p}": (hidden,) for n in ("ln_1", "ln_2") for p in ("weight", "bias")}
        for name, rows, columns in (("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
                                    ("mlp.c_fc", hidden, 4 * hidden),
                                    ("mlp.c_proj", 4 * hidden, hidden)):  # fmt: skip
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
        yield shapes


def fill(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    weights: str = NORMAL,
) -> torch.Tensor:
    """Fill a tensor with seeded random weights.

    normal: norm weights around 1, embeddings of unit standard deviation, matrices of
    1/sqrt(inputs). uniform: every tensor uniform.
    """
    if weights == UNIFORM:
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
        return ((2 * drawn - 1) * UNIFORM_RANGE).to(dtype).cpu()
    value = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    if len(shape) == 1:
        norm = name.endswith("weight")
        value = value * 0.1 + (1.0 if norm else 0.0)
    elif "wte" not in name and "embed" not in name:
        # Conv1D keeps [in, out]
        inputs = shape[0] if name.startswith("h.") else shape[1]
        value = value * inputs**-0.5
    return value.to(dtype).cpu()


def main() -> None:
    """Write the shards, the index and the config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="other than the shape's, for a dry run")
    parser.add_argument(
        "--weights", choices=(NORMAL, UNIFORM), default=NORMAL, help="how they are drawn"
    )
    args = parser.parse_args()
    config = with_num_layers(args.shape, args.layers)
    dtype = getattr(torch, str(config["torch_dtype"]))
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(
        args.seed
    )
    args.out.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for number, shard in enumerate(tensors(config)):
        file = f"model-{number:05d}.safetensors"
        drawn = {
            name: fill(name, shape, dtype, generator, args.weights) for name, shape in shard.items()
        }
        save_file(drawn, args.out / file)
        where |= dict.fromkeys(shard, file)
    (args.out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{args.out}: {len(where)} tensors")


if __name__ == "__main__":
    main()
