"""Falcon-H1's multipliers of µP, folded into linear layers (arXiv:2507.22448, section 3.2.3).

Each is a factor of a linear layer's input or output, so of its rows: they are folded into the
weights when these are read, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models._hf_config import positive_float
from modelmill.nn.decoder import DecoderConfig


@dataclass(frozen=True)
class FalconH1Multipliers:
    """The factors.

    Attributes:
        attention_in, ssm_in: Of what attention and recurrence read.
        attention_out, ssm_out: Of what they return.
        key: Of the keys.
        ssm: Of z, x, B, C and dt.
        mlp: Of the gate in front of its activation, and of the MLP's output.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5
    mlp: tuple[float, ...] = (1.0,) * 2


@dataclass(frozen=True)
class FalconH1Config(DecoderConfig):
    """The decoder's sizes, and the multipliers."""

    multipliers: FalconH1Multipliers = field(default_factory=FalconH1Multipliers)


def read_multipliers(raw: RawConfig) -> FalconH1Multipliers:
    """The multipliers of a config.json."""
    single = {
        name: positive_float(raw, f"{name}_multiplier", default=1.0)
        for name in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    }
    return FalconH1Multipliers(
        **single,
        ssm=_read_factors(raw, "ssm_multipliers", 5),
        mlp=_read_factors(raw, "mlp_multipliers", 2),
    )


def _read_factors(raw: RawConfig, key: str, count: int) -> tuple[float, ...]:
    """A list of factors, 1 where the key is absent.

    Raises:
        CheckpointError: for what is no list of so many numbers above 0.
    """
    values = raw.get(key)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(
            f"config.json: {key} must be a list of {count} numbers above 0, not {quote(values, 60)}"
        )
    return tuple(positive_float({key: value}, key) for value in values)


def fold_multipliers_into_rule(rule: Rule, config: FalconH1Config) -> Rule:
    """The rule, whose rows are multiplied by their factors."""
    _, _, path = rule.target.split(".", 2) if rule.target.startswith("layers.") else ("", "", "")
    module, _, leaf = path.rpartition(".")
    by_rows = _row_factors_by_module(config, of_input=leaf == "weight").get(module, [])
    if all(factor == 1.0 for _, factor in by_rows):
        return rule
    rows = "/".join(f"{count}*{factor!r}" for count, factor in by_rows)
    return replace(rule, how=f"{rule.how}+scale_rows:{rows}")


def _row_factors_by_module(
    config: FalconH1Config, *, of_input: bool
) -> dict[str, list[tuple[int, float]]]:
    """By module, consecutive rows and their factor; of_input: with that of what it reads.

    A bias is added behind the factor of the input.
    """
    by, state = config.multipliers, config.parallel_recurrence
    assert state is not None, "a recurrence stands beside the attention"
    attention, ssm = (by.attention_in, by.ssm_in) if of_input else (1.0, 1.0)
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    z, x, b, c, dt = (ssm * each for each in by.ssm)
    return {
        "attn.qkv_proj": [(q, attention), (kv, attention * by.key), (kv, attention)],
        "attn.o_proj": [(config.hidden, by.attention_out)],
        "mamba.in_proj": [
            (state.width, x), (state.shared_width, b), (state.shared_width, c), (state.width, z),
        ],
        "mamba.rates": [(state.heads, dt)],
        "mamba.out_proj": [(config.hidden, by.ssm_out)],
        "mlp.gate_up_proj": [(config.inner, by.mlp[0]), (config.inner, 1.0)],
        "mlp.down_proj": [(config.hidden, by.mlp[1])],
    }  # fmt: skip
