"""A checkpoint becomes an engine: tensors stream through, the staged engine is judged, and only then appears."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import modelmill
from modelmill.artifact.manifest import SCHEMA, Manifest
from modelmill.artifact.shard import ShardWriter
from modelmill.artifact.store import ACCEPTANCE, TOKENIZER, Staging
from modelmill.artifact.tuning import StoredTuning, path_of, to_bytes
from modelmill.build.ahead import Fingerprint, ahead
from modelmill.build.kinds import LANGUAGE
from modelmill.build.layers import Layers
from modelmill.build.pieces import TOWER, Piece
from modelmill.build.plan import PACKING, Plan, layer_of
from modelmill.checkpoint.rename import apply
from modelmill.checkpoint.scan import finite, scan
from modelmill.core.config import to_dict
from modelmill.core.errors import AcceptanceError, ArtifactError, CheckpointError, CorruptCheckpoint, UsageError
from modelmill.core.size import byte_text
from modelmill.text.tokenizer import load_tokenizer
from modelmill.weights.held import pack

Progress = Callable[[str, int, int], None]
Accept = Callable[[Path, Plan], dict[str, Any]]
Tune = Callable[[Plan], StoredTuning | None]
ROUNDED = 32
"""Bytes that rounding takes for each weight: as read, in float32, spread scales and offsets, what is divided."""


def build(
    plan: Plan, out: Path, accept: Accept | None, progress: Progress | None = None, tune: Tune | None = None
) -> dict[str, Any]:
    """Write the engine of ``plan`` to ``out``; returns the acceptance report.

    accept: judges the staged folder and returns {"accepted": bool, "reason": str, …}; None writes an unjudged engine
    and the report says so. progress: called with (stage, done, total). tune: gives this device's launch sizes, which
    the engine is then judged with. An interrupted build resumes at the next call.
    Raises AcceptanceError (nothing is written), CheckpointError, TokenizerError, ArtifactError, and UsageError where
    there is too little memory, before anything is written.
    """
    plan.build_memory.check(str(plan.checkpoint.path), judged=accept is not None)
    files = plan.checkpoint.tokenizer_files() if plan.kind == LANGUAGE else {}
    if files:
        load_tokenizer(files).check_against(plan.sizes.vocab)
    staging = Staging(out, plan.key())
    staging.open()
    fingerprint = Fingerprint(plan.checkpoint)
    try:
        _write_weights(plan, staging, progress)
        for name, data in sorted(files.items()):
            staging.write(f"{TOKENIZER}/{name}", data)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # what rounding took is the engine's room now
        staging.seal(_manifest(plan, staging, fingerprint.result(progress)))
        tuning = tune(plan) if tune is not None and plan.kind == LANGUAGE else None
        if tuning is not None:
            staging.write_loose(path_of(tuning.device), to_bytes(tuning))
        report = _judge(plan, staging, accept)
        staging.write_loose(ACCEPTANCE, _json(report))
        staging.publish()
    except (AcceptanceError, CheckpointError, UsageError):
        staging.discard()
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM):
            free = (
                f"; the engine needs {byte_text(plan.weight_bytes)}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else ""
            )
            raise ArtifactError(f"cannot write {out}: {error.strerror}{free}; run the build again to resume") from None
        raise
    finally:
        fingerprint.stop()
        staging.close()
    return report


def _write_weights(plan: Plan, staging: Staging, progress: Progress | None) -> None:
    done = 0
    shards = plan.shards()
    depth = sum(layer_of(name) is not None for name in shards)
    left = [name for name in shards if name not in staging.done and layer_of(name) is not None]
    calibrated = plan.calibration is not None and bool(left)
    layers = Layers(plan, staging, _check_range) if calibrated else None
    following = dict(pairwise(left))

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None and layers is None:
            progress("weights", done, plan.weight_bytes)

    def told_layer(finished: int) -> None:
        if progress is not None and layers is not None:
            progress("quantizing layers", finished, depth)

    with nullcontext() if layers is None else closing(layers):
        for name, pieces in shards.items():
            layer, size = layer_of(name), sum(piece.nbytes for piece in pieces)
            if name in staging.done:
                if layers is not None and layer is not None and name < left[-1]:
                    told_layer(layer)
                    layers.pass_by(layer, pieces, name)
                told(size)
                continue
            infos = {full: info for piece in pieces for full, info in piece.stored.items()}
            with staging.shard(name, infos) as writer:
                if layers is not None and layer is not None:
                    told_layer(layer)
                    layers.write(layer, pieces, writer, shards.get(following.get(name, ""), ()))
                    told_layer(layer + 1)
                    continue
                for piece, tensors in ahead(partial(_read_piece, plan), pieces):
                    _write_piece(plan, piece, tensors, writer)
                    del tensors  # before the one after the next is read
                    told(piece.nbytes)


def _read_piece(plan: Plan, piece: Piece) -> dict[str, torch.Tensor]:
    """Read and check one tensor, or those that stand for it where it is kept, by suffix."""
    if piece.kept is not None:
        found = piece.kept.read(plan.checkpoint, plan.dtype).tensors()
    else:
        found = {"": apply(piece.resolved, plan.checkpoint.get, plan.checkpoint.info)}
    for part in found.values():
        scan(", ".join(piece.resolved.sources), part)
    return found


def _write_piece(plan: Plan, piece: Piece, tensors: dict[str, torch.Tensor], writer: ShardWriter) -> None:
    """Pack and write what was read."""
    if piece.kept is not None:
        for suffix, part in tensors.items():
            writer.add(f"{piece.module}.{suffix}", part)
        return
    tensor = tensors[""]
    if piece.held is None:
        cast = tensor.to(piece.dtype)
        _check_range(cast, piece, plan)
        writer.add(piece.resolved.target, cast)
        return
    if piece.held == "dense" or (plan.recipe is None and not piece.module.startswith(TOWER)):
        held = pack(piece.held, tensor, piece.dtype if piece.held == "dense" else plan.dtype)
    else:
        # the same bits there and here: a build's bytes do not depend on the machine
        held = plan.recipe_of(piece.module).hold(tensor.to(_where(plan, tensor.numel())).float(), None)
    for suffix, part in held.tensors().items():
        _check_range(part, piece, plan)
        writer.add(f"{piece.module}.{suffix}", part.cpu())


def _where(plan: Plan, numbers: int) -> str:
    """Where so many weights are rounded: on the target, if it is a GPU with room for them now."""
    if plan.device == "cpu":
        return "cpu"
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return "cuda" if ROUNDED * numbers < torch.cuda.mem_get_info()[0] + kept else "cpu"


def _check_range(tensor: torch.Tensor, piece: Piece, plan: Plan) -> None:
    if tensor.is_floating_point() and tensor.itemsize > 1 and not finite(tensor):
        what = ", ".join(piece.resolved.sources)
        if piece.held not in (None, "dense"):
            kept = str(tensor.dtype).removeprefix("torch.")
            raise CorruptCheckpoint(f"{what}: scales of {piece.held} overflow in {kept}; build with -q int8 or none")
        raise CorruptCheckpoint(f"{what} overflows in {plan.config.dtype}; build with --dtype bfloat16 or float32")


def _manifest(plan: Plan, staging: Staging, fingerprint: str) -> Manifest:
    source: dict[str, Any] = {"container": plan.checkpoint.container, "fingerprint": fingerprint}
    if plan.read is not None:
        source["calibration"] = plan.read.facts()
    if plan.warnings:
        source["warnings"] = list(plan.warnings)
    return Manifest(
        schema=SCHEMA,
        kind=plan.kind,
        model_type=plan.checkpoint.model_type,
        packing=PACKING,
        max_model_len=plan.max_model_len,
        config=plan.checkpoint.config,
        build=to_dict(plan.config),
        weights=plan.held,
        aliases=plan.aliases,
        generation=plan.checkpoint.generation_config,
        source=source,
        versions={"modelmill": modelmill.__version__, "torch": torch.__version__.split("+")[0]},
        files=dict(sorted(staging.done.items())),
    )


def _judge(plan: Plan, staging: Staging, accept: Accept | None) -> dict[str, Any]:
    if accept is None:
        return {"accepted": None, "reason": "built without acceptance (--no-check)"}
    report = accept(staging.path, plan)
    if not report["accepted"]:
        raise AcceptanceError(f"the engine was refused and not written: {report['reason']}")
    return report


def _json(report: dict[str, Any]) -> bytes:
    import json

    return (json.dumps(report, indent=1, sort_keys=True) + "\n").encode()
