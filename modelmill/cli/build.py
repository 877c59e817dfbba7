"""``modelmill build``: builds a verified engine from a checkpoint."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.builder.recipe_options import (
    ALL_RECIPE_OPTIONS,
    RECIPE_OPTIONS,
    check_recipe_options,
)
from modelmill.cli.acceptance_tables import show_modules, show_recipe
from modelmill.cli.engine_options import local_model
from modelmill.cli.options import CommonArgs, config
from modelmill.cli.output import emit_json, print_facts, print_note, print_table, show_progress
from modelmill.cli.vision_flags import MiniGPT4Files
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig, option
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.artifact.autotune_store import AutotuneRecord
    from modelmill.builder.plan import BuildPlan
    from modelmill.checkpoint.open import Checkpoint

HELP = "Build an engine from a checkpoint, and check that it computes what the checkpoint computes."
EPILOG = """Examples:

  modelmill build model.gguf -o model.engine

  modelmill build models/Qwen--Qwen3-0.6B -o qwen3.engine --dtype bfloat16 -q int8

  modelmill build models/Qwen--Qwen3-0.6B --dry-run"""


VISION_OPTIONS = (
    "dtype",
    "quantization",
    "activation_scales",
    "weight_scales",
    "target",
    "kernels",
    "seed",
)
"""The options that apply to a segmentation engine."""

QUIET_LINE_SECONDS = 60.0
"""With --quiet and without a terminal, seconds between progress lines."""
CALIBRATION_OPTIONS = ("calibration_samples", "calibration_length")


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill build``."""

    checkpoint: Path = option(
        help="a Hugging Face folder, or a .gguf, .safetensors, .bin or .pth file",
        positional=True,
        metavar="CHECKPOINT",
    )
    output: Path | None = option(
        None,
        "engine folder to write; it appears when it is complete",
        flags=("-o", "--output"),
        metavar="ENGINE",
    )
    force: bool = option(False, "replace an existing engine at -o", flags=("--force",))
    quiet: bool = option(
        False, "print one line about the result, without plan and tables", flags=("--quiet",)
    )
    dry_run: bool = option(False, "print the plan and write nothing", flags=("--dry-run",))
    delta: Path | None = option(
        None, "second checkpoint to add to the first (Vicuna's deltas)", metavar="DELTA"
    )
    check: bool = option(True, "compare the engine with the float32 reference before publishing it")
    tune: bool = option(
        True, "autotune the kernels' launch configs on this GPU and store the best in the engine"
    )
    vision_files: MiniGPT4Files = config(MiniGPT4Files, "MiniGPT-4's parts")
    build: BuildConfig = config(BuildConfig, "Build")


def run(args: Args) -> int:
    """Print the plan, build, print the acceptance summary.

    Raises:
        AcceptanceError: if the engine does not pass the acceptance contract.
    """
    if args.output is None and not args.dry_run:
        raise UsageError(
            "-o ENGINE is missing: the folder to write the engine to (or --dry-run for the plan "
            "alone)"
        )
    every = QUIET_LINE_SECONDS if args.quiet else None
    with show_progress("planning", quiet=args.json, lines=True, every=every) as on_progress:
        # inside, since torch takes seconds to import
        from modelmill.artifact.store import check_target, is_engine
        from modelmill.builder.config_only import checkpoint_of_config, is_config_only
        from modelmill.builder.plan import make_plan
        from modelmill.checkpoint.open import open_checkpoint
        from modelmill.loader.device import compile_cpu_kernels

        source, vision = args.vision_files.split_checkpoint(args.checkpoint)
        source = local_model(source)
        if is_engine(source):
            raise UsageError(
                f"{source} is an engine already; give the checkpoint that it was built from"
            )
        there = args.output is not None and not args.dry_run and check_target(args.output)
        if args.dry_run and is_config_only(source):
            checkpoint = checkpoint_of_config(source)
            print_note("no weights here: the sizes are those of config.json")
        else:
            checkpoint = open_checkpoint(source, delta=args.delta, vision=vision)
        # the plan of -q auto alone takes minutes, so it is refused before planning
        if there and not args.force and args.build.quantization == "auto":
            raise UsageError(
                f"{args.output} is an engine already; choose another -o, or replace it with --force"
            )
        compile_cpu_kernels("cpu" if args.build.target == "cpu" else "auto", on_progress)
        build_plan = make_plan(checkpoint, args.build, on_progress)
    check_recipe_options(args.build, segmentation=build_plan.engine_type != "language")
    plan = build_plan.describe()
    for warning in build_plan.warnings:
        print_note(f"warning: {warning}")
    if args.output is None or args.dry_run:
        emit_json(plan) if args.json else show_plan(plan)
        return 0
    if there and not args.force:
        return _check_existing(args, build_plan)
    return _build(args, source, vision, build_plan)


def _check_existing(args: Args, made: BuildPlan) -> int:
    """Accept an existing engine that was built from this checkpoint with these options.

    Raises:
        UsageError: if it differs; the message names the differences.
    """
    from modelmill.artifact.store import open_artifact
    from modelmill.builder.existing_engine import differences_from_plan

    assert args.output is not None
    with show_progress("comparing with what is there", quiet=args.json, lines=True) as progress:
        differences = differences_from_plan(
            made, args.output, with_acceptance=args.check, on_progress=progress
        )
    if differences:
        more = f" and {len(differences) - 2} more" if len(differences) > 2 else ""
        raise UsageError(
            f"{args.output} is an engine already, and another one "
            f"({'; '.join(differences[:2])}{more}); "
            "choose another -o, or replace it with --force"
        )
    if args.json:
        report = open_artifact(args.output).acceptance()
        done = {
            "engine": str(args.output),
            "seconds": 0.0,
            "plan": made.describe(),
            "acceptance": report,
        }
        emit_json({**done, "tuning": None})
    else:
        print(
            f"{args.output} is already built from this checkpoint with these options (--force "
            "builds it again)"
        )
    return 0


def _build(args: Args, source: Path, vision: Any, made: BuildPlan) -> int:
    from modelmill.llm import build_engine

    assert args.output is not None
    plan = made.describe()
    if not args.json and not args.quiet:
        show_plan(plan)
    began = time.perf_counter()
    try:
        with show_progress(
            "building", lines=not args.json, every=QUIET_LINE_SECONDS if args.quiet else None
        ) as on_progress:
            options: dict[str, Any] = {
                "delta": args.delta,
                "vision": vision,
                "on_progress": on_progress,
                "check": args.check,
                "tune": args.tune,
                "plan": made,
            }
            report = build_engine(source, args.output, args.build, **options)
    except KeyboardInterrupt:
        print_note("stopped; the same command goes on from here")
        raise
    seconds = time.perf_counter() - began
    _warn_broken_template(made.checkpoint)
    if made.generation is not None and (unused := made.generation.warning()) is not None:
        print_note(unused)
    tuned = _autotune(made, args)
    if args.json:
        tuning = (
            None
            if tuned is None
            else {"device": tuned.device, "choices": tuned.choices, "facts": tuned.facts}
        )
        done = {
            "engine": str(args.output),
            "seconds": seconds,
            "plan": plan,
            "acceptance": report,
            "tuning": tuning,
        }
        emit_json(done)
        return 0
    if args.quiet:
        show_warnings(report)
        print(f"{args.output} is ready ({seconds:.1f} s): {acceptance_summary(report)}")
        return 0
    show_acceptance(report)
    if tuned is not None:
        show_tuning(tuned)
    example = (
        "segment {} IMAGE --point X,Y"
        if made.engine_type == "segmentation"
        else "run {} --prompt '…'"
    )
    if "image_embeddings" in report and plan["tokenizer"]:
        example = "chat {} --image photo.jpg"
    print(f"{args.output} is ready ({seconds:.1f} s): modelmill {example.format(args.output)}")
    return 0


def _warn_broken_template(checkpoint: Checkpoint) -> None:
    """Warn about a broken chat template: the engine accepts only raw prompts."""
    from modelmill.cli.inspect import text_facts

    facts = text_facts(checkpoint.tokenizer_files())["chat_template"]
    if facts is not None and "error" in facts:
        print_note(f"{facts['error']}; run it with --raw, or give another with --chat-template")


def _autotune(plan: BuildPlan, args: Args) -> AutotuneRecord | None:
    """Return the build's autotuned launch configs; prints why if a GPU's engine has none."""
    import torch

    from modelmill.artifact.autotune_store import read_record
    from modelmill.builder.autotune_measure import skip_reason

    if plan.config.target != "cuda" or args.output is None or plan.engine_type != "language":
        return None
    if not args.tune:
        print_note("not tuned (--no-tune): the engine runs with default launch configs")
        return None
    record = (
        read_record(args.output, torch.cuda.get_device_name())
        if torch.cuda.is_available()
        else None
    )
    if record is None:
        print_note(skip_reason(plan) or "not tuned: the engine runs with default launch configs")
    return record


def show_tuning(tuning: AutotuneRecord) -> None:
    """Print the tuned device and the speedup of the tuned steps."""
    steps = tuning.facts.get("steps", {})
    rows = [
        [int(rows), each["default_us"], each["tuned_us"], each["untried"]]
        for rows, each in steps.items()
        if each["default_us"] is not None
    ]
    count = sum(map(len, tuning.choices.values()))
    print(f"tuned for {tuning.device}: {count} products with tuned launch configs")
    if rows:
        print_table(
            ("sequences", "default, µs", "tuned, µs", "not tried"),
            rows,
            title="Steps of the layers it was tuned on",
        )


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
        (name, _with_reason(value, reasons.get(name)))
        for name, value in build.items()
        if (value not in (None, {}) or name in reasons)
        and (language or name in VISION_OPTIONS)
        and _option_applies(name, build)
    ]
    formats = ", ".join(
        f"{name} {format_bytes(count)}" for name, count in plan["bytes_by_format"].items()
    )
    print_facts(
        [
            ("checkpoint", f"{plan['checkpoint']} ({plan['container']})"),
            (
                "architecture",
                f"{plan['model_type']}, {_layer_count_text(plan)}{plan['tensors']} tensors",
            ),
            (
                "tokenizer",
                ("yes" if plan["tokenizer"] else "none: an ids-only engine") if language else None,
            ),
            ("parameters", _parameters_text(plan)),
            ("weights", f"{format_bytes(memory['weights'])} ({formats})"),
            ("longest sequence", plan["max_model_len"] if language else None),
            ("sampling", (plan["sampling"] or {}).get("text")),
            ("layers", _count_formats(build.get("layer_recipes") or {})),
            *options,
        ],
        title="Plan",
    )
    show_bit_choice(plan["auto"])
    _show_memory(memory, cache)


def _parameters_text(plan: dict[str, Any]) -> str:
    """The number of parameters, and of those that a token is multiplied with."""
    total, active = plan["parameters"], plan["active_parameters"]
    text = f"{total / 1e9:.3g} billion" if total >= 1e8 else f"{total / 1e6:.3g} million"
    return text if active == total else f"{text}, {active / 1e9:.3g} billion a token"


def _merged_groups(memory: dict[str, Any]) -> list[dict[str, Any]]:
    """The page groups of the memory report, those of a window as one."""
    merged: dict[int | None, dict[str, Any]] = {}
    for group in memory.get("kv_page_groups", ()):
        total = merged.setdefault(group["window"], {"layers": 0, "bytes_per_sequence": 0})
        total["window"] = group["window"]
        total["layers"] += group["layers"]
        total["bytes_per_sequence"] += group["bytes_per_sequence"]
    return list(merged.values())


def _page_group_text(group: dict[str, Any]) -> str:
    """What the longest sequence takes in the layers with a window, or in those without."""
    window = group["window"]
    tokens = "all tokens" if window is None else f"the last {window} tokens"
    size = format_bytes(group["bytes_per_sequence"])
    return f"{group['layers']} layers keep {tokens}: {size} in the longest sequence"


def _show_memory(memory: dict[str, Any], cache: str | None) -> None:
    """Print the memory; cache: KV bytes per token, None without a KV cache."""
    print_facts(
        [
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
            *(("", _page_group_text(group)) for group in _merged_groups(memory)),
            (
                "recurrent state per sequence",
                format_bytes(state) if (state := memory.get("state_per_sequence")) else None,
            ),
            ("fits", memory["fits"]),
        ],
        title="Memory",
    )


def _option_applies(name: str, build: dict[str, Any]) -> bool:
    """Whether an option affects this build."""
    if name in CALIBRATION_OPTIONS:
        return build["calibration"] is not None
    if name in ALL_RECIPE_OPTIONS:
        return name in RECIPE_OPTIONS.get(build["quantization"], ())
    if name == "tower":
        return bool(build["tower"] != "none")
    return name != "layer_recipes"


def _count_formats(forms: dict[str, str]) -> str | None:
    """Count the layers of each form."""
    counts = Counter(forms.values())
    return ", ".join(f"{count} × {form}" for form, count in sorted(counts.items())) or None


def show_bit_choice(choice: dict[str, Any] | None) -> None:
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


def _layer_count_text(plan: dict[str, Any]) -> str:
    return "" if plan["layers"] is None else f"{plan['layers']} layers, "


def _with_reason(value: Any, reason: str | None) -> str:
    if reason is None:
        return str(value)
    return reason if value is None or reason.startswith(str(value)) else f"{value} ({reason})"


def show_acceptance(report: dict[str, Any]) -> None:
    """Print the acceptance report: the verdict, and the worst layer of each module."""
    if not report or report.get("accepted") is None:
        print_facts([("acceptance", (report or {}).get("reason", "built without"))])
        return
    if "masks" in report:
        show_masks(report)
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
            ("picture's embeddings' error", _vision_summary(report.get("image_embeddings"))),
            ("next tokens as the checkpoint's", _percent(logits.get("agreement"))),
            ("size", format_bytes(report["bytes"]) if "bytes" in report else None),
            ("reference", report.get("reference")),
            ("not used", _ignored_tensors(report)),
        ],
        title="Acceptance",
    )
    recipe = report.get("quantization_errors") or []
    show_recipe(recipe, any(each["before"] != each["after"] for each in recipe))
    show_modules([_row_and_tile(row) for row in report.get("layers", [])])
    show_warnings(report)


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


def _row_and_tile(row: dict[str, Any]) -> dict[str, Any]:
    """Label the worst row and tile of a quantized matrix; errors are relative to its norm."""
    return (
        {**row, "module": f"{row['module']}, worst tile"}
        if row["name"].endswith(".worst_block")
        else row
    )


def _vision_summary(pictures: dict[str, Any] | None) -> str | None:
    return (
        None
        if pictures is None
        else f"{pictures['rel_l2']} of their size (bound {pictures['bound']})"
    )


def _ignored_tensors(report: dict[str, Any]) -> str | None:
    """Format the checkpoint's tensors that the engine does not use."""
    return (
        ", ".join(f"{row['count']} × {row['what']}" for row in report.get("unused_tensors") or [])
        or None
    )


def show_masks(report: dict[str, Any]) -> None:
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
            ("not used", _ignored_tensors(report)),
        ],
        title="Acceptance",
    )
    # one row for all norms on inputs of magnitude √eps, and one for all stored matrices
    together = {"eps": "norms, small inputs", "weight": "matrices, as held"}
    layers = [
        {**row, "module": together.get(row["module"].rpartition(".")[2], row["module"])}
        for row in report.get("layers", [])
    ]
    show_modules(layers)


def _percent(value: Any) -> str | None:
    return f"{100 * value:.1f} %" if isinstance(value, float) else None
