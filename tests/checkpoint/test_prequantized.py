"""Checkpoints of GPTQ, AWQ, compressed-tensors: whole numbers stay, and mean what an independent
writer meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelmill.accept.reference.dequantize import DequantizedContainer
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.errors import CheckpointError, CorruptCheckpoint
from tests.checkpoint import packed_writers as writers

NAME = "model.layers.0.mlp.down_proj.weight"
STEM = NAME.removesuffix(".weight")


def write_and_open(
    folder: Path, settings: dict[str, Any], parts: writers.Parts, **config: Any
) -> Checkpoint:
    raw = {"model_type": "llama", "quantization_config": settings} | config
    tensors = {f"{STEM}.{suffix}": tensor for suffix, tensor in parts.items()}
    writers.write_checkpoint(folder, raw, tensors | {"model.norm.weight": torch.ones(3)})
    return open_checkpoint(folder)


def check_matrix(checkpoint: Checkpoint, drawn: writers.SeededMatrix, bits: int) -> None:
    """Bits, whole numbers and values, by our reader and by the reference's own."""
    layout = checkpoint.quant_layout(NAME)
    assert layout is not None
    assert (layout.bits, layout.rows, layout.columns) == (bits, *drawn.codes.shape)
    assert checkpoint.names() == [NAME, "model.norm.weight"] or set(checkpoint.names()) == {
        NAME,
        "model.norm.weight",
    }
    assert checkpoint.tensor_info(NAME).shape == drawn.codes.shape
    packed = checkpoint.read_quantized_matrix(NAME)
    order = np.arange(len(drawn.group_index)) if packed.perm is None else packed.perm.numpy()
    shift = 0 if bits == 4 else 128
    assert np.array_equal(packed.codes.numpy().astype(np.int64) + shift, drawn.codes[:, order])
    # float32 holds scale · (code − zero) exactly for scales of 11 bits
    assert np.array_equal(checkpoint.get(NAME).double().numpy(), drawn.weight)
    reference = DequantizedContainer(checkpoint.raw_container, checkpoint.config)
    assert set(reference.names()) == set(checkpoint.names())
    assert np.array_equal(reference.get(NAME).numpy(), drawn.weight)


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("second", [False, True], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_gptq(
    tmp_path: Path, group: int, bits: int, second: bool, symmetric: bool, act_order: bool
) -> None:
    drawn = writers.seeded_matrix(
        16, 256, group, bits=bits, symmetric=symmetric, act_order=act_order, seed=bits + group
    )
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": act_order,
    }
    settings |= {"checkpoint_format": "gptq_v2"} if second else {}
    checkpoint = write_and_open(
        tmp_path, settings, writers.gptq_tensors(drawn, bits, second=second)
    )
    check_matrix(checkpoint, drawn, bits)
    layout = checkpoint.quant_layout(NAME)
    assert layout is not None
    assert layout.has_offset is not symmetric
    assert (layout.perm_digest is not None) == (act_order and group != -1)
    weight_formats = {
        ("int8" if symmetric and group == -1 else "int8_group") if bits == 8 else "int4"
    }
    assert {layout.weight_format} == weight_formats


def test_gptq_without_g_idx_and_with_a_short_last_group(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(8, 160, 128, seed=3)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}
    check_matrix(
        write_and_open(tmp_path, settings, writers.gptq_tensors(drawn, 4, g_idx=False)), drawn, 4
    )


def test_an_old_gptq_folder_has_its_settings_in_a_file_beside(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(8, 128, 64, seed=4)
    tensors = {
        f"{STEM}.{suffix}": tensor for suffix, tensor in writers.gptq_tensors(drawn, 4).items()
    }
    writers.write_checkpoint(
        tmp_path, {"model_type": "llama"}, tensors | {"model.norm.weight": torch.ones(3)}
    )
    (tmp_path / "quantize_config.json").write_text(
        json.dumps({"bits": 4, "group_size": 64, "sym": False})
    )
    check_matrix(open_checkpoint(tmp_path), drawn, 4)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_awq(tmp_path: Path, group: int) -> None:
    drawn = writers.seeded_matrix(24, 256, group, seed=group)
    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    check_matrix(write_and_open(tmp_path, settings, writers.awq_tensors(drawn)), drawn, 4)


def test_an_old_awq_folder_has_its_settings_in_a_file_beside(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(8, 128, 64, seed=4)
    tensors = {f"{STEM}.{suffix}": tensor for suffix, tensor in writers.awq_tensors(drawn).items()}
    writers.write_checkpoint(
        tmp_path, {"model_type": "llama"}, tensors | {"model.norm.weight": torch.ones(3)}
    )
    side = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(side))
    checkpoint = open_checkpoint(tmp_path)
    assert np.array_equal(checkpoint.get(NAME).double().numpy(), drawn.weight)


def ct(
    bits: int, *, strategy: str, group: int | None, symmetric: bool, ct_format: str, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
    }
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None} | more
    }
    return {
        "quant_method": "compressed-tensors",
        "format": ct_format,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def ct_int8_channels(symmetric: bool, activations: dict[str, Any] | None) -> dict[str, Any]:
    """Weights of 8 bits with a scale per channel, not packed; activations as given."""
    return ct(
        8,
        strategy="channel",
        group=None,
        symmetric=symmetric,
        ct_format="int-quantized",
        input_activations=activations,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zeros", ["symmetric", "packed zeros", "plain zeros"])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_pack_quantized(
    tmp_path: Path, bits: int, group: int, zeros: str, dtype: torch.dtype
) -> None:
    symmetric = zeros == "symmetric"
    drawn = writers.seeded_matrix(
        20, 256, group, bits=bits, symmetric=symmetric, dtype=dtype, seed=bits + group
    )
    strategy = "channel" if group == -1 else "group"
    settings = ct(
        bits, strategy=strategy, group=group, symmetric=symmetric, ct_format="pack-quantized"
    )
    parts = writers.compressed_tensors(
        drawn, bits, symmetric=symmetric, pack_zeros=zeros == "packed zeros"
    )
    check_matrix(write_and_open(tmp_path, settings, parts), drawn, bits)


def test_compressed_with_reordered_columns(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(20, 256, 64, symmetric=True, act_order=True, seed=8)
    settings = ct(4, strategy="group", group=64, symmetric=True, ct_format="pack-quantized")
    checkpoint = write_and_open(
        tmp_path, settings, writers.compressed_tensors(drawn, 4, symmetric=True)
    )
    check_matrix(checkpoint, drawn, 4)
    layout = checkpoint.quant_layout(NAME)
    assert layout is not None
    assert layout.perm_digest is not None


def test_columns_that_fill_no_whole_word(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(7, 100, -1, symmetric=False, seed=8)
    settings = ct(4, strategy="channel", group=None, symmetric=False, ct_format="pack-quantized")
    check_matrix(
        write_and_open(tmp_path, settings, writers.compressed_tensors(drawn, 4, symmetric=False)),
        drawn,
        4,
    )


@pytest.mark.parametrize(
    "activations", [None, {"num_bits": 8, "dynamic": True, "strategy": "token"}]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_int8(
    tmp_path: Path, symmetric: bool, activations: dict[str, Any] | None
) -> None:
    drawn = writers.seeded_matrix(
        16, 96, -1, bits=8, symmetric=symmetric, dtype=torch.bfloat16, seed=2
    )
    settings = ct_int8_channels(symmetric, activations)
    checkpoint = write_and_open(
        tmp_path,
        settings,
        writers.compressed_tensors(drawn, 8, symmetric=symmetric, pack=False, pack_zeros=False),
    )
    check_matrix(checkpoint, drawn, 8)
    layout = checkpoint.quant_layout(NAME)
    assert layout is not None
    assert layout.weight_format == ("int8" if symmetric else "int8_group")
    assert ("8 bits, per token are ignored, activations stay floating point" in layout.label) == (
        activations is not None
    )


def test_one_scale_for_a_whole_tensor(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(16, 96, -1, bits=8, symmetric=True, seed=2)
    drawn.scales[:] = drawn.scales[0]
    parts = writers.compressed_tensors(drawn, 8, symmetric=True, pack=False) | {
        "weight_scale": torch.tensor(drawn.scales[0]).to(torch.float16)
    }
    settings = ct(8, strategy="tensor", group=None, symmetric=True, ct_format="int-quantized")
    check_matrix(write_and_open(tmp_path, settings, parts), drawn, 8)


def test_gpt2_names_mean_the_transposes(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(16, 64, 32, seed=2)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    checkpoint = write_and_open(
        tmp_path, settings, writers.gptq_tensors(drawn, 4), model_type="gpt2"
    )
    assert checkpoint.tensor_info(NAME).shape == (64, 16)
    assert np.array_equal(checkpoint.get(NAME).double().numpy(), drawn.weight.T)
    assert np.array_equal(
        DequantizedContainer(checkpoint.raw_container, checkpoint.config).get(NAME).numpy(),
        drawn.weight.T,
    )


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
CT = ct(4, strategy="group", group=128, symmetric=True, ct_format="pack-quantized")


def ct_weights(**changes: Any) -> dict[str, Any]:
    settings = json.loads(json.dumps(CT))
    settings["config_groups"]["group_0"]["weights"] |= changes
    return dict(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (GPTQ | {"bits": 2}, "2 bits.*-q int4"),
        (GPTQ | {"bits": 3}, "3 bits.*-q int4"),
        (GPTQ | {"bits": 4.0}, "4.0 bits.*-q int4"),
        (AWQ | {"bits": 4.0}, "4.0 bits.*-q int4"),
        (GPTQ | {"group_size": 16}, "groups of 16.*--group-size 32"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin.*gptq_v2"),
        (AWQ | {"bits": 8}, "8 bits.*-q int4"),
        (AWQ | {"version": "gemv"}, "gemv.*gemm"),
        (AWQ | {"group_size": 48}, "groups of 48"),
        (CT | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized.*take the original"),
        (CT | {"format": "float-quantized"}, "float-quantized.*fp8"),
        (CT | {"config_groups": {}}, "no config_groups"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        (CT | {"sparsity_config": "x"}, "stored sparse .'x'"),
        (
            ct(
                4,
                strategy="group",
                group=128,
                symmetric=True,
                ct_format="pack-quantized",
                input_activations="x",
            ),
            "no object",
        ),
        (ct_weights(num_bits=3), "3-bit int"),
        (ct_weights(num_bits=[4]), "4.-bit int"),
        (ct_weights(type="float"), "4-bit float"),
        (ct_weights(strategy="block"), "by block"),
        (ct_weights(group_size=16), "groups of 16"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "bitsandbytes.*known are gptq, awq",
        ),
        ({"quant_method": "hqq"}, "hqq, which is not supported.*-q int4 or -q int8"),
        ({"bits": 4}, "an unnamed method"),
        ("gptq", "no object"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named_with_a_way_out(
    tmp_path: Path, settings: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        write_and_open(tmp_path, settings, {"qweight": torch.zeros(1, dtype=torch.int32)})
    assert "\n" not in str(error.value)


def test_contradictions_are_named(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(16, 256, 128, symmetric=False, seed=1)
    parts = writers.gptq_tensors(drawn, 4)
    with pytest.raises(CorruptCheckpoint, match="zeros other than 8"):
        write_and_open(tmp_path / "a", GPTQ, parts).get(NAME)
    with pytest.raises(CheckpointError, match="not groups of 64"):
        write_and_open(tmp_path / "b", GPTQ | {"group_size": 64}, parts).quant_layout(NAME)
    uneven = parts | {"g_idx": torch.tensor([0] * 100 + [1] * 156, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match="uneven"):
        write_and_open(tmp_path / "c", GPTQ | {"sym": False}, uneven).quant_layout(NAME)
    short = parts | {"g_idx": parts["g_idx"][:-1]}
    with pytest.raises(CorruptCheckpoint, match="255 entries"):
        write_and_open(tmp_path / "d", GPTQ | {"sym": False}, short).quant_layout(NAME)
    with pytest.raises(CorruptCheckpoint, match="do not fit"):
        write_and_open(
            tmp_path / "e", AWQ, writers.awq_tensors(drawn) | {"scales": torch.ones(2, 24)}
        ).quant_layout(NAME)
    packed = writers.compressed_tensors(drawn, 4, symmetric=True)
    with pytest.raises(CheckpointError, match="holds no 16 × 300 codes"):
        write_and_open(
            tmp_path / "f", CT, packed | {"weight_shape": torch.tensor([16, 300])}
        ).quant_layout(NAME)


def _shapes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers in other shapes, fewer of them, and in other types."""
    flat = tensor.flatten()
    ranks = [
        flat,
        flat[0],
        tensor[None],
        tensor[..., None],
        flat[:0],
        tensor[:0],
        tensor[..., :0],
        tensor[..., :-1],
    ]
    dtypes = [
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    ]
    odd = (
        [torch.full_like(tensor, float("nan"))]
        if tensor.is_floating_point()
        else [tensor - 1, tensor * 0]
    )
    return [
        *ranks,
        *(tensor.to(dtype) for dtype in dtypes),
        torch.full(tensor.shape, float("nan")),
        *odd,
    ]


@pytest.mark.parametrize(
    "container", ["gptq", "gptq of 8 bits", "awq", "compressed", "compressed int8"]
)
def test_damaged_parts_are_named_and_never_end_in_a_traceback(
    tmp_path: Path, container: str
) -> None:
    """Each part alone in another shape or type: it is read, or refused in one line."""
    bits = 8 if "8" in container else 4
    drawn = writers.seeded_matrix(16, 256, 128, bits=bits, seed=bits)
    settings: dict[str, Any]
    if container.startswith("gptq"):
        settings, parts = GPTQ | {"bits": bits, "sym": False}, writers.gptq_tensors(drawn, bits)
    elif container == "awq":
        settings, parts = AWQ, writers.awq_tensors(drawn)
    else:
        settings = ct(
            bits, strategy="group", group=128, symmetric=False, ct_format="pack-quantized"
        )
        parts = writers.compressed_tensors(
            drawn, bits, symmetric=False, pack=bits == 4, pack_zeros=bits == 4
        )
        parts |= {"weight_g_idx": torch.from_numpy(drawn.group_index).to(torch.int32)}
    refused = 0
    for suffix, tensor in parts.items():
        for number, changed in enumerate(_shapes(tensor)):
            checkpoint = write_and_open(
                tmp_path / f"{suffix}-{number}", settings, parts | {suffix: changed}
            )
            message = ""
            try:
                assert checkpoint.get(NAME).shape == (16, 256)
            except CheckpointError as problem:
                message = str(problem)
                refused += 1
            assert "\n" not in message
    assert refused >= 9 * len(parts)


@pytest.mark.parametrize(
    ("suffix", "changed", "message"),
    [
        ("weight_shape", torch.tensor([16, 256, 1]), "does not contain rows and columns"),
        ("weight_shape", torch.tensor([float("nan"), 256.0]), "does not contain rows and columns"),
        ("weight_shape", torch.tensor([0, 256]), "does not contain rows and columns"),
        ("weight_packed", torch.zeros(16, 32), "weight_packed is float32"),
        (
            "weight_g_idx",
            torch.tensor([0] * 128 + [1] * 127, dtype=torch.int32),
            "255 entries for 256",
        ),
        ("weight_g_idx", torch.zeros(256, 2, dtype=torch.int32), "entries for 256 columns"),
    ],
)
def test_what_compressed_parts_must_be(
    tmp_path: Path, suffix: str, changed: torch.Tensor, message: str
) -> None:
    parts = writers.compressed_tensors(
        writers.seeded_matrix(16, 256, 128, symmetric=True, seed=1), 4, symmetric=True
    )
    with pytest.raises(CorruptCheckpoint, match=message):
        write_and_open(tmp_path, CT, parts | {suffix: changed}).quant_layout(NAME)


def test_one_zero_point_for_a_whole_tensor(tmp_path: Path) -> None:
    drawn = writers.seeded_matrix(16, 256, 128, bits=8, seed=2)
    drawn.zeros[:] = 130
    parts = writers.compressed_tensors(drawn, 8, symmetric=False, pack=False, pack_zeros=False)
    settings = ct(8, strategy="group", group=128, symmetric=False, ct_format="int-quantized")
    checkpoint = write_and_open(
        tmp_path, settings, parts | {"weight_zero_point": torch.tensor([2], dtype=torch.int8)}
    )
    assert np.array_equal(checkpoint.get(NAME).double().numpy(), drawn.weight)
