"""Present a GGUF file as Hugging Face would: tensor names, values and config.json.

What llama.cpp's converter did is undone: LLaMA's q and k rows are permuted for interleaved rotary pairs,
GPT-2's Conv1D weights are transposed, and names and config keys are its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelmill.checkpoint.container import TensorInfo, no_such_tensor
from modelmill.checkpoint.gguf import GgufFile
from modelmill.checkpoint.gguf_config import read_config
from modelmill.checkpoint.gguf_packed import form_of, packed_of
from modelmill.checkpoint.packed import Form, Packed
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.o_proj",
    "blk.attn_q_norm": "self_attn.q_norm",
    "blk.attn_k_norm": "self_attn.k_norm",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
QWEN_NAMES = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "ln_1",
    "blk.attn_qkv": "attn.c_attn",
    "blk.attn_output": "attn.c_proj",
    "blk.ffn_norm": "ln_2",
    "blk.ffn_up": "mlp.w1",
    "blk.ffn_gate": "mlp.w2",
    "blk.ffn_down": "mlp.c_proj",
}
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "ln_1",
    "blk.attn_qkv": "attn.c_attn",
    "blk.attn_output": "attn.c_proj",
    "blk.ffn_norm": "ln_2",
    "blk.ffn_up": "mlp.c_fc",
    "blk.ffn_down": "mlp.c_proj",
}

CONSUMED = dict.fromkeys(("llama", "qwen", "qwen2", "qwen3"), ("rope_freqs.weight",))
"""Read into the config's rope_scaling and not shown as a tensor, by architecture; GPT-2 rotates nothing."""


@dataclass(frozen=True)
class Layout:
    """How one GGUF architecture maps to Hugging Face. blocks: the prefix of a layer's names."""

    names: dict[str, str]
    blocks: str
    permuted: bool = False
    transposed: bool = False


LAYOUTS = {
    "llama": Layout(LLAMA_NAMES, "model.layers", permuted=True),
    "qwen": Layout(QWEN_NAMES, "transformer.h"),
    "qwen2": Layout(LLAMA_NAMES, "model.layers"),
    "qwen3": Layout(LLAMA_NAMES, "model.layers"),
    "gpt2": Layout(GPT2_NAMES, "transformer.h", transposed=True),
}


@dataclass(frozen=True)
class _Entry:
    source: str
    shape: tuple[int, ...]
    undo: Callable[[torch.Tensor], torch.Tensor] | None
    transposed: bool = False


class GgufAsHf:
    """A GGUF's tensors under Hugging Face names, with `config` and `generation_config` made from its keys.

    unread: the architecture's own keys that neither was made from.

    Tensors this architecture does not know keep their GGUF name, so that renaming reports them as left over.
    Raises UnknownArchitecture, or CorruptCheckpoint where keys and tensors contradict each other.
    """

    def __init__(self, raw: GgufFile) -> None:
        arch = raw.metadata.get("general.architecture")
        layout = LAYOUTS.get(arch) if isinstance(arch, str) else None
        if layout is None:
            raise UnknownArchitecture(
                f"{raw.path}: has the GGUF architecture {arch!r}; modelmill reads {', '.join(LAYOUTS)}"
            )
        self._raw = raw
        self.metadata = raw.metadata
        tied = "output.weight" not in raw.names() or (
            # The GPT-2 converter writes the tied head a second time.
            arch == "gpt2" and raw.same_values("output.weight", "token_embd.weight")
        )
        self.config, self.generation_config, self.unread = read_config(raw, str(arch), tied)
        self._entries: dict[str, _Entry] = {}
        for name in raw.names():
            if name in CONSUMED.get(str(arch), ()) or (tied and name == "output.weight"):
                continue
            self._add(name, layout)

    def names(self) -> list[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        entry = self._entry(name)
        source = self._raw.info(entry.source)
        return TensorInfo(name, entry.shape, source.dtype, source.nbytes)

    def get(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        tensor = self._raw.get(entry.source)
        return tensor if entry.undo is None else entry.undo(tensor)

    def form(self, name: str) -> Form | None:
        """How a matrix is stored; None for one that cannot be kept in its own form."""
        entry = self._entry(name)
        return form_of(self._raw.info(entry.source), transposed=entry.transposed)

    def packed(self, name: str) -> Packed:
        """Its blocks taken apart, rows in Hugging Face's order (of the transpose where the form says so)."""
        entry = self._entry(name)
        blocks = self._raw.blocks(entry.source)
        if entry.undo is not None and not entry.transposed:
            blocks = entry.undo(blocks)
        return packed_of(self._raw.info(entry.source).dtype, blocks)

    def files(self) -> list[Path]:
        return self._raw.files()

    def vocabulary(self) -> bytes:
        """Every tokenizer.* key of the GGUF as one JSON object, under its own full key."""
        kept = {k: v for k, v in self.metadata.items() if k.startswith("tokenizer.")}
        return json.dumps(kept, default=_plain).encode("ascii")

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise no_such_tensor(self._raw.path, name)
        return self._entries[name]

    def _add(self, name: str, layout: Layout) -> None:
        shape = self._raw.info(name).shape
        target, base = _renamed(name, layout)
        undo: Callable[[torch.Tensor], torch.Tensor] | None = None
        transposed = False
        if layout.permuted and base in ("blk.attn_q", "blk.attn_k"):
            heads = self.config["num_attention_heads" if base == "blk.attn_q" else "num_key_value_heads"]
            if not shape or shape[0] % (2 * heads):
                raise CorruptCheckpoint(
                    f"{self._raw.path}: {name} has {list(shape)}, which {heads} heads do not divide"
                )
            undo = _unpermute(heads)
        elif layout.transposed and base.startswith("blk.") and len(shape) == 2:
            shape, undo, transposed = (shape[1], shape[0]), lambda tensor: tensor.t().contiguous(), True
        if target in self._entries:
            raise CorruptCheckpoint(f"{self._raw.path}: two tensors mean {target}")
        self._entries[target] = _Entry(name, shape, undo, transposed)


def _renamed(name: str, layout: Layout) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor (its own where unknown), and its base without layer and suffix."""
    stem, _, suffix = name.rpartition(".")
    parts = stem.split(".", 2)
    layer = ""
    # no model has a million layers, and Python refuses to read a number of thousands of digits
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 7:
        layer, stem = parts[1], f"blk.{parts[2]}"
    found = layout.names.get(stem)
    if found is None or suffix not in ("weight", "bias") or stem.startswith("blk.") != bool(layer):
        return name, ""
    return (f"{layout.blocks}.{int(layer)}.{found}.{suffix}" if layer else f"{found}.{suffix}"), stem


def _unpermute(heads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Undo the converter's reordering of a head's rows from [2, half] to [half, 2]."""

    def undo(tensor: torch.Tensor) -> torch.Tensor:
        pairs = tensor.view(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return undo


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a GGUF value of type {type(value).__name__}")
