"""A small MiniGPT-4 with seeded weights in its published files: LLaMA folder, EVA, BLIP-2 and
projection .pth.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

VISION_ENCODER = {"width": 48, "depth": 3, "heads": 3, "inner": 80, "image": 56, "patch": 14}
QFORMER = {
    "width": 32,
    "depth": 4,
    "heads": 4,
    "inner": 56,
    "image_width": 48,
    "cross_attention_frequency": 2,
    "queries": 8,
}
HIDDEN = 64


def random_values(
    generator: torch.Generator, *shape: int, std: float | None = None, mean: float = 0.0
) -> torch.Tensor:
    """Values that keep activations near 1."""
    fan = torch.Size(shape[1:]).numel() if len(shape) > 1 else 1
    scale = std if std is not None else (fan**-0.5 if len(shape) > 1 else 0.1)
    return torch.randn(shape, generator=generator) * scale + mean


def vision_encoder_state(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """eva_vit_g.pth's names, with the unused last block and the head's norm."""
    w, inner, places = (
        VISION_ENCODER["width"],
        VISION_ENCODER["inner"],
        (VISION_ENCODER["image"] // VISION_ENCODER["patch"]) ** 2 + 1,
    )
    out = {
        "cls_token": random_values(generator, 1, 1, w, std=0.5),
        "pos_embed": random_values(generator, 1, places, w, std=0.5),
        "patch_embed.proj.weight": random_values(
            generator, w, 3, VISION_ENCODER["patch"], VISION_ENCODER["patch"]
        ),
        "patch_embed.proj.bias": random_values(generator, w),
        "norm.weight": random_values(generator, w),
        "norm.bias": random_values(generator, w),
    }
    for i in range(VISION_ENCODER["depth"] + 1):
        at = f"blocks.{i}."
        for norm in ("norm1", "norm2"):
            out[at + norm + ".weight"] = random_values(generator, w, mean=1)
            out[at + norm + ".bias"] = random_values(generator, w)
        out[at + "attn.qkv.weight"] = random_values(generator, 3 * w, w)
        out[at + "attn.q_bias"], out[at + "attn.v_bias"] = (
            random_values(generator, w),
            random_values(generator, w),
        )
        out |= _linear(generator, at + "attn.proj", w, w)
        out |= _linear(generator, at + "mlp.fc1", inner, w) | _linear(
            generator, at + "mlp.fc2", w, inner
        )
    return out


def qformer_state(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """blip2_pretrained's names: both branches of the Q-Former, words included, and a projection of
    its own.
    """
    w, inner, image_width = QFORMER["width"], QFORMER["inner"], QFORMER["image_width"]
    out = {
        "query_tokens": random_values(generator, 1, QFORMER["queries"], w, std=1.0),
        "ln_vision.weight": random_values(generator, image_width, mean=1),
        "ln_vision.bias": random_values(generator, image_width),
        "Qformer.bert.embeddings.word_embeddings.weight": random_values(generator, 20, w),
        "Qformer.bert.embeddings.position_embeddings.weight": random_values(generator, 16, w),
        "Qformer.bert.embeddings.position_ids": torch.arange(16)[None],
        "Qformer.bert.embeddings.LayerNorm.weight": random_values(generator, w, mean=1),
        "Qformer.bert.embeddings.LayerNorm.bias": random_values(generator, w),
        "t5_proj.weight": random_values(generator, 24, w),
        "t5_proj.bias": random_values(generator, 24),
    }
    for i in range(QFORMER["depth"]):
        at = f"Qformer.bert.encoder.layer.{i}."
        for part, width in (
            ("attention", w),
            *(
                (("crossattention", image_width),)
                if i % QFORMER["cross_attention_frequency"] == 0
                else ()
            ),
        ):
            out |= _linear(generator, f"{at}{part}.self.query", w, w)
            for name in ("key", "value"):
                out |= _linear(generator, f"{at}{part}.self.{name}", w, width)
            out |= _output(generator, f"{at}{part}.output", w, w)
        for branch in ("", "_query"):
            out |= _linear(generator, f"{at}intermediate{branch}.dense", inner, w)
            out |= _output(generator, f"{at}output{branch}", w, inner)
    return out


def projection_state(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return _linear(generator, "llama_proj", HIDDEN, QFORMER["width"])


def llama_folder(folder: Path, tokenizer: Path, seed: int = 5) -> None:
    """A Hugging Face LLaMA of Vicuna's vocabulary (32,001), with LLaMA's tokenizer.model."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=32001,
        max_position_embeddings=512, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.12,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.model")


def write_checkpoint(folder: Path, shared: Path, seed: int = 3, **settings: Any) -> Path:
    """The files side by side, as in a download; skips where transformers is
    missing.

    shared: the folder of real data, for LLaMA's tokenizer.
    """
    pytest.importorskip("transformers")
    tokenizer = shared / "data" / "tokenizers" / "llama" / "tokenizer.model"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    llama_folder(folder / "vicuna", tokenizer)
    torch.save(vision_encoder_state(generator), folder / "eva_vit_g.pth")
    torch.save({"model": qformer_state(generator)}, folder / "blip2_pretrained_flant5xxl.pth")
    projection = {
        "model": projection_state(generator),
        "iters": 20000,
        "config": {"run": {"seed": 42}},
    }
    torch.save(projection, folder / "pretrained_minigpt4.pth")
    sizes = {
        "vision_encoder": {"depth": VISION_ENCODER["depth"], "heads": VISION_ENCODER["heads"]},
        "qformer": {"heads": QFORMER["heads"]},
    }
    (folder / "minigpt4.json").write_text(json.dumps(sizes | settings))
    return folder


def _linear(generator: torch.Generator, name: str, out: int, inner: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": random_values(generator, out, inner),
        f"{name}.bias": random_values(generator, out),
    }


def _output(generator: torch.Generator, name: str, out: int, inner: int) -> dict[str, torch.Tensor]:
    norm = {
        f"{name}.LayerNorm.weight": random_values(generator, out, mean=1),
        f"{name}.LayerNorm.bias": random_values(generator, out),
    }
    return _linear(generator, f"{name}.dense", out, inner) | norm
