"""Compares an existing engine with a build plan."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import modelmill
from modelmill.artifact.store import open_artifact
from modelmill.builder.plan import BuildPlan
from modelmill.core.config import config_to_dict
from modelmill.core.errors import ArtifactError
from modelmill.core.progress_callback import Progress


def differences_from_plan(
    plan: BuildPlan,
    engine_path: Path,
    *,
    with_acceptance: bool = True,
    on_progress: Progress | None = None,
) -> list[str]:
    """Describe how the engine at a path differs from the one that ``plan`` would write.

    The checkpoint is read whole only if everything else is the same.

    with_acceptance: whether the new engine would be checked.

    Returns:
        A few words per difference; [] if there is none.
    """
    try:
        artifact = open_artifact(engine_path)
        judged = artifact.acceptance_report().get("accepted")
    except ArtifactError:
        return ["it cannot be opened by this version"]
    manifest = artifact.manifest
    there, now = manifest.build, json.loads(json.dumps(config_to_dict(plan.config)))
    differences = [
        f"{name.replace('_', '-')} {there.get(name)} there, {now.get(name)} now"
        for name in sorted(there.keys() | now.keys())
        if there.get(name) != now.get(name)
    ]
    if manifest.max_model_len != plan.max_model_len:
        differences.append(
            f"max-model-len {manifest.max_model_len} there, {plan.max_model_len} now"
        )
    versions = {"modelmill": modelmill.__version__, "torch": torch.__version__.split("+")[0]}
    differences += [
        f"built by {name} {manifest.versions.get(name)}, this is {version}"
        for name, version in versions.items()
        if manifest.versions.get(name) != version
    ]
    if with_acceptance and judged is not True:
        differences.append("it was built without acceptance")
    if manifest.source.get("calibration") != (
        None if plan.quantization_text_source is None else plan.quantization_text_source.to_json()
    ):
        differences.append("calibrated on something else")
    if differences:
        return differences
    same = manifest.source.get("fingerprint") == plan.checkpoint.fingerprint(on_progress)
    return [] if same else ["built from another checkpoint"]
