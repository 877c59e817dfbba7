"""Reads the fields of a config.json that describe a Mamba2, and has its tensors' names."""

from __future__ import annotations

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models._hf_config import exact_quotient, positive_int, read_boolean
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.mamba2 import Mamba2Spec

MAX_CONV_WIDTH, MAX_HEAD_DIM = 64, 1024


def mamba_checkpoint_names(stem: str) -> dict[str, tuple[str, ...]]:
    """The checkpoint's names of the modules, of a mixer with this name."""
    return {
        "attn.in_proj": (f"{stem}.in_proj",),
        "attn.rates": (f"{stem}.in_proj",),
        "attn.conv": (f"{stem}.conv1d",),
        "attn.ssm": (stem,),
        "attn.gated_norm": (f"{stem}.norm",),
        "attn.out_proj": (f"{stem}.out_proj",),
    }


MAMBA_CHECKPOINT_NAMES = mamba_checkpoint_names("mixer")


def conv_width(raw: RawConfig, key: str, *, default: int = 4) -> int:
    """Tokens that the convolution reads.

    Raises:
        CheckpointError: for one, which keeps no state.
    """
    width = positive_int(raw, key, default=default, max_value=MAX_CONV_WIDTH)
    if width < 2:
        raise CheckpointError(
            f"config.json: {key} must be at least 2, not {width}; a convolution over one token "
            "keeps no state"
        )
    return width


def read_mamba_heads_dim_and_groups(
    raw: RawConfig,
    inner: int,
    keys: tuple[str, str, str],
    *,
    groups: int,
    inner_name: str = "the expanded hidden_size",
) -> tuple[int, int, int]:
    """The heads, the channels of each, and the groups that share B and C.

    Args:
        raw: The config.
        inner: Channels of all heads.
        keys: The names of the three; the second may be "auto".
        groups: How many groups there are where config.json is silent.
        inner_name: What ``inner`` is in config.json.

    Raises:
        CheckpointError: for heads that are not ``inner`` channels, or cannot share B and C.
    """
    heads = positive_int(raw, keys[0], default=128)
    automatic = raw.get(keys[1]) in (None, "auto")
    dim = inner // heads if automatic else positive_int(raw, keys[1], max_value=MAX_HEAD_DIM)
    if heads * dim != inner:
        raise CheckpointError(
            f"config.json: {keys[0]}={heads} of {keys[1]}={dim} are {heads * dim} channels, where "
            f"{inner_name} has {inner}; correct one"
        )
    count = positive_int(raw, keys[2], default=groups)
    exact_quotient(keys[0], heads, keys[2], count)
    return heads, dim, count


def hybrid_mamba_spec(
    raw: RawConfig,
    config: DecoderConfig,
    inner: int | None = None,
    inner_name: str = "the expanded hidden_size",
    **switches: bool,
) -> Mamba2Spec:
    """The recurrence of a hybrid, from the keys that begin with ``mamba_``.

    Args:
        raw: The config.
        config: The decoder's sizes.
        inner: Channels of all heads; None: ``mamba_expand`` times those of the stream.
        inner_name: What they are in config.json.
        switches: Further fields of Mamba2Spec.
    """
    expanded = config.hidden * positive_int(raw, "mamba_expand", default=2)
    keys = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups")
    heads, dim, groups = read_mamba_heads_dim_and_groups(
        raw, expanded if inner is None else inner, keys, groups=1, inner_name=inner_name
    )
    return Mamba2Spec(
        config.hidden, heads, dim, positive_int(raw, "mamba_d_state", default=256, max_value=1024),
        groups, conv_width(raw, "mamba_d_conv"), config.eps,
        read_boolean(raw, "mamba_proj_bias", False), read_boolean(raw, "mamba_conv_bias", True),
        time_step_limit(raw), **switches,
    )  # fmt: skip


def time_step_limit(raw: RawConfig) -> tuple[float, float]:
    """Least and largest step Δ.

    Raises:
        CheckpointError: for what is no pair of numbers in order.
    """
    limit = raw.get("time_step_limit")
    limit = (0.0, float("inf")) if limit is None else limit
    numbers = isinstance(limit, list | tuple) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in limit
    )
    if not numbers or len(limit) != 2 or not 0 <= limit[0] < limit[1]:
        raise CheckpointError(
            "config.json: time_step_limit must be two numbers from 0 up, the smaller one first, "
            f"not {quote(limit, 60)}"
        )
    return float(limit[0]), float(limit[1])
