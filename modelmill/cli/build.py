"""``modelmill build``: builds a verified engine from a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.builder.recipe_option_check import check_recipe_options
from modelmill.cli.acceptance_tables import acceptance_summary, show_acceptance, show_warnings
from modelmill.cli.engine_options import resolve_or_pull_model
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_json, print_note, print_table, show_progress
from modelmill.cli.plan_tables import show_plan
from modelmill.cli.vision_flags import MiniGPT4Files
from modelmill.core.config import (
    BuildConfig,
    expert_parallel_option_field,
    option_field,
    path_option_field,
    tp_option_field,
)
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


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill build``."""

    checkpoint: Path = option_field(
        help="a Hugging Face folder, or a .gguf, .safetensors, .bin or .pth file",
        positional=True,
        metavar="CHECKPOINT",
    )
    output: Path | None = option_field(
        None,
        "engine folder to write; it appears when it is complete",
        flags=("-o", "--output"),
        metavar="ENGINE",
    )
    force: bool = option_field(False, "replace an existing engine at -o", flags=("--force",))
    quiet: bool = option_field(
        False, "print one line about the result, without plan and tables", flags=("--quiet",)
    )
    dry_run: bool = option_field(False, "print the plan and write nothing", flags=("--dry-run",))
    tp: int = tp_option_field(
        "with --dry-run: tell the memory of one of so many GPUs that run the engine together"
    )
    enable_expert_parallel: bool = expert_parallel_option_field(
        "with --dry-run and --tp: each GPU has whole experts of a mixture"
    )
    delta: Path | None = path_option_field(
        "second checkpoint to add to the first (Vicuna's deltas)", "DELTA"
    )
    check: bool = option_field(
        True, "compare the engine with the float32 reference before publishing it"
    )
    tune: bool = option_field(
        True, "autotune the kernels' launch configs on this GPU and store the best in the engine"
    )
    vision_files: MiniGPT4Files = config_field(MiniGPT4Files, "MiniGPT-4's parts")
    build: BuildConfig = config_field(BuildConfig, "Build")

    @property
    def progress_interval(self) -> float | None:
        """Seconds between progress lines without a terminal; None: as usual."""
        return 60.0 if self.quiet else None


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
    _check_rank_options(args)
    calibration = args.build.calibration
    if calibration is not None and not Path(calibration).exists():  # before anything is fetched
        raise UsageError(f"--calibration {calibration}: there is no such file")
    with show_progress(
        "planning", quiet=args.json, lines=True, every=args.progress_interval
    ) as on_progress:
        # inside, since torch takes seconds to import
        from modelmill.artifact.store import build_target_has_engine, is_engine_folder
        from modelmill.builder.config_only import checkpoint_from_config, is_config_only
        from modelmill.builder.fit_advice import describe_plan
        from modelmill.builder.plan import make_build_plan
        from modelmill.checkpoint.open import open_checkpoint
        from modelmill.loader.device import ensure_cpu_kernels_compiled

        source, vision = args.vision_files.resolve_language_and_vision_paths(args.checkpoint)
        source = resolve_or_pull_model(source)
        if is_engine_folder(source):
            raise UsageError(
                f"{source} is an engine already; give the checkpoint that it was built from"
            )
        there = (
            args.output is not None and not args.dry_run and build_target_has_engine(args.output)
        )
        if args.dry_run and is_config_only(source):
            checkpoint = checkpoint_from_config(source)
            print_note("no weights here: the sizes are those of config.json")
        else:
            checkpoint = open_checkpoint(source, delta=args.delta, vision=vision)
        # the plan of -q auto alone takes minutes, so it is refused before planning
        if there and not args.force and args.build.quantization == "auto":
            raise UsageError(
                f"{args.output} is an engine already; choose another -o, or replace it with --force"
            )
        ensure_cpu_kernels_compiled("cpu" if args.build.target == "cpu" else "auto", on_progress)
        build_plan = make_build_plan(checkpoint, args.build, on_progress)
    check_recipe_options(args.build, segmentation=build_plan.engine_type != "language")
    plan = describe_plan(build_plan, args.tp, args.enable_expert_parallel)
    for warning in build_plan.warnings:
        print_note(f"warning: {warning}")
    if args.output is None or args.dry_run:
        print_json(plan) if args.json else show_plan(plan)
        return 0
    if there and not args.force:
        return _accept_matching_existing_engine(args, build_plan)
    return _build_and_report(args, source, vision, build_plan)


def _check_rank_options(args: Args) -> None:
    """Refuse ranks of a plan that make no sense.

    Raises:
        UsageError: for ranks of a build, less than one, or experts divided over one.
    """
    if args.tp < 1:
        raise UsageError(f"--tp must be at least 1, not {args.tp}")
    if args.tp > 1 and not args.dry_run:
        raise UsageError(
            "--tp splits an engine when it starts, not when it is built: give it to run or serve, "
            "or --dry-run beside it"
        )
    if args.enable_expert_parallel and args.tp == 1:
        raise UsageError(
            "--enable-expert-parallel divides experts over ranks: give --tp 2 or more, or leave "
            "it out"
        )


def _accept_matching_existing_engine(args: Args, made: BuildPlan) -> int:
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
        report = open_artifact(args.output).acceptance_report()
        done = {
            "engine": str(args.output),
            "seconds": 0.0,
            "plan": made.describe(),
            "acceptance": report,
        }
        print_json({**done, "tuning": None})
    else:
        print(
            f"{args.output} is already built from this checkpoint with these options (--force "
            "builds it again)"
        )
    return 0


def _build_and_report(args: Args, source: Path, vision: Any, made: BuildPlan) -> int:
    from modelmill.builder.fit_advice import describe_plan
    from modelmill.llm import build_engine

    assert args.output is not None
    plan = describe_plan(made)
    if not args.json and not args.quiet:
        show_plan(plan)
    began = time.perf_counter()
    try:
        with show_progress(
            "building", lines=not args.json, every=args.progress_interval
        ) as on_progress:
            options: dict[str, Any] = {
                "delta": args.delta, "vision": vision, "on_progress": on_progress,
                "check": args.check, "tune": args.tune, "plan": made,
            }  # fmt: skip
            report = build_engine(source, args.output, args.build, **options)
    except KeyboardInterrupt:
        print_note("stopped; the same command goes on from here")
        raise
    seconds = time.perf_counter() - began
    _warn_broken_template(made.checkpoint)
    if made.generation is not None and (unused := made.generation.unused_warning()) is not None:
        print_note(unused)
    tuned = _read_autotune_record_after_build(made, args)
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
        print_json(done)
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
    from modelmill.cli.inspect import tokenizer_and_chat_facts

    facts = tokenizer_and_chat_facts(checkpoint.tokenizer_files())["chat_template"]
    if facts is not None and "error" in facts:
        print_note(f"{facts['error']}; run it with --raw, or give another with --chat-template")


def _read_autotune_record_after_build(plan: BuildPlan, args: Args) -> AutotuneRecord | None:
    """Return the build's autotuned launch configs; prints why if a GPU's engine has none."""
    import torch

    from modelmill.artifact.autotune_store import read_autotune_record
    from modelmill.builder.autotune_measure import autotune_skip_reason

    if plan.config.target != "cuda" or args.output is None or plan.engine_type != "language":
        return None
    if not args.tune:
        print_note("not tuned (--no-tune): the engine runs with default launch configs")
        return None
    record = (
        read_autotune_record(args.output, torch.cuda.get_device_name())
        if torch.cuda.is_available()
        else None
    )
    if record is None:
        print_note(
            autotune_skip_reason(plan) or "not tuned: the engine runs with default launch configs"
        )
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
