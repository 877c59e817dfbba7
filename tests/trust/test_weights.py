"""Weights that are not numbers are found at build in every container and named, before an engine
exists.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, TensorMismatch
from tests.checkpoint.checkpoint_factory import (
    LLAMA_CONFIG,
    llama_state,
    write_folder,
    write_llama_gguf,
)
from tests.hypothesis_examples import examples
from tests.trust.error_lines import check_one_line

NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "lm_head.weight",
]


def build(path: Path, out: Path, **options: str) -> None:
    config = BuildConfig(target="cpu", **options)  # type: ignore[arg-type]
    build_engine.build(make_build_plan(open_checkpoint(path), config), out, None)


def without_vocabulary(path: Path) -> Path:
    """The tokenizer that the writer makes up is refused before the weights are looked at."""
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"none"))
    return path


@pytest.mark.parametrize("container", ["safetensors", "pth", "gguf"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_value_that_is_none(tmp_path: Path, container: str, value: float, name: str) -> None:
    state = llama_state()
    state[name].view(-1)[-1] = value
    path = write_folder(tmp_path / "hf", state)
    if container == "pth":
        (path / "model.safetensors").unlink()
        torch.save(state, path / "pytorch_model.bin")
    elif container == "gguf":
        path = without_vocabulary(write_llama_gguf(tmp_path / "m.gguf", state))
    with pytest.raises(CorruptCheckpoint, match=name.replace(".", r"\.")) as raised:
        build(path, tmp_path / "e")
    check_one_line(raised.value)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_scale_in_a_block_format(tmp_path: Path, options: dict[str, str]) -> None:
    """One bad half among the bytes of a quantized tensor makes 32 values that are no numbers."""
    path = tmp_path / "m.gguf"
    state = llama_state()
    name = "model.layers.0.mlp.up_proj.weight"
    blocks = gguf.quants.quantize(state.pop(name).numpy(), gguf.GGMLQuantizationType.Q8_0)
    blocks[3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    write_llama_gguf(
        path, state, raw={"blk.0.ffn_up.weight": (blocks, gguf.GGMLQuantizationType.Q8_0)}
    )
    with pytest.raises(CorruptCheckpoint, match=name.replace(".", r"\.")):
        build(without_vocabulary(path), tmp_path / "e", **options)


@pytest.mark.parametrize("shape", [(20,), (20, 32, 1), (32, 20), (20, 31), (0, 32), ()], ids=str)
def test_another_shape_than_the_config_says(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = llama_state() | {"lm_head.weight": torch.ones(shape)}
    with pytest.raises(TensorMismatch, match=r"lm_head\.weight") as raised:
        build(write_folder(tmp_path / "hf", state), tmp_path / "e")
    check_one_line(raised.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.uint8])
def test_another_kind_of_number(tmp_path: Path, dtype: torch.dtype) -> None:
    state = llama_state()
    state["model.norm.weight"] = state["model.norm.weight"].to(dtype)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight") as raised:
        build(write_folder(tmp_path / "hf", state), tmp_path / "e")
    check_one_line(raised.value)


def test_a_config_that_names_fewer_or_more_layers_than_there_are(tmp_path: Path) -> None:
    many = examples(full=4096, quick=64)  # names of all would be more than the line may have
    for layers, message in ((1, "no place for"), (3, "lacks"), (many, "lacks")):
        folder = write_folder(
            tmp_path / str(layers), llama_state(), {**LLAMA_CONFIG, "num_hidden_layers": layers}
        )
        with pytest.raises(TensorMismatch, match=message) as raised:
            build(folder, tmp_path / "e")
        check_one_line(raised.value, 3000)
