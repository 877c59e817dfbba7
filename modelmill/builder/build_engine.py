"""Builds an engine: streams tensors into a staging folder, checks it and publishes it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

import modelmill
from modelmill.artifact.autotune_store import (
    AutotuneRecord,
    autotune_record_path,
    encode_autotune_record,
)
from modelmill.artifact.manifest import MANIFEST_SCHEMA_VERSION, PACKING_VERSION, Manifest
from modelmill.artifact.shard import ShardWriter
from modelmill.artifact.store import ACCEPTANCE_FILE, TOKENIZER_FOLDER, EngineStaging
from modelmill.builder.layer_quantizer import LayerQuantizer
from modelmill.builder.plan import BuildPlan, weight_file_layer
from modelmill.builder.tensor_plan import PlannedTensor
from modelmill.checkpoint.chat_format import chat_format_remark
from modelmill.checkpoint.open import Checkpoint
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import config_to_dict
from modelmill.core.errors import (
    AcceptanceError,
    ArtifactError,
    CheckpointError,
    UsageError,
)
from modelmill.core.model_family import LANGUAGE_ENGINE_TYPE
from modelmill.core.progress_callback import Progress
from modelmill.text.tokenizer_loader import load_tokenizer

Item = TypeVar("Item")
Result = TypeVar("Result")
AcceptFunction = Callable[[Path, BuildPlan], dict[str, Any]]
TuneFunction = Callable[[BuildPlan], AutotuneRecord | None]
GPU_ROUNDING_BYTES_PER_WEIGHT = 32
"""Bytes per weight needed to round it: input, float32, expanded scales and offsets, quotient."""


def build(
    plan: BuildPlan,
    out: Path,
    accept: AcceptFunction | None,
    on_progress: Progress | None = None,
    tune: TuneFunction | None = None,
) -> dict[str, Any]:
    """Write the engine of ``plan`` to ``out``.

    An interrupted build resumes at the next call.

    Args:
        plan: the build plan.
        out: path of the engine.
        accept: checks the staged folder and returns {"accepted": bool, "reason": str, …}; None
            skips the check, which the report records.
        on_progress: called with (stage, done, total).
        tune: returns this device's launch configs, which the engine is then checked with.

    Returns:
        The acceptance report.

    Raises:
        AcceptanceError: if the engine is refused; nothing is written.
        CheckpointError: if the checkpoint is damaged.
        TokenizerError: if the tokenizer cannot be used.
        ArtifactError: if the engine cannot be written.
        UsageError: if there is too little memory; raised before anything is written.
    """
    plan.build_memory.check_free_memory(
        str(plan.checkpoint.path), with_acceptance=accept is not None
    )
    files = plan.checkpoint.tokenizer_files() if plan.engine_type == LANGUAGE_ENGINE_TYPE else {}
    if files:
        load_tokenizer(files).check_ids_fit_embedding(plan.model_config.vocab)
    staging = EngineStaging(out, plan.resume_key())
    staging.open()
    fingerprint = BackgroundFingerprint(plan.checkpoint)
    try:
        _write_weights(plan, staging, on_progress)
        for name, data in sorted(files.items()):
            staging.write_hashed_file(f"{TOKENIZER_FOLDER}/{name}", data)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # free the memory of rounding for the engine
        staging.prune_unlisted_and_write_manifest(
            _make_manifest(plan, staging, fingerprint.result(on_progress))
        )
        tuning = (
            tune(plan) if tune is not None and plan.engine_type == LANGUAGE_ENGINE_TYPE else None
        )
        if tuning is not None:
            staging.write_unhashed_file(
                autotune_record_path(tuning.device), encode_autotune_record(tuning)
            )
        report = _run_acceptance(plan, staging, accept)
        staging.write_unhashed_file(ACCEPTANCE_FILE, _to_json_bytes(report))
        staging.publish()
    except (AcceptanceError, CheckpointError, UsageError):
        staging.delete_folder()
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            free = (
                f"; the engine needs {format_bytes(plan.weight_bytes)}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else ""
            )
            raise ArtifactError(
                f"cannot write {out}: {error.strerror}{free}; run the build again to resume"
            ) from None
        raise
    finally:
        fingerprint.stop()
        staging.close()
    return report


def _write_weights(plan: BuildPlan, staging: EngineStaging, on_progress: Progress | None) -> None:
    done = 0
    shards = plan.tensors_by_weight_file()
    depth = sum(weight_file_layer(name) is not None for name in shards)
    left = [
        name
        for name in shards
        if name not in staging.finished_files and weight_file_layer(name) is not None
    ]
    calibrated = plan.calibration is not None and bool(left)
    layers = LayerQuantizer(plan, staging) if calibrated else None
    following = dict(pairwise(left))

    def report_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None and layers is None:
            on_progress("weights", done, plan.weight_bytes)

    def told_layer(finished: int) -> None:
        if on_progress is not None and layers is not None:
            on_progress("quantizing layers", finished, depth)

    with nullcontext() if layers is None else closing(layers):
        for name, planned_tensors in shards.items():
            layer, size = (
                weight_file_layer(name),
                sum(planned.nbytes for planned in planned_tensors),
            )
            if name in staging.finished_files:
                if layers is not None and layer is not None and name < left[-1]:
                    told_layer(layer)
                    layers.forward_finished_layer(layer, planned_tensors, name)
                report_bytes(size)
                continue
            infos = {
                full: info
                for planned in planned_tensors
                for full, info in planned.stored_info.items()
            }
            with staging.open_shard_writer(name, infos) as writer:
                if layers is not None and layer is not None:
                    told_layer(layer)
                    layers.quantize_and_write(
                        layer, planned_tensors, writer, shards.get(following.get(name, ""), ())
                    )
                    told_layer(layer + 1)
                    continue
                for planned, tensors in prefetch(
                    lambda planned: planned.read(plan.checkpoint, plan.dtype), planned_tensors
                ):
                    _pack_and_write_tensor(plan, planned, tensors, writer)
                    del tensors  # before the tensor after the next is read
                    report_bytes(planned.nbytes)


def _pack_and_write_tensor(
    plan: BuildPlan, planned: PlannedTensor, tensors: dict[str, torch.Tensor], writer: ShardWriter
) -> None:
    """Pack and write what was read."""
    if planned.prequantized_weight is not None:
        for suffix, part in tensors.items():
            writer.add_tensor(f"{planned.module}.{suffix}", part)
        return
    tensor = tensors[""]
    if planned.recipe is None:
        # a weight that stays dense is stored as any other tensor
        cast = tensor.to(planned.dtype).contiguous()
        planned.check_no_overflow(cast)
        writer.add_tensor(planned.rule.target, cast)
        return
    # the same bits on every device: the bytes of an engine do not depend on the machine
    quantized = planned.recipe.quantize(
        tensor.to(_quantization_device(plan, tensor.numel())).float(), None
    )
    for suffix, part in quantized.tensors().items():
        planned.check_no_overflow(part)
        writer.add_tensor(f"{planned.module}.{suffix}", part.cpu())


def _quantization_device(plan: BuildPlan, num_weights: int) -> str:
    """Return the device for rounding: the target GPU if it has enough free memory, else the CPU."""
    if plan.device == "cpu":
        return "cpu"
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return (
        "cuda"
        if GPU_ROUNDING_BYTES_PER_WEIGHT * num_weights < torch.cuda.mem_get_info()[0] + kept
        else "cpu"
    )


def _make_manifest(plan: BuildPlan, staging: EngineStaging, fingerprint: str) -> Manifest:
    source: dict[str, Any] = {"container": plan.checkpoint.container, "fingerprint": fingerprint}
    if plan.quantization_text_source is not None:
        source["calibration"] = plan.quantization_text_source.to_json()
    if remark := chat_format_remark(plan.checkpoint.side_files):
        source["chat_template"] = remark
    if plan.warnings:
        source["warnings"] = list(plan.warnings)
    return Manifest(
        schema=MANIFEST_SCHEMA_VERSION,
        engine_type=plan.engine_type,
        model_type=plan.checkpoint.model_type,
        packing=PACKING_VERSION,
        max_model_len=plan.max_model_len,
        config=plan.checkpoint.config,
        build=config_to_dict(plan.config),
        weight_formats=plan.weight_formats,
        aliases=plan.aliases,
        generation=plan.checkpoint.generation_config,
        source=source,
        versions={"modelmill": modelmill.__version__, "torch": torch.__version__.split("+")[0]},
        files=dict(sorted(staging.finished_files.items())),
    )


def _run_acceptance(
    plan: BuildPlan, staging: EngineStaging, accept: AcceptFunction | None
) -> dict[str, Any]:
    if accept is None:
        return {"accepted": None, "reason": "built without acceptance (--no-check)"}
    report = accept(staging.path, plan)
    if not report["accepted"]:
        raise AcceptanceError(
            f"the engine was refused and not written: {report['reason']} (--no-check writes it, "
            "and modelmill compare shows every module)"
        )
    return report


def _to_json_bytes(report: dict[str, Any]) -> bytes:
    import json

    return (json.dumps(report, indent=1, sort_keys=True) + "\n").encode()


def prefetch(
    load: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item and ``load(item)``; the next one is loaded while the current one is used.

    At most two exist at a time if the caller drops one before it requests the next.
    """
    with ThreadPoolExecutor(1) as pool:
        coming: tuple[Item, Future[Result]] | None = None
        for item in items:
            following = item, pool.submit(load, item)
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
        if coming is not None:
            yield coming[0], coming[1].result()


class BackgroundFingerprint:
    """Computes the sha256 of a checkpoint's files while its weights are read.

    ``stop`` must be called.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._stop_event, self._callbacks = threading.Event(), list[Progress]()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(checkpoint.fingerprint, self._report_progress)

    def result(self, on_progress: Progress | None) -> str:
        """Wait for the result; progress is reported from now on."""
        if on_progress is not None:
            self._callbacks.append(on_progress)
        return self._future.result()

    def stop(self) -> None:
        """Stop the thread if it has not finished."""
        self._stop_event.set()
        self._pool.shutdown()

    def _report_progress(self, stage: str, done: int, total: int) -> None:
        if self._stop_event.is_set():
            raise InterruptedError("the build ended")
        for progress in self._callbacks:
            progress(stage, done, total)
