"""Makes model repositories for Triton Inference Server: engine, config.pbtxt and model.py.

::

    REPOSITORY/NAME/config.pbtxt
    REPOSITORY/NAME/1/model.py
    REPOSITORY/NAME/1/engine          the engine's folder, linked or copied
    REPOSITORY/NAME/1/start.json      how to open it: RunConfig's fields, chat template, length of the queue
"""  # noqa: E501

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelmill.artifact.manifest import Manifest, check_engine_type
from modelmill.artifact.store import open_artifact
from modelmill.core.config import RunConfig, config_from_dict
from modelmill.core.errors import UsageError
from modelmill.export.triton_tensors import INPUT_TENSORS, OUTPUT_TENSORS, format_pbtxt_fields

MODEL_VERSION = "1"
ENGINE_DIR = "engine"
START_OPTIONS_FILE = "start.json"
_MODEL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

MODEL_PY_SOURCE = '''"""The Python backend of Triton Inference Server for an engine of modelmill."""

import triton_python_backend_utils as triton

from modelmill.export.triton_backend import TritonBackend


class TritonPythonModel:
    """Passes requests to the engine, which batches and answers them outside of ``execute``."""

    def initialize(self, args):
        self.backend = TritonBackend.open(triton, args)

    def execute(self, requests):
        return self.backend.execute(requests)

    def finalize(self):
        self.backend.close()
'''


@dataclass(frozen=True)
class EngineStartOptions:
    """How to open the engine.

    Attributes:
        run: fields of RunConfig that differ from its defaults.
        chat_template: replaces the engine's own.
        waiting: length of the queue, as in ``modelmill serve``.
    """

    run: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    waiting: int = 1024

    def to_json(self) -> str:
        """The content of start.json."""
        return (
            json.dumps(
                {
                    "run": dict(self.run),
                    "chat_template": self.chat_template,
                    "waiting": self.waiting,
                }
            )
            + "\n"
        )

    @staticmethod
    def read(path: Path) -> EngineStartOptions:
        """Read start.json.

        Raises:
            UsageError: the file is missing or invalid.
        """
        try:
            raw = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            raise UsageError(f"{path} cannot be read; export the engine again") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("run", {}), dict):
            raise UsageError(
                f"{path} must be an object with run, chat_template and waiting; export the "
                "engine again"
            )
        options = config_from_dict(EngineStartOptions, raw, str(path))
        config_from_dict(RunConfig, options.run, str(path))
        return options


def export_triton_repository(
    engine: Path,
    repository: Path,
    *,
    name: str | None = None,
    copy: bool = False,
    start_options: EngineStartOptions,
) -> Path:
    """Write REPOSITORY/NAME for an engine folder and return it. It is published atomically.

    Args:
        engine: the engine folder.
        repository: the folder of models.
        name: None: the folder's name without .engine.
        copy: copy the engine's files; otherwise link to them.
        start_options: how to open it.

    Raises:
        UsageError: the name is taken or invalid, or the folder cannot be written.
        ArtifactError: the engine is invalid.
    """
    manifest = open_artifact(engine).manifest
    check_engine_type(engine, manifest.engine_type, "language")
    model_name = name or Path(os.path.abspath(engine)).name.removesuffix(".engine")
    if not _MODEL_NAME_PATTERN.fullmatch(model_name):
        raise UsageError(
            f"--name {model_name[:60]!r}: letters, digits, _, - and . only; give another --name"
        )
    run = config_from_dict(RunConfig, start_options.run, "run")
    target = repository / model_name
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists already; remove it, or give another --name")
    staged = repository / f".{model_name}.part"
    try:
        shutil.rmtree(staged, ignore_errors=True)
        (staged / MODEL_VERSION).mkdir(parents=True)
        (staged / "config.pbtxt").write_text(
            _config_pbtxt(model_name, _instance_kind(manifest, run))
        )
        (staged / MODEL_VERSION / "model.py").write_text(MODEL_PY_SOURCE)
        (staged / MODEL_VERSION / START_OPTIONS_FILE).write_text(start_options.to_json())
        _symlink_or_copy_engine(engine, staged / MODEL_VERSION / ENGINE_DIR, copy)
        os.rename(staged, target)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from None
    return target


def _symlink_or_copy_engine(engine: Path, target: Path, copy: bool) -> None:
    if copy:
        shutil.copytree(engine, target)
    else:
        target.symlink_to(engine.resolve(), target_is_directory=True)


def _instance_kind(manifest: Manifest, run: RunConfig) -> str:
    """Triton's instance kind.

    KIND_MODEL if the engine chooses the device itself: several GPUs, or one given by its number.
    """
    if run.tp > 1 or ":" in run.device:
        return "KIND_MODEL"
    device = manifest.build.get("target") if run.device == "auto" else run.device
    return "KIND_GPU" if device == "cuda" else "KIND_CPU"


def _config_pbtxt(name: str, instance_kind: str) -> str:
    return f'''# modelmill export triton. Requests share one engine's steps, so there is one instance a device: for more
# streams raise max_num_seqs in {MODEL_VERSION}/{START_OPTIONS_FILE}, for more GPUs list them in the instance group.
name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: 1, kind: {instance_kind} }} ]
input {format_pbtxt_fields(INPUT_TENSORS, optional=True)}
output {format_pbtxt_fields(OUTPUT_TENSORS, optional=False)}
'''  # noqa: E501
