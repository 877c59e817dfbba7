"""Shared parts of the vision transformers: patches, attention and MLP blocks, the residual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.conv import VisionLayerNorm
from modelmill.nn.layer_spec import (
    CompositeSpec,
    LayerSpec,
    LinearRowBlock,
    LinearSpec,
    ModuleSpec,
    NormSpec,
    QuantSiteSpec,
)
from modelmill.nn.linear import Linear
from modelmill.nn.partition import NO_PARTITIONS
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.quant_types import QuantizedInput


@dataclass(frozen=True)
class TransformerSizes:
    """The sizes that every transformer has."""

    width: int
    depth: int
    heads: int
    inner: int


class VitBranch(nn.Module):
    """What a block adds to its stream: attention, or an MLP."""

    @property
    def input_proj(self) -> Linear:
        """The product that reads the normed stream; it says in which form."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor | QuantizedInput, vision: VisionContext) -> torch.Tensor:
        """[…, C], the same shape, in floating point."""
        raise NotImplementedError


class VitMLP(VitBranch):
    """Feed-forward block: down(gelu(up(x)))."""

    def __init__(self, width: int, inner: int, up: str, down: str) -> None:
        """Make the linear layers; up, down: their names."""
        super().__init__()
        self.names = up, down
        self.add_module(up, Linear(width, inner, bias=True))
        self.add_module(down, Linear(inner, width, bias=True))

    @property
    def input_proj(self) -> Linear:
        """The first of the two."""
        return self._linear(0)

    def forward(self, x: torch.Tensor | QuantizedInput, vision: VisionContext) -> torch.Tensor:
        """[…, C], the same shape."""
        down = self._linear(1)
        return vision.apply_linear(down, vision.apply_linear_gelu(self._linear(0), x, down))

    def _linear(self, index: int) -> Linear:
        linear = self.get_submodule(self.names[index])
        assert isinstance(linear, Linear), "made so"
        return linear


class VitBlock(nn.Module):
    """norm → attention → add, norm → MLP → add."""

    def __init__(
        self, spec: LayerSpec, width: int, eps: float, attn: VitBranch, mlp: VitBranch
    ) -> None:
        super().__init__()
        self.spec = spec
        self.norm1 = VisionLayerNorm(width, eps)
        self.attn = attn
        self.norm2 = VisionLayerNorm(width, eps)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, …, C], the same shape."""
        x, branch = self.forward_deferred_add(x, None, vision)
        return x + branch

    def forward_deferred_add(
        self, x: torch.Tensor, branch: torch.Tensor | None, vision: VisionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block whose input is the residual and a branch not yet added to it.

        A norm reads what the addition before it writes, so that one op does both.

        Returns:
            The next residual and branch.
        """
        normed, x = self.norm1.add_norm(x, branch, self.attn.input_proj, vision)
        normed, x = self.norm2.add_norm(x, self.attn(normed, vision), self.mlp.input_proj, vision)
        return x, self.mlp(normed, vision)


def run_blocks(blocks: Iterable[nn.Module], x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
    """The stream [B, …, C] behind the last of the blocks."""
    branch: torch.Tensor | None = None
    for block in blocks:
        assert isinstance(block, VitBlock), "blocks are all of one kind"
        x, branch = block.forward_deferred_add(x, branch, vision)
    return x if branch is None else x + branch


def patchify(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """[B, 3, H, W] → [B, H / P, W / P, 3 · P²], P the patch size.

    The channels are in the order of a convolution's weight [C, 3, P, P]: without overlap the
    convolution is a GEMM of these rows.
    """
    batch, channels, height, width = x.shape
    parts = x.reshape(
        batch, channels, height // patch_size, patch_size, width // patch_size, patch_size
    )
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3)


def vit_block_spec(
    width: int,
    inner: int,
    mlp: tuple[str, str],
    reference: Mapping[str, str],
    tables: tuple[str, ...] = (),
) -> LayerSpec:
    """What a ``VitBlock`` is made of.

    Args:
        width: Channels of the stream.
        inner: Channels inside the MLP.
        mlp: Names of its two linear layers.
        reference: Module → its name in the reference, wholes included; "" is the block.
        tables: The attention's tensors beside its linear layers.
    """
    up, down = (f"mlp.{name}" for name in mlp)

    def linear(path: str, reads: str, writes: str, rows: int) -> LinearSpec:
        return biased_linear_spec(path, reads, writes, reference[path], rows)

    inputs, middle = ("branch", "residual"), ("attn_out", "stream")
    modules: tuple[ModuleSpec, ...] = (
        affine_norm_spec("norm1", inputs, ("attn_input", "stream"), reference["norm1"]),
        linear("attn.qkv", "attn_input", "qkv", 3 * width),
        linear("attn.proj", "mixed", "attn_out", width),
        affine_norm_spec("norm2", middle, ("mlp_input", "residual_out"), reference["norm2"]),
        linear(up, "mlp_input", "up", inner),
        linear(down, "act", "mlp_out", width),
    )
    inside = {module.path for module in modules}
    wholes = tuple(
        CompositeSpec(path, name, tables if path == "attn" else ())
        for path, name in reference.items()
        if path not in inside
    )
    return LayerSpec(
        modules=modules,
        sites=linear_input_sites(modules, heavy_tailed="act"),
        outputs=("mlp_out", "residual_out"),
        partitions=NO_PARTITIONS,
        composites=wholes,
    )


def biased_linear_spec(path: str, reads: str, writes: str, reference: str, rows: int) -> LinearSpec:
    """A linear layer with a bias whose site is named by the value that it reads."""
    return LinearSpec(
        path=path,
        reads=(reads,),
        writes=(writes,),
        site=reads,
        parts=(LinearRowBlock(reference, rows),),
        tensors=("weight", "bias"),
    )


def affine_norm_spec(
    path: str, reads: tuple[str, ...], writes: tuple[str, ...], reference: str
) -> NormSpec:
    """A LayerNorm; with two values read it adds the first to the second."""
    return NormSpec(
        path=path,
        reads=reads,
        writes=writes,
        reference=(reference,),
        tensors=("weight", "bias"),
        op="layer_norm" if len(reads) == 1 else "add_layer_norm",
    )


def linear_input_sites(
    modules: Iterable[ModuleSpec], heavy_tailed: str = ""
) -> tuple[QuantSiteSpec, ...]:
    """The sites of linear layers, in their order.

    heavy_tailed: the site of an activation's outputs.
    """
    names = dict.fromkeys(m.site for m in modules if isinstance(m, LinearSpec))
    return tuple(QuantSiteSpec(name, heavy_tailed=name == heavy_tailed) for name in names)
