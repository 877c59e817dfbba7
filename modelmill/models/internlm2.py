"""InternLM2 and 2.5: LLaMA whose q, k and v are one matrix, stored by KV head."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    embed="model.tok_embeddings",
    head="output",
    grouped_qkv=True,
    names={
        "attn_norm": ("attention_norm",),
        "attn.qkv_proj": ("attention.wqkv",),
        "attn.o_proj": ("attention.wo",),
        "mlp.gate_up_proj": ("feed_forward.w1", "feed_forward.w3"),
        "mlp.down_proj": ("feed_forward.w2",),
        "mlp_norm": ("ffn_norm",),
    },
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in InternLM2Config."""
    return _llama_common.config_from_hf(raw, **attention_bias_fields(raw, "bias", True))
