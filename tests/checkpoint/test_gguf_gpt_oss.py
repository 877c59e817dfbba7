"""gpt-oss in GGUF, as llama.cpp's converter leaves it: experts in MXFP4, gate and up apart."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept
from tests.checkpoint.checkpoint_factory import write_tensors
from tests.models.all_families import CASES
from tests.models.family_cases import transformers_model

pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 96}
MXFP4 = gguf.GGMLQuantizationType.MXFP4


def test_experts_stay_in_mxfp4(tmp_path: Path) -> None:
    raw = CASES["gpt_oss"].raw(**SIZES, swiglu_limit=7.0)
    model = transformers_model(raw, tmp_path / "hf")
    yarn = raw["rope_parameters"]
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "gpt-oss")
    writer.add_block_count(3)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_expert_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(12)
    writer.add_value_length(12)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(yarn["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(yarn["factor"])
    writer.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
    writer.add_float32("gpt-oss.rope.scaling.yarn_beta_fast", yarn["beta_fast"])
    writer.add_float32("gpt-oss.rope.scaling.yarn_beta_slow", yarn["beta_slow"])
    writer.add_expert_count(5)
    writer.add_expert_used_count(2)
    writer.add_sliding_window(20)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 3)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".experts." not in name:
                target = names.get_name(name, try_suffixes=(".weight", ".bias"))
                target = f"{target}.weight" if name.endswith("sinks") else target
                writer.add_tensor(target, tensor.numpy())
                continue
            layer, bias = name.split(".")[2], name.endswith("_bias")
            rows = tensor if bias else tensor.mT  # [E, out] or [E, out, in]
            is_down = "down_proj" in name
            restored = torch.empty_like(rows)
            for number, part in enumerate(("down",) if is_down else ("gate", "up")):
                own = rows if is_down else rows[:, number::2]
                target = f"blk.{layer}.ffn_{part}_exps.{'bias' if bias else 'weight'}"
                if bias:
                    writer.add_tensor(target, own.contiguous().numpy())
                    continue
                blocks = gguf.quants.quantize(own.contiguous().numpy(), MXFP4)
                writer.add_tensor(target, blocks, raw_dtype=MXFP4)
                expanded = torch.from_numpy(gguf.quants.dequantize(blocks, MXFP4))
                restored[:, slice(None) if is_down else slice(number, None, 2)] = expanded
            if not bias:
                tensor.copy_(restored.mT)
    write_tensors(writer)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert config["rope_scaling"]["truncate"] is False
    report, written = build_and_accept(tmp_path / "m.gguf", tmp_path / "e", "float32", "keep")
    assert written, report.get("reason", report)
    engine = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert engine.artifact is not None
    assert "mxfp4" in engine.artifact.manifest.weight_formats.values()
    ids = torch.randint(2, 120, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].float()
    assert (TeacherForcedScorer(engine).compute_logits([ids])[0] - expected).abs().max() < 1e-4
