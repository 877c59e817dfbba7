"""What vision transformers share, against the formulas written out in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext
from modelmill.nn.vit import VitBlock, VitBranch, patchify, run_blocks, vit_block_spec
from modelmill.ops import registry
from modelmill.ops.quant_types import QuantizedInput
from modelmill.weights import dense


class ScalingBranch(VitBranch):
    """A product; enough to see who reads what."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.only = Linear(*weight.shape)
        self.only.weight = dense.DenseWeight.pack(weight, weight.dtype)

    @property
    def input_proj(self) -> Linear:
        return self.only

    def forward(self, x: torch.Tensor | QuantizedInput, vision: VisionContext) -> torch.Tensor:
        return vision.apply_linear(self.only, x)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_a_product_of_patches_is_the_convolution(
    batch: int, tall: int, wide: int, side: int
) -> None:
    generator = torch.Generator().manual_seed(tall * 10 + wide)
    x = torch.randn(batch, 3, tall * side, wide * side, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 3, side, side, generator=generator, dtype=torch.float64)
    patches = patchify(x, side)
    assert patches.shape == (batch, tall, wide, 3 * side * side)
    expected = F.conv2d(x, weight, stride=side).permute(0, 2, 3, 1)
    assert torch.allclose(F.linear(patches, weight.flatten(1)), expected, atol=1e-12)


def test_the_branch_that_travels_is_added_once() -> None:
    """Blocks in a row are the sum x + a(n(x)) + m(n(x + a(n(x)))) of each, one after another."""
    generator = torch.Generator().manual_seed(0)
    width = 6
    vision = VisionContext(registry.select_backends("cpu"))
    x = expected = torch.randn(2, 3, width, generator=generator)
    names = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.up", "mlp.down")
    spec = vit_block_spec(width, width, ("up", "down"), dict(zip(names, names)))
    blocks = []
    for _ in range(3):
        attn, mlp = (torch.randn(width, width, generator=generator) for _ in range(2))
        block = VitBlock(spec, width, 1e-6, ScalingBranch(attn), ScalingBranch(mlp))
        for norm in (block.norm1, block.norm2):
            norm.weight, norm.bias = (torch.randn(width, generator=generator) for _ in range(2))
        blocks.append(block)
        alone = block(expected, vision)
        expected = expected + normed(expected, block.norm1) @ attn.T
        expected = expected + normed(expected, block.norm2) @ mlp.T
        assert torch.allclose(alone, expected, atol=1e-4)
    assert torch.allclose(run_blocks(blocks, x, vision), expected, atol=1e-4)
    assert torch.equal(run_blocks([], x, vision), x)


def normed(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    away = x - x.mean(-1, keepdim=True)
    return away / (away.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight + norm.bias
