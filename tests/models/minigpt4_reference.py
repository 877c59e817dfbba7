"""MiniGPT-4 in plain float32 out of transformers' parts: BLIP-2's vision model and Q-Former, and
LlamaForCausalLM.

Weights are mapped from the published files by hand, prompts are cut and tokenized with
sentencepiece itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import sentencepiece
import torch
import transformers

from tests.models.minigpt4_seeded import HIDDEN, QFORMER, VISION_ENCODER

SYSTEM = (
    "Give the following image: <Img>ImageContent</Img>. You will be able to see the image once I "
    "provide it to you. "
    "Please answer my questions.###"
)


class MiniGpt4Reference:
    """The reference: ``embed`` a picture, ``answer`` a prompt that is cut at its pictures."""

    def __init__(self, folder: Path) -> None:
        def load(name: str) -> dict[str, Any]:
            checkpoint = torch.load(folder / name, weights_only=True)
            return checkpoint.get("model", checkpoint)

        eva, blip, projection = (
            load(f)
            for f in ("eva_vit_g.pth", "blip2_pretrained_flant5xxl.pth", "pretrained_minigpt4.pth")
        )
        self.vision = transformers.Blip2VisionModel(
            transformers.Blip2VisionConfig(
                hidden_size=VISION_ENCODER["width"], intermediate_size=VISION_ENCODER["inner"],
                num_hidden_layers=VISION_ENCODER["depth"],
                num_attention_heads=VISION_ENCODER["heads"],
                image_size=VISION_ENCODER["image"], patch_size=VISION_ENCODER["patch"],
                layer_norm_eps=1e-6, qkv_bias=True,
            )
        ).eval()  # fmt: skip
        self.vision.load_state_dict(_vision(eva, blip), strict=True)
        # BLIP-2's own norm behind the vision encoder has torch's default
        self.vision.post_layernorm.eps = 1e-5
        self.qformer = transformers.Blip2QFormerModel(
            transformers.Blip2QFormerConfig(
                hidden_size=QFORMER["width"], num_hidden_layers=QFORMER["depth"],
                num_attention_heads=QFORMER["heads"], intermediate_size=QFORMER["inner"],
                encoder_hidden_size=QFORMER["image_width"],
                cross_attention_frequency=QFORMER["cross_attention_frequency"],
                layer_norm_eps=1e-12,
            )
        ).eval()  # fmt: skip
        self.qformer.load_state_dict(_qformer(blip), strict=True)
        self.queries = blip["query_tokens"]
        self.projection = torch.nn.Linear(QFORMER["width"], HIDDEN)
        self.projection.load_state_dict(
            {k.removeprefix("llama_proj."): v for k, v in projection.items()}
        )
        self.llama = transformers.LlamaForCausalLM.from_pretrained(folder / "vicuna").float().eval()
        self.tokenizer = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / "vicuna" / "tokenizer.model")
        )

    @torch.inference_mode()
    def embed(self, picture: PIL.Image.Image) -> torch.Tensor:
        """[queries, hidden]."""
        size = VISION_ENCODER["image"]
        small = np.asarray(
            picture.convert("RGB").resize((size, size), PIL.Image.Resampling.BICUBIC)
        )
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
        x = ((torch.from_numpy(small.copy()).float() / 255 - mean) / std).permute(2, 0, 1)[None]
        image_features = self.vision(x).last_hidden_state
        query_output = self.qformer(
            query_embeds=self.queries, encoder_hidden_states=image_features
        ).last_hidden_state
        return self.projection(query_output)[0]

    @torch.inference_mode()
    def answer(
        self, prompt: str, pictures: Sequence[PIL.Image.Image], count: int, **options: Any
    ) -> list[int]:
        """Greedy ids; ``prompt`` has <ImageHere> where the pictures go.

        how: more of generate's options.
        """
        texts = prompt.split("<ImageHere>")
        assert len(texts) == len(pictures) + 1
        embed = self.llama.get_input_embeddings()
        parts = []
        for index, text in enumerate(texts):
            ids = ([1] if index == 0 else []) + self.tokenizer.encode(text)
            parts.append(embed(torch.tensor([ids])))
            if index < len(pictures):
                parts.append(self.embed(pictures[index])[None])
        embeddings = torch.cat(parts, 1)
        mask = torch.ones(embeddings.shape[:2], dtype=torch.long)
        out = self.llama.generate(
            inputs_embeds=embeddings, attention_mask=mask,
            max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, **options,
        )  # fmt: skip
        return out[0].tolist()


def _vision(eva: dict[str, torch.Tensor], blip: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {
        "embeddings.class_embedding": eva["cls_token"],
        "embeddings.position_embedding": eva["pos_embed"],
        "embeddings.patch_embedding.weight": eva["patch_embed.proj.weight"],
        "embeddings.patch_embedding.bias": eva["patch_embed.proj.bias"],
        "post_layernorm.weight": blip["ln_vision.weight"],
        "post_layernorm.bias": blip["ln_vision.bias"],
    }
    for i in range(VISION_ENCODER["depth"]):
        eva_block, reference = f"blocks.{i}.", f"encoder.layers.{i}."
        zeros = torch.zeros_like(eva[eva_block + "attn.q_bias"])
        out[reference + "self_attn.qkv.weight"] = eva[eva_block + "attn.qkv.weight"]
        out[reference + "self_attn.qkv.bias"] = torch.cat(
            (eva[eva_block + "attn.q_bias"], zeros, eva[eva_block + "attn.v_bias"])
        )
        for end in ("weight", "bias"):
            out[f"{reference}self_attn.projection.{end}"] = eva[f"{eva_block}attn.proj.{end}"]
            for one, other in (
                ("norm1", "layer_norm1"),
                ("norm2", "layer_norm2"),
                ("mlp.fc1", "mlp.fc1"),
                ("mlp.fc2", "mlp.fc2"),
            ):
                out[f"{reference}{other}.{end}"] = eva[f"{eva_block}{one}.{end}"]
    return out


def _qformer(blip: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in blip.items():
        if name.startswith("Qformer.bert.embeddings.LayerNorm"):
            out[name.replace("Qformer.bert.embeddings.LayerNorm", "layernorm")] = tensor
        if not name.startswith("Qformer.bert.encoder."):
            continue
        rest = name.removeprefix("Qformer.bert.")
        if ".intermediate." in rest or (".output." in rest and "attention.output" not in rest):
            continue  # the words' branch
        out[rest.replace("attention.self.", "attention.attention.")] = tensor
    return out
