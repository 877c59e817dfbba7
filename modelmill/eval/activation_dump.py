"""Write intermediate tensors of one prompt to a safetensors file, by module name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import most_similar_name


def dump_module_outputs(
    engine_core: Any, ids: Sequence[int], pattern: str, path: Path
) -> dict[str, Tensor]:
    """Run ``ids`` as a prompt and write the outputs of modules that match the glob ``pattern``.

    Each output has one row per token; several tensors of a module are named NAME.0, NAME.1, …. The
    ids are written as ``ids`` [T] int64. An existing dump is replaced.

    Raises:
        UsageError: if no module matches, or the file cannot be written or is not a dump.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_dump_overwrite(path)
    known = [name for name, _ in engine_core.model.named_modules() if name]
    if not any(fnmatch(name, pattern) for name in known):
        hint = most_similar_name(pattern, known)
        raise UsageError(
            f"--dump {pattern!r} matches no module" + (f"; did you mean {hint}?" if hint else "")
            + f" (modules: {', '.join(known[:4])}, …)"
        )  # fmt: skip
    tensors = _concat_chunks(
        TeacherForcedScorer(engine_core).record_module_outputs([list(ids)], pattern)
    )
    tensors["ids"] = torch.tensor(list(ids))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path))
    except (OSError, SafetensorError) as error:  # SafetensorError: such as for a folder
        raise UsageError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return tensors


def check_dump_overwrite(path: Path) -> None:
    """Raise UsageError if the file exists and is not a dump, such as a checkpoint."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return
    try:
        with safe_open(str(path), "pt") as file:
            is_dump = "ids" in file.keys()  # noqa: SIM118 -- not a dict
    except (OSError, SafetensorError):
        is_dump = False
    if not is_dump:
        raise UsageError(f"{path} exists and is not a dump; choose another file or remove it")


def _concat_chunks(chunks: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Concatenate the steps of a chunked prompt along the tokens."""
    tensors: dict[str, Tensor] = {}
    for name, steps in chunks.items():
        if isinstance(steps[0], Tensor):
            tensors[name] = torch.cat(steps).contiguous()
            continue
        if isinstance(steps[0], tuple):
            for index in range(len(steps[0])):
                parts = [step[index] for step in steps]
                if all(isinstance(part, Tensor) for part in parts):
                    tensors[f"{name}.{index}"] = torch.cat(parts).contiguous()
    return tensors
