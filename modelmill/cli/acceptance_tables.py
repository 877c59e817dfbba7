"""Tables of an acceptance report: verdict, each module's worst layer, what a recipe costs."""

from __future__ import annotations

import re
import statistics
from typing import Any

from modelmill.cli.output import print_facts, print_note, print_table
from modelmill.core.byte_size import format_bytes
from modelmill.core.expert_calibration_threshold import MIN_EXPERT_TOKENS


def show_acceptance(report: dict[str, Any]) -> None:
    """Print the acceptance report: the verdict, and the worst layer of each module."""
    if not report or report.get("accepted") is None:
        print_facts([("acceptance", (report or {}).get("reason", "built without"))])
        return
    if "masks" in report:
        show_segmentation_acceptance(report)
        return
    logits = report.get("logits") or {}
    agreed = f"{logits.get('agreed_rows')} of {logits.get('sure_rows')} where the reference is sure"
    perplexity = f"{logits.get('perplexity')} (reference {logits.get('reference_perplexity')})"
    print_facts(
        [
            ("verdict", report.get("verdict")),
            (
                "compared",
                f"{len(report.get('layers', []))} modules, {logits.get('tokens')} tokens"
                if logits
                else None,
            ),
            ("next tokens", agreed if logits else None),
            ("perplexity", perplexity if logits else None),
            ("mean KL to the checkpoint", logits.get("mean_kl")),
            (
                "picture's embeddings' error",
                _format_image_embedding_error(report.get("image_embeddings")),
            ),
            ("next tokens as the checkpoint's", _format_percent(logits.get("agreement"))),
            ("size", format_bytes(report["bytes"]) if "bytes" in report else None),
            ("reference", report.get("reference")),
            ("not used", _format_ignored_tensors(report)),
        ],
        title="Acceptance",
    )
    recipe = report.get("quantization_errors") or []
    show_recipe_errors(recipe, any(each["before"] != each["after"] for each in recipe))
    show_worst_layers([_label_if_worst_tile(row) for row in report.get("layers", [])])
    show_warnings(report)


def show_segmentation_acceptance(report: dict[str, Any]) -> None:
    """Print the acceptance report of a segmentation engine."""
    masks = report["masks"]
    print_facts(
        [
            ("verdict", report.get("verdict")),
            (
                "compared",
                f"{len(report.get('layers', []))} modules; {masks['prompts']} prompts on a "
                "picture of our own",
            ),
            (
                "embedding's error",
                f"{masks['embedding_rel_l2']} of its size (bound {masks['embedding_bound']})",
            ),
            (
                "mask logits' error",
                f"{masks['logits_rel_l2']} of their size (bound {masks['logits_bound']})",
            ),
            (
                "IoU with the reference",
                f"{masks['mask_iou_mean']} on average (bound {masks['mask_iou_bound']}), "
                f"{masks['mask_iou_min']} at least",
            ),
            ("scores differ by", f"at most {masks['score_difference']}"),
            ("size", format_bytes(report["bytes"])),
            ("not used", _format_ignored_tensors(report)),
        ],
        title="Acceptance",
    )
    # one row for all norms on inputs of magnitude √eps, and one for all stored matrices
    together = {"eps": "norms, small inputs", "weight": "matrices, as held"}
    layers = [
        {**row, "module": together.get(row["module"].rpartition(".")[2], row["module"])}
        for row in report.get("layers", [])
    ]
    show_worst_layers(layers)


def show_warnings(report: dict[str, Any]) -> None:
    """Print what the acceptance report warns about, a line each."""
    for warning in (report or {}).get("warnings", ()):
        print_note(f"warning: {warning}")


def acceptance_summary(report: dict[str, Any]) -> str:
    """Summarize the acceptance report in a few words."""
    if not report or report.get("accepted") is None:
        return (report or {}).get("reason", "built without acceptance")
    size = format_bytes(report["bytes"]) if "bytes" in report else ""
    words = [
        f"accepted ({report.get('verdict')})",
        f"{len(report.get('layers', []))} modules compared",
        size,
    ]
    return ", ".join(filter(None, words))


def _label_if_worst_tile(row: dict[str, Any]) -> dict[str, Any]:
    """Label the worst row and tile of a quantized matrix; errors are relative to its norm."""
    return (
        {**row, "module": f"{row['module']}, worst tile"}
        if row["name"].endswith(".worst_block")
        else row
    )


def _format_image_embedding_error(pictures: dict[str, Any] | None) -> str | None:
    return (
        None
        if pictures is None
        else f"{pictures['rel_l2']} of their size (bound {pictures['bound']})"
    )


def _format_ignored_tensors(report: dict[str, Any]) -> str | None:
    """Format the checkpoint's tensors that the engine does not use."""
    return (
        ", ".join(f"{row['count']} × {row['what']}" for row in report.get("unused_tensors") or [])
        or None
    )


def _format_percent(value: Any) -> str | None:
    return f"{100 * value:.1f} %" if isinstance(value, float) else None


def show_worst_layers(layers: list[dict[str, Any]]) -> None:
    """Print the worst layer of each module."""
    rows = worst_layer_by_module(layers)
    columns = (
        "module",
        "worst at",
        "max abs",
        "mean abs",
        "median abs",
        "cosine",
        "tolerance",
        "within",
    )
    keys = ("module", "name", "max_abs", "mean_abs", "median_abs", "cosine", "tolerance", "ok")
    print_table(columns, [[row.get(key) for key in keys] for row in rows])


def show_recipe_errors(layer_reports: list[dict[str, Any]], calibrated: bool = True) -> None:
    """Print each layer's output errors before (rounding to nearest) and after the recipe."""
    if not layer_reports:
        return
    layers: dict[int, list[dict[str, Any]]] = {}
    facts, layer_reports = layer_reports, merge_experts_into_worst(layer_reports)
    for each in layer_reports:
        layers.setdefault(each["layer"], []).append(each)
    modules = list(dict.fromkeys(each["module"] for each in layer_reports))
    columns = ["layer", *modules, "bits", "outlier channels"]
    if "clusters" in layer_reports[0]:
        columns.append("clusters (of one channel)")
    rows = []
    for layer, matrices in layers.items():
        by_module = {each["module"]: each for each in matrices}
        errors = [_format_error_change(by_module.get(module)) for module in modules]
        worst = max(matrices, key=lambda each: each["outliers"][0][1])
        channels = ", ".join(
            f"{channel} ({times:.3g}×)" for channel, times in worst["outliers"][:2]
        )
        bits = sum(each["bits"] for each in matrices) / len(matrices)
        row = [layer, *errors, f"{bits:.3g}", f"{worst['module']}: {channels}"]
        if "clusters" in matrices[0]:
            row.append(", ".join(f"{each['clusters']} ({each['alone']})" for each in matrices))
        rows.append(row)
    where = "calibration inputs" if calibrated else "acceptance text"
    print_table(
        columns, rows, title=f"Errors of outputs on the {where}, rounded to nearest → as held"
    )
    line = format_expert_calibration_tokens(facts)
    if line is not None:
        print_note(line)


def merge_experts_into_worst(layer_reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the experts of a layer, the one with the largest error after the recipe, as "*"."""
    worst: dict[tuple[int, str], dict[str, Any]] = {}
    for each in layer_reports:
        module = replace_expert_number(each["module"])
        key = each["layer"], module
        if key not in worst or each["after"] > worst[key]["after"]:
            worst[key] = {**each, "module": module}
    return list(worst.values())


def replace_expert_number(module: str) -> str:
    """A module's name with "*" in the place of an expert's number."""
    return re.sub(r"\bexperts\.\d+", "experts.*", module)


def format_expert_calibration_tokens(layer_reports: list[dict[str, Any]]) -> str | None:
    """How many calibration tokens the experts had; None without experts."""
    counts = [
        (each["expert_tokens"], each["layer"], each["module"])
        for each in layer_reports
        if "expert_tokens" in each and each["module"].endswith("down_proj")
    ]
    if not counts:
        return None
    least, layer, module = min(counts)
    few = sum(count < MIN_EXPERT_TOKENS for count, _, _ in counts)
    expert = module.removeprefix("mlp.").rpartition(".")[0]
    line = (
        f"calibration tokens of an expert: least {least} (layer {layer}, {expert}), "
        f"median {statistics.median(count for count, _, _ in counts):.0f}"
    )
    if not few:
        return line
    return (
        f"{line}; {few} of {len(counts)} experts had fewer than {MIN_EXPERT_TOKENS} and were "
        "calibrated on all tokens of their layer: more calibration text helps them"
    )


def _format_error_change(matrix: dict[str, Any] | None) -> str | None:
    """Format errors in per cent; one number if the weights are rounded to nearest."""
    if matrix is None:
        return None
    before, after = matrix["before"], matrix["after"]
    return ("" if before == after else f"{100 * before:.2g} → ") + f"{100 * after:.2g} %"


def worst_layer_by_module(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each module the layer closest to its tolerance, in the order of the modules."""
    worst: dict[str, dict[str, Any]] = {}
    for layer in layers:
        module = replace_expert_number(layer["module"])
        current = worst.get(module)
        if current is None or tolerance_ratio(layer) > tolerance_ratio(current):
            worst[module] = {**layer, "module": module}
    return list(worst.values())


def tolerance_ratio(layer: dict[str, Any]) -> float:
    """Return error / tolerance; above 1 the check fails."""
    error, tolerance = float(layer["max_abs"]), float(layer["tolerance"])
    if not layer.get("ok", True):
        return float("inf")
    return error / tolerance if tolerance else error
