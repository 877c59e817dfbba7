"""Presents a GGUF file as a Hugging Face checkpoint: tensor names, values and config.json.

The changes of llama.cpp's converter are undone: LLaMA's q and k rows are permuted for interleaved
rotary pairs, GPT-2's Conv1D weights are transposed, and names and config keys are its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelmill.checkpoint.container import TensorInfo, no_such_tensor_error
from modelmill.checkpoint.gguf import EXPERT_SEPARATOR, GgufFile
from modelmill.checkpoint.gguf_alibi_families import ALIBI_ARCHITECTURES
from modelmill.checkpoint.gguf_apertus import APERTUS_ARCHITECTURES
from modelmill.checkpoint.gguf_biased_router_families import BIASED_ROUTER_ARCHITECTURES
from modelmill.checkpoint.gguf_config import array_as_list, read_config
from modelmill.checkpoint.gguf_delta_net import DELTA_NET_ARCHITECTURES
from modelmill.checkpoint.gguf_dense_families import DENSE_ARCHITECTURES, LONGROPE_TENSORS
from modelmill.checkpoint.gguf_families import (
    EXPERT_NAMES,
    GGUF_FAMILY_ARCHITECTURES,
    GPT2_NAMES,
    LLAMA_NAMES,
    MIXTRAL_EXPERT_TENSORS,
    TRANSFORMER_H_NAMES,
    GgufArchitecture,
    ReorderedTensorSlice,
)
from modelmill.checkpoint.gguf_gemma4 import FUSED_GATE_UP_TENSOR, GEMMA4_ARCHITECTURES
from modelmill.checkpoint.gguf_granite_swa import GRANITE_SWA_ARCHITECTURES
from modelmill.checkpoint.gguf_group_limited_experts import GROUP_LIMITED_MOE_ARCHITECTURES
from modelmill.checkpoint.gguf_hunyuan import HUNYUAN_ARCHITECTURES
from modelmill.checkpoint.gguf_lfm2 import LFM2_ARCHITECTURES
from modelmill.checkpoint.gguf_mamba import CONVERTER_INVERSES, MAMBA_ARCHITECTURES
from modelmill.checkpoint.gguf_mellum import MELLUM_ARCHITECTURES
from modelmill.checkpoint.gguf_nemotron_h import NEMOTRON_H_ARCHITECTURES
from modelmill.checkpoint.gguf_packed import (
    BLOCK_COLUMNS,
    gguf_quant_layout,
    unpack_gguf_blocks,
)
from modelmill.checkpoint.quant_layout import QuantizedMatrix, QuantLayout
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

QWEN_NAMES = {**TRANSFORMER_H_NAMES, "blk.ffn_up": "mlp.w1", "blk.ffn_gate": "mlp.w2"}
QWEN_MOE_NAMES = {**LLAMA_NAMES, **EXPERT_NAMES, "blk.ffn_gate_inp": "mlp.gate"}
SHARED_EXPERT_NAMES = {
    "blk.ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "blk.ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "blk.ffn_up_shexp": "mlp.shared_expert.up_proj",
    "blk.ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    **MIXTRAL_EXPERT_TENSORS,
    "blk.ffn_gate_inp": "block_sparse_moe.gate",
}

ROPE_FREQS_ARCHITECTURES = ("llama", "qwen", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "olmoe")
ROPE_SCALING_TENSORS_BY_ARCHITECTURE = dict.fromkeys(
    (
        *ROPE_FREQS_ARCHITECTURES,
        *GGUF_FAMILY_ARCHITECTURES,
        *BIASED_ROUTER_ARCHITECTURES,
        *GRANITE_SWA_ARCHITECTURES,
        *GEMMA4_ARCHITECTURES,
        *DELTA_NET_ARCHITECTURES,
        *APERTUS_ARCHITECTURES,
        *HUNYUAN_ARCHITECTURES,
        *DENSE_ARCHITECTURES,
    ),
    ("rope_freqs.weight",),
) | {"phi3": LONGROPE_TENSORS, "mistral3": (), "starcoder": ()}
"""Tensors that become the config's rope_scaling and are hidden, by architecture.

GPT-2 and StarCoder have no RoPE, and Ministral 3's scaling is in the metadata alone.
"""


ARCHITECTURES = {
    "llama": GgufArchitecture(
        LLAMA_NAMES, "model.layers", has_permuted_qk=True, alike_types=("mistral",)
    ),
    "qwen": GgufArchitecture(QWEN_NAMES, "transformer.h"),
    "qwen2": GgufArchitecture(LLAMA_NAMES, "model.layers"),
    "qwen3": GgufArchitecture(LLAMA_NAMES, "model.layers"),
    "qwen2moe": GgufArchitecture({**QWEN_MOE_NAMES, **SHARED_EXPERT_NAMES}, model_type="qwen2_moe"),
    "qwen3moe": GgufArchitecture(QWEN_MOE_NAMES, model_type="qwen3_moe"),
    "olmoe": GgufArchitecture(QWEN_MOE_NAMES, "model.layers"),
    "gpt2": GgufArchitecture(GPT2_NAMES, "transformer.h", transposed=True),
    **GGUF_FAMILY_ARCHITECTURES,
    **DENSE_ARCHITECTURES,
    **ALIBI_ARCHITECTURES,
    **GROUP_LIMITED_MOE_ARCHITECTURES,
    **GEMMA4_ARCHITECTURES,
    **MAMBA_ARCHITECTURES,
    **LFM2_ARCHITECTURES,
    **DELTA_NET_ARCHITECTURES,
    **APERTUS_ARCHITECTURES,
    **HUNYUAN_ARCHITECTURES,
    **MELLUM_ARCHITECTURES,
    **NEMOTRON_H_ARCHITECTURES,
    **BIASED_ROUTER_ARCHITECTURES,
    **GRANITE_SWA_ARCHITECTURES,
}
REFUSED_ARCHITECTURES = {
    "phimoe": "has neither the noise of its router nor the temperature of its rotation",
    "mistral4": "does not say by how much queries grow with the position",
}
"""Architectures whose files lack what the model computes with, and what that is."""


ARCHITECTURES_IF_MOE = {
    "llama": replace(
        ARCHITECTURES["llama"], names=MIXTRAL_NAMES, model_type="mixtral", alike_types=()
    )
}
"""Architectures that are another family where the file has experts."""


@dataclass(frozen=True)
class _HfTensorSource:
    source: str
    shape: tuple[int, ...]
    restore: Callable[[torch.Tensor], torch.Tensor] | None
    transposed: bool = False
    is_kept: bool = True  # whether it can stay quantized


class GgufAsHf:
    """A GGUF's tensors under Hugging Face names, with `config` and `generation_config`.

    unread: the architecture's own keys that neither was made from. Unknown tensors keep their GGUF
    name, so that renaming reports them as unused. Raises UnknownArchitecture, or CorruptCheckpoint
    if keys and tensors contradict each other.
    """

    def __init__(self, raw: GgufFile) -> None:
        arch = raw.metadata.get("general.architecture")
        layout = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
        experts = raw.metadata.get("llama.expert_count")
        if arch == "llama" and isinstance(experts, int) and experts > 0:
            layout = ARCHITECTURES_IF_MOE["llama"]
        if arch in REFUSED_ARCHITECTURES:
            raise UnknownArchitecture(
                f"{raw.path}: a GGUF of {arch} {REFUSED_ARCHITECTURES[arch]}; use its Hugging Face "
                "folder"
            )
        if layout is None:
            raise UnknownArchitecture(
                f"{raw.path}: has the GGUF architecture {arch!r}; modelmill reads "
                f"{', '.join(ARCHITECTURES)}"
            )
        if layout.variant is not None and layout.variant[0] in raw.names():
            layout = layout.variant[1]
        self._raw = raw
        self.metadata = raw.metadata
        tied = "output.weight" not in raw.names() or (
            # The converters of GPT-2 and BLOOM write the tied head a second time.
            arch in ("gpt2", "bloom")
            and raw.has_equal_stored_bytes("output.weight", "token_embd.weight")
        )
        self.config, self.generation_config, self.unread = read_config(
            raw, str(arch), tied, layout.read_config
        )
        if layout.model_type:
            self.config["model_type"] = layout.model_type
        self._entries: dict[str, _HfTensorSource] = {}
        self._numbers = _metadata_as_tensors(raw, layout, self.config)
        parts = {} if layout.parts is None else layout.parts(self.config)
        drafts = _mtp_layers(raw, str(arch), layout, self.config)
        for name in raw.names():
            if layout.joins_latent and ".attn_v_b." in name:
                continue  # read with attn_k_b
            if name in ROPE_SCALING_TENSORS_BY_ARCHITECTURE.get(str(arch), ()) or (
                tied and name == "output.weight"
            ):
                continue
            if _parse_layer_number(name) in drafts:
                own = _HfTensorSource(name, raw.tensor_info(name).shape, None, is_kept=False)
                self._add_entry(f"{layout.draft_prefix}{name}", own)
                continue
            base = _hf_name(name, layout)[1]
            whole = f"{base}.{name.rpartition('.')[2]}"
            if base in parts or whole in parts:
                self._add_reordered_slices(name, layout, parts.get(base) or parts[whole])
                continue
            self._add_tensor(name, layout)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._entries, *self._numbers]

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape and dtype of a tensor without reading it."""
        if name in self._numbers:
            number = self._numbers[name]
            return TensorInfo(name, tuple(number.shape), "float32", number.nbytes)
        entry = self._find_entry(name)
        source = self._raw.tensor_info(entry.source)
        share = torch.Size(entry.shape).numel() / max(source.numel, 1)
        return TensorInfo(name, entry.shape, source.dtype, round(source.nbytes * min(share, 1)))

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor by its name."""
        if name in self._numbers:
            return self._numbers[name]
        entry = self._find_entry(name)
        tensor = self._raw.get(entry.source)
        return tensor if entry.restore is None else entry.restore(tensor)

    def quant_layout(self, name: str) -> QuantLayout | None:
        """Return the quantization layout of a matrix; None if it cannot be kept."""
        if name in self._numbers:
            return None
        entry = self._find_entry(name)
        if not entry.is_kept:
            return None
        layout = gguf_quant_layout(self._raw.tensor_info(entry.source), transposed=entry.transposed)
        if layout is None or entry.transposed:
            return layout
        return replace(layout, rows=entry.shape[0])  # of an expert's matrix perhaps a half

    def read_quantized_matrix(self, name: str) -> QuantizedMatrix:
        """Return its codes and scales, rows in Hugging Face's order (or transposed)."""
        entry = self._find_entry(name)
        blocks = self._raw.read_raw_blocks(entry.source)
        if entry.restore is not None and not entry.transposed:
            blocks = entry.restore(blocks)
        return unpack_gguf_blocks(self._raw.tensor_info(entry.source).dtype, blocks)

    def files(self) -> list[Path]:
        """Return the files that the tensors are read from."""
        return self._raw.files()

    def tokenizer_metadata_json(self) -> bytes:
        """Return every tokenizer.* key of the GGUF as one JSON object, under its full key."""
        kept = {k: v for k, v in self.metadata.items() if k.startswith("tokenizer.")}
        return json.dumps(kept, default=_to_json_value).encode("ascii")

    def _find_entry(self, name: str) -> _HfTensorSource:
        if name not in self._entries:
            raise no_such_tensor_error(self._raw.path, name)
        return self._entries[name]

    def _add_tensor(self, name: str, architecture: GgufArchitecture) -> None:
        shape = self._raw.tensor_info(name).shape
        target, base = _hf_name(name, architecture)
        undo: Callable[[torch.Tensor], torch.Tensor] | None = None
        transposed = False
        if architecture.has_permuted_qk and base in ("blk.attn_q", "blk.attn_k"):
            heads = self.config[
                "num_attention_heads" if base == "blk.attn_q" else "num_key_value_heads"
            ]
            if not shape or shape[0] % (2 * heads):
                raise CorruptCheckpoint(
                    f"{self._raw.path}: {name} has {list(shape)}, which {heads} heads do not divide"
                )
            undo = _make_unpermute_transform(heads)
        elif architecture.grouped_qkv and base == "blk.attn_qkv":
            heads = self.config["num_attention_heads"]
            undo = _make_qkv_interleave_transform(heads, self.config.get("num_kv_heads", heads))
        elif architecture.norms_plus_one and base.endswith("_norm") and name.endswith(".weight"):
            undo = _subtract_one
        elif architecture.transposed and base.startswith("blk.") and len(shape) == 2:
            shape = (shape[1], shape[0])
            undo, transposed = _transpose, True
        if base == FUSED_GATE_UP_TENSOR and len(shape) == 3:
            self._split_fused_expert_tensor(target, name, shape)
            return
        if "*" in target and len(shape) == 3:
            for expert in range(shape[0]):
                entry = _HfTensorSource(f"{name}{EXPERT_SEPARATOR}{expert}", shape[1:], None)
                self._add_entry(target.replace("*", str(expert)), entry)
            return
        if "*" in target and len(shape) == 2:  # a bias of each expert
            for expert in range(shape[0]):
                own = _HfTensorSource(name, shape[1:], _make_single_row_selector(expert))
                self._add_entry(target.replace("*", str(expert)), own)
            return
        if base in ("blk.attn_sinks", "blk.exp_probs_b"):  # no tensor of a module there
            target = target.removesuffix(".weight").removesuffix(".bias")
        if base == "blk.ffn_gate_inp_shexp" and len(shape) == 1:  # a matrix of one row
            self._add_entry(target, _HfTensorSource(name, (1, *shape), lambda tensor: tensor[None]))
            return
        if base in CONVERTER_INVERSES and not name.endswith(".bias"):
            restored = CONVERTER_INVERSES[base]
            before = restored.shape(shape)
            values = restored.values
            entry = _HfTensorSource(
                name, before, lambda tensor: values(tensor).reshape(before), True
            )
            self._add_entry(target, entry)
            return
        if base == "blk.attn_k_b":
            self._add_kv_b_proj(target, name, shape)
            return
        self._add_entry(target, _HfTensorSource(name, shape, undo, transposed))

    def _add_reordered_slices(
        self, name: str, architecture: GgufArchitecture, parts: tuple[ReorderedTensorSlice, ...]
    ) -> None:
        """Add the tensors that a stored one is, in their own order of rows or columns."""
        shape = self._raw.tensor_info(name).shape
        target, base = _hf_name(name, architecture)
        restored = CONVERTER_INVERSES.get(base) if not name.endswith(".bias") else None
        stored = architecture.names.get(base) or parts[0].name
        for part in parts:
            if not part.fits_shape(shape):
                raise CorruptCheckpoint(
                    f"{self._raw.path}: {name} has {list(shape)}, which is not divided into "
                    f"{part.units} parts"
                )
            own = part.sliced_shape(shape)
            restore: Callable[[torch.Tensor], torch.Tensor] = part.select
            if restored is not None:
                own = restored.shape(own)
                restore = _compose_transforms(part.select, restored.values, own)
            in_blocks = part.axis == 0 or shape[1] // part.units % BLOCK_COLUMNS == 0
            entry = _HfTensorSource(name, own, restore, is_kept=in_blocks and restored is None)
            self._add_entry(target.replace(stored, part.name), entry)

    def _split_fused_expert_tensor(self, target: str, name: str, shape: tuple[int, ...]) -> None:
        """Add each expert's gate and up projections, which are the halves of one matrix."""
        experts, rows, columns = shape
        for expert in range(experts):
            for part, restore in (("gate_proj", _first_half), ("up_proj", _second_half)):
                own = target.replace("gate_up_proj", part).replace("*", str(expert))
                source = f"{name}{EXPERT_SEPARATOR}{expert}"
                self._add_entry(own, _HfTensorSource(source, (rows // 2, columns), restore))

    def _add_kv_b_proj(self, target: str, name: str, shape: tuple[int, ...]) -> None:
        """Join the up-projections of latent attention: a head's keys, transposed, and values."""
        values = name.replace(".attn_k_b.", ".attn_v_b.")
        v_shape = self._raw.tensor_info(values).shape if values in self._raw.names() else ()
        if len(shape) != 3 or len(v_shape) != 3 or shape[:2] != (v_shape[0], v_shape[2]):
            raise CorruptCheckpoint(
                f"{self._raw.path}: {name} has {list(shape)}, which {values} with "
                f"{list(v_shape)} does not fit"
            )

        def join(keys: torch.Tensor) -> torch.Tensor:
            both = torch.cat((keys.transpose(1, 2), self._raw.get(values)), 1)
            return both.flatten(0, 1)

        rows = shape[0] * (shape[2] + v_shape[1])
        self._add_entry(target, _HfTensorSource(name, (rows, shape[1]), join, True))

    def _add_entry(self, target: str, entry: _HfTensorSource) -> None:
        if target in self._entries:
            raise CorruptCheckpoint(f"{self._raw.path}: two tensors mean {target}")
        self._entries[target] = entry


def _hf_name(name: str, architecture: GgufArchitecture) -> tuple[str, str]:
    """Return the Hugging Face name of a GGUF tensor, and its base without layer and suffix.

    An unknown tensor keeps its name.
    """
    bare = re.fullmatch(r"blk\.([0-9]{1,6})\.(\w+)", name)
    if bare and f"blk.{bare[2]}" in architecture.names:  # a tensor that is no module's
        base = f"blk.{bare[2]}"
        return f"{architecture.layer_prefix}.{int(bare[1])}.{architecture.names[base]}", base
    stem, _, suffix = name.rpartition(".")
    parts = stem.split(".", 2)
    layer = ""
    # no model has a million layers, and Python refuses to parse a number of thousands of digits
    if (
        len(parts) == 3
        and parts[0] == "blk"
        and parts[1].isascii()
        and parts[1].isdigit()
        and len(parts[1]) < 7
    ):
        layer, stem = parts[1], f"blk.{parts[2]}"
    whole = architecture.names.get(f"{stem}.{suffix}")  # no weight or bias of a module
    if whole is not None and layer:
        return f"{architecture.layer_prefix}.{int(layer)}.{whole}", stem
    hf_base = architecture.names.get(stem)
    if (
        hf_base is None
        or suffix not in ("weight", "bias")
        or stem.startswith("blk.") != bool(layer)
    ):
        return name, ""
    return (
        f"{architecture.layer_prefix}.{int(layer)}.{hf_base}.{suffix}"
        if layer
        else f"{hf_base}.{suffix}"
    ), stem


def _make_unpermute_transform(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Undo the converter's reordering of a head's rows from [2, half] to [half, 2]."""

    def undo(tensor: torch.Tensor) -> torch.Tensor:
        pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return undo


def _make_qkv_interleave_transform(
    heads: int, kv_heads: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Undo the converter's order of all q, all k, all v: by KV head its q, k and v."""

    def undo(tensor: torch.Tensor) -> torch.Tensor:
        dim, rest = tensor.shape[0] // (heads + 2 * kv_heads), tensor.shape[1:]
        q, k, v = tensor.split([heads * dim, kv_heads * dim, kv_heads * dim])
        parts = [each.reshape(kv_heads, -1, dim, *rest) for each in (q, k, v)]
        return torch.cat(parts, 1).reshape(tensor.shape)

    return undo


def _compose_transforms(
    first: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: second(first(tensor)).reshape(shape)


def _mtp_layers(
    raw: GgufFile, arch: str, layout: GgufArchitecture, config: Mapping[str, Any]
) -> range:
    """Return the layers that only predict: the last ones of those that the file counts."""
    if not layout.draft_prefix:
        return range(0)
    return range(config["num_hidden_layers"], int(raw.metadata[f"{arch}.block_count"]))


def _metadata_as_tensors(
    raw: GgufFile, layout: GgufArchitecture, config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the tensors that are metadata in the file.

    Raises:
        CorruptCheckpoint: for metadata that has no number for each layer.
    """
    numbers = {}
    for key, (name, shape) in layout.numbers_by_layer.items():
        layers, stored = config["num_hidden_layers"], raw.metadata.get(key)
        listed = array_as_list(stored)
        values = listed if isinstance(listed, list) else [listed] * layers
        if len(values) != layers or not all(
            type(each) is float and math.isfinite(each) for each in values
        ):
            raise CorruptCheckpoint(
                f"{raw.path}: the key {key} must have a number for each of the {layers} layers; it "
                f"is {str(stored)[:60]}"
            )
        for layer, value in enumerate(values):
            full = f"{layout.layer_prefix}.{layer}.{name}"
            numbers[full] = torch.tensor(value).reshape(shape)
    return numbers


def _parse_layer_number(name: str) -> int:
    """Return the number of a tensor's layer; -1 outside of the layers."""
    parts = re.match(r"blk\.([0-9]{1,6})\.", name)
    return -1 if parts is None else int(parts[1])


def _make_single_row_selector(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor[index]


def _first_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: len(tensor) // 2]


def _second_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[len(tensor) // 2 :]


def _subtract_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor - 1


def _transpose(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous()


def _to_json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a GGUF value of type {type(value).__name__}")
