"""MiniGPT-4's image part in plain float32: EVA's ViT-g, BLIP-2's norm and Q-Former, projection.

It is written from the papers (arXiv:2211.07636, 2301.12597, 2304.10592) and the layout of the
published files, and shares nothing with models, nn, ops or rename rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights, project
from modelmill.accept.reference.tensor_source import OpenedCheckpoint
from modelmill.accept.reference.vision_reference import (
    EngineMatrices,
    ReferenceNorm,
    ReferenceStage,
    VisionReference,
)

VISION_ENCODER_PREFIX = "visual_encoder"
QFORMER_PREFIX = "Qformer.bert"
# of the norm between vision encoder and Q-Former: torch's default, as in BLIP-2
LN_VISION_EPS = 1e-5
VISION_ENCODER_EPS, QFORMER_EPS = 1e-6, 1e-12


class MiniGpt4VisionReference(VisionReference):
    """The image part of a checkpoint."""

    def __init__(
        self, checkpoint: OpenedCheckpoint, engine_matrices: EngineMatrices | None = None
    ) -> None:
        super().__init__(checkpoint, engine_matrices)
        embedder_config: Mapping[str, Any] = checkpoint.config["image_embedder"]
        self.vision_config, self.qformer_config = (
            embedder_config["vision_encoder"],
            embedder_config["qformer"],
        )
        self.patch_size = int(
            self.source.get(f"{VISION_ENCODER_PREFIX}.patch_embed.proj.weight").shape[-1]
        )
        self.image_size = self.patch_size * round(
            (self.source.get(f"{VISION_ENCODER_PREFIX}.pos_embed").shape[1] - 1) ** 0.5
        )
        eps: Mapping[str, float] = embedder_config.get("eps", {})
        self.eps = {
            "vision_encoder": VISION_ENCODER_EPS,
            "between": LN_VISION_EPS,
            "qformer": QFORMER_EPS,
            **eps,
        }

    def normalize_image(self, image: Tensor) -> Tensor:
        """Normalize [S, S, 3] uint8 to [1, 3, S, S]."""
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
        return ((image.float() / 255 - mean) / std).permute(2, 0, 1)[None]

    def encoder_stages(self, x: Tensor) -> Iterator[ReferenceStage]:
        """Yield the stages from the normalized image to its embeddings [1, 32, hidden]."""
        for stage in self._vit_stages(x):
            yield stage
        vision_output = stage.expected[0]
        normed = self._norm(
            ("image_embedder.ln_vision", "ln_vision"),
            vision_output,
            self.eps["between"],
            None,
            "ln_vision",
        )
        yield ReferenceStage(
            "image_embedder.ln_vision", None, "ln_vision", (vision_output,), (normed,)
        )
        queries = self.source.get("query_tokens")
        for stage in self._qformer_stages(queries, normed):
            yield stage
        query_output = stage.expected[0]
        out = self._linear("llama_proj", query_output)
        yield _flattened_linear_stage("image_embedder.proj", None, "proj", query_output, out)

    def _vit_stages(self, x: Tensor) -> Iterator[ReferenceStage]:
        kernel, bias = (
            self.source.get(f"{VISION_ENCODER_PREFIX}.patch_embed.proj.{end}")
            for end in ("weight", "bias")
        )
        # each patch's pixels times the kernel, from the definition
        patches = (
            F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
            @ kernel.flatten(1).t()
            + bias
        )
        yield ReferenceStage(
            "image_embedder.visual_encoder.patch_embed", None, "patch_embed", (x,), (patches,)
        )
        stream = torch.cat(
            (self.source.get(f"{VISION_ENCODER_PREFIX}.cls_token"), patches), 1
        ) + self.source.get(f"{VISION_ENCODER_PREFIX}.pos_embed")
        eps = self.eps["vision_encoder"]
        for i in range(int(self.vision_config["depth"])):
            engine_name = f"image_embedder.visual_encoder.blocks.{i}"
            file_name = f"{VISION_ENCODER_PREFIX}.blocks.{i}"
            before = stream
            names = f"{engine_name}.norm1", f"{file_name}.norm1"
            normed = self._norm(names, stream, eps, i, "vision_encoder.norm1")
            yield ReferenceStage(
                f"{engine_name}.norm1", i, "vision_encoder.norm1", (stream,), (normed,)
            )
            q, k, v = self._linear(f"{file_name}.attn.qkv", normed).chunk(3, -1)
            yield _flattened_linear_stage(
                f"{engine_name}.attn.qkv", i, "vision_encoder.qkv", normed, torch.cat((q, k, v), -1)
            )
            inner = _attention_core(q, k, v, int(self.vision_config["heads"]))
            mixed = self._linear(f"{file_name}.attn.proj", inner)
            yield _flattened_linear_stage(
                f"{engine_name}.attn.proj", i, "vision_encoder.proj", inner, mixed
            )
            yield ReferenceStage(
                f"{engine_name}.attn", i, "vision_encoder.attn", (normed,), (mixed,)
            )
            stream = stream + mixed
            names = f"{engine_name}.norm2", f"{file_name}.norm2"
            normed = self._norm(names, stream, eps, i, "vision_encoder.norm2")
            yield ReferenceStage(
                f"{engine_name}.norm2", i, "vision_encoder.norm2", (stream,), (normed,)
            )
            inner = self._linear(f"{file_name}.mlp.fc1", normed)
            yield _flattened_linear_stage(
                f"{engine_name}.mlp.fc1", i, "vision_encoder.fc1", normed, inner
            )
            out = self._linear(f"{file_name}.mlp.fc2", F.gelu(inner))
            yield _flattened_linear_stage(
                f"{engine_name}.mlp.fc2", i, "vision_encoder.fc2", F.gelu(inner), out
            )
            yield ReferenceStage(f"{engine_name}.mlp", i, "vision_encoder.mlp", (normed,), (out,))
            stream = stream + out
            yield ReferenceStage(engine_name, i, "vision_encoder.block", (before,), (stream,))

    def read_linear(self, name: str) -> ModuleWeights:
        """Return a linear layer of the checkpoint by its name there; keys have no bias."""
        weight = self.source.get(f"{name}.weight")
        if not name.endswith(".attn.qkv"):
            return ModuleWeights(weight, self.source.get(f"{name}.bias"))
        q, v = (self.source.get(f"{name.removesuffix('qkv')}{part}_bias") for part in "qv")
        return ModuleWeights(weight, torch.cat((q, torch.zeros_like(q), v)))

    def checkpoint_matrix_by_engine_path(self, path: str) -> Tensor:
        """Return the checkpoint's matrix of the engine's module ``path``."""
        return self.read_linear(path.removeprefix("image_embedder.")).weight

    def _qformer_stages(self, x: Tensor, image_features: Tensor) -> Iterator[ReferenceStage]:
        start = self._norm(
            ("image_embedder.qformer.norm", f"{QFORMER_PREFIX}.embeddings.LayerNorm"),
            x,
            self.eps["qformer"],
            None,
            "qformer.norm",
        )
        yield ReferenceStage("image_embedder.qformer.norm", None, "qformer.norm", (x,), (start,))
        x = start
        for i in range(int(self.qformer_config["depth"])):
            engine_name, file_name = (
                f"image_embedder.qformer.layer.{i}",
                f"{QFORMER_PREFIX}.encoder.layer.{i}",
            )
            before = x
            for part in (
                "attention",
                *(
                    ("crossattention",)
                    if i % int(self.qformer_config["cross_attention_frequency"]) == 0
                    else ()
                ),
            ):
                for stage in self._qformer_attention_stages(
                    (f"{engine_name}.{part}", f"{file_name}.{part}"), x, image_features, i, part
                ):
                    yield stage
                x = stage.expected[0]
            inner = self._linear(f"{file_name}.intermediate_query.dense", x)
            yield _flattened_linear_stage(
                f"{engine_name}.intermediate_query.dense", i, "qformer.up", x, inner
            )
            names = (f"{engine_name}.output_query", f"{file_name}.output_query")
            out = self._linear(f"{names[1]}.dense", F.gelu(inner))
            yield _flattened_linear_stage(
                f"{names[0]}.dense", i, "qformer.down", F.gelu(inner), out
            )
            x = self._project_add_norm(names, F.gelu(inner), x, i, "feed_forward")
            yield ReferenceStage(engine_name, i, "qformer.layer", (before, image_features), (x,))

    def _qformer_attention_stages(
        self,
        names: tuple[str, str],
        x: Tensor,
        image_features: Tensor,
        layer: int,
        attention_name: str,
    ) -> Iterator[ReferenceStage]:
        """Attention of the queries to themselves or to the image, with residual and norm."""
        engine_name, file_name = names
        source = x if attention_name == "attention" else image_features
        inputs = {"query": x, "key": source, "value": source}
        made = {
            name: self._linear(f"{file_name}.self.{name}", value) for name, value in inputs.items()
        }
        for name, value in inputs.items():
            yield _flattened_linear_stage(
                f"{engine_name}.self.{name}",
                layer,
                f"qformer.{attention_name}.{name}",
                value,
                made[name],
            )
        mixed = _attention_core(
            made["query"], made["key"], made["value"], int(self.qformer_config["heads"])
        )
        dense = self._linear(f"{file_name}.output.dense", mixed)
        yield _flattened_linear_stage(
            f"{engine_name}.output.dense", layer, f"qformer.{attention_name}.dense", mixed, dense
        )
        out = self._project_add_norm(
            (f"{engine_name}.output", f"{file_name}.output"), mixed, x, layer, attention_name
        )
        yield ReferenceStage(engine_name, layer, f"qformer.{attention_name}", (x, source), (out,))

    def _project_add_norm(
        self, names: tuple[str, str], x: Tensor, residual: Tensor, layer: int, module: str
    ) -> Tensor:
        """Projection, residual and norm.

        names: the engine's and the file's.
        """
        engine_name, file_name = names
        total = self._linear(f"{file_name}.dense", x) + residual
        return self._norm(
            (f"{engine_name}.LayerNorm", f"{file_name}.LayerNorm"),
            total,
            self.eps["qformer"],
            layer,
            f"qformer.{module}.norm",
        )

    def _norm(
        self, names: tuple[str, str], x: Tensor, eps: float, layer: int | None, module: str
    ) -> Tensor:
        """Apply a norm by its names in the engine and in the file."""
        engine_name, file_name = names
        weight = self.source.get(f"{file_name}.weight")
        bias = self.source.get(f"{file_name}.bias")
        return self.apply_and_register_norm(
            ReferenceNorm(engine_name, layer, module, weight, bias, eps), x
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return project(x, self.engine_or_checkpoint_weights(name, f"image_embedder.{name}"))


def _attention_core(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Full attention of [1, T, C] each, head by head."""
    out = []
    for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        weights = torch.softmax(a @ b.transpose(1, 2) / math.sqrt(a.shape[-1]), -1)
        out.append(weights @ c)
    return torch.cat(out, -1)


def _flattened_linear_stage(
    path: str, layer: int | None, module: str, x: Tensor, expected: Tensor
) -> ReferenceStage:
    """Return the stage of a linear layer alone; it reads rows."""
    return ReferenceStage(path, layer, module, (x.flatten(0, -2),), (expected.flatten(0, -2),))
