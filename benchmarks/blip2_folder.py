"""MiniGPT-4's sizes as peers read them: a folder of BLIP-2 with a LLaMA, and random pictures.

The folder holds no weights. Tokenizer and image processor are of this file, so that a peer that
insists on both needs no network: ids go in and come out, and only the mark of a picture is a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IMAGE_TOKEN = "<image>"
IMAGE_TOKEN_ID = 0
"""Below every id of a random prompt."""


def blip2_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of BLIP-2 with the sizes of one of ours (``minigpt4.make_config``)."""
    embedder = config["image_embedder"]
    tower, qformer = embedder["vision_encoder"], embedder["qformer"]
    text = {key: value for key, value in config.items() if key != "image_embedder"}
    text |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    vision = {
        "model_type": "blip_2_vision_model", "hidden_size": tower["width"],
        "intermediate_size": tower["inner"], "num_hidden_layers": tower["depth"],
        "num_attention_heads": tower["heads"], "image_size": tower["image"],
        "patch_size": tower["patch"], "hidden_act": "gelu", "qkv_bias": True,
    }  # fmt: skip
    asking = {
        "model_type": "blip_2_qformer", "hidden_size": qformer["width"],
        "num_hidden_layers": qformer["depth"], "num_attention_heads": qformer["heads"],
        "intermediate_size": qformer["inner"], "encoder_hidden_size": qformer["image_width"],
        "cross_attention_frequency": qformer["cross_attention_frequency"],
        "layer_norm_eps": 1e-12,
    }  # fmt: skip
    return {
        "model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"],
        "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "num_query_tokens": qformer["queries"], "image_token_index": IMAGE_TOKEN_ID,
        "text_config": text, "vision_config": vision, "qformer_config": asking,
    }  # fmt: skip


def write_blip2_folder(config: Mapping[str, Any], folder: Path) -> Path:
    """Write config, image processor and tokenizer of ``blip2_config`` into ``folder``."""
    from modelmill.models.minigpt4 import IMAGE_MEAN, IMAGE_STD

    made = blip2_config(config)
    side = made["vision_config"]["image_size"]
    words = [IMAGE_TOKEN, "<unk>", "<s>", "</s>"]
    words += [f"w{number}" for number in range(len(words), made["text_config"]["vocab_size"])]
    special = [
        {
            "id": number, "content": word, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": True,
        }
        for number, word in enumerate(words[:4])
    ]  # fmt: skip
    files: dict[str, dict[str, Any]] = {
        "config.json": made,
        "preprocessor_config.json": {
            "image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor",
            "do_resize": True, "size": {"height": side, "width": side}, "resample": 3,
            "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
            "image_mean": list(IMAGE_MEAN), "image_std": list(IMAGE_STD), "do_convert_rgb": True,
        },
        "processor_config.json": {
            "processor_class": "Blip2Processor",
            "num_query_tokens": made["num_query_tokens"],
        },
        "tokenizer.json": {
            "version": "1.0", "added_tokens": special,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {
                "type": "WordLevel", "unk_token": "<unk>",
                "vocab": {word: number for number, word in enumerate(words)},
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>",
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>",
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def random_images(count: int, seed: int, side: int) -> torch.Tensor:
    """[count, S, S, 3] uint8 that no other seed gives."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
