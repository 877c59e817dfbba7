"""Common options of the verbs that evaluate an engine's texts, and opening both sides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelmill.cli import engine_options
from modelmill.cli.engine_options import ENGINE_HELP, ImplicitBuildOptions
from modelmill.cli.options import CommonArgs, config_field
from modelmill.core.config import DTYPE_CHOICES, RunConfig, option_field, path_option_field
from modelmill.core.packages import require_package

if TYPE_CHECKING:
    from modelmill.checkpoint.open import Checkpoint
    from modelmill.eval.hf_reference import HfReference
    from modelmill.llm import LLM


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs(CommonArgs):
    """The engine, the data, and the checkpoint that transformers runs on the same data."""

    engine: Path = option_field(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    data: Path | None = option_field(None, "what to evaluate on", required=True, metavar="FILE")
    reference: Path | None = path_option_field(
        "also run this checkpoint through transformers", "CHECKPOINT"
    )
    reference_dtype: str = option_field("float32", "type of the reference", choices=DTYPE_CHOICES)
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint in the engine's place"
    )
    run: RunConfig = config_field(RunConfig, "Engine")


def require_transformers_for_reference(args: EvaluationArgs) -> None:
    """Check that transformers is installed if a reference is requested.

    Raises:
        MissingDependency: if it is not.
    """
    if args.reference is not None:
        require_package("--reference", "transformers", "eval")


def open_evaluated_engine(args: EvaluationArgs) -> LLM:
    """Open the engine, with memory left for the reference on the same GPU.

    Raises:
        UsageError: if the engine was calibrated on the data.
    """
    from modelmill.eval.datasets import refuse_calibration_file

    assert args.data is not None, "a required option"
    settings = (
        args.run if args.reference is None else engine_options.share_gpu_with_reference(args.run)
    )
    llm = engine_options.open_llm(args.engine, args.build, settings)
    refuse_calibration_file(args.data, llm.engine_core.opened_artifact.manifest.source)
    return llm


def load_transformers_reference(
    args: EvaluationArgs, device: str
) -> tuple[Checkpoint, HfReference]:
    """Load the reference's checkpoint into transformers."""
    from modelmill.checkpoint.open import open_checkpoint
    from modelmill.eval import hf_reference

    assert args.reference is not None, "checked by the caller"
    checkpoint = open_checkpoint(engine_options.resolve_or_pull_model(args.reference))
    return checkpoint, hf_reference.load_reference(checkpoint, args.reference_dtype, device)
