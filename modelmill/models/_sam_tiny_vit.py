"""MobileSAM's encoder, a TinyViT.

Zhang et al. 2023, arXiv:2306.14289; Wu et al. 2022, arXiv:2207.10666. Batch norms are folded into
their convolutions when the engine is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.models._rename_rules import SourceTensors, SourceTensorsByPath
from modelmill.models._sam_vit import make_neck
from modelmill.nn.conv import Conv2d, VisionLayerNorm
from modelmill.nn.layer_spec import CompositeSpec, LayerSpec, LinearSpec, ModuleSpec, NormSpec
from modelmill.nn.linear import Linear
from modelmill.nn.partition import NO_PARTITIONS
from modelmill.nn.vision_context import VisionContext
from modelmill.nn.vit import affine_norm_spec, biased_linear_spec, linear_input_sites
from modelmill.ops.image_attention import ImageAttentionInputs

POINTWISE_CONV_SUFFIXES = (".conv1", ".conv3")  # of a chain of three; linear layers here


@dataclass(frozen=True)
class TinyVitSpec:
    """Sizes of the four stages.

    The first has convolutions only, and the last does not halve the image.
    """

    widths: tuple[int, ...] = (64, 128, 160, 320)
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (2, 4, 5, 10)
    windows: tuple[int, ...] = (7, 7, 14, 7)
    strides: tuple[int, ...] = (2, 2, 1)
    out: int = 256
    image: int = 1024
    eps: float = 1e-5

    @property
    def tokens_per_side(self) -> int:
        """Tokens a side of the embedding."""
        return self.image // 16

    def stage_spec(self, stage: int) -> LayerSpec:
        """What a stage is made of; the reference's names are the paths inside it."""
        width, block = (
            self.widths[stage],
            _conv_block_specs_and_compared_paths
            if stage == 0
            else _vit_block_specs_and_compared_paths,
        )
        blocks = [block(f"blocks.{i}", width) for i in range(self.depths[stage])]
        modules = [module for inner, _ in blocks for module in inner]
        wholes = [path for _, names in blocks for path in names]
        if stage + 1 < len(self.widths):
            out = self.widths[stage + 1]
            modules += _convolution_specs("downsample", out, out)
            wholes.append("downsample")
        return LayerSpec(
            modules=tuple(modules),
            sites=linear_input_sites(modules),
            outputs=("stage_out",),
            partitions=NO_PARTITIONS,
            composites=tuple(
                CompositeSpec(path, path, ("attention_biases",) if path.endswith(".attn") else ())
                for path in wholes
            ),
        )


def _linear_spec(path: str, rows: int) -> LinearSpec:
    """A linear layer that reads a site of its own."""
    return biased_linear_spec(path, f"{path}.in", f"{path}.out", path, rows)


def _norm_spec(path: str) -> NormSpec:
    return affine_norm_spec(path, (f"{path}.in",), (f"{path}.out",), path)


def _depthwise_spec(path: str) -> ModuleSpec:
    """A convolution by channel."""
    return ModuleSpec(
        path=path,
        reads=(f"{path}.in",),
        writes=(f"{path}.out",),
        tensors=("weight", "bias"),
        op="conv2d",
    )


def _convolution_specs(path: str, inner: int, out: int) -> list[ModuleSpec]:
    """1×1, by channel, 1×1."""
    return [
        _linear_spec(f"{path}.conv1", inner),
        _depthwise_spec(f"{path}.conv2"),
        _linear_spec(f"{path}.conv3", out),
    ]


def _conv_block_specs_and_compared_paths(
    path: str, width: int
) -> tuple[list[ModuleSpec], list[str]]:
    """The modules of an ``MBConv`` and what is compared as a whole."""
    return _convolution_specs(path, 4 * width, width), [path]


def _vit_block_specs_and_compared_paths(
    path: str, width: int
) -> tuple[list[ModuleSpec], list[str]]:
    """The modules of a ``TinyVitBlock`` and what is compared as a whole."""
    modules = [
        _norm_spec(f"{path}.attn.norm"),
        _linear_spec(f"{path}.attn.qkv", 3 * width),
        _linear_spec(f"{path}.attn.proj", width),
        replace(_depthwise_spec(f"{path}.local_conv"), reference=(f"{path}.local_conv",)),
        _norm_spec(f"{path}.mlp.norm"),
        _linear_spec(f"{path}.mlp.fc1", 4 * width),
        _linear_spec(f"{path}.mlp.fc2", width),
    ]
    return modules, [f"{path}.attn", f"{path}.mlp"]


def _fold_batch_norm_sources(path: str, stored: str, *, pointwise: bool) -> SourceTensorsByPath:
    """A convolution's weight and bias, from the convolution and the batch norm behind it.

    Args:
        path: The convolution in the model.
        stored: Both in the checkpoint.
        pointwise: Whether a convolution of 1×1 becomes a linear layer.
    """
    weight = (f"{stored}.c.weight", f"{stored}.bn.weight", f"{stored}.bn.running_var")
    norm = ("bias", "weight", "running_mean", "running_var")
    how = "fold_weight+pointwise" if pointwise else "fold_weight"
    return {
        f"{path}.weight": SourceTensors(weight, how),
        f"{path}.bias": SourceTensors(tuple(f"{stored}.bn.{name}" for name in norm), "fold_bias"),
    }


PATCH_EMBED_SOURCES = {
    **_fold_batch_norm_sources(
        "image_encoder.patch_embed.0", "image_encoder.patch_embed.seq.0", pointwise=False
    ),
    **_fold_batch_norm_sources(
        "image_encoder.patch_embed.2", "image_encoder.patch_embed.seq.2", pointwise=False
    ),
}
"""The tensors before the first stage."""


def stage_conv_tensor_sources(stages: Iterable[LayerSpec]) -> SourceTensorsByPath:
    """The tensors of the stages' convolutions."""
    sources: dict[str, SourceTensors] = {}
    for module in (module for stage in stages for module in stage.modules):
        pointwise = module.path.endswith(POINTWISE_CONV_SUFFIXES)
        if pointwise or module.op == "conv2d":
            sources |= _fold_batch_norm_sources(module.path, module.path, pointwise=pointwise)
    return sources


class MBConv(nn.Module):
    """1×1 → depthwise 3×3 → 1×1, added to its input.

    A 1×1 convolution is a linear layer of each pixel.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 4 * width
        self.conv1 = Linear(width, inner, bias=True)
        self.conv2 = Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.conv3 = Linear(inner, width, bias=True)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, H, W, C], the same shape."""
        inner = F.gelu(conv_channels_last(self.conv2, F.gelu(vision.apply_linear(self.conv1, x))))
        return F.gelu(x + vision.apply_linear(self.conv3, inner))


class PatchMerging(nn.Module):
    """To the next stage's channels, at half the size or the same."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Linear(width, out, bias=True)
        self.conv2 = Conv2d(out, out, 3, stride=stride, padding=1, groups=out)
        self.conv3 = Linear(out, out, bias=True)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, H, W, C] → [B, H', W', C']."""
        inner = F.gelu(conv_channels_last(self.conv2, F.gelu(vision.apply_linear(self.conv1, x))))
        return vision.apply_linear(self.conv3, inner)


class TinyVitAttention(nn.Module):
    """Windows with a table of biases by offset. q, k and v lie head by head."""

    attention_biases: torch.Tensor

    def __init__(self, width: int, heads: int, window: int, eps: float) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm = VisionLayerNorm(width, eps)
        self.qkv = Linear(width, 3 * width, bias=True)
        self.proj = Linear(width, width, bias=True)
        self.register_buffer("attention_biases", torch.empty(heads, window * window, device="meta"))

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, H, W, C], the same shape.

        Windows over the edge hold zeros there, put in before the norm.
        """
        batch, height, width, channels = x.shape
        qkv = self._qkv(self.norm(x), vision)
        fill = None
        if height % self.window or width % self.window:
            # a norm of zeros is its bias
            fill = self._qkv(self.norm.bias[None, None, None], vision)[0, 0, 0].contiguous()
        mixed = vision.ops.image_attention(
            ImageAttentionInputs(qkv, self.heads, self.window, fill, bias=self.attention_biases)
        )
        return vision.apply_linear(self.proj, mixed.view(batch, height, width, channels))

    def _qkv(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        batch, height, width, channels = x.shape
        by_head = vision.apply_linear(self.qkv, x).view(
            batch, height, width, self.heads, 3, channels // self.heads
        )
        return by_head.transpose(3, 4)


class TinyVitMLP(nn.Module):
    """norm → up → GELU → down."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = VisionLayerNorm(width, eps)
        self.fc1 = Linear(width, 4 * width, bias=True)
        self.fc2 = Linear(4 * width, width, bias=True)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[…, C], the same shape."""
        return vision.apply_linear(self.fc2, F.gelu(vision.apply_linear(self.fc1, self.norm(x))))


class TinyVitBlock(nn.Module):
    """Attention, added; a convolution by channel, in its place; MLP, added.

    [B, H, W, C], the same shape.
    """

    def __init__(self, width: int, heads: int, window: int, eps: float) -> None:
        super().__init__()
        self.attn = TinyVitAttention(width, heads, window, eps)
        self.local_conv = Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = TinyVitMLP(width, eps)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, H, W, C], the same shape."""
        x = conv_channels_last(self.local_conv, x + self.attn(x, vision))
        return x + self.mlp(x, vision)


class TinyVitStage(nn.Module):
    """Blocks, and the merge to the next stage."""

    def __init__(self, spec: TinyVitSpec, index: int) -> None:
        super().__init__()
        self.spec = spec.stage_spec(index)
        width = spec.widths[index]
        blocks = (
            MBConv(width)
            if index == 0
            else TinyVitBlock(width, spec.heads[index], spec.windows[index], spec.eps)
            for _ in range(spec.depths[index])
        )
        self.blocks = nn.ModuleList(blocks)
        last = index + 1 == len(spec.widths)
        self.downsample = (
            None if last else PatchMerging(width, spec.widths[index + 1], spec.strides[index])
        )

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, H, W, C] → [B, H', W', C']."""
        for block in self.blocks:
            x = block(x, vision)
        return x if self.downsample is None else self.downsample(x, vision)


class TinyVitEncoder(nn.Module):
    """An image to its embedding. Inside, a pixel's channels lie side by side (channels last)."""

    stack = "layers"

    def __init__(self, spec: TinyVitSpec) -> None:
        super().__init__()
        self.spec = spec
        first = spec.widths[0]
        self.patch_embed = nn.ModuleDict(
            {
                "0": Conv2d(3, first // 2, 3, stride=2, padding=1),
                "2": Conv2d(first // 2, first, 3, stride=2, padding=1),
            }
        )
        self.layers = nn.ModuleList(TinyVitStage(spec, i) for i in range(len(spec.widths)))
        self.neck = make_neck(spec.widths[-1], spec.out)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, 3, S, S] → [B, 256, S/16, S/16]."""
        x = x.contiguous(memory_format=torch.channels_last)
        x = self.patch_embed["2"](F.gelu(self.patch_embed["0"](x))).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x, vision)
        return self.neck(x.permute(0, 3, 1, 2))


def conv_channels_last(conv: Conv2d, x: torch.Tensor) -> torch.Tensor:
    """A convolution on [B, H, W, C]; the channels-last layout makes both permutations views."""
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
