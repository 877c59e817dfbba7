"""Building and judging in one go, for tests of the acceptance contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelmill.accept.run import run_engine_acceptance
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import AcceptanceError
from tests.accept.qwen_v1_plain import seeded_qwen
from tests.models.tiny_models import save_hf, save_raw

SETTINGS = [
    (dtype, recipe) for dtype in ("float32", "float16", "bfloat16") for recipe in ("none", "int8")
]
FAMILIES = ("gpt2", "llama", "llama-bias", "llama-mqa", "llama-tied", "qwen", "qwen2", "qwen3")
QWEN = {
    "model_type": "qwen", "architectures": ["QWenLMHeadModel"], "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "kv_channels": 8, "intermediate_size": 80,
    "seq_length": 128,
    "max_position_embeddings": 128, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000.0,
    "rotary_pct": 1.0,
    "use_dynamic_ntk": True, "use_logn_attn": True, "no_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


def save_tiny(name: str, folder: Path) -> Path:
    """The seeded checkpoint of a family of ``tiny_models``, or of "qwen"."""
    if name == "qwen":
        return save_raw(folder, seeded_qwen(QWEN, 1), QWEN)
    save_hf(name, folder)
    return folder


class TinyCheckpoints(dict[str, Path]):
    """The seeded checkpoints by family, written into ``folder`` on first use."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = save_tiny(name, self._folder / name)
        return self[name]


def build_and_accept(
    checkpoint: Path, out: Path, dtype: str, recipe: str, **options: Any
) -> tuple[dict[str, Any], bool]:
    """Build through the acceptance contract: (its report, whether the engine was written)."""
    report: dict[str, Any] = {}

    def judge(staged: Path, plan: Any) -> dict[str, Any]:
        report.update(run_engine_acceptance(staged, plan.checkpoint))
        return report

    config = BuildConfig(dtype=dtype, quantization=recipe, target="cpu", **options)
    try:
        build(make_build_plan(open_checkpoint(checkpoint), config), out, judge)
    except AcceptanceError as refusal:
        report["refusal"] = str(refusal)
    return report, out.exists()
