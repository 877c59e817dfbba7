"""``modelmill compare``: an engine against the checkpoint it was made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.acceptance_tables import show_acceptance, worst_layer_by_module
from modelmill.cli.engine_options import ENGINE_HELP, ImplicitBuildOptions, resolve_or_pull_model
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_facts, print_json, print_table, show_progress
from modelmill.cli.vision_flags import MiniGPT4Files
from modelmill.core.config import RunConfig, non_default_fields, option_field, path_option_field
from modelmill.core.errors import UsageError

if TYPE_CHECKING:
    from modelmill.artifact.manifest import Manifest
    from modelmill.artifact.store import Artifact
    from modelmill.checkpoint.open import Checkpoint

HELP = "Compare an engine with its checkpoint: template and tokens first, then layer by layer."
EPILOG = """Exit code 0 only where everything is within its dtype's published tolerance. No engine is rebuilt.

Examples:

  modelmill compare model.engine model.gguf --plot errors.png

  modelmill compare Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B --dtype float32"""  # noqa: E501

SIZE_NAMES = {
    "layers": "layers",
    "hidden": "hidden size",
    "inner": "inner size",
    "vocab": "vocabulary",
}
# fixed by the acceptance contract: with chunked prefill, a quantized KV cache or other lengths a
# correct engine would differ from the reference
EXCLUDED_OPTIONS = (
    *("enable_prefix_caching", "cuda_graphs", "kv_cache_dtype", "tp", "enable_expert_parallel"),
    "seed",
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_mixed_tokens"),
)
METRIC_COLUMNS = ("max_abs", "mean_abs", "median_abs", "max_rel", "cosine", "tolerance")


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """An engine and a checkpoint."""

    engine: Path = option_field(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    checkpoint: Path = option_field(
        help="the checkpoint that it is compared with", positional=True, metavar="CHECKPOINT"
    )
    delta: Path | None = path_option_field("second checkpoint that was added to the first", "DELTA")
    all: bool = option_field(
        False, "list every module of every layer, not only the worst", flags=("--all",)
    )
    plot: Path | None = path_option_field("draw the errors by layer", "FILE.png")
    vision_files: MiniGPT4Files = config_field(MiniGPT4Files, "MiniGPT-4's parts")
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint in the engine's place"
    )
    run: RunConfig = config_field(RunConfig, "Engine", exclude=EXCLUDED_OPTIONS)


def run(args: Args) -> int:
    """Compare and print; exit code 0 if everything is within tolerance."""
    from modelmill.accept.run import acceptance_token_ids, compare_engine
    from modelmill.artifact.store import is_engine_folder, open_artifact
    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.eval.checkpoint_comparison import compare_tokenizer_and_layers, draw_layer_errors
    from modelmill.eval.report import check_plot_path, plot
    from modelmill.llm import LLM, resolve_or_build_engine

    if args.plot is not None:
        check_plot_path(args.plot)
    if is_engine_folder(args.checkpoint):
        raise UsageError(
            f"{args.checkpoint} is an engine, and it is compared with a checkpoint: "
            "modelmill compare ENGINE CHECKPOINT"
        )
    model = resolve_or_pull_model(args.engine)
    with show_progress(f"opening {model.name}", lines=True) as on_progress:
        engine = resolve_or_build_engine(model, non_default_fields(args.build), on_progress, None)
    artifact = open_artifact(engine)
    source, vision = args.vision_files.resolve_language_and_vision_paths(args.checkpoint)
    checkpoint = open_checkpoint(resolve_or_pull_model(source), delta=args.delta, vision=vision)
    if artifact.manifest.engine_type == "segmentation":
        return _compare_segmentation_stages(args, artifact, checkpoint)
    check_same_model_sizes(artifact.manifest, checkpoint)
    # rounded keys are no fault of the engine's
    settings = replace(
        args.run, enable_prefix_caching=False, cuda_graphs=False, kv_cache_dtype="activations"
    )
    with show_progress("comparing", lines=True) as on_progress:
        llm = LLM(engine, progress=on_progress, **non_default_fields(settings))
        ids = acceptance_token_ids(artifact)
        result = compare_tokenizer_and_layers(
            llm,
            checkpoint,
            lambda: compare_engine(llm.engine_core, checkpoint, ids, on_progress=on_progress),
        )
    print_json(result) if args.json else _show_checkpoint_comparison(result, args.all)
    if args.plot is not None:
        plot(
            args.plot,
            lambda axes: draw_layer_errors(axes, result["layers"]),
            f"{args.engine.name}: {result['verdict']}",
        )
    return 0 if result["passed"] else 1


def _compare_segmentation_stages(args: Args, artifact: Artifact, checkpoint: Checkpoint) -> int:
    """The same for an engine that segments images, stage by stage.

    Raises UsageError for what only layers have.
    """
    from modelmill.accept.segmentation import compare_segmentation_engine
    from modelmill.builder.model_config import derive_missing_config
    from modelmill.loader.device import ensure_cpu_kernels_compiled, resolve_device
    from modelmill.vision.sam_loader import open_sam_model

    if args.plot is not None or args.all:
        raise UsageError(
            "--plot and --all are for language models; --json lists all modules of an encoder"
        )
    with show_progress("comparing", lines=True) as on_progress:
        ensure_cpu_kernels_compiled(args.run.device, on_progress)
        model = open_sam_model(artifact, resolve_device(args.run.device), args.run.kernels)
        result = compare_segmentation_engine(
            artifact, model, derive_missing_config(checkpoint), on_progress=on_progress
        )
    print_json(result) if args.json else show_acceptance(result)
    if not args.json and not result["accepted"]:
        print_facts([("why", result["reason"])])
    return 0 if result["accepted"] else 1


def check_same_model_sizes(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """Layers and widths must agree: nothing can be compared otherwise.

    Raises UsageError with both.
    """
    from modelmill.builder.model_config import find_family, read_model_config
    from modelmill.core.module_lookup import import_module_if_exists

    ours, reference = (
        import_module_if_exists("modelmill.models", manifest.model_type),
        find_family(checkpoint),
    )
    if ours is None:
        return
    built = ours.config_from_hf(manifest.config)
    expected, _ = read_model_config(checkpoint, reference)
    for name, words in SIZE_NAMES.items():
        have, want = getattr(built, name, None), getattr(expected, name, None)
        if have is not None and want is not None and have != want:
            raise UsageError(
                f"{words}: {have} in the engine, {want} in {checkpoint.path}; "
                "give the checkpoint that the engine was built from"
            )


def _show_checkpoint_comparison(result: dict[str, Any], all_modules: bool) -> None:
    checks = result["text"]
    if checks:
        rows = [
            [c["what"], c["subject"].replace("\n", "⏎"), c["against"], _format_text_check(c)]
            for c in checks
        ]
        print_table(("checked", "text", "against", "equal"), rows, title="Template and tokens")
    layers = result["layers"] if all_modules else worst_layer_by_module(result["layers"])
    outside = [layer for layer in result["layers"] if not layer["ok"] and layer not in layers]
    rows = [
        [layer["name"], *[layer[key] for key in METRIC_COLUMNS], layer["ok"]]
        for layer in [*layers, *outside[:20]]
    ]
    names = [column.replace("_", " ") for column in METRIC_COLUMNS]
    print_table(
        ("module", *names, "within"),
        rows,
        title="Every module" if all_modules else "The worst of each module",
    )
    logits = result.get("logits") or {}
    print_facts(
        [
            (
                "compared",
                f"{len(result['layers'])} modules in {result.get('dtype')}, "
                f"{result.get('quantization')}",
            ),
            (
                "logits",
                f"relative error {logits['rel_l2']}, bound {logits['bound']}" if logits else None,
            ),
            ("verdict", result["verdict"]),
            ("why", result.get("reason") if not result["passed"] else None),
        ]
    )


def _format_text_check(check: dict[str, Any]) -> str:
    if check["equal"]:
        return "yes"
    if check["equal"] is None or check["note"]:
        return check["note"]
    return f"no, from {check['place']} on: {check['ours']!r}, not {check['theirs']!r}"
