"""``modelmill build``: a checkpoint becomes a verified engine."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.build.options import CONCERNS, OF_RECIPES, check_concerns
from modelmill.cli.eyes import Eyes
from modelmill.cli.options import Common, config
from modelmill.cli.output import emit_json, facts, note, progress, table
from modelmill.core.config import BuildConfig, option
from modelmill.core.errors import UsageError
from modelmill.core.size import byte_text

if TYPE_CHECKING:
    from modelmill.artifact.tuning import StoredTuning
    from modelmill.build.plan import Plan
    from modelmill.checkpoint.open import Checkpoint

HELP = "Build an engine from a checkpoint, and check that it computes what the checkpoint computes."
MORE = """Examples:

  modelmill build model.gguf -o model.engine

  modelmill build models/Qwen--Qwen3-0.6B -o qwen3.engine --dtype bfloat16 -q int8

  modelmill build models/Qwen--Qwen3-0.6B --dry-run"""


STILL = ("dtype", "quantization", "activation_scales", "weight_scales", "target", "kernels", "seed")
"""The options that concern an engine which segments images."""

QUIET_SECONDS = 60.0
"""With --quiet, seconds between lines where there is no terminal."""
OF_CALIBRATION = ("calibration_samples", "calibration_length")


@dataclass(frozen=True, kw_only=True)
class Args(Common):
    """checkpoint: a Hugging Face folder or a .gguf, .safetensors, .bin or .pth file."""

    checkpoint: Path = option(
        help="a Hugging Face folder, or a .gguf, .safetensors, .bin or .pth file",
        positional=True,
        metavar="CHECKPOINT",
    )
    output: Path | None = option(
        None, "engine folder to write; it appears when it is complete", flags=("-o", "--output"), metavar="ENGINE"
    )
    force: bool = option(False, "replace an engine that stands at -o already", flags=("--force",))
    quiet: bool = option(False, "say what was built in one line, without the plan and the tables", flags=("--quiet",))
    dry_run: bool = option(False, "print the plan and write nothing", flags=("--dry-run",))
    delta: Path | None = option(None, "second checkpoint to add to the first (Vicuna's deltas)", metavar="DELTA")
    check: bool = option(True, "judge the engine against the float32 reference before it appears")
    tune: bool = option(True, "time launch sizes of the kernels on this GPU and keep the best in the engine")
    eyes: Eyes = config(Eyes, "MiniGPT-4's parts")
    build: BuildConfig = config(BuildConfig, "Build")


def run(args: Args) -> int:
    """Print the plan, build, print the acceptance summary. A refused engine raises AcceptanceError."""
    if args.output is None and not args.dry_run:
        raise UsageError("-o ENGINE is missing: the folder to write the engine to (or --dry-run for the plan alone)")
    every = QUIET_SECONDS if args.quiet else None
    with progress("planning", quiet=args.json, lines=True, every=every) as told:
        from modelmill.artifact.store import check_place, is_engine  # inside, since torch takes seconds to import
        from modelmill.build.plan import make_plan
        from modelmill.checkpoint.open import open_checkpoint
        from modelmill.runtime.device import prepare

        source, vision = args.eyes.with_checkpoint(args.checkpoint)
        if is_engine(source):
            raise UsageError(f"{source} is an engine already; give the checkpoint that it was built from")
        there = args.output is not None and not args.dry_run and check_place(args.output)
        checkpoint = open_checkpoint(source, delta=args.delta, vision=vision)
        if there and not args.force and args.build.quantization == "auto":  # whose plan alone takes minutes
            raise UsageError(f"{args.output} is an engine already; choose another -o, or replace it with --force")
        prepare("cpu" if args.build.target == "cpu" else "auto", told)
        made = make_plan(checkpoint, args.build, told)
    check_concerns(args.build, still=made.kind != "language")
    plan = made.describe()
    for warning in made.warnings:
        note(f"warning: {warning}")
    if args.output is None or args.dry_run:
        emit_json(plan) if args.json else show_plan(plan)
        return 0
    if there and not args.force:
        return _already(args, made)
    return _build(args, source, vision, made)


def _already(args: Args, made: Plan) -> int:
    """What is there is left alone: it is what was asked for, or UsageError says in what it is not."""
    from modelmill.artifact.store import open_artifact
    from modelmill.build.existing import differences

    assert args.output is not None
    with progress("comparing with what is there", quiet=args.json, lines=True) as told:
        odd = differences(made, args.output, check=args.check, progress=told)
    if odd:
        more = f" and {len(odd) - 2} more" if len(odd) > 2 else ""
        raise UsageError(
            f"{args.output} is an engine already, and another one ({'; '.join(odd[:2])}{more}); "
            "choose another -o, or replace it with --force"
        )
    if args.json:
        report = open_artifact(args.output).acceptance()
        done = {"engine": str(args.output), "seconds": 0.0, "plan": made.describe(), "acceptance": report}
        emit_json({**done, "tuning": None})
    else:
        print(f"{args.output} is already built from this checkpoint with these options (--force builds it again)")
    return 0


def _build(args: Args, source: Path, vision: Any, made: Plan) -> int:
    from modelmill.llm import build_engine

    assert args.output is not None
    plan = made.describe()
    if not args.json and not args.quiet:
        show_plan(plan)
    began = time.perf_counter()
    try:
        with progress("building", lines=not args.json, every=QUIET_SECONDS if args.quiet else None) as told:
            how: dict[str, Any] = {
                "delta": args.delta,
                "vision": vision,
                "progress": told,
                "check": args.check,
                "tune": args.tune,
                "plan": made,
            }
            report = build_engine(source, args.output, args.build, **how)
    except KeyboardInterrupt:
        note("stopped; the same command goes on from here")
        raise
    seconds = time.perf_counter() - began
    _warn_of_template(made.checkpoint)
    if made.generation is not None and (unused := made.generation.warning()) is not None:
        note(unused)
    tuned = _tuned(made, args)
    if args.json:
        tuning = None if tuned is None else {"device": tuned.device, "choices": tuned.choices, "facts": tuned.facts}
        done = {"engine": str(args.output), "seconds": seconds, "plan": plan, "acceptance": report, "tuning": tuning}
        emit_json(done)
        return 0
    if args.quiet:
        print(f"{args.output} is ready ({seconds:.1f} s): {in_short(report)}")
        return 0
    show_acceptance(report)
    if tuned is not None:
        show_tuning(tuned)
    asked = "segment {} IMAGE --point X,Y" if made.kind == "segmentation" else "run {} --prompt '…'"
    if "pictures" in report and plan["tokenizer"]:
        asked = "chat {} --image photo.jpg"
    print(f"{args.output} is ready ({seconds:.1f} s): modelmill {asked.format(args.output)}")
    return 0


def _warn_of_template(checkpoint: Checkpoint) -> None:
    """A broken chat template leaves an engine that answers raw prompts: that is said now, not at the first chat."""
    from modelmill.cli.inspect import text_facts

    told = text_facts(checkpoint.tokenizer_files())["chat_template"]
    if told is not None and "error" in told:
        note(f"{told['error']}; run it with --raw, or give another with --chat-template")


def _tuned(plan: Plan, args: Args) -> StoredTuning | None:
    """The launch sizes that the build found; where a GPU's engine has none, why."""
    import torch

    from modelmill.artifact.tuning import read_tuning
    from modelmill.build.rehearsal import why_not

    if plan.config.target != "cuda" or args.output is None or plan.kind != "language":
        return None
    if not args.tune:
        note("not tuned (--no-tune): the engine runs with default launch sizes")
        return None
    found = read_tuning(args.output, torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if found is None:
        note(why_not(plan) or "not tuned: the engine runs with default launch sizes")
    return found


def show_tuning(tuning: StoredTuning) -> None:
    """What was tuned on which device, and what it was worth there."""
    steps = tuning.facts.get("steps", {})
    rows = [
        [int(rows), each["default_us"], each["tuned_us"], each["untried"]]
        for rows, each in steps.items()
        if each["default_us"] is not None
    ]
    count = sum(map(len, tuning.choices.values()))
    print(f"tuned for {tuning.device}: {count} products with launch sizes of their own")
    if rows:
        table(("sequences", "default, µs", "tuned, µs", "not tried"), rows, title="Steps of the layers it was tuned on")


def show_plan(plan: dict[str, Any]) -> None:
    """The plan for people: what, why, and the memory it takes."""
    build, reasons, memory = plan["build"], plan["reasons"], plan["memory"]
    language = plan["kind"] == "language"
    cache = (
        f"{byte_text(memory['kv_per_token'])} ({byte_text(memory['kv_per_token_8bit'])} in 8 bits)"
        if language
        else None
    )
    options = [
        (name, _with_reason(value, reasons.get(name)))
        for name, value in build.items()
        if (value not in (None, {}) or name in reasons) and (language or name in STILL) and _concerns(name, build)
    ]
    kinds = ", ".join(f"{name} {byte_text(count)}" for name, count in plan["bytes_by_kind"].items())
    facts(
        [
            ("checkpoint", f"{plan['checkpoint']} ({plan['container']})"),
            ("architecture", f"{plan['model_type']}, {_depth(plan)}{plan['tensors']} tensors"),
            ("tokenizer", ("yes" if plan["tokenizer"] else "none: an ids-only engine") if language else None),
            ("weights", f"{byte_text(memory['weights'])} ({kinds})"),
            ("longest sequence", plan["max_model_len"] if language else None),
            ("sampling", (plan["sampling"] or {}).get("text")),
            ("layers", _counted(build.get("layer_recipes") or {})),
            *options,
        ],
        title="Plan",
    )
    show_choice(plan["auto"])
    facts(
        [
            ("device", f"{byte_text(memory['device_total'])}, {byte_text(memory['device_free'])} free now"),
            ("while building", f"{byte_text(memory['build_peak'])} ({byte_text(memory['build_mapped'])} mapped files)"),
            ("weights at run time", byte_text(memory["weights"])),
            *(
                [("expanded at start", f"{byte_text(memory['expanded'])}: this CPU has no compiled kernels for them")]
                if memory.get("expanded")
                else []
            ),
            ("workspace at run time", byte_text(memory["workspace"])),
            ("KV cache per token", cache),
            ("fits", memory["fits"]),
        ],
        title="Memory",
    )


def _concerns(name: str, build: dict[str, Any]) -> bool:
    """Whether an option says something of this build."""
    if name in OF_CALIBRATION:
        return build["calibration"] is not None
    if name in OF_RECIPES:
        return name in CONCERNS.get(build["quantization"], ())
    if name == "tower":
        return bool(build["tower"] != "none")
    return name != "layer_recipes"


def _counted(forms: dict[str, str]) -> str | None:
    """How many layers have which form."""
    counts = Counter(forms.values())
    return ", ".join(f"{count} × {form}" for form, count in sorted(counts.items())) or None


def show_choice(found: dict[str, Any] | None) -> None:
    """What ``-q auto`` chose, layer by layer, and what it measured."""
    if found is None:
        return
    forms = list(found["layers"][0]["kl"])[:-1]
    rows = [
        [row["layer"], row["form"], byte_text(row["bytes"]), *(row["kl"][form] for form in forms)]
        for row in found["layers"]
    ]
    table(("layer", "chosen", "size", *(f"KL {form}" for form in forms)), rows, title="Layers, each rounded alone")
    rise = 100 * (math.exp(found["log_perplexity"]) - 1)
    print(
        f"together: mean KL at most {found['kl']:.4g} nats a token, perplexity {rise:+.2f} % at most "
        "(means plus standard errors, on calibration data)\n"
    )


def _depth(plan: dict[str, Any]) -> str:
    return "" if plan["layers"] is None else f"{plan['layers']} layers, "


def _with_reason(value: Any, reason: str | None) -> str:
    if reason is None:
        return str(value)
    return reason if value is None or reason.startswith(str(value)) else f"{value} ({reason})"


def show_acceptance(report: dict[str, Any]) -> None:
    """The acceptance report for people: the verdict, and the worst of each kind of module."""
    if not report or report.get("accepted") is None:
        facts([("acceptance", (report or {}).get("reason", "built without"))])
        return
    if "masks" in report:
        show_masks(report)
        return
    logits = report.get("logits") or {}
    agreed = f"{logits.get('agreed_rows')} of {logits.get('sure_rows')} where the reference is sure"
    perplexity = f"{logits.get('perplexity')} (reference {logits.get('reference_perplexity')})"
    facts(
        [
            ("verdict", report.get("verdict")),
            ("compared", f"{len(report.get('layers', []))} modules, {logits.get('tokens')} tokens" if logits else None),
            ("next tokens", agreed if logits else None),
            ("perplexity", perplexity if logits else None),
            ("mean KL to the checkpoint", logits.get("mean_kl")),
            ("picture's embeddings' error", _eyes(report.get("pictures"))),
            ("next tokens as the checkpoint's", _share(logits.get("agreement"))),
            ("size", byte_text(report["bytes"]) if "bytes" in report else None),
            ("reference", report.get("reference")),
            ("not used", _dropped(report)),
        ],
        title="Acceptance",
    )
    recipe = report.get("recipe") or []
    show_recipe(recipe, any(each["before"] != each["after"] for each in recipe))
    show_modules([_of_parts(row) for row in report.get("layers", [])])


def in_short(report: dict[str, Any]) -> str:
    """The acceptance report in a few words."""
    if not report or report.get("accepted") is None:
        return (report or {}).get("reason", "built without acceptance")
    size = byte_text(report["bytes"]) if "bytes" in report else ""
    words = [f"accepted ({report.get('verdict')})", f"{len(report.get('layers', []))} modules compared", size]
    return ", ".join(filter(None, words))


def _of_parts(row: dict[str, Any]) -> dict[str, Any]:
    """A line of its own for the worst row and tile of a quantized matrix: shares of its size, not of one weight."""
    return {**row, "module": f"{row['module']}, worst tile"} if row["name"].endswith(".parts") else row


def _eyes(pictures: dict[str, Any] | None) -> str | None:
    return None if pictures is None else f"{pictures['rel_l2']} of their size (bound {pictures['bound']})"


def _dropped(report: dict[str, Any]) -> str | None:
    """The checkpoint's tensors that the engine does without."""
    return ", ".join(f"{row['count']} × {row['what']}" for row in report.get("dropped") or []) or None


def show_masks(report: dict[str, Any]) -> None:
    """The same for an engine that segments images."""
    masks = report["masks"]
    facts(
        [
            ("verdict", report.get("verdict")),
            (
                "compared",
                f"{len(report.get('layers', []))} modules; {masks['prompts']} prompts on a picture of our own",
            ),
            ("embedding's error", f"{masks['embedding_rel_l2']} of its size (bound {masks['embedding_bound']})"),
            ("mask logits' error", f"{masks['logits_rel_l2']} of their size (bound {masks['logits_bound']})"),
            (
                "IoU with the reference",
                f"{masks['mask_iou_mean']} on average (bound {masks['mask_iou_bound']}), "
                f"{masks['mask_iou_least']} at least",
            ),
            ("scores differ by", f"at most {masks['score_difference']}"),
            ("size", byte_text(report["bytes"])),
            ("not used", _dropped(report)),
        ],
        title="Acceptance",
    )
    # all norms on inputs of the size of √eps in one row, and all matrices as they are held
    together = {"eps": "norms, small inputs", "weight": "matrices, as held"}
    layers = [
        {**row, "module": together.get(row["module"].rpartition(".")[2], row["module"])}
        for row in report.get("layers", [])
    ]
    show_modules(layers)


def show_modules(layers: list[dict[str, Any]]) -> None:
    """The worst of each module."""
    rows = worst_by_module(layers)
    columns = ("module", "worst at", "max abs", "mean abs", "median abs", "cosine", "tolerance", "within")
    keys = ("module", "name", "max_abs", "mean_abs", "median_abs", "cosine", "tolerance", "ok")
    table(columns, [[row.get(key) for key in keys] for row in rows])


def show_recipe(told: list[dict[str, Any]], calibrated: bool = True) -> None:
    """What a recipe did to each layer: errors of its outputs before (plain rounding) and after."""
    if not told:
        return
    layers: dict[int, list[dict[str, Any]]] = {}
    for each in told:
        layers.setdefault(each["layer"], []).append(each)
    first = next(iter(layers.values()))
    columns = ["layer", *(each["module"] for each in first), "bits", "outlier channels"]
    if "clusters" in first[0]:
        columns.append("clusters (of one channel)")
    rows = []
    for layer, matrices in layers.items():
        errors = [_change(each["before"], each["after"]) for each in matrices]
        worst = max(matrices, key=lambda each: each["outliers"][0][1])
        channels = ", ".join(f"{channel} ({times:.3g}×)" for channel, times in worst["outliers"][:2])
        bits = sum(each["bits"] for each in matrices) / len(matrices)
        row = [layer, *errors, f"{bits:.3g}", f"{worst['module']}: {channels}"]
        if "clusters" in matrices[0]:
            row.append(", ".join(f"{each['clusters']} ({each['alone']})" for each in matrices))
        rows.append(row)
    where = "calibration inputs" if calibrated else "acceptance text"
    table(columns, rows, title=f"Errors of outputs on the {where}, rounded to nearest → as held")


def _change(before: float, after: float) -> str:
    """Errors in per cent; one number where rounding to nearest is what is held."""
    return ("" if before == after else f"{100 * before:.2g} → ") + f"{100 * after:.2g} %"


def _share(value: Any) -> str | None:
    return f"{100 * value:.1f} %" if isinstance(value, float) else None


def worst_by_module(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each module the layer that comes closest to its tolerance, in the order of the modules."""
    worst: dict[str, dict[str, Any]] = {}
    for layer in layers:
        found = worst.get(layer["module"])
        if found is None or closeness(layer) > closeness(found):
            worst[layer["module"]] = layer
    return list(worst.values())


def closeness(layer: dict[str, Any]) -> float:
    """The error as a share of its tolerance; above 1 is out of bounds."""
    error, tolerance = float(layer["max_abs"]), float(layer["tolerance"])
    if not layer.get("ok", True):
        return float("inf")
    return error / tolerance if tolerance else error
