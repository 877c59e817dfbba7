"""The marks that each recipe must reach on SmolLM2, beside what the rows say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# what, options of the build (the first that has a row), type of the KV cache, must: per cent of
# perplexity over float32
SINGLE_TARGETS = (
    ("int8", ("-q int8",), "auto", 0.3),
    ("KV cache in int8", ("-q none",), "int8", 0.3),
    ("smoothquant, per token", ("-q smoothquant",), "auto", 1.5),
    ("fp8", ("-q fp8",), "auto", 2.5),
    ("rptq W8A8, static, exact", ("-q rptq --bits w8a8", "-q rptq"), "auto", 2.0),
    (
        "rptq W4A4",
        (
            "-q rptq --bits w4a4",
            "-q rptq --bits w4a4 --copies 3",
            "-q rptq --bits w4a4 --splits-per-channel 3",
        ),
        "auto",
        100.0,
    ),
    ("GGUF's Q4_1 kept", ("-q keep",), "auto", 0.0),
)
W4A8_BUILDS = (
    "-q rptq --bits w4a8",
    "-q rptq --bits w4a8 --copies 2",
    "-q rptq --bits w4a8 --splits-per-channel 2",
)
MAX_RATIO = 2.0  # points that W4A8 may cost over its own weights with inputs as they are
BEST_INT4 = {128: 34.0, 64: 25.0}
JUDGED_INT4 = {(128, "gptq"): ("-q int4",), (128, "awq"): ("-q int4 --method awq",)}
NONE_JUDGED: Mapping[str, tuple[float, float]] = {}
METHODS = ("gptq", "awq", "awq+gptq")
TOLERANCE_STEP = 0.01  # per cent are shown in hundredths


def targets_table(
    rows: Sequence[Row], held_back: Mapping[str, tuple[float, float]] = NONE_JUDGED
) -> list[str]:
    """Markdown lines: what, must, measured, and whether it was reached; the same on other texts.

    held_back: mean and worst, in per cent, on texts that took no part in choosing anything, by the
    options of a build. The mean is held against what must be.
    """
    lines = ["| what | must | measured | | held back: mean, worst | |", "|---|---|---|---|---|---|"]

    def others(options: Sequence[str], must: float) -> str:
        judged = next((held_back[each] for each in options if each in held_back), None)
        if judged is None:
            return "  |  |"
        mean, worst = judged
        return f" {mean:+.2f}, {worst:+.2f} % | {_verdict(mean, must)} |"

    for what, options, kv_dtype, must in SINGLE_TARGETS:
        value = _excess(rows, options, kv_dtype)
        line = _line(f"{what}, over float32", f"≤ +{must:g} %", value, must, "%")
        lines.append(line + others(options if kv_dtype == "auto" else (), must))
    quantized_inputs, alone = (
        _excess(rows, W4A8_BUILDS, "auto", quantized_inputs) for quantized_inputs in (False, True)
    )
    over = None if quantized_inputs is None or alone is None else quantized_inputs - alone
    line = _line(
        "rptq W4A8, over its own W4A16", f"≤ {MAX_RATIO:g} points", over, MAX_RATIO, "points"
    )
    lines.append(line + others((), MAX_RATIO))
    for group, must in BEST_INT4.items():
        by_method = _int4(rows, group)
        better = {method: excess for method, excess in by_method.items() if method in METHODS}
        best = min(better, key=lambda method: better[method]) if better else None
        what = f"int4, groups of {group}, the best" + (f" ({best})" if best else "")
        line = _line(what, f"≤ +{must:g} %", None if best is None else better[best], must, "%")
        lines.append(line + others(JUDGED_INT4.get((group, best or ""), ()), must))
        for method in ("gptq", "awq"):
            if {method, "nearest"} <= set(by_method):
                nearest = round(by_method["nearest"], 2)
                target = f"better than nearest's {nearest:+.2f} %"
                lines.append(
                    _line(
                        f"int4, groups of {group}, {method}",
                        target,
                        by_method[method],
                        nearest - TOLERANCE_STEP,
                        "%",
                    )
                    + others((), 0.0)
                )
    return lines


def _line(what: str, target: str, measured: float | None, max_value: float, unit: str) -> str:
    verdict = "" if measured is None else _verdict(measured, max_value)
    return (
        f"| {what} | {target} | "
        f"{'no row' if measured is None else f'{measured + 0.0:+.2f} {unit}'} | {verdict} |"
    )


def _verdict(measured: float, max_value: float) -> str:
    return "reached" if round(measured, 2) <= max_value + TOLERANCE_STEP / 10 else "missed"


def _excess(
    rows: Sequence[Row], options: Sequence[str], kv_dtype: str, reference: bool = False
) -> float | None:
    """Per cent over float32 of the first of ``options`` that was measured."""
    for each in options:
        for row in rows:
            fields = (
                row["options"] or "-q none",
                row.get("kv_cache_dtype", "auto"),
                bool(row.get("whole_inputs")),
            )
            if fields == (each, kv_dtype, reference) and "excess" in row:
                return round(100 * row["excess"], 4)
    return None


def _int4(rows: Sequence[Row], group: int) -> dict[str, float]:
    """Per cent over float32 by method, asymmetric, the KV cache as the activations."""
    return {
        row["method"]: round(100 * row["excess"], 4)
        for row in rows
        if (row.get("recipe"), row.get("group"), row.get("kv_cache_dtype"))
        == ("int4", group, "auto")
        and not row.get("symmetric")
        and "excess" in row
    }
