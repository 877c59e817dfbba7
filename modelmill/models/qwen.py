"""Qwen v1 (``QWenLMHeadModel``: Qwen-7B, 14B, 72B and their chats).

``out = c_proj(w1(x) · silu(w2(x)))``: the gate is w2. The rotation's base follows the request's
prompt length (dynamic NTK) and stays through its decode; queries past ``seq_length`` are scaled by
logn.
"""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import (
    non_negative_float,
    num_layers,
    positive_float,
    positive_int,
    read_boolean,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.rotary import RopeSpec

Model = Decoder
# of the MLP w2 is the gate, w1 is up
CHECKPOINT_LAYOUT = CheckpointLayout(
    **_gpt2_common.NON_LAYER_NAMES,
    names={**_gpt2_common.GPT2_LAYER_NAMES, "mlp.gate_up_proj": ("mlp.w2", "mlp.w1")},
    ignored=(
        r".*\.attn\.masked_bias",
        r".*\.attn\.bias",
        r"(.*\.)?rotary_emb\.inv_freq",
        r"(.*\.)?logn_tensor",
    ),
)
OPTIONAL_BIASES = ("o_proj.bias", "gate_up_proj.bias", "down_proj.bias")
# α grows with the prompt; beyond this multiple of seq_length the original was never measured
MAX_NTK_CONTEXT_MULTIPLE = 16
SUPPORTED_VALUES = {"activation": ("swiglu",), "pos_emb": ("rotary",)}
UNUSED_CONFIG_KEYS = (
    "n_inner", "use_cache_quantization", "use_cache_kernel", "softmax_in_fp32", "onnx_safe",
    "params_dtype",
    "bias_dropout_fusion", "tokenizer_type",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json, the old key names accepted too.

    ``intermediate_size`` counts w1 and w2 together.
    """
    hidden = positive_int(raw, "hidden_size", "n_embd")
    heads = positive_int(raw, "num_attention_heads", "n_head")
    dim = positive_int(raw, "kv_channels", default=hidden // heads)
    if dim % 2:
        raise CheckpointError(
            f"config.json: kv_channels={dim} is odd; rotary embeddings need pairs"
        )
    inner = positive_int(raw, "intermediate_size", "ffn_hidden_size")
    if inner % 2:
        raise CheckpointError(
            f"config.json: intermediate_size={inner} is odd, but it counts w1 and w2 together"
        )
    seq_length = positive_int(raw, "seq_length", default=2048)
    positions = positive_int(raw, "max_position_embeddings", "n_positions", default=seq_length)
    ntk = read_boolean(raw, "use_dynamic_ntk", False)
    if non_negative_float(raw, "rotary_pct", default=1.0) != 1.0:
        raise CheckpointError("config.json: rotary_pct other than 1.0 is not supported")
    base = positive_float(raw, "rotary_emb_base", "rope_theta", default=10000.0)
    spec = RopeSpec(dim, base, seq_length, ntk_length=seq_length if ntk else None)
    config = DecoderConfig(
        hidden=hidden,
        inner=inner // 2,
        layers=num_layers(raw, "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        vocab=positive_int(raw, "vocab_size", "padded_vocab_size"),
        eps=non_negative_float(raw, "layer_norm_epsilon", default=1e-6),
        max_len=max(positions, seq_length),
        rope=spec,
        qkv_bias=True,
        out_bias=not read_boolean(raw, "no_bias", True),
        mlp_bias=not read_boolean(raw, "no_bias", True),
        tied=read_boolean(raw, "tie_word_embeddings", False),
        logn=seq_length if read_boolean(raw, "use_logn_attn", False) else None,
    )
    return (
        replace(config, max_extended_len=max(config.max_len, MAX_NTK_CONTEXT_MULTIPLE * seq_length))
        if ntk
        else config
    )


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; a layer's optional biases stand behind its matrices.

    So engines have them: their files keep their hashes.
    """

    def place(rule: Rule) -> tuple[int, bool]:
        layer = rule.target.split(".")[1] if rule.target.startswith("layers.") else -1
        return int(layer), rule.target.endswith(OPTIONAL_BIASES)

    return sorted(CHECKPOINT_LAYOUT.rename_rules(config), key=place)
