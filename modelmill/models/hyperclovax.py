"""HyperCLOVA X SEED (``HyperCLOVAXForCausalLM``): Granite with norms behind the branches."""

from __future__ import annotations

from modelmill.core.config_view import RawConfig
from modelmill.core.errors import CheckpointError
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_and_mlp_bias, boolean, factor, positive_float
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.sandwich import SandwichLayer, ScaledBranchLayer

Model = Decoder
LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, "attn_post": ("post_norm1",), "mlp_post": ("post_norm2",)}
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in HyperCLOVAXConfig.

    Raises:
        CheckpointError: for branches that are both normed and scaled.
    """
    normed = boolean(raw, "use_post_norm", True)
    scale = positive_float(raw, "residual_multiplier", default=1.0)
    if normed and scale != 1.0:
        raise CheckpointError(
            f"config.json: residual_multiplier={scale:g} is not supported beside norms behind the "
            "branches (use_post_norm); published models have 1"
        )
    attention_scale = raw.get("attention_multiplier")
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(activation="silu"),
        layer=SandwichLayer if normed else ScaledBranchLayer,
        **attention_and_mlp_bias(raw),
        attention_scale=None
        if attention_scale is None
        else positive_float(raw, "attention_multiplier"),
        embedding_scale=factor(raw, "embedding_multiplier"),
        branch_scale=None if normed else scale,
        logit_scale=factor(raw, "logits_scaling"),
    )
