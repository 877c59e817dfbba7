"""The configs and the tensors of GGUFs of dense families, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from modelmill.accept.reference.gguf_metadata import (
    add_rope_scaling,
    decoder_config,
    layer_types_from_window_pattern,
    make_metadata_reader,
    rope_scaling_options,
)
from modelmill.accept.reference.gguf_source import (
    POST_NORM_TENSORS,
    GgufConfigReaderAndSource,
    GgufSource,
    undo_llama_qk_permutation,
)
from modelmill.accept.reference.tensor_source import RawContainer
from modelmill.core.errors import UnknownArchitecture

LAYER_NORM_EPS_KEY = "attention.layer_norm_epsilon"
LONGROPE_FACTOR_TENSORS = ("rope_factors_long", "rope_factors_short")


def _bias_config(names: list[str]) -> dict[str, bool]:
    """Return which projections of the first layer have a bias."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in names,
        "attention_out_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
    }


def _make_config_reader(
    model_type: str, eps_key: str = "rms_norm_eps"
) -> Callable[[Any], dict[str, Any]]:
    """Return what reads the config of a family whose norms have this key of the epsilon."""

    def read(container: RawContainer) -> dict[str, Any]:
        fact, config = make_metadata_reader(container), decoder_config(container, model_type)
        turned = fact("rope.dimension_count", config["head_dim"])
        return add_rope_scaling(container, config) | {
            **_bias_config(container.names()),
            eps_key: float(fact(LAYER_NORM_EPS_KEY, config["rms_norm_eps"])),
            "partial_rotary_factor": int(turned) / config["head_dim"],
        }

    return read


def command_r_config(container: RawContainer) -> dict[str, Any]:
    """Return Command R's config; those of the larger models norm heads of q and k."""
    return _make_config_reader("cohere", "layer_norm_eps")(container) | {
        "logit_scale": float(make_metadata_reader(container)("logit_scale")),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in container.names(),
    }


def olmo_config(container: RawContainer) -> dict[str, Any]:
    """Return OLMo 1's config."""
    bound = float(make_metadata_reader(container)("attention.clamp_kqv", 0))
    return _make_config_reader("olmo")(container) | {"clip_qkv": bound or None}


def olmo2_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of OLMo 2, or with windows of OLMo 3, whose full layers are scaled."""
    fact = make_metadata_reader(container)
    window = fact("attention.sliding_window")
    if window is None:
        return _make_config_reader("olmo2")(container)
    config = decoder_config(container, "olmo3")
    theta = config.pop("rope_theta")
    return config | {
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **rope_scaling_options(fact)},
            "sliding_attention": {"rope_theta": theta},
        },
        "sliding_window": int(window),
        "layer_types": layer_types_from_window_pattern(fact, config["num_hidden_layers"]),
    }


def phi3_config(container: RawContainer) -> dict[str, Any]:
    """Return Phi-3's config; the lists of LongRoPE are tensors."""
    fact = make_metadata_reader(container)
    config = _make_config_reader("phi3")(container) | {
        "sliding_window": int(fact("attention.sliding_window", 0)) or None,
        "original_max_position_embeddings": fact("rope.scaling.original_context_length"),
    }
    if f"{LONGROPE_FACTOR_TENSORS[0]}.weight" not in container.names():
        return config
    lists = {
        f"{name.split('_')[2]}_factor": container.get(f"{name}.weight").float().tolist()
        for name in LONGROPE_FACTOR_TENSORS
    }
    stated = fact("rope.scaling.attn_factor") or None
    return config | {"rope_scaling": {"rope_type": "longrope", "attention_factor": stated, **lists}}


def mistral3_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of Ministral 3, or of the text half of a Mistral 3, a Mistral.

    Raises:
        UnknownArchitecture: the queries grow, but positions are not scaled.
    """
    fact, config = make_metadata_reader(container), decoder_config(container, "mistral")
    scaling = rope_scaling_options(fact)
    multiplier, slope = (
        fact("rope.scaling.yarn_log_multiplier"),
        fact("attention.temperature_scale"),
    )
    if scaling and multiplier:
        scaling |= {"mscale": float(multiplier), "mscale_all_dim": float(multiplier)}
    if slope is None:
        return config | ({"rope_scaling": scaling} if scaling else {})
    if not scaling:
        raise UnknownArchitecture("queries that grow without a scaling are not known here")
    rope = {"rope_theta": config["rope_theta"], **scaling, "llama_4_scaling_beta": float(slope)}
    return config | {"model_type": "ministral3", "rope_parameters": rope}


def starcoder_config(container: RawContainer) -> dict[str, Any]:
    """Return StarCoder's config."""
    fact = make_metadata_reader(container)
    return {
        "model_type": "gpt_bigcode",
        "vocab_size": container.tensor_info("token_embd.weight").shape[0],
        "n_embd": int(fact("embedding_length")),
        "n_layer": int(fact("block_count")),
        "n_head": int(fact("attention.head_count")),
        "n_positions": int(fact("context_length")),
        "layer_norm_epsilon": float(fact(LAYER_NORM_EPS_KEY)),
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": int(fact("attention.head_count_kv", 1)) == 1,
        "tie_word_embeddings": "output.weight" not in container.names(),
    }


class PermutedGgufSource(GgufSource):
    """A container whose rows of q and k are in interleaved order."""

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor dequantized, each head's rows as first half and second half."""
        tensor = super().read_uncast_tensor(name)
        if ".self_attn.q_proj." in name:
            return undo_llama_qk_permutation(tensor, self._config["num_attention_heads"])
        if ".self_attn.k_proj." in name:
            return undo_llama_qk_permutation(tensor, self._config["num_key_value_heads"])
        return tensor


class NemotronGgufSource(GgufSource):
    """A container whose norms' weights are stored plus 1."""

    def read_uncast_tensor(self, name: str) -> Tensor:
        """Return the tensor dequantized, a norm's weight less 1."""
        tensor = super().read_uncast_tensor(name)
        return tensor - 1 if name.endswith("norm.weight") else tensor


class SeedOssGgufSource(GgufSource):
    """A container whose norm in front of the MLP has the name of one behind the attention."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        "post_attention_layernorm": "post_attention_norm"
    }


class ExaoneGgufSource(GgufSource):
    """A container of EXAONE 3, whose tensors have names like GPT-2's."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        **{f"attn.attention.{part}_proj": f"attn_{part}" for part in "qkv"},
        "attn.attention.out_proj": "attn_output",
        "mlp.c_fc_0": "ffn_gate",
        "mlp.c_fc_1": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }


class PostNormGgufSource(GgufSource):
    """A container with norms behind the branches."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = POST_NORM_TENSORS


class Phi3GgufSource(GgufSource):
    """A container with q, k and v in one matrix, gate and up in another."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        "self_attn.qkv_proj": "attn_qkv",
        "mlp.gate_up_proj": "ffn_up",
    }

    def __init__(self, container: RawContainer, *args: Any, **kwargs: Any) -> None:
        super().__init__(container, *args, **kwargs)
        for name in LONGROPE_FACTOR_TENSORS:
            if self.has(f"{name}.weight"):
                self.read_uncast_tensor(f"{name}.weight")  # the config was made from it


CONFIG_READERS_AND_SOURCES: dict[str, GgufConfigReaderAndSource] = {
    "arcee": (_make_config_reader("arcee"), PermutedGgufSource),
    "nemotron": (_make_config_reader("nemotron", "norm_eps"), NemotronGgufSource),
    "exaone": (_make_config_reader("exaone"), ExaoneGgufSource),
    "jais2": (_make_config_reader("jais2", "layer_norm_eps"), GgufSource),
    "seed_oss": (_make_config_reader("seed_oss"), SeedOssGgufSource),
    "command-r": (command_r_config, GgufSource),
    "olmo": (olmo_config, PermutedGgufSource),
    "olmo2": (olmo2_config, PostNormGgufSource),
    "phi3": (phi3_config, Phi3GgufSource),
    "mistral3": (mistral3_config, PermutedGgufSource),
    "starcoder": (starcoder_config, GgufSource),
}
