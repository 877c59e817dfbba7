"""What an entry of the folder ``families`` is made of: one file for each family.

All tests of a family follow from its entry: a small config, every switch of the family's
configuration class at a second value, values that are refused, and faults that acceptance has to
name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.nn.alibi import AlibiConfig
from tests.models.plain_forward import Logits
from tests.models.tiny_models import save_model

Change = Callable[[Any], Any]
NULL: Any = object()
VOCAB = 120
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0},
    {"rope_parameters": LLAMA3},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
                         "original_max_position_embeddings": 64}},
)  # fmt: skip
COMMON_SWITCHES: tuple[dict[str, Any], ...] = (
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"hidden_size": 64, "intermediate_size": 72},
    {"num_hidden_layers": 3},
    {"max_position_embeddings": 128},
    {"vocab_size": 96},
)
REFUSED: dict[str, Any] = {"is_encoder_decoder": True, "hidden_act": "quick_gelu"}


@dataclass(frozen=True)
class PlantedFault:
    """A wrong configuration of our own model, and what acceptance has to name.

    Attributes:
        change: Of the model's config.
        modules: Names, one of which is in the verdict.
        layer: The layer in the verdict; None: outside.
        case: Changes of the checkpoint's config.
    """

    change: Change
    modules: tuple[str, ...]
    layer: int | None = 0
    case: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GgufCase:
    """A family's GGUF, as llama.cpp's converter writes it.

    Attributes:
        architecture: Its name.
        facts: Keys behind the architecture's name, from the config.
        permuted: Whether the rows of q and k are in interleaved order.
        grouped: Whether the checkpoint has q, k and v by KV head.
        changes: Of the small config.
        tensors: Changes the checkpoint's tensors before they are renamed.
        numbers: Metadata that is made from the checkpoint's tensors.
    """

    architecture: str
    facts: Callable[[dict[str, Any]], dict[str, Any]]
    permuted: bool = False
    grouped: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[dict[str, Any], dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = (
        None
    )
    numbers: Callable[[dict[str, torch.Tensor]], dict[str, list[float]]] | None = None


def rms_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The epsilon of RMSNorm."""
    return {"attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps", 1e-5)}


def head_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The width of a head's keys and values."""
    return {f"attention.{part}_length": raw["head_dim"] for part in ("key", "value")}


def gemma_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """What all GGUFs of Gemma have."""
    return {
        **head_facts(raw),
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps", 1e-6),
    }


def norms_plus_one(
    raw: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gemma's tensors as the converter writes them."""
    del raw
    return {name: each + 1 if "norm" in name else each for name, each in tensors.items()}


@dataclass(frozen=True)
class FamilyCase:
    """One family.

    Attributes:
        model_type: Its name.
        base: A small config.json.
        switches: Changes of it, each tried by itself.
        refused: Values that are refused by their key's name.
        faults: Planted faults by name.
        unnamed_fields: Fields of transformers' class that are in neither, and why.
        gguf: Its GGUF, where llama.cpp writes one that is read.
        kv_tolerance: Of logits with int8 pages, as a share of their root mean square.
        split_tolerance: Of logits over ranks; more than rounding alone where scores are not scaled,
            whose sharp softmax multiplies it.
        make: Makes a seeded checkpoint in a folder from a config; returns its independent logits.
        attention: transformers' implementation of attention.
    """

    model_type: str
    base: Mapping[str, Any]
    switches: tuple[Mapping[str, Any], ...]
    refused: Mapping[str, Any]
    faults: Mapping[str, PlantedFault]
    unnamed_fields: frozenset[str] = frozenset()
    kv_tolerance: float = 0.05
    split_tolerance: float = 1e-4
    make: Callable[[dict[str, Any], Path], Logits] | None = None
    gguf: GgufCase | None = None
    attention: str = "eager"

    def raw(self, **changes: Any) -> dict[str, Any]:
        """A config.json; ``None`` leaves a key out, ``NULL`` is its null."""
        merged = {"model_type": self.model_type, "pad_token_id": 0, **self.base, **changes}
        present = {key: value for key, value in merged.items() if value is not None}
        return {key: None if value is NULL else value for key, value in present.items()}

    def save(self, folder: Path, **changes: Any) -> Logits:
        """Write a seeded checkpoint; returns the independent implementation."""
        if self.make is None:
            return save_transformers(self.raw(**changes), folder, self.attention)
        return self.make(self.raw(**changes), folder)


GQA_SIZES: tuple[dict[str, Any], ...] = (
    {"num_key_value_heads": 4}, {"num_key_value_heads": 1},
    {"hidden_size": 64, "intermediate_size": 72}, {"vocab_size": 96},
    {"max_position_embeddings": 128},
)  # fmt: skip
"""Switches of sizes of a family whose number of layers is tied to another field."""


def decoder_family(
    model_type: str,
    base: Mapping[str, Any],
    switches: tuple[Mapping[str, Any], ...],
    refused: Mapping[str, Any],
    faults: Mapping[str, PlantedFault],
    *,
    sizes: tuple[Mapping[str, Any], ...] | None = None,
    ropes: tuple[Mapping[str, Any], ...] = ROPES,
    **more: Any,
) -> FamilyCase:
    """A family of decoders with LLaMA's keys; what it says comes beside what all have.

    Args:
        model_type: Its name.
        base: Beside ``SMALL``; ``None`` leaves a key out.
        switches: Behind ``sizes`` and ``ropes``.
        refused: Beside ``REFUSED``.
        faults: Beside ``LLAMA_FAULTS``, or in the place of one of them.
        sizes: Switches of sizes; None: ``COMMON_SWITCHES``, with fewer layers where the base has
            more than two.
        ropes: Switches of the rotation.
        more: Further attributes of FamilyCase.
    """
    if sizes is None:
        more_layers = base.get("num_hidden_layers", 2) > 2
        sizes = tuple(
            {"num_hidden_layers": 2} if more_layers and "num_hidden_layers" in each else each
            for each in COMMON_SWITCHES
        )
    return FamilyCase(
        model_type,
        {**SMALL, **base},
        (*sizes, *ropes, *switches),
        {**REFUSED, **refused},
        {**LLAMA_FAULTS, **faults},
        **more,
    )


def size_switches(
    *kv_heads: int | None, hidden_size: int = 64, num_hidden_layers: int = 2
) -> tuple[dict[str, Any], ...]:
    """Each size at a second value, one at a time."""
    return (
        *({"num_key_value_heads": count} for count in kv_heads),
        {"hidden_size": hidden_size},
        {"num_hidden_layers": num_hidden_layers},
        {"intermediate_size": 72},
        {"vocab_size": 96},
        {"max_position_embeddings": 128},
    )


def make_causal_lm(config: Any, **options: Any) -> Any:
    """The transformers model of a config; of Mistral 4 the auto class has none."""
    import transformers

    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config, **options)
    name = type(config).__name__.replace("Config", "ForCausalLM")
    return getattr(transformers, name)._from_config(config, **options)


def transformers_model(raw: dict[str, Any], folder: Path, attention: str = "eager") -> Any:
    """The transformers model of a config.json, seeded, weights spread enough to show faults."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if raw["model_type"] not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {raw['model_type']}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = make_causal_lm(config, attn_implementation=attention).float().eval()
    draw = torch.Generator().manual_seed(0)
    # their norms' weights are stored less 1, but for those behind a recurrence
    less_one = raw["model_type"].startswith(("gemma", "qwen3_next", "qwen3_5"))
    less_one &= not raw["model_type"].startswith("gemma4")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = not less_one or "linear_attn" in name
            norm = parameter.dim() == 1 and not name.endswith("bias") and plain
            norm &= ".lambda_" not in name  # their products are exponents
            spread = 0.3 if parameter.dim() == 1 else 1.2 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * spread + float(norm))
            if raw["model_type"] == "gemma4_text" and name.endswith("q_norm.weight"):
                parameter.mul_(parameter.numel() ** -0.5)  # scores are not scaled
            if name.endswith("A_log"):  # decays that last for some tokens
                parameter.sub_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.3 + 1)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.3)
    return model


def save_transformers(raw: dict[str, Any], folder: Path, attention: str = "eager") -> Logits:
    """Write a seeded checkpoint of the transformers class, under the config.json ``raw``."""
    model = transformers_model(raw, folder, attention)
    save_model(model, folder)  # under the names of published files
    (folder / "config.json").write_text(json.dumps(raw))

    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    depends_on_length = {"dynamic", "longrope"} & {scaling.get("type"), scaling.get("rope_type")}

    @cache
    def logits_of_prompt(ids: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].float()

    @torch.no_grad()
    def logits(ids: list[int], decode_from: int | None = None) -> torch.Tensor:
        if decode_from is None or not depends_on_length:
            return logits_of_prompt(tuple(ids))
        out = model(torch.tensor([ids[:decode_from]]), use_cache=True)
        rows = [out.logits[0]]
        for token in ids[decode_from:]:
            cache = out.past_key_values
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            rows.append(out.logits[0])
        return torch.cat(rows)

    return logits


def fault(
    modules: str | tuple[str, ...],
    layer: int | None = 0,
    case: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PlantedFault:
    """A fault that replaces fields of the model's config; a callable gets the field's value."""
    names = (modules,) if isinstance(modules, str) else modules
    return PlantedFault(changed(**changes), names, layer, case or {})


def changed(**changes: Any) -> Change:
    """Replaces fields; a callable gets the field's value."""

    def change(spec: Any) -> Any:
        values = {
            key: value(getattr(spec, key)) if callable(value) else value
            for key, value in changes.items()
        }
        return replace(spec, **values)

    return change


def times(factor: float) -> Callable[[float], float]:
    """Multiplies a number."""
    return lambda value: value * factor


def plus(number: int) -> Callable[[int], int]:
    """Adds to a number."""
    return lambda value: value + number


def base_of(base: float) -> Change:
    """Sets a rotation's base."""
    return lambda rope: replace(rope, base=base)


def based(factor: float) -> Callable[[Any], Any]:
    """Multiplies a rotation's base."""
    return lambda rope: replace(rope, base=rope.base * factor)


def with_dim(dim: int) -> Change:
    """Sets a rotation's channels."""
    return lambda rope: replace(rope, dim=dim)


def with_scaling(**changes: Any) -> Change:
    """Changes a rotation's scaling."""
    return lambda rope: replace(rope, scaling={**rope.scaling, **changes})


def with_eps(factor: float) -> Change:
    """Multiplies the epsilon of the norms of q and k."""
    return lambda norm: replace(norm, eps=norm.eps * factor)


QK_NORM = ("attn.qkv_norm.qk_norm", "attn.qkv_norm.eps")
QK = ("attn.q_proj", "attn.k_proj")
ROTARY = ("attn.rope_cache.q", "attn.rope_cache.k")
ROPE_FAULT = fault(ROTARY, rope=based(2.0))
EPS_FAULT = fault("attn_norm.eps", eps=times(10))
ALL_ROTATED = fault(ROTARY, 1, unrotated_layers=frozenset())


class ReversedSlopes(AlibiConfig):
    """ALiBi with the slopes in the other order."""

    def slopes(self, heads: int) -> list[float]:
        return super().slopes(heads)[::-1]


class EvenSlopes(AlibiConfig):
    """ALiBi with the even ones of the finer slopes, as for a power of two of heads."""

    def slopes(self, heads: int) -> list[float]:
        power = 1 << (heads - 1).bit_length()
        return super().slopes(power)[:heads]


ALIBI_FAULTS = {
    "no ALiBi": fault("attn.core", alibi=None),
    "slopes in the other order": fault("attn.core", alibi=ReversedSlopes()),
    "slopes of the next power of two": fault("attn.core", alibi=EvenSlopes()),
    "slopes x 1.5": fault("attn.core", alibi=AlibiConfig(scale=1.5)),
    "another largest exponent": fault("attn.core", alibi=AlibiConfig(bias_max=16.0)),
}
LLAMA_FAULTS = {"RoPE base x 2": ROPE_FAULT, "eps x 10": EPS_FAULT}
