"""``-q keep``: engines hold a checkpoint's own whole numbers, judged against the reference's own
reading of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.artifact.store import open_artifact
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, CorruptArtifact, TensorMismatch, UsageError
from modelmill.ops import registry
from modelmill.weights import base, dense, int4, int8_group, mixed_rows
from tests.accept.build_and_accept import build_and_accept, save_tiny
from tests.accept.planted_faults import faults, plant_fault
from tests.checkpoint import packed_writers as writers
from tests.checkpoint.checkpoint_factory import gguf_names, permute, write_tensors
from tests.checkpoint.test_prequantized import ct, ct_int8_channels

HIDDEN, INNER, HEADS, KV, LAYERS, VOCAB = 64, 96, 4, 2, 2, 96
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
FUSED = {
    "attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
Tensors = dict[str, torch.Tensor]


def plain(seed: int = 0) -> Tensors:
    """What no tool quantizes: embedding, head, norms."""
    generator = torch.Generator().manual_seed(seed)
    names = [
        "model.norm",
        *(
            f"model.layers.{i}.{n}"
            for i in range(LAYERS)
            for n in ("input_layernorm", "post_attention_layernorm")
        ),
    ]
    tensors = {
        f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator) for name in names
    }
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return tensors


def stems() -> list[tuple[str, tuple[int, int]]]:
    return [
        (f"model.layers.{i}.{name}", shape) for i in range(LAYERS) for name, shape in SHAPES.items()
    ]


def matrices(artifact: Any) -> dict[str, np.ndarray]:
    """What the engine's linears hold, float32 as float64."""
    matrix_by_name = {}
    for module, weight_format in artifact.manifest.weight_formats.items():
        prefix = f"{module}."
        names = [n for n in artifact.names() if n.startswith(prefix)]
        if names:
            weight = base.from_tensors(
                weight_format, {n.removeprefix(prefix): artifact.tensor(n) for n in names}
            )
            matrix_by_name[module] = weight.dequantize().double().numpy()
    return matrix_by_name


def check(
    folder: Path,
    out: Path,
    expected_weights: dict[str, np.ndarray],
    dtype: str = "float32",
    recipe: str = "none",
) -> Any:
    """Build, judge, and compare every matrix with what was meant."""
    report, written = build_and_accept(folder, out, dtype, recipe)
    assert written, report.get("reason")
    artifact = open_artifact(out)
    assert artifact.manifest.build["quantization"] == "keep"
    actual = matrices(artifact)
    for layer in range(LAYERS):
        for module, sources in FUSED.items():
            expected = np.concatenate(
                [expected_weights[f"model.layers.{layer}.{name}"] for name in sources]
            )
            assert np.array_equal(actual[f"layers.{layer}.{module}"], expected), module
    plan = make_build_plan(
        open_checkpoint(folder), BuildConfig(dtype=dtype, quantization=recipe, target="cpu")
    )
    assert sum(artifact.tensor(name).nbytes for name in artifact.names()) == plan.weight_bytes
    return artifact


def foreign(
    folder: Path, settings: dict[str, Any], make: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint whose matrices ``make(shape, seed)`` gives as (parts, weight)."""
    tensors, expected = plain(), {}
    for seed, (stem, shape) in enumerate(stems()):
        parts, weight = make(shape, seed)
        tensors |= {f"{stem}.{suffix}": part for suffix, part in parts.items()}
        expected[stem] = weight
    return writers.write_checkpoint(
        folder, CONFIG | {"quantization_config": settings}, tensors
    ), expected


def gptq(bits: int, **options: Any) -> Any:
    def make(shape: tuple[int, int], seed: int) -> tuple[Tensors, np.ndarray]:
        drawn = writers.seeded_matrix(*shape, 32, bits=bits, seed=seed, **options)
        return writers.gptq_tensors(drawn, bits), drawn.weight

    return make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_is_kept(tmp_path: Path, bits: int, symmetric: bool, dtype: str) -> None:
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric}
    folder, expected = foreign(tmp_path / "hf", settings, gptq(bits, symmetric=symmetric))
    artifact = check(folder, tmp_path / "e", expected, dtype)
    weight_format = "int4" if bits == 4 else "int8_group"
    assert artifact.manifest.weight_formats["layers.0.attn.qkv_proj"] == weight_format
    assert artifact.manifest.weight_formats["head"] == "dense"


def with_biases(make: Any, value: float) -> Any:
    """AutoGPTQ's bias beside each packed matrix, whether the family has it or not."""

    def make_with_bias(shape: tuple[int, int], seed: int) -> tuple[Tensors, np.ndarray]:
        parts, weight = make(shape, seed)
        bias = torch.zeros(shape[0], dtype=torch.float16)
        bias[-1] = value if seed == 3 else 0
        return parts | {"bias": bias}, weight

    return make_with_bias


def test_biases_of_zeros_that_the_family_has_not_are_left_out(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    folder, expected = foreign(tmp_path / "hf", settings, with_biases(gptq(4, symmetric=True), 0.0))
    artifact = check(folder, tmp_path / "e", expected)
    assert not any(name.endswith("bias") for name in artifact.names())


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_bias_that_the_family_has_not_is_named_where_it_is_not_zero(
    tmp_path: Path, value: float
) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    folder, _ = foreign(tmp_path / "hf", settings, with_biases(gptq(4, symmetric=True), value))
    with pytest.raises(
        TensorMismatch, match=r"layers\.0\.self_attn\.o_proj\.bias beside a packed matrix"
    ) as error:
        make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))
    assert "\n" not in str(error.value)


def test_biases_that_the_family_has_are_kept_and_zeros_elsewhere_are_named(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    folder, _ = foreign(tmp_path / "hf", settings, with_biases(gptq(4, symmetric=True), 0.5))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    plan = make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))
    biases = {piece.rule.target for piece in plan.tensors if piece.rule.target.endswith("bias")}
    assert biases == {
        f"layers.{i}.attn.{name}.bias" for i in range(LAYERS) for name in ("qkv_proj", "o_proj")
    }
    tensors = load_file(folder / "model.safetensors") | {"model.norm.bias": torch.zeros(HIDDEN)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorMismatch, match=r"no place for: model\.norm\.bias"):
        make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))


def test_orders_that_differ_are_held_apart_and_equal_ones_together(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    folder, expected = foreign(tmp_path / "hf", settings, gptq(4, symmetric=True, act_order=True))
    artifact = check(folder, tmp_path / "e", expected)
    assert artifact.manifest.weight_formats["layers.0.attn.qkv_proj"] == "mixed_rows"
    assert artifact.manifest.weight_formats["layers.0.attn.o_proj"] == "int4"

    def make_equal_orders(shape: tuple[int, int], seed: int) -> tuple[Tensors, np.ndarray]:
        drawn = writers.seeded_matrix(*shape, 32, symmetric=True, seed=seed)
        drawn.group_index = drawn.group_index[np.random.default_rng(shape[1]).permutation(shape[1])]
        return writers.gptq_tensors(drawn, 4), drawn.weight

    folder, expected = foreign(tmp_path / "same", settings, make_equal_orders)
    artifact = check(folder, tmp_path / "f", expected)
    assert artifact.manifest.weight_formats["layers.0.attn.qkv_proj"] == "int4"


def test_awq_is_kept(tmp_path: Path) -> None:
    def make(shape: tuple[int, int], seed: int) -> tuple[Tensors, np.ndarray]:
        drawn = writers.seeded_matrix(*shape, 32, seed=seed)
        return writers.awq_tensors(drawn), drawn.weight

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    }
    check(
        *foreign(tmp_path / "hf", settings, make)[:1],
        tmp_path / "e",
        foreign(tmp_path / "hf", settings, make)[1],
    )


def test_compressed_tensors_with_some_modules_left_whole(tmp_path: Path) -> None:
    def make(shape: tuple[int, int], seed: int) -> tuple[Tensors, np.ndarray]:
        if seed % 7 == 2:  # v
            weight = (
                torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[1] ** -0.5
            )
            return {"weight": weight}, weight.double().numpy()
        drawn = writers.seeded_matrix(*shape, 32, symmetric=True, dtype=torch.bfloat16, seed=seed)
        return writers.compressed_tensors(drawn, 4, symmetric=True), drawn.weight

    settings = ct(4, strategy="group", group=32, symmetric=True, ct_format="pack-quantized")
    folder, expected = foreign(tmp_path / "hf", settings, make)
    artifact = check(folder, tmp_path / "e", expected)
    assert artifact.manifest.weight_formats["layers.1.attn.qkv_proj"] == "mixed_rows"
    assert artifact.manifest.weight_formats["layers.1.mlp.gate_up_proj"] == "int4"


def test_int8_of_compressed_tensors_runs_as_int8(tmp_path: Path) -> None:
    def make(shape: tuple[int, int], seed: int) -> tuple[Tensors, np.ndarray]:
        drawn = writers.seeded_matrix(
            *shape, -1, bits=8, symmetric=True, dtype=torch.bfloat16, seed=seed
        )
        return writers.compressed_tensors(drawn, 8, symmetric=True, pack=False), drawn.weight

    activations = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    settings = ct_int8_channels(symmetric=True, activations=activations)
    folder, expected = foreign(tmp_path / "hf", settings, make)
    artifact = check(folder, tmp_path / "e", expected)
    assert artifact.manifest.weight_formats["layers.0.mlp.down_proj"] == "int8"
    plan = make_build_plan(open_checkpoint(folder), BuildConfig(target="cpu"))
    assert (
        "activations of 8 bits, per token are ignored, activations stay floating point"
        in plan.reasons["quantization"]
    )


def test_a_wrong_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference reads the file by itself: an error of our reader does not pass."""
    from modelmill.checkpoint import gptq_format

    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    folder, _ = foreign(tmp_path / "hf", settings, gptq(4))
    real_make = gptq_format.parse_scheme
    monkeypatch.setattr(
        gptq_format,
        "parse_scheme",
        lambda *a: gptq_format.GptqScheme(**{**vars(real_make(*a)), "zero_point_offset": 0}),
    )
    report, written = build_and_accept(folder, tmp_path / "e", "float32", "none")
    assert not written
    assert report["layer"] == 0


RULES = ("gate and up swapped", "k renamed v", "the two norms renamed", "eps x 10", "RoPE base x 2")


@pytest.mark.parametrize("name", RULES)
def test_planted_faults_are_refused_in_kept_engines_too(tmp_path: Path, name: str) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", dict.fromkeys(GGUF_TYPES, "Q4_1"))
    fault = next(fault for fault in faults("llama") if fault.name == name)
    with plant_fault(fault, "llama"):
        report, written = build_and_accept(path, tmp_path / "e", "bfloat16", "keep")
    assert not written
    assert (report["layer"], report["module"] in fault.modules) == (fault.layer, True), report[
        "reason"
    ]


def test_another_recipe_rounds_what_the_numbers_mean(tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    folder, _ = foreign(tmp_path / "hf", settings, gptq(4))
    report, written = build_and_accept(folder, tmp_path / "e", "float32", "int8")
    assert written, report.get("reason")
    assert open_artifact(tmp_path / "e").manifest.weight_formats["layers.0.attn.o_proj"] == "int8"


# -- GGUF
# ---------------------------------------------------------------------------

GGUF_TYPES = {
    "self_attn.q_proj": "Q4_1", "self_attn.k_proj": "Q4_1", "self_attn.v_proj": "Q4_1",
    "self_attn.o_proj": "Q4_0",
    "mlp.gate_proj": "Q8_0", "mlp.up_proj": "Q4_0", "mlp.down_proj": "F16",
}  # fmt: skip


def write_gguf(
    path: Path, ggml_types: dict[str, str], *, tied: bool = False
) -> tuple[Path, dict[str, np.ndarray]]:
    """A llama of ``kinds`` by the gguf package, and the matrices that its own reader gives, rows
    put back.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    names = gguf_names(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in plain().items():
        if not (tied and name.startswith("lm_head")):
            stem = names.get_name(name.removesuffix(".weight"))
            ggml_type = "Q8_0" if name.startswith("model.embed") else "F32"
            add(writer, f"{stem}.weight", tensor.numpy(), ggml_type)
    expected = {}
    generator = torch.Generator().manual_seed(5)
    for stem, shape in stems():
        weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).numpy()
        heads = {"q_proj": HEADS, "k_proj": KV}.get(stem.rpartition(".")[2])
        stored = weight if heads is None else permute(weight, heads)
        ggml_type = ggml_types[stem.split(".", 3)[3]]
        read = add(writer, f"{names.get_name(stem)}.weight", stored, ggml_type).astype(np.float64)
        # the converter's order undone: within a head rows 2j, 2j + 1 are channels j, j + half
        expected[stem] = read if heads is None else _unpermuted(read, heads)
    write_tensors(writer)
    return path, expected


def _unpermuted(stored: np.ndarray, heads: int) -> np.ndarray:
    out = np.empty_like(stored)
    dim = len(stored) // heads
    for row in range(len(stored)):
        head, within = divmod(row, dim)
        out[head * dim + within // 2 + (within % 2) * (dim // 2)] = stored[row]
    return out


def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, ggml_type: str) -> np.ndarray:
    """Add a tensor; returns what the gguf package reads back."""
    number = gguf.GGMLQuantizationType[ggml_type]
    stored = gguf.quants.quantize(values, number)
    writer.add_tensor(name, stored, raw_dtype=number)
    return gguf.quants.dequantize(stored, number)


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_kept(tmp_path: Path, ggml_type: str) -> None:
    path, expected = write_gguf(tmp_path / "m.gguf", dict.fromkeys(GGUF_TYPES, ggml_type))
    artifact = check(path, tmp_path / "e", expected, recipe="keep")
    weight_formats = {
        k for module, k in artifact.manifest.weight_formats.items() if module != "head"
    }
    assert weight_formats == {"int8_group" if ggml_type == "Q8_0" else "int4"}
    assert artifact.tensor("layers.0.mlp.down_proj.scale").shape == (HIDDEN, INNER // 32)


def test_a_mixed_gguf_keeps_what_it_can(tmp_path: Path) -> None:
    path, expected = write_gguf(tmp_path / "m.gguf", GGUF_TYPES | {"self_attn.k_proj": "Q5_1"})
    artifact = check(path, tmp_path / "e", expected, recipe="keep")
    weight_formats = {
        m.removeprefix("layers.0."): k
        for m, k in artifact.manifest.weight_formats.items()
        if m.startswith("layers.0.")
    }
    assert weight_formats == {
        "attn.qkv_proj": "mixed_rows", "attn.o_proj": "int4", "mlp.gate_up_proj": "mixed_rows",
        "mlp.down_proj": "dense"
    }  # fmt: skip


def test_the_tied_head_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", GGUF_TYPES, tied=True)
    plan = make_build_plan(
        open_checkpoint(path), BuildConfig(quantization="keep", quantize_head=True, target="cpu")
    )
    assert plan.weight_formats["head"] == "int8_group"
    report, written = build_and_accept(path, tmp_path / "e", "float32", "keep", quantize_head=True)
    assert written, report.get("reason")


def test_nothing_to_keep_is_named(tmp_path: Path) -> None:
    path, _ = write_gguf(tmp_path / "m.gguf", dict.fromkeys(GGUF_TYPES, "F16"))
    checkpoint = open_checkpoint(path)
    plan = make_build_plan(checkpoint, BuildConfig(quantization="keep", target="cpu"))
    assert set(plan.weight_formats.values()) == {"dense"}, "the embedding alone is in blocks"
    with pytest.raises(UsageError, match=r"has no matrix that can be kept.*-q int4"):
        make_build_plan(
            open_checkpoint(save_tiny("llama", tmp_path / "hf")), BuildConfig(quantization="keep")
        )
    writers.write_checkpoint(
        tmp_path / "liar", CONFIG | {"quantization_config": {"quant_method": "gptq"}}, plain()
    )
    with pytest.raises(CheckpointError, match="none are; remove its quantization_config"):
        make_build_plan(open_checkpoint(tmp_path / "liar"), BuildConfig())


# -- stacked weights
# ---------------------------------------------------------------------------


def pile() -> mixed_rows.MixedRowsWeight:
    generator = torch.Generator().manual_seed(1)
    four = int4.Int4Weight.pack(
        torch.randn(6, 96, generator=generator), torch.float32, group_size=32
    )
    codes = torch.randint(-128, 128, (5, 96), generator=generator, dtype=torch.int8)
    eight = int8_group.Int8GroupWeight.from_codes(
        codes, torch.rand(5, 3, generator=generator).half(), None, 32
    )
    return mixed_rows.MixedRowsWeight(
        (four, eight, dense.DenseWeight(torch.randn(4, 96, generator=generator)))
    )


def test_a_stack_is_its_rows() -> None:
    stack = pile()
    assert stack.shape == (15, 96)
    assert stack.column_slice_alignment == 32
    again = base.from_tensors("mixed_rows", stack.tensors())
    assert torch.equal(again.dequantize(), stack.dequantize())
    x, bias = torch.randn(3, 96), torch.randn(15)
    expected = x @ stack.dequantize().T + bias
    torch.testing.assert_close(
        stack.matmul(x, bias, registry.select_backends("cpu")), expected, rtol=1e-4, atol=1e-3
    )
    part = stack.slice([(2, 8), (12, 15)], (32, 96))
    rows = torch.cat([stack.dequantize()[2:8], stack.dequantize()[12:15]])
    assert torch.equal(part.dequantize(), rows[:, 32:])


def test_a_damaged_stack_is_named() -> None:
    tensors = pile().tensors()
    with pytest.raises(CorruptArtifact, match="part 'weight'"):
        base.from_tensors("mixed_rows", tensors | {"weight": torch.zeros(1)})
    with pytest.raises(CorruptArtifact, match="do not fit together"):
        base.from_tensors("mixed_rows", {**tensors, "2-dense-weight": torch.zeros(4, 64)})


@pytest.mark.parametrize("format_class", [int4.Int4Weight, int8_group.Int8GroupWeight])
def test_a_reordered_weight_reads_its_inputs_in_order(format_class: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    four = format_class is int4.Int4Weight
    codes = torch.randint(0, 16, (8, 70), generator=generator).to(torch.uint8)
    order = torch.randperm(70, generator=generator).to(torch.int32)
    scale = torch.rand(8, 3, generator=generator)
    if four:
        weight: Any = int4.Int4Weight(int4.pack_codes(codes), scale, None, 70, 32, perm=order)
    else:
        weight = int8_group.Int8GroupWeight.from_codes(codes.to(torch.int8), scale, None, 32, order)
    wide = (codes.float() - (8 if four else 0)) * scale.repeat_interleave(32, 1)[:, :70]
    expected = torch.empty(8, 70)
    expected[:, order.long()] = wide
    assert torch.equal(weight.dequantize(), expected)
    again = base.from_tensors(weight.format, weight.tensors())
    assert torch.equal(again.dequantize(), expected)
    assert again.column_slice_alignment == 70, "columns of another order are not cut"
    assert torch.equal(weight.slice([(2, 5)], (0, 70)).dequantize(), expected[2:5])
    x = torch.randn(3, 70)
    torch.testing.assert_close(
        weight.matmul(x, None, registry.select_backends("cpu")),
        x @ expected.T,
        rtol=1e-4,
        atol=1e-4,
    )
