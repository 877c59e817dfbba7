"""SAM in plain float32, written from the papers and the layout of the files.

See arXiv:2304.02643 and 2306.14289. It shares nothing with models, nn, ops or rename rules. Every
stage is a ``ReferenceStage``: its place in the engine, its inputs and its expected outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.tensor_source import OpenedCheckpoint
from modelmill.accept.reference.vision_reference import (
    EngineMatrices,
    ReferenceNorm,
    ReferenceStage,
    VisionReference,
)
from modelmill.core.errors import TensorMismatch

BATCH_NORM_EPS = 1e-5


class SamReference(VisionReference):
    """A checkpoint's three stages."""

    def __init__(
        self, checkpoint: OpenedCheckpoint, engine_matrices: EngineMatrices | None = None
    ) -> None:
        super().__init__(checkpoint, engine_matrices)
        names = checkpoint.raw_container.names()
        self.is_transformers_layout = "vision_encoder.pos_embed" in names
        self._prefix = next(
            (p for p in ("", "module.", "model.") if f"{p}mask_decoder.iou_token.weight" in names),
            "",
        )
        vision: Mapping[str, Any] = checkpoint.config.get("vision_config") or {}
        self.is_mobile_sam = f"{self._prefix}image_encoder.patch_embed.seq.0.c.weight" in names
        if not self.is_mobile_sam:
            grid, width = self.get("image_encoder.pos_embed").shape[2:]
            self.tokens_per_side, self.width = int(grid), int(width)
            self.patch_size = int(self.get("image_encoder.patch_embed.proj.weight").shape[-1])
            known = {768: 12, 1024: 16, 1280: 16}
            table = self.get("image_encoder.blocks.0.attn.rel_pos_h").shape[1]
            self.heads = int(
                vision.get("num_attention_heads") or known.get(self.width, self.width // table)
            )
            self.eps = float(vision.get("layer_norm_eps", 1e-6))
            self.image_size = self.tokens_per_side * self.patch_size
        else:
            self.tokens_per_side = 64
            self.image_size = 1024
            self.eps = 1e-5
        self.depth = 0 if self.is_mobile_sam else self._count_encoder_blocks()
        # the longer tables belong to layers with global attention, for this image size or another
        rows = [
            int(self.get(f"image_encoder.blocks.{i}.attn.rel_pos_h").shape[0])
            for i in range(self.depth)
        ]
        self._window_table_rows = (
            min(rows, default=0)
            if len(set(rows)) > 1 or set(rows) != {2 * self.tokens_per_side - 1}
            else 0
        )

    def get(self, name: str) -> Tensor:
        """Return a tensor in float32 by its name in the original files."""
        return self.source.get(self._checkpoint_tensor_name(name))

    def _count_encoder_blocks(self) -> int:
        depth = 0
        stem = "image_encoder.blocks.{}.mlp.lin1.weight"
        while self.source.has(self._checkpoint_tensor_name(stem.format(depth))):
            depth += 1
        return depth

    def _checkpoint_tensor_name(self, name: str) -> str:
        return _transformers_name(name) if self.is_transformers_layout else self._prefix + name

    def norm(self, path: str, x: Tensor, eps: float, channels: bool = False) -> Tensor:
        """Apply a norm by its path."""
        weight, bias = self.get(f"{path}.weight"), self.get(f"{path}.bias")
        norm = ReferenceNorm(path, *split_encoder_path(path), weight, bias, eps, channels)
        return self.apply_and_register_norm(norm, x)

    def read_linear(self, path: str) -> ModuleWeights:
        """Return [out, in] and [out] of a linear layer, or of a 1×1 convolution with batch norm."""
        if not self.source.has(self._checkpoint_tensor_name(f"{path}.c.weight")):
            return ModuleWeights(self.get(f"{path}.weight"), self.get(f"{path}.bias"))
        factor = (
            self.get(f"{path}.bn.weight")
            / (self.get(f"{path}.bn.running_var") + BATCH_NORM_EPS).sqrt()
        )
        weight = self.get(f"{path}.c.weight")[:, :, 0, 0] * factor[:, None]
        return ModuleWeights(
            weight, self.get(f"{path}.bn.bias") - self.get(f"{path}.bn.running_mean") * factor
        )

    def linear(self, path: str, x: Tensor) -> Tensor:
        """Apply a linear layer: […, in] → […, out]."""
        weight, bias, fake_quantize = self.engine_or_checkpoint_weights(path, path)
        y = (x if fake_quantize is None else fake_quantize(x)) @ weight.t()
        return y if bias is None else y + bias

    def normalize_image(self, image: Tensor) -> Tensor:
        """Normalize [H, W, 3] uint8 whose longer side is the encoder's to [1, 3, S, S]."""
        mean, std = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
        x = ((image.float() - mean) / std).permute(2, 0, 1)
        return F.pad(x, (0, self.image_size - x.shape[2], 0, self.image_size - x.shape[1]))[None]

    def encoder_stages(self, x: Tensor) -> Iterator[ReferenceStage]:
        """Yield the stages from the normalized image to its embedding, the last output."""
        yield from self._tiny_vit_stages(x) if self.is_mobile_sam else self._vit_stages(x)

    def _vit_stages(self, x: Tensor) -> Iterator[ReferenceStage]:
        proj = "image_encoder.patch_embed.proj"
        tokens = F.conv2d(
            x, self.get(f"{proj}.weight"), self.get(f"{proj}.bias"), stride=self.patch_size
        )
        tokens = tokens.permute(0, 2, 3, 1)
        yield ReferenceStage("image_encoder.patch_embed", None, "patch_embed", (x,), (tokens,))
        x = tokens + self.get("image_encoder.pos_embed")
        for i in range(self.depth):
            path = f"image_encoder.blocks.{i}"
            normed = self.norm(f"{path}.norm1", x, self.eps)
            yield ReferenceStage(f"{path}.norm1", i, "norm1", (x,), (normed,))
            mixed = self._relative_position_attention(f"{path}.attn", normed)
            yield ReferenceStage(f"{path}.attn", i, "attn", (normed,), (mixed,))
            x = x + mixed
            normed = self.norm(f"{path}.norm2", x, self.eps)
            yield ReferenceStage(f"{path}.norm2", i, "norm2", (x,), (normed,))
            inner = self.linear(f"{path}.mlp.lin2", F.gelu(self.linear(f"{path}.mlp.lin1", normed)))
            yield ReferenceStage(f"{path}.mlp", i, "mlp", (normed,), (inner,))
            x = x + inner
        yield from self._neck_stages(x.permute(0, 3, 1, 2))

    def _relative_position_attention(self, path: str, x: Tensor) -> Tensor:
        """Attention of [1, H, W, C] by windows, or global if the tables are long enough."""
        _, height, width, channels = x.shape
        high, wide = self.get(f"{path}.rel_pos_h"), self.get(f"{path}.rel_pos_w")
        side = (high.shape[0] + 1) // 2 if high.shape[0] == self._window_table_rows else height
        out = torch.zeros_like(x)
        padded = F.pad(x, (0, 0, 0, -width % side, 0, -height % side))
        offsets = torch.arange(side)[:, None] - torch.arange(side)[None] + side - 1
        # the tables have this size in every published file; otherwise they are interpolated
        rows, columns = (_resize_position_table(t, 2 * side - 1)[offsets] for t in (high, wide))
        for top in range(0, padded.shape[1], side):
            for left in range(0, padded.shape[2], side):
                window = padded[0, top : top + side, left : left + side].reshape(
                    side * side, channels
                )
                done = self._single_window_attention(path, window, side, rows, columns)
                tall, broad = min(side, height - top), min(side, width - left)
                out[0, top : top + tall, left : left + broad] = done[:tall, :broad]
        return out

    def _single_window_attention(
        self, path: str, window: Tensor, side: int, rows: Tensor, columns: Tensor
    ) -> Tensor:
        """Attention of the tokens of one window [side², C], as [side, side, C]."""
        channels, heads = window.shape[1], self.heads
        dim = channels // heads
        q, k, v = self.linear(f"{path}.qkv", window).view(-1, 3, heads, dim).permute(1, 2, 0, 3)
        mixed = torch.empty(heads, side * side, dim)
        for head in range(heads):  # one at a time: the whole image has 4096 tokens
            places = q[head].view(side, side, dim)
            above = torch.einsum("yxd,ykd->yxk", places, rows).reshape(side * side, side, 1)
            beside = torch.einsum("yxd,xkd->yxk", places, columns).reshape(side * side, 1, side)
            scores = (q[head] @ k[head].t()) / math.sqrt(dim) + (above + beside).reshape(
                side * side, -1
            )
            mixed[head] = scores.softmax(-1) @ v[head]
        return self.linear(f"{path}.proj", mixed.permute(1, 0, 2).reshape(side, side, channels))

    def _neck_stages(self, x: Tensor) -> Iterator[ReferenceStage]:
        path = "image_encoder.neck"
        y = F.conv2d(x, self.get(f"{path}.0.weight"))
        yield ReferenceStage(f"{path}.0", None, "neck.0", (x,), (y,))
        z = self.norm(f"{path}.1", y, 1e-6, channels=True)
        yield ReferenceStage(f"{path}.1", None, "neck.1", (y,), (z,))
        y = F.conv2d(z, self.get(f"{path}.2.weight"), padding=1)
        yield ReferenceStage(f"{path}.2", None, "neck.2", (z,), (y,))
        z = self.norm(f"{path}.3", y, 1e-6, channels=True)
        yield ReferenceStage(f"{path}.3", None, "neck.3", (y,), (z,))

    def _conv_batch_norm(
        self, path: str, x: Tensor, stride: int = 1, pad: int = 0, groups: int = 1
    ) -> Tensor:
        """Yield a convolution and its batch norm as two stages."""
        if path in self._engine_matrices:
            return self.linear(path, channels_last(x)).permute(0, 3, 1, 2)
        x = F.conv2d(x, self.get(f"{path}.c.weight"), None, stride, pad, groups=groups)
        mean, variance = self.get(f"{path}.bn.running_mean"), self.get(f"{path}.bn.running_var")
        weight, bias = self.get(f"{path}.bn.weight"), self.get(f"{path}.bn.bias")
        x = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + BATCH_NORM_EPS).sqrt()
        return x * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)

    def _tiny_vit_stages(self, x: Tensor) -> Iterator[ReferenceStage]:
        for index in (0, 2):
            y = self._conv_batch_norm(f"image_encoder.patch_embed.seq.{index}", x, 2, 1)
            yield ReferenceStage(
                f"image_encoder.patch_embed.{index}", None, f"patch_embed.{index}", (x,), (y,)
            )
            x = F.gelu(y) if index == 0 else y
        for index, (depth, heads, window) in enumerate(
            ((2, 2, 7), (2, 4, 7), (6, 5, 14), (2, 10, 7))
        ):
            for i in range(depth):
                path = f"image_encoder.layers.{index}.blocks.{i}"
                if index == 0:
                    y = F.gelu(self._conv_batch_norm(f"{path}.conv1", x))
                    y = F.gelu(self._conv_batch_norm(f"{path}.conv2", y, pad=1, groups=y.shape[1]))
                    y = F.gelu(x + self._conv_batch_norm(f"{path}.conv3", y))
                    yield ReferenceStage(
                        path, index, f"blocks.{i}", (channels_last(x),), (channels_last(y),)
                    )
                    x = y
                    continue
                tokens = x.permute(0, 2, 3, 1)
                mixed = self._bias_table_attention(f"{path}.attn", tokens, heads, window)
                yield ReferenceStage(f"{path}.attn", index, f"blocks.{i}.attn", (tokens,), (mixed,))
                x = (tokens + mixed).permute(0, 3, 1, 2)
                y = self._conv_batch_norm(f"{path}.local_conv", x, pad=1, groups=x.shape[1])
                yield ReferenceStage(
                    f"{path}.local_conv", index, f"blocks.{i}.local_conv", (x,), (y,)
                )
                tokens = y.permute(0, 2, 3, 1)
                inner = F.gelu(
                    self.linear(f"{path}.mlp.fc1", self.norm(f"{path}.mlp.norm", tokens, self.eps))
                )
                inner = self.linear(f"{path}.mlp.fc2", inner)
                yield ReferenceStage(f"{path}.mlp", index, f"blocks.{i}.mlp", (tokens,), (inner,))
                x = (tokens + inner).permute(0, 3, 1, 2)
            if index < 3:
                path = f"image_encoder.layers.{index}.downsample"
                y = F.gelu(self._conv_batch_norm(f"{path}.conv1", x))
                y = F.gelu(
                    self._conv_batch_norm(f"{path}.conv2", y, 1 if index == 2 else 2, 1, y.shape[1])
                )
                y = self._conv_batch_norm(f"{path}.conv3", y)
                yield ReferenceStage(
                    path, index, "downsample", (channels_last(x),), (channels_last(y),)
                )
                x = y
        yield from self._neck_stages(x)

    def _bias_table_attention(self, path: str, x: Tensor, heads: int, window: int) -> Tensor:
        """Attention of [1, H, W, C]: the image is padded with zeros before the norm."""
        _, height, width, channels = x.shape
        dim = channels // heads
        padded = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        normed = self.norm(f"{path}.norm", padded, self.eps)
        place = torch.arange(window)
        apart = (place[:, None] - place[None]).abs()
        offset = apart[:, None, :, None] * window + apart[None, :, None, :]
        bias = self.get(f"{path}.attention_biases")[:, offset.reshape(window**2, window**2)]
        out = torch.empty_like(padded)
        for top in range(0, padded.shape[1], window):
            for left in range(0, padded.shape[2], window):
                part = normed[0, top : top + window, left : left + window].reshape(-1, channels)
                q, k, v = (
                    self.linear(f"{path}.qkv", part).view(-1, heads, 3, dim).permute(2, 1, 0, 3)
                )
                weights = (q @ k.transpose(1, 2) * dim**-0.5 + bias).softmax(-1)
                mixed = (weights @ v).transpose(0, 1).reshape(-1, channels)
                done = self.linear(f"{path}.proj", mixed).view(window, window, channels)
                out[0, top : top + window, left : left + window] = done
        return out[:, :height, :width]


def split_encoder_path(path: str) -> tuple[int | None, str]:
    """Return the encoder layer of a module (None outside) and its name within the layer."""
    parts = path.split(".")
    layer = int(parts[2]) if parts[1] in ("blocks", "layers") else None
    return layer, ".".join(parts[3:] if layer is not None else parts[1:])


def channels_last(x: Tensor) -> Tensor:
    """Permute [B, C, H, W] to [B, H, W, C], the layout of the engine's modules."""
    return x.permute(0, 2, 3, 1)


def _resize_position_table(table: Tensor, length: int) -> Tensor:
    if len(table) == length:
        return table
    return F.interpolate(table.t()[None], size=length, mode="linear")[0].t()


_TRANSFORMERS_NAMES = {
    "image_encoder.patch_embed.proj": "vision_encoder.patch_embed.projection",
    "image_encoder.neck.0": "vision_encoder.neck.conv1",
    "image_encoder.neck.1": "vision_encoder.neck.layer_norm1",
    "image_encoder.neck.2": "vision_encoder.neck.conv2",
    "image_encoder.neck.3": "vision_encoder.neck.layer_norm2",
    "prompt_encoder.pe_layer.positional_encoding_gaussian_matrix": "shared_image_embedding.positional_embedding",  # noqa: E501
    "mask_decoder.output_upscaling.0": "mask_decoder.upscale_conv1",
    "mask_decoder.output_upscaling.1": "mask_decoder.upscale_layer_norm",
    "mask_decoder.output_upscaling.3": "mask_decoder.upscale_conv2",
    "mask_decoder.transformer.norm_final_attn": "mask_decoder.transformer.layer_norm_final_attn",
    "prompt_encoder.mask_downscaling.0": "prompt_encoder.mask_embed.conv1",
    "prompt_encoder.mask_downscaling.1": "prompt_encoder.mask_embed.layer_norm1",
    "prompt_encoder.mask_downscaling.3": "prompt_encoder.mask_embed.conv2",
    "prompt_encoder.mask_downscaling.4": "prompt_encoder.mask_embed.layer_norm2",
    "prompt_encoder.mask_downscaling.6": "prompt_encoder.mask_embed.conv3",
}


def _transformers_name(name: str) -> str:
    """Return an original name as in transformers' checkpoints."""
    for original, replacement in _TRANSFORMERS_NAMES.items():
        if name == original or name.startswith(original + "."):
            return replacement + name[len(original) :]
    parts = name.split(".")
    if parts[:2] == ["image_encoder", "blocks"]:
        parts[:2] = ["vision_encoder", "layers"]
    elif parts[0] == "image_encoder":
        parts[0] = "vision_encoder"
    elif parts[:2] == ["prompt_encoder", "point_embeddings"]:
        parts[1] = "point_embed"
    elif "output_hypernetworks_mlps" in parts or "iou_prediction_head" in parts:
        at = parts.index("layers")
        parts[at : at + 2] = {"0": ["proj_in"], "1": ["layers", "0"], "2": ["proj_out"]}[
            parts[at + 1]
        ]
    return ".".join(f"layer_{p}" if p in ("norm1", "norm2", "norm3", "norm4") else p for p in parts)


def check_is_sam(reference: SamReference) -> None:
    """Raise TensorMismatch early if the checkpoint is not a SAM."""
    if not reference.is_mobile_sam and not reference.depth:
        raise TensorMismatch("the checkpoint holds no image encoder of SAM")
