"""Builds config.json and generation_config.json from a GGUF's metadata keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from modelmill.checkpoint import gguf_rope_scaling
from modelmill.checkpoint.gguf import GgufFile
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UnknownArchitecture
from modelmill.core.read_tracking_config import ReadTrackingConfig

MAX_COUNT = 1 << 24
"""Above every real vocabulary, width, depth and context; prevents overflows later."""

MOE_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe"}
"""Architectures with experts that have a name of their own → model_type."""

ARCHITECTURES_READING_EXPERT_KEYS = (
    "gpt-oss", "glm4moe", "deepseek2", "gemma4", "granitemoe", "granitehybrid", "qwen3next",
    "qwen35moe", "hunyuan-moe", "hy_v3", "lfm2moe", "nemotron_h_moe", "mellum", "dots1",
    "ernie4_5-moe", "exaone-moe", "minimax-m2", "afmoe", "bailingmoe2",
)  # fmt: skip
"""Architectures whose reader reads the keys of experts itself."""

SLIDING_WINDOW_KEY, SLIDING_WINDOW_PATTERN_KEY = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
)
DEFAULT_FULL_ATTENTION_PERIOD = 4
"""Every fourth layer has full attention, where the file has no pattern."""

SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""general.sampling.… of a GGUF, as llama.cpp reads them.

The rest (xtc, mirostat, a window of penalties) is llama.cpp's own.
"""


def read_config(
    raw: GgufFile, arch: str, tied: bool, reader: ConfigReader | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return config, generation_config and unread keys of an architecture.

    reader: reads its keys; None: one of llama, qwen, qwen2, qwen3 and gpt2.

    Raises:
        CorruptCheckpoint: for missing or invalid keys.
        UnknownArchitecture: for variants (experts, partial RoPE) that share a name with a supported
            family but compute something else.
    """
    keys = ArchitectureKeys(raw, arch)
    experts = keys.get_positive_int("expert_count", 0)
    if experts and arch not in ("llama", *MOE_MODEL_TYPES, *ARCHITECTURES_READING_EXPERT_KEYS):
        raise UnknownArchitecture(
            f"{raw.path}: is a mixture of experts of architecture {arch}; modelmill reads those of "
            f"llama (Mixtral), {', '.join((*MOE_MODEL_TYPES, *ARCHITECTURES_READING_EXPERT_KEYS))}"
        )
    if (
        "token_embd.weight" not in raw.names()
        or len(raw.tensor_info("token_embd.weight").shape) != 2
    ):
        raise CorruptCheckpoint(f"{raw.path}: has no token_embd.weight matrix")
    vocabulary = raw.tensor_info("token_embd.weight").shape[0]
    config: dict[str, Any] = {
        "model_type": "mixtral" if experts and arch == "llama" else MOE_MODEL_TYPES.get(arch, arch),
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "torch_dtype": str(raw.tensor_info("token_embd.weight").decoded_dtype).removeprefix(
            "torch."
        ),
    }
    config.update(
        (
            reader
            or {"gpt2": _read_gpt2_config, "qwen": _read_qwen_config}.get(arch, _read_llama_config)
        )(keys)
    )
    if experts and arch not in ARCHITECTURES_READING_EXPERT_KEYS:
        config.update(_read_moe_config(keys, experts, config["model_type"]))
    ids = _read_special_token_ids(raw, vocabulary)
    config.update({name: value for name, value in ids.items() if not isinstance(value, list)})
    if isinstance(ids.get("eos_token_id"), list):
        config["eos_token_id"] = ids["eos_token_id"][0]
    unread = {
        key: array_as_list(value)
        for key, value in keys.view.unread().items()
        if key.startswith(f"{arch}.")
    }
    _consume_sliding_window_rope_base(keys, unread)
    # full attention, as in llama.cpp: a window as long as the context is equal to it
    window, context = f"{arch}.attention.sliding_window", keys.get_positive_int("context_length")
    if isinstance(unread.get(window), int) and not 0 < unread[window] < context:
        del unread[window]
    return config, {**ids, **_sampling_defaults(raw)}, unread


def _consume_sliding_window_rope_base(keys: ArchitectureKeys, unread: dict[str, Any]) -> None:
    """Check, and take from the unread keys, the base of layers with a window: that of all layers.

    Raises:
        UnknownArchitecture: for another base in a family with windows that does not read it.
    """
    key = f"{keys.arch}.rope.freq_base_swa"
    if (
        key not in unread
        or f"{keys.arch}.{SLIDING_WINDOW_KEY}" in unread
        or SLIDING_WINDOW_KEY not in keys
    ):
        return
    local, theta = unread.pop(key), keys.get_positive_float("rope.freq_base", 10000.0)
    if local != keys.raw.metadata.get(f"{keys.arch}.rope.freq_base", theta):
        raise UnknownArchitecture(
            f"{keys.raw.path}: the key {key} is {str(local)[:40]}; modelmill computes layers with "
            f"a window of {keys.arch} with rope.freq_base ({theta:g})"
        )


def _sampling_defaults(raw: GgufFile) -> dict[str, Any]:
    """Return the publisher's sampling defaults in generation_config's keys; {} without any."""
    defaults: dict[str, Any] = {}
    for key, name in SAMPLING_KEYS.items():
        value = raw.metadata.get(f"general.sampling.{key}")
        if value is not None:
            defaults[name] = (
                _shortest_decimal(value)
                if isinstance(value, float) and math.isfinite(value)
                else value
            )
    return {"do_sample": True, **defaults} if defaults else {}


class ArchitectureKeys:
    """A GGUF's keys of one architecture, each checked as it is read.

    view: every key, and which were read.
    """

    def __init__(self, raw: GgufFile, arch: str) -> None:
        self.raw, self.arch = raw, arch
        self.view = ReadTrackingConfig(raw.metadata)

    def __contains__(self, key: str) -> bool:
        """Return whether the file has a key, without reading it."""
        return f"{self.arch}.{key}" in self.raw.metadata

    def get_positive_int(self, key: str, default: int | None = None) -> int:
        """Read a key that is a number from 1 up."""
        value = self.view.get(f"{self.arch}.{key}", default)
        least = 1 if default is None else min(default, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
            raise CorruptCheckpoint(
                f"{self.raw.path}: the key {self.arch}.{key} is {_describe_value(value)}"
            )
        return value

    def get_positive_float(self, key: str, default: float | None = None) -> float:
        """Read a key that is a number above 0."""
        value = self.view.get(f"{self.arch}.{key}", default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise CorruptCheckpoint(
                f"{self.raw.path}: the key {self.arch}.{key} is {_describe_value(value)}"
            )
        return _shortest_decimal(value)

    def get_flag(self, key: str, default: bool) -> bool:
        """Read a key that is true or false."""
        value = self.view.get(f"{self.arch}.{key}", default)
        if not isinstance(value, bool):
            raise CorruptCheckpoint(
                f"{self.raw.path}: the key {self.arch}.{key} is {_describe_value(value)}"
            )
        return value

    def is_nonzero(self, key: str) -> bool:
        """Read whether the file has a key that is not 0, of those where 0 means none."""
        value = self.view.get(f"{self.arch}.{key}")
        return value is not None and not (type(value) in (int, float) and value == 0)

    def has_tensor(self, tensor: str) -> bool:
        """Return whether the file has a tensor."""
        return tensor in self.raw.names()


ConfigReader = Callable[[ArchitectureKeys], dict[str, Any]]
"""Keys → what config.json would have."""


def array_as_list(value: Any) -> Any:
    """Return a list of an array; other values as they are."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def read_layer_flags(keys: ArchitectureKeys, key: str, layers: int) -> list[bool]:
    """Read a key with true or false for each layer.

    Raises:
        CorruptCheckpoint: for anything else.
    """
    stored = keys.view.get(f"{keys.arch}.{key}")
    listed = array_as_list(stored)
    # a list of lists cannot be in a set
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(v not in (0, 1) for v in listed)
    ):
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the key {keys.arch}.{key} must have true or false for each of the "
            f"{layers} layers; it is {str(stored)[:60]}"
        )
    return [bool(each) for each in listed]


def read_window_layer_types(keys: ArchitectureKeys, layers: int) -> list[str]:
    """Read which layers have a window: from a list, or all but every n-th; none without a window.

    Raises:
        CorruptCheckpoint: for a list that does not say it of each layer.
    """
    if SLIDING_WINDOW_KEY not in keys:
        return ["full_attention"] * layers
    stored = keys.view.get(f"{keys.arch}.{SLIDING_WINDOW_PATTERN_KEY}")
    if stored is None or type(stored) is int:
        period = keys.get_positive_int(SLIDING_WINDOW_PATTERN_KEY, DEFAULT_FULL_ATTENTION_PERIOD)
        windowed = [(layer + 1) % period != 0 for layer in range(layers)]
    else:
        windowed = read_layer_flags(keys, SLIDING_WINDOW_PATTERN_KEY, layers)
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal of a float32: GGUF stores float32, config.json had 1e-05."""
    with np.errstate(over="ignore"):  # infinity is no shorter
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else float(value)


def _describe_value(value: Any) -> str:
    return "missing" if value is None else f"{str(value)[:40]}, which makes no sense"


def head_dim(keys: ArchitectureKeys, *, partial: bool = False) -> int:
    """Return the channels of a head; partial: fewer of them may rotate.

    Raises:
        UnknownArchitecture: for heads whose keys, values and rotated channels differ.
    """
    heads, width = (
        keys.get_positive_int("attention.head_count"),
        keys.get_positive_int("embedding_length"),
    )
    key_dim = keys.get_positive_int("attention.key_length", max(1, width // heads))
    value_dim = keys.get_positive_int("attention.value_length", key_dim)
    rotated = key_dim if partial else keys.get_positive_int("rope.dimension_count", key_dim)
    if value_dim != key_dim or rotated != key_dim:
        raise UnknownArchitecture(
            f"{keys.raw.path}: has heads of {key_dim} keys, {value_dim} values and {rotated} "
            "rotated "
            "channels; modelmill computes heads where the three agree"
        )
    return key_dim


def _read_llama_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the keys of LLaMA, Mistral (which GGUF calls llama), Qwen2 and Qwen3."""
    classes = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        **dict.fromkeys(MOE_MODEL_TYPES, ""),  # see _read_moe_config
    }
    heads = keys.get_positive_int("attention.head_count")
    theta = keys.get_positive_float("rope.freq_base", 10000.0)
    return {
        "architectures": [classes[keys.arch]],
        "hidden_size": keys.get_positive_int("embedding_length"),
        "intermediate_size": keys.get_positive_int("feed_forward_length"),
        "num_hidden_layers": keys.get_positive_int("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get_positive_int("attention.head_count_kv", heads),
        "head_dim": head_dim(keys),
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "rms_norm_eps": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(keys, theta),
        "hidden_act": "silu",
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
    }


def _read_moe_config(keys: ArchitectureKeys, count: int, model_type: str) -> dict[str, Any]:
    """Read the keys of a mixture of experts.

    Whether weights are renormalised is not in the file: it belongs to the architecture.
    """
    classes = {
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "olmoe": "OlmoeForCausalLM",
    }
    config: dict[str, Any] = {
        "architectures": [classes[model_type]],
        "num_local_experts" if model_type == "mixtral" else "num_experts": count,
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
    }
    if model_type == "mixtral":
        return config
    config["norm_topk_prob"] = model_type == "qwen3_moe"
    inner = keys.get_positive_int(
        "expert_feed_forward_length", keys.get_positive_int("feed_forward_length")
    )
    if model_type == "olmoe":
        return config | {"intermediate_size": inner}
    config["moe_intermediate_size"] = inner
    if model_type == "qwen2_moe":
        shared = keys.get_positive_int("expert_shared_feed_forward_length", inner)
        config |= {"shared_expert_intermediate_size": shared, "qkv_bias": True}
    return config


def rope_scaling(keys: ArchitectureKeys, theta: float) -> dict[str, Any] | None:
    """Return config.json's rope_scaling; None without scaling."""
    raw = keys.raw
    with prefix_errors_with_path(raw):
        if not keys.has_tensor("rope_freqs.weight"):
            return gguf_rope_scaling.linear_or_yarn_rope_scaling(keys.view, keys.arch)
        info = raw.tensor_info("rope_freqs.weight")
        if info.shape != (head_dim(keys) // 2,):
            raise CorruptCheckpoint(
                f"rope_freqs.weight has {list(info.shape)}, not one a frequency"
            )
        factors = raw.get("rope_freqs.weight").float().tolist()
        return gguf_rope_scaling.rope_scaling_from_rope_freqs(keys.view, keys.arch, factors, theta)


def yarn_mscale_rope_scaling(keys: ArchitectureKeys, share: float = 1.0) -> dict[str, Any] | None:
    """Return rope_scaling where YaRN's temperature is multiplied.

    share: see rope_scaling_from_yarn_multiplier.
    """
    with prefix_errors_with_path(keys.raw):
        return gguf_rope_scaling.rope_scaling_from_yarn_multiplier(keys.view, keys.arch, share)


@contextmanager
def prefix_errors_with_path(raw: GgufFile) -> Iterator[None]:
    """Put the file's path in front of the errors within."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{raw.path}: {error}") from None


def _read_qwen_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the keys of Qwen v1.

    A GGUF contains neither dynamic NTK, logn nor the trained length: both are off, as in llama.cpp,
    and seq_length is the file's context length.
    """
    channels, feed_forward = head_dim(keys), keys.get_positive_int("feed_forward_length")
    if keys.has_tensor("blk.0.ffn_up.weight") and keys.raw.tensor_info("blk.0.ffn_up.weight").shape[
        :1
    ] == (feed_forward,):
        # config.json counts w1 and w2 together, as do GGUFs of the official converter; this one
        # does not.
        feed_forward *= 2
    context = keys.get_positive_int("context_length")
    theta = keys.get_positive_float("rope.freq_base", 10000.0)
    if rope_scaling(keys, theta) is not None:
        raise UnknownArchitecture(
            f"{keys.raw.path}: scales the positions of a Qwen v1, which modelmill does not compute"
        )
    return {
        "architectures": ["QWenLMHeadModel"],
        "hidden_size": keys.get_positive_int("embedding_length"),
        "intermediate_size": feed_forward,
        "num_hidden_layers": keys.get_positive_int("block_count"),
        "num_attention_heads": keys.get_positive_int("attention.head_count"),
        "kv_channels": channels,
        "max_position_embeddings": context,
        "seq_length": context,
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "rotary_emb_base": theta,
        "rotary_pct": 1.0,
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        "no_bias": True,
    }


def _read_gpt2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    width, context = (
        keys.get_positive_int("embedding_length"),
        keys.get_positive_int("context_length"),
    )
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": keys.get_positive_int("block_count"),
        "n_head": keys.get_positive_int("attention.head_count"),
        "n_inner": keys.get_positive_int("feed_forward_length", 4 * width),
        "n_positions": context,
        "n_ctx": context,
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _read_special_token_ids(raw: GgufFile, vocabulary: int) -> dict[str, Any]:
    """Return bos, eos (with end-of-turn, if there is one) and pad ids, all in the vocabulary."""
    tokens = raw.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocabulary:
        raise CorruptCheckpoint(
            f"{raw.path}: has {len(tokens)} tokens but only {vocabulary} embedding rows"
        )
    token_ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "padding"):
        value = raw.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
            raise CorruptCheckpoint(
                f"{raw.path}: its {name} token {_describe_value(value)} is outside the vocabulary"
            )
        token_ids[name] = value
    ends = list(dict.fromkeys(token_ids[name] for name in ("eos", "eot") if name in token_ids))
    ids: dict[str, Any] = {}
    if "bos" in token_ids:
        ids["bos_token_id"] = token_ids["bos"]
    if ends:
        ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if "padding" in token_ids:
        ids["pad_token_id"] = token_ids["padding"]
    return ids
