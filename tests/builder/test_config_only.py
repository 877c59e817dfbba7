"""Plans of which only config.json is here: the same tensors as with the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_shapes import MOE_SHAPES
from modelmill.builder.config_only import checkpoint_from_config, is_config_only
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.cli.main import main
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError
from tests.models.all_families import CASES

pytest.importorskip("transformers")

GEMMA4_TEXT = {
    "model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "use_cache": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
GEMMA4_E = {
    **GEMMA4_TEXT, "attention_k_eq_v": False, "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072, "num_attention_heads": 8, "sliding_window": 512,
    "num_global_key_value_heads": None, "enable_moe_block": False,
}  # fmt: skip
GEMMA4_WIDE = {
    **GEMMA4_TEXT, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144, "num_kv_shared_layers": 0, "sliding_window": 1024,
    "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
}  # fmt: skip


def gemma4_types(layers: int, every: int) -> list[str]:
    """Every n-th layer has full attention."""
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]


def gemma4(text: dict[str, Any]) -> dict[str, Any]:
    """A published config.json around that of its language model."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "boi_token_id": 255999, "eoi_token_id": 258882, "image_token_id": 258880,
        "eos_token_id": [1, 106], "tie_word_embeddings": True, "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 768},
        "torch_dtype": "bfloat16",
    }  # fmt: skip


# fields of the published config.json files, and the parameters that their authors count
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Qwen3-30B-A3B": (dict(MOE_SHAPES["qwen3-30b-a3b"]), 30.5, 3.3),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1e6, "vocab_size": 32000, "torch_dtype": "bfloat16",
        },
        46.7, 12.9,
    ),
    "Qwen3-Next-80B-A3B": (
        {**MOE_SHAPES["qwen3-next-12-layers"], "num_hidden_layers": 48},
        79.7, 3.9,
    ),
    "DeepSeek-V2-Lite": (
        {
            **MOE_SHAPES["deepseek-v2-lite"], "max_position_embeddings": 163840,
            "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                             "mscale": 0.707, "mscale_all_dim": 0.707,
                             "original_max_position_embeddings": 4096},
        },
        15.7, 2.7,  # with the embedding; its authors count 2.4 without
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
            "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
            "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4,
            "experts_per_token": 4, "sliding_window": 128, "swiglu_limit": 7.0,
            "vocab_size": 201088, "max_position_embeddings": 131072, "rope_theta": 150000,
            "initial_context_length": 4096, "torch_dtype": "bfloat16",
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "truncate": False,
                             "original_max_position_embeddings": 4096},
        },
        20.9, 4.2,  # with the embedding; its authors count 3.6 without
    ),
    "gemma-3-27b": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
            "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376,
                "intermediate_size": 21504, "num_attention_heads": 32, "num_hidden_layers": 62,
                "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        },
        27.0, 27.0,  # its authors count 27.4 with vision
    ),
    "gemma-4-E2B": (gemma4(
        {
            **GEMMA4_E, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
            "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
            "layer_types": gemma4_types(35, 5),
        }),
        4.63, 4.63,  # its authors count 5.1 with vision and audio
    ),
    "gemma-4-E4B": (gemma4(
        {
            **GEMMA4_E, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42,
            "num_key_value_heads": 2, "num_kv_shared_layers": 18, "use_double_wide_mlp": False,
            "layer_types": gemma4_types(42, 6),
        }),
        7.46, 7.46,  # its authors count 8.0 with vision and audio
    ),
    "gemma-4-26B-A4B": (gemma4(
        {
            **GEMMA4_WIDE, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "layer_types": gemma4_types(30, 6),
        }),
        25.2, 3.8,
    ),
    "gemma-4-31B": (gemma4(
        {
            **GEMMA4_WIDE, "hidden_size": 5376, "intermediate_size": 21504,
            "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
            "num_global_key_value_heads": 4, "enable_moe_block": False, "num_experts": None,
            "top_k_experts": None, "moe_intermediate_size": None,
            "layer_types": gemma4_types(60, 6),
        }),
        30.7, 30.7,
    ),
}  # fmt: skip


def save_config(folder: Path, raw: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_authors_count(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, total, active = PUBLISHED[name]
    folder = save_config(tmp_path / "published", raw)
    arguments = ["build", str(folder), "--dry-run", "--target", "cpu", "-q", "int4", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] / 1e9 == pytest.approx(total, abs=0.06)
    assert plan["active_parameters"] / 1e9 == pytest.approx(active, abs=0.06)
    memory = plan["memory"]
    # tables of embeddings stay as they are: float32 on a CPU without bfloat16
    most = 2.7 if name.startswith("gemma-4-E") else 0.75
    assert 0.5 * plan["parameters"] < memory["weights"] < most * plan["parameters"]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_that_of_the_weights(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.save(tmp_path / "weights")
    raw = json.loads((tmp_path / "weights" / "config.json").read_text())
    folder = save_config(tmp_path / "config", raw)
    assert is_config_only(folder)
    assert not is_config_only(tmp_path / "weights")
    config = BuildConfig(dtype="float32", target="cpu", quantization="int8")
    planned, expected = (
        make_build_plan(checkpoint, config)
        for checkpoint in (checkpoint_from_config(folder), open_checkpoint(tmp_path / "weights"))
    )
    shapes, right = (
        {(each.module, each.rule.target): (each.shape, each.nbytes) for each in plan.tensors}
        for plan in (planned, expected)
    )
    assert shapes == right


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
        ({"dtype": "float64"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_a_gpus_engine_has_the_dtype_that_the_config_names(
    named: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    raw = {key: each for key, each in CASES["granite"].raw().items() if "dtype" not in key}
    checkpoint = checkpoint_from_config(save_config(tmp_path / "config", raw | named))
    assert make_build_plan(checkpoint, BuildConfig(target="cuda")).config.dtype == dtype


def test_without_weights_nothing_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_config(tmp_path / "config", CASES["qwen3_moe"].raw())
    with pytest.raises(SystemExit, match="1"):
        main(["build", str(folder), "-o", str(tmp_path / "e")])
    assert "holds no weights" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="holds no weights"):
        checkpoint_from_config(folder).get("model.embed_tokens.weight")


def test_a_model_of_images_is_refused(tmp_path: Path) -> None:
    folder = save_config(tmp_path / "config", {"model_type": "sam"})
    with pytest.raises(CheckpointError):
        checkpoint_from_config(folder)
