"""The acceptance contract: runs a staged engine and compares it with the float32 reference.

Modules, wiring and norms are checked one by one (``accept.module_check``); then whole sequences run
freely, in one batch, partly as prefill and partly as decode, and their logits, next tokens and
perplexity are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from modelmill.accept.embedding_and_head import check_embedding_tables, check_quantized_head
from modelmill.accept.module_check import ModuleCheck
from modelmill.accept.quantized_layers import QuantizedLayersCheck
from modelmill.accept.quantized_reference import (
    language_model_weight_formats,
    needs_separate_weight_check,
)
from modelmill.accept.reference import ReferenceModel
from modelmill.accept.reference_device import PlacedReference, open_cpu_reference, place_reference
from modelmill.accept.rotary_by_length import ROTARY_MODULE as ROTARY
from modelmill.accept.rotary_by_length import check_rotary_by_length
from modelmill.accept.sequence_logits_check import (
    check_sequence_logits,
    recheck_with_amplified_bound,
)
from modelmill.accept.static_range_check import static_range_report
from modelmill.accept.step_embeddings_check import StepEmbeddingsCheck
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.unused_tensors import (
    apply_unused_tensor_verdict,
    explain_unused_language_tensors,
)
from modelmill.accept.vision_stage_check import (
    ACCEPTED_VERDICT,
    make_acceptance_report,
    round_significant_digits,
)
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.checkpoint.open import Checkpoint
from modelmill.core import log
from modelmill.core.config import RunConfig
from modelmill.core.progress_callback import Progress
from modelmill.core.quoting import truncate_to_one_line
from modelmill.loader.model_loader import build_model
from modelmill.nn.layer_spec import layer_spec
from modelmill.nn.layer_stack import kv_shape
from modelmill.runtime.engine_core import EngineCore
from modelmill.text.tokenizer_loader import load_tokenizer

_log = log.get_logger(__name__)
NUM_SEQUENCES = 3
SEQUENCE_LENGTH = 96


def run_engine_acceptance(
    staged: Path, checkpoint: Checkpoint, *, on_progress: Progress | None = None
) -> dict[str, Any]:
    """Check a staged engine.

    Returns:
        The report: {"accepted", "reason", "verdict", "layer", "module", "layers", …}.
    """
    artifact = open_artifact(staged, staged=True)
    if artifact.manifest.engine_type == "segmentation":
        from modelmill.accept.segmentation import run_segmentation_acceptance

        return run_segmentation_acceptance(staged, checkpoint, on_progress=on_progress)
    config = RunConfig(
        device=artifact.manifest.build["target"] if torch.cuda.is_available() else "cpu",
        max_num_seqs=8,
        max_model_len=min(artifact.manifest.max_model_len, SEQUENCE_LENGTH),
        max_num_batched_tokens=SEQUENCE_LENGTH,
        kv_cache_bytes=_kv_cache_bytes(artifact),
        kv_cache_dtype="activations",
        enable_prefix_caching=False,
        cuda_graphs=False,
        kernels=artifact.manifest.build["kernels"],
    )
    loop = EngineCore.open(artifact, config)
    return compare_engine(loop, checkpoint, acceptance_token_ids(artifact), on_progress=on_progress)


def acceptance_token_ids(artifact: Artifact) -> list[list[int]]:
    """Return the sequences to check with: the built-in text, or seeded ids without a tokenizer."""
    limit = min(SEQUENCE_LENGTH, artifact.manifest.max_model_len)
    files = artifact.tokenizer_files()
    vocab = int(
        artifact.manifest.config.get("vocab_size") or artifact.manifest.config["padded_vocab_size"]
    )
    if files:
        text = (resources.files("modelmill.accept") / "text.txt").read_text()
        ids = load_tokenizer(files).encode(text, bos=False)
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab, (NUM_SEQUENCES * limit,), generator=generator).tolist()
    cuts = [ids[i * limit : (i + 1) * limit] for i in range(NUM_SEQUENCES)]
    return [cut for cut in cuts if len(cut) > 1] or [ids[:limit]]


def compare_engine(
    engine_core: EngineCore,
    checkpoint: Checkpoint,
    ids: Sequence[Sequence[int]],
    *,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare an opened engine with its checkpoint on sequences of ids.

    Returns:
        The report. verdict: ACCEPTED_VERDICT, or "bug at layer N, module M" with ``layer`` and
        ``module`` set.
    """

    def on_stage(stage: str, done: int = 0, total: int = 1) -> None:
        if on_progress is not None:
            on_progress(f"acceptance: {stage}", done, total)

    if checkpoint.language is not None:
        from modelmill.accept.vision_encoder import (
            check_vision_encoder,
            merge_vision_language_reports,
        )

        on_stage("vision encoder")
        return merge_vision_language_reports(
            check_vision_encoder(engine_core, checkpoint),
            compare_engine(engine_core, checkpoint.language, ids, on_progress=on_progress),
        )
    on_gpu = torch.device(engine_core.device).type == "cuda"
    try:
        place = place_reference(checkpoint, engine_core, ids[0])
        on_gpu = place.device != "cpu"
        return _compare_with_reference(engine_core, place, ids, on_stage)
    except (
        RuntimeError,
        TypeError,
    ) as error:  # torch's errors: out of memory after all, or tensors on two devices
        if not on_gpu:
            raise
        reason = truncate_to_one_line(str(error), 200)
        _log.warning("the reference failed on the GPU (%s); it runs on the CPU", reason)
        again = open_cpu_reference(checkpoint, f"on the GPU it failed ({reason})")
    return _compare_with_reference(engine_core, again, ids, on_stage)


def _compare_with_reference(
    engine_core: EngineCore,
    placed_reference: PlacedReference,
    ids: Sequence[Sequence[int]],
    on_stage: Callable[..., None],
) -> dict[str, Any]:
    """Compare on the reference's device.

    on_stage: called with a stage and its progress.
    """
    reference = checkpoint_reference = placed_reference.reference
    manifest, model = engine_core.opened_artifact.manifest, engine_core.model_runner.model
    weight_formats = language_model_weight_formats(engine_core.model, manifest.weight_formats)
    # matrices kept from the checkpoint are not rounded here: the reference expands them itself
    kept = manifest.build["quantization"] == "keep"
    uses_engine_weights = needs_separate_weight_check(weight_formats) and not kept
    rounded = not kept and bool(set(weight_formats.values()) - {"dense"})
    sequences = [list(s) for s in ids]
    # the first is the probe, all prompt; of the others the last quarter is decoded token by token
    starts = [len(sequences[0]), *(max(1, len(s) * 3 // 4) for s in sequences[1:])]
    dtype = manifest.build["dtype"]
    rounding = None
    split = list(zip(sequences, starts, strict=True))
    if rounded:
        quantized = engine_core.opened_artifact.read_quant_reports_and_scales_by_layer()
        rounding = QuantizedLayersCheck(
            checkpoint_reference, model, weight_formats, dtype, split,
            uses_engine_weights=uses_engine_weights,
            folded_scales={layer: scales for layer, (_, scales) in quantized.items()},
            has_stored_errors=bool(quantized),
        )  # fmt: skip
        reference = rounding.reference_with_weight_check()
    module_check = ModuleCheck(
        engine_core, reference, sequences[0], split[1:],
        uses_engine_weights=uses_engine_weights or kept,
    )  # fmt: skip
    last = module_check.check_modules(
        lambda done: on_stage("modules of layers", done, reference.num_layers)
    )
    on_stage("wiring")
    module_check.check_layers_on_reference_stream()
    on_stage("norms")
    module_check.check_norm_eps()
    module_check.check_extreme_inputs()
    on_stage("sequences")
    streams = [last, *module_check.other_streams]
    whole = _check_whole_sequences(engine_core, reference, split, streams, module_check, rounding)
    findings = [
        *check_embedding_tables(checkpoint_reference, model, dtype),
        *check_rotary_by_length(checkpoint_reference, model),
    ]
    if rounding is not None:
        findings += [
            *rounding.findings,
            *check_quantized_head(checkpoint_reference, model, manifest.weight_formats, dtype),
        ]
    report = _make_engine_report(engine_core, [*findings, *module_check.findings], whole) | {
        "reference": placed_reference.description
    }
    if rounding is not None and not report["quantization_errors"]:
        report["quantization_errors"] = rounding.quantization_errors
    report |= static_range_report(module_check.static_ranges, report["quantization_errors"])
    on_stage("done", 1)
    return apply_unused_tensor_verdict(
        report, explain_unused_language_tensors(checkpoint_reference)
    )


def _check_whole_sequences(
    engine_core: EngineCore,
    reference: ReferenceModel,
    split: Sequence[tuple[list[int], int]],
    streams: list[torch.Tensor],
    module_check: ModuleCheck,
    rounding: QuantizedLayersCheck | None,
) -> dict[str, Any]:
    """Check free runs, and again where only rounding may be amplified.

    What is found of their embeddings comes to the findings of ``module_check``.

    Args:
        engine_core: the engine.
        reference: the reference.
        split: the sequences and the lengths of their prompts.
        streams: the reference's final residual streams.
        module_check: the check of the modules, which has run.
        rounding: that of a quantized engine's layers.
    """
    exact, checkpoint_reference = None, reference
    if rounding is not None:
        rounding.check_remaining_layers()
        checkpoint_reference = rounding.checkpoint_reference
        if rounding.uses_engine_weights:
            exact = (checkpoint_reference, rounding.checkpoint_residual_streams)
    ids, starts = (list(each) for each in zip(*split, strict=True))
    manifest = engine_core.opened_artifact.manifest
    embeddings = StepEmbeddingsCheck(checkpoint_reference, ids, manifest.max_model_len)
    whole = check_sequence_logits(
        engine_core, reference, ids, starts, streams, exact, module_check.routings,
        embeddings=embeddings,
    )  # fmt: skip
    module_check.add_findings(embeddings.findings(manifest.build["dtype"]))
    if whole["ok"] or not all(each.is_within_bound for each in module_check.findings):
        return whole
    if rounding is not None and exact is None:
        # the rounding of the weights is compared by itself: here it is left out
        reference, exact = rounding.reference_with_engine_weights(), (checkpoint_reference, streams)
    return recheck_with_amplified_bound(engine_core, reference, split, exact)


def _stored_quantization_errors(engine_core: EngineCore) -> list[dict[str, Any]]:
    """Return a calibrated recipe's facts of each matrix: errors, bits, outlier channels."""
    facts_by_layer = engine_core.opened_artifact.read_quant_reports_and_scales_by_layer()
    return [
        {"layer": layer, "module": module, **fact}
        for layer, (facts, _) in sorted(facts_by_layer.items())
        for module, fact in facts.items()
    ]


def _make_engine_report(
    engine_core: EngineCore, findings: list[ToleranceCheckResult], sequence_report: dict[str, Any]
) -> dict[str, Any]:
    bad = [f for f in findings if not f.is_within_bound]
    first = _failure_for_verdict(bad)
    if first is not None:
        outside = "the rotation" if first.module.startswith(ROTARY) else "the embedding or head"
        where = outside if first.layer is None else f"layer {first.layer}"
        verdict = f"bug at {where}, module {first.module}"
        why = "; ".join(first.bound.describe_violations(first.metrics))
        reason = (
            f"{verdict}: {why}; another --dtype or --kernel "
            f"{_suggest_kernel_override(first, engine_core.model_runner.model)} may help"
        )
    elif not sequence_report["ok"]:
        verdict = "bug between the modules: every module is right alone, whole sequences are not"
        broken = "; ".join(sequence_report["broken"])
        reason = f"{verdict} ({broken}); try another --dtype, or --kernel paged_attention=torch"
    else:
        verdict = reason = ACCEPTED_VERDICT
    return make_acceptance_report(
        engine_core.opened_artifact,
        engine_core.ops.backends,
        first,
        findings,
        verdict=verdict,
        reason=reason,
        whole_ok=sequence_report["ok"],
        whole={
            "logits": {k: round_significant_digits(v) for k, v in sequence_report.items()},
            "quantization_errors": _stored_quantization_errors(engine_core),
        },
    )


def _failure_for_verdict(failures: list[ToleranceCheckResult]) -> ToleranceCheckResult | None:
    """Return the finding to name in the verdict.

    A faulty module is preferred to a faulty layer; then the earliest.
    """
    alone = [f for f in failures if f.module != "layer"] or failures
    first = min(alone, key=lambda f: (_layer_sort_key(f), alone.index(f))) if alone else None
    # a norm with a wrong eps deviates most where half of the result is due to eps
    eps = next((f for f in failures if first is not None and f.name == f"{first.name}.eps"), None)
    if (
        first is not None
        and eps is not None
        and eps.bound.error_to_bound_ratio(eps.metrics)
        > 3 * first.bound.error_to_bound_ratio(first.metrics)
    ):
        return eps
    return first


def _layer_sort_key(finding: ToleranceCheckResult) -> float:
    if finding.layer is not None:
        return finding.layer
    return math.inf if finding.module.startswith(("norm", "head", ROTARY)) else -1


def _suggest_kernel_override(first: ToleranceCheckResult, model: Any) -> str:
    specs = (
        ()
        if first.layer is None
        else layer_spec(model.get_submodule(f"layers.{first.layer}")).modules
    )
    return f"{next((s.op for s in specs if first.module.startswith(s.path)), 'linear')}=torch"


def _kv_cache_bytes(artifact: Artifact) -> int:
    """Return the float32 KV cache bytes for the checked sequences, of the layers with a cache."""
    model = build_model(artifact.manifest.model_type, artifact.manifest.config)
    shape = kv_shape(model.get_submodule("layers").children())
    return max(shape.page_bytes((NUM_SEQUENCES + 2) * (SEQUENCE_LENGTH + 64), torch.float32), 1)
