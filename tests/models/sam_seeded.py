"""A small SAM with seeded weights in the original layout, a file of it, and transformers' of any
size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modelmill.models import sam
from modelmill.nn.linear import Linear

SMALL = sam.SamVitSpec(
    width=48, depth=2, heads=3, global_attn_indexes=(1,), inner=96, image=160, window=4
)


def small_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that keep values near 1, as trained ones do; norms near their identity."""
    model = sam.Model(sam.SamConfig(SMALL))
    shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    shapes |= {f"{n}.weight": m.shape for n, m in model.named_modules() if isinstance(m, Linear)}
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in sorted(shapes.items()):
        size = torch.Size(shape)
        fan = size[1:].numel() if len(size) > 1 else 1
        spread = 1.2 * fan**-0.5 if len(size) > 1 else 0.1
        if "rel_pos" in name or "embed" in name or "token" in name:
            spread = 0.5
        if "q_proj" in name or "k_proj" in name:
            spread *= 0.3  # sharper attention would magnify any rounding, as trained ones do not
        if "gaussian" in name:
            spread = 1.0
        state[name] = torch.randn(size, generator=generator) * spread
        if _is_norm(model, name) and name.endswith("weight"):
            state[name] += 1
    return state


def tiny_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """The same in MobileSAM's layout, of its one size, batch norms behind the encoder's
    convolutions.
    """
    config = sam.SamConfig(sam.TinyVitSpec())
    model = sam.Model(config)
    shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    shapes |= {f"{n}.weight": m.shape for n, m in model.named_modules() if isinstance(m, Linear)}
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}

    def random_tensor(shape: tuple[int, ...], spread: float, around: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread + around

    for rule in sam.rename_rules(config):
        shape = shapes[rule.target]
        fan = torch.Size(shape[1:]).numel() if len(shape) > 1 else 1
        spread = 1.2 * fan**-0.5 if len(shape) > 1 else 0.1
        if rule.how == "copy":
            known = any(
                part in rule.target for part in ("embed.weight", "embeddings", "token", "biases")
            )
            spread = 1.0 if "gaussian" in rule.target else 0.5 if known else spread
            spread *= 0.3 if "q_proj" in rule.target or "k_proj" in rule.target else 1.0
            norm = rule.target.endswith("weight") and _is_norm(model, rule.target)
            state[rule.target] = random_tensor(shape, spread, 1.0 if norm else 0.0)
        for source in rule.sources if rule.how != "copy" else ():
            if source.endswith(".c.weight"):
                state[source] = random_tensor(
                    (*shape, 1, 1) if "pointwise" in rule.how else shape, spread
                )
            elif source not in state:
                around = 1.0 if source.endswith(("bn.weight", "running_var")) else 0.0
                state[source] = (
                    random_tensor(shape[:1], 0.1, around).abs()
                    if around
                    else random_tensor(shape[:1], 0.1)
                )
    return state


def _is_norm(model: nn.Module, name: str) -> bool:
    return "Norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__


def small_file(folder: Path, seed: int = 0) -> Path:
    """A .safetensors without anything beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sam_small.safetensors"
    save_file(small_state(seed), path)
    return path


def hf_sam_model(vision: dict[str, Any]) -> Any:
    """transformers' SamModel with weights that keep values near 1; skips where transformers is
    missing.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.SamConfig(vision_config=vision)
    config.prompt_encoder_config.image_size = vision["image_size"]
    config.prompt_encoder_config.image_embedding_size = vision["image_size"] // vision["patch_size"]
    config.mask_decoder_config.layer_norm_eps = 1e-5  # the original's are torch's default
    model = transformers.SamModel(config).eval()
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        fan = parameter[0].numel() if parameter.dim() > 1 else 1
        spread = (
            0.1
            if parameter.dim() < 2
            else (0.5 if "pos" in name or "embed" in name else 1.2 * fan**-0.5)
        )
        spread *= 0.3 if "q_proj" in name or "k_proj" in name else 1.0
        parameter.data.normal_(0, spread, generator=generator)
        if "layer_norm" in name and name.endswith("weight"):
            parameter.data.add_(1)
    places = model.shared_image_embedding.positional_embedding
    places.data.normal_(0, 1, generator=generator)
    model.prompt_encoder.shared_embedding.positional_embedding.data.copy_(places)
    return model
