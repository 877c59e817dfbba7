"""Tables of an acceptance report where a layer has experts."""

from __future__ import annotations

from modelmill.cli.acceptance_tables import (
    format_expert_calibration_tokens,
    merge_experts_into_worst,
    worst_layer_by_module,
)


def fact(layer: int, module: str, after: float, **more: object) -> dict[str, object]:
    return {"layer": layer, "module": module, "before": after, "after": after, **more}


def test_experts_share_a_column_with_the_worst_of_them() -> None:
    facts = [
        fact(0, "attn.o_proj", 0.1),
        fact(0, "mlp.experts.0.down_proj", 0.2),
        fact(0, "mlp.experts.11.down_proj", 0.3),
        fact(1, "mlp.experts.3.down_proj", 0.1),
    ]
    merged = merge_experts_into_worst(facts)
    assert [(each["layer"], each["module"], each["after"]) for each in merged] == [
        (0, "attn.o_proj", 0.1),
        (0, "mlp.experts.*.down_proj", 0.3),
        (1, "mlp.experts.*.down_proj", 0.1),
    ]


def test_the_worst_expert_of_all_layers_is_named() -> None:
    rows = [
        {"name": f"layers.0.mlp.experts.{i}.up_proj", "module": f"mlp.experts.{i}.up_proj",
         "max_abs": error, "tolerance": 1.0}
        for i, error in enumerate((0.1, 0.9, 0.4))
    ]  # fmt: skip
    (worst,) = worst_layer_by_module(rows)
    assert (worst["name"], worst["module"]) == (
        "layers.0.mlp.experts.1.up_proj",
        "mlp.experts.*.up_proj",
    )


def test_experts_with_few_tokens_are_counted() -> None:
    facts = [
        fact(layer, f"mlp.experts.{expert}.{name}", 0.1, expert_tokens=tokens)
        for layer, expert, tokens in ((0, 0, 500), (0, 1, 64), (2, 7, 3))
        for name in ("gate_up_proj", "down_proj")
    ]
    line = format_expert_calibration_tokens(facts)
    assert line is not None
    assert line.startswith(
        "calibration tokens of an expert: least 3 (layer 2, experts.7), median 64"
    )
    assert "1 of 3 experts had fewer than 64" in line
    few = format_expert_calibration_tokens(facts[:4])
    assert few is not None
    assert "fewer" not in few
    assert format_expert_calibration_tokens([fact(0, "mlp.down_proj", 0.1)]) is None
