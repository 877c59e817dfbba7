"""Weights that do not fit their config: one line with the file, the fields, and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import TensorMismatch
from tests.cli.mechanisms import save_checkpoint
from tests.trust.error_lines import check_one_line

pytest.importorskip("transformers")

FLOAT = BuildConfig(dtype="float32", target="cpu")
Config, Weights = dict[str, Any], dict[str, torch.Tensor]
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def without(name: str) -> Callable[[Config, Weights], None]:
    """A checkpoint that lost a tensor."""
    return lambda _, weights: weights.__delitem__(name)


def with_value(key: str, value: int) -> Callable[[Config, Weights], None]:
    """A config with another value."""
    return lambda config, _: config.__setitem__(key, value)


def cut_router(_: Config, weights: Weights) -> None:
    """One expert's row of the router is lost."""
    name = "model.layers.0.block_sparse_moe.gate.weight"
    weights[name] = weights[name][:3]


def fits(shown: str, values: str) -> str:
    """The advice where values are known with which all fits."""
    return f"; config.json has {shown}; with {values} every tensor fits: correct it there"


CASES: dict[str, tuple[str, Callable[[Config, Weights], None], str, str]] = {
    "a state of another size": (
        "state space", with_value("state_size", 15), "shape [328, 64] has not 324 rows",
        fits("state_size=15", "state_size=16"),
    ),
    "a kernel of another width": (
        "state space", with_value("conv_kernel", 3),
        "conv1d.weight: shape [192, 4] where the config asks for [192, 3]",
        fits("conv_kernel=3", "conv_kernel=4"),
    ),
    "heads of another size": (
        "gated delta rule", with_value("linear_key_head_dim", 8), "in_proj_qkvz.weight): shape",
        fits(
            "linear_key_head_dim=8, linear_num_key_heads=2",
            "linear_key_head_dim=16 or linear_num_key_heads=4",
        ),
    ),
    "a latent of another size": (
        "latent attention", with_value("kv_lora_rank", 31), "kv_a_layernorm.weight: shape [32]",
        fits("kv_lora_rank=31", "kv_lora_rank=32"),
    ),
    "fewer experts": (
        "experts", with_value("num_local_experts", 3), "holds 6 tensor(s) the model has no place",
        fits("num_local_experts=3", "num_local_experts=4"),
    ),
    "more experts": (
        "experts", with_value("num_local_experts", 5), "needs 6 tensor(s) the checkpoint lacks",
        fits("num_local_experts=5", "num_local_experts=4"),
    ),
    "a lost expert": (
        "experts", without(EXPERT), f"the model needs 1 tensor(s) the checkpoint lacks: {EXPERT};",
        "; this follows from num_hidden_layers=2, num_local_experts=4 in config.json; fetch the "
        "file again, or take the config.json that belongs to these weights",
    ),
    "an expert too many": (
        "experts",
        lambda _, weights: weights.update({EXPERT.replace("s.1.", "s.9."): weights[EXPERT] + 0}),
        "the checkpoint holds 1 tensor(s) the model has no place for: ",
        "; this follows from num_hidden_layers=2, num_local_experts=4 in config.json; take the "
        "config.json that belongs to these weights",
    ),
    "a router cut off": (
        "experts", cut_router, "gate.weight: shape [3, 64] where the config asks for [4, 64]",
        "; this follows from hidden_size=64, num_local_experts=4 in config.json; take the "
        "config.json that belongs to these weights",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """mechanism → its checkpoint, written at its first use."""
    folders: dict[str, Path] = {}

    def folder(mechanism: str) -> Path:
        if mechanism not in folders:
            made = tmp_path_factory.mktemp("mechanism")
            folders[mechanism] = save_checkpoint(mechanism, made / "m")
        return folders[mechanism]

    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_message_names_file_field_and_value(
    saved: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    mechanism, change, what, advice = CASES[case]
    source = saved(mechanism)
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    change(config, weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(TensorMismatch) as caught:
        make_build_plan(open_checkpoint(tmp_path), FLOAT)
    line = str(caught.value)
    check_one_line(line)
    assert line.startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert what in line
    assert line.endswith(advice)


def test_the_shard_that_has_the_tensor_is_named(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = load_file(saved("experts") / "model.safetensors")
    config = json.loads((saved("experts") / "config.json").read_text())
    gates = {name for name in weights if "gate.weight" in name}
    shards = {"a.safetensors": weights.keys() - gates, "b.safetensors": gates}
    for file, names in shards.items():
        save_file({name: weights[name] for name in names}, tmp_path / file)
    places = {name: file for file, names in shards.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for value, place in ((3, tmp_path / "a.safetensors"), (5, index)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": value}))
        with pytest.raises(TensorMismatch) as caught:
            make_build_plan(open_checkpoint(tmp_path), FLOAT)
        assert str(caught.value).startswith(f"{place}: ")
