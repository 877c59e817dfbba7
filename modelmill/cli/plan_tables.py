"""Tables of a build's plan: what is built with which options, and the memory that it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from modelmill.builder.recipe_option_check import ALL_RECIPE_OPTIONS, RECIPE_OPTIONS
from modelmill.cli.output import print_facts, print_table
from modelmill.core.byte_size import format_bytes
from modelmill.core.page_groups import sum_group_counts_by_window

SEGMENTATION_BUILD_OPTIONS = (
    "dtype",
    "quantization",
    "activation_scales",
    "weight_scales",
    "target",
    "kernels",
    "seed",
)
"""The options that apply to a segmentation engine."""
CALIBRATION_OPTIONS = ("calibration_samples", "calibration_length")


def show_plan(plan: dict[str, Any]) -> None:
    """Print the plan: options with reasons, and memory."""
    build = plan["build"]
    reasons = plan["reasons"]
    memory = plan["memory"]
    language = plan["engine_type"] == "language"
    cache = (
        f"{format_bytes(memory['kv_per_token'])} ({format_bytes(memory['kv_per_token_8bit'])} in "
        "8 bits)"
        if language
        else None
    )
    options = [
        (name, _format_with_reason(value, reasons.get(name)))
        for name, value in build.items()
        if (value not in (None, {}) or name in reasons)
        and (language or name in SEGMENTATION_BUILD_OPTIONS)
        and _is_option_used(name, build)
    ]
    formats = ", ".join(
        f"{name} {format_bytes(count)}" for name, count in plan["bytes_by_format"].items()
    )
    print_facts(
        [
            ("checkpoint", f"{plan['checkpoint']} ({plan['container']})"),
            (
                "architecture",
                f"{plan['model_type']}, {_format_layer_count(plan)}{plan['tensors']} tensors",
            ),
            (
                "tokenizer",
                ("yes" if plan["tokenizer"] else "none: an ids-only engine") if language else None,
            ),
            ("chat template", plan["chat_template"]),
            ("parameters", format_parameter_count(plan["parameters"], plan["active_parameters"])),
            ("weights", f"{format_bytes(memory['weights'])} ({formats})"),
            ("experts", plan["experts"]),
            ("longest sequence", plan["max_model_len"] if language else None),
            ("sampling", (plan["sampling"] or {}).get("text")),
            ("layers", _format_layers_per_weight_format(build.get("layer_recipes") or {})),
            *options,
        ],
        title="Plan",
    )
    show_auto_quantization(plan["auto"])
    _show_memory(memory, cache)


def format_parameter_count(total: int, active: int) -> str:
    """The number of parameters, and of those that a token is multiplied with, in one unit."""
    unit, name = next(
        (each for each in ((1e9, "billion"), (1e6, "million")) if total >= each[0] / 10),
        (1e3, "thousand"),
    )
    text = f"{total / unit:.3g} {name}"
    return text if active == total else f"{text}, {active / unit:.3g} {name} a token"


def _format_layer_count(plan: dict[str, Any]) -> str:
    return "" if plan["layers"] is None else f"{plan['layers']} layers, "


def _format_with_reason(value: Any, reason: str | None) -> str:
    if reason is None:
        return str(value)
    return reason if value is None or reason.startswith(str(value)) else f"{value} ({reason})"


def _is_option_used(name: str, build: dict[str, Any]) -> bool:
    """Whether an option affects this build."""
    if name in CALIBRATION_OPTIONS:
        return build["calibration"] is not None
    if name in ALL_RECIPE_OPTIONS:
        return name in RECIPE_OPTIONS.get(build["quantization"], ())
    if name == "tower":
        return bool(build["tower"] != "none")
    return name != "layer_recipes"


def _format_layers_per_weight_format(forms: dict[str, str]) -> str | None:
    """Count the layers of each form."""
    counts = Counter(forms.values())
    return ", ".join(f"{count} × {form}" for form, count in sorted(counts.items())) or None


def _show_memory(memory: dict[str, Any], cache: str | None) -> None:
    """Print the memory; cache: KV bytes per token, None without a KV cache."""
    print_facts(
        [
            ("memory of", _format_ranks(memory.get("ranks", 1))),
            (
                "device",
                f"{format_bytes(memory['device_total'])}, {format_bytes(memory['device_free'])} "
                "free now",
            ),
            (
                "while building",
                f"{format_bytes(memory['build_peak'])} ({format_bytes(memory['build_mapped'])} "
                "mapped files)",
            ),
            ("weights at run time", format_bytes(memory["weights"])),
            *(
                [
                    (
                        "expanded at start",
                        f"{format_bytes(memory['expanded'])}: this CPU has no compiled kernels "
                        "for them",
                    )
                ]
                if memory.get("expanded")
                else []
            ),
            ("workspace at run time", format_bytes(memory["workspace"])),
            ("KV cache per token", cache),
            *(("", line) for line in _page_group_lines(memory.get("kv_page_groups", ()))),
            (
                "recurrent state per sequence",
                format_bytes(state) if (state := memory.get("state_per_sequence")) else None,
            ),
            ("fits", memory["fits"]),
        ],
        title="Memory",
    )


def _format_ranks(ranks: int) -> str | None:
    return None if ranks == 1 else f"the largest of {ranks} ranks (--tp {ranks})"


def _page_group_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    """What the longest sequence takes in the layers of each window, and in those without."""
    windows = [group["window"] for group in groups]
    layers, sizes = (
        sum_group_counts_by_window(windows, [group[key] for group in groups])
        for key in ("layers", "bytes_per_sequence")
    )
    return [
        f"{format_layers_by_kv_window(layers[window], window)}: "
        f"{format_bytes(size)} in the longest sequence"
        for window, size in sizes.items()
    ]


def format_layers_by_kv_window(layers: int, window: int | None) -> str:
    """Say how many layers keep the keys and values of which tokens."""
    return f"{layers} layers keep " + (
        "all tokens" if window is None else f"the last {window} tokens"
    )


def show_auto_quantization(choice: dict[str, Any] | None) -> None:
    """Print the choice of ``-q auto`` for each layer, and its measurements."""
    if choice is None:
        return
    forms = list(choice["layers"][0]["kl"])[:-1]
    rows = [
        [
            row["layer"],
            row["bit_choice"],
            format_bytes(row["bytes"]),
            *(row["kl"][form] for form in forms),
        ]
        for row in choice["layers"]
    ]
    print_table(
        ("layer", "chosen", "size", *(f"KL {form}" for form in forms)),
        rows,
        title="Layers, each rounded alone",
    )
    rise = 100 * (math.exp(choice["log_perplexity"]) - 1)
    print(
        f"together: mean KL at most {choice['kl']:.4g} nats a token, perplexity {rise:+.2f} % at "
        "most "
        "(means plus standard errors, on calibration data)\n"
    )
