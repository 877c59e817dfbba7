"""Intermediate tensors of one prompt, written to a safetensors file by module name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmill.core.errors import UsageError
from modelmill.core.registry import closest_name


def dump_module_outputs(
    engine_core: Any, ids: Sequence[int], pattern: str, path: Path
) -> dict[str, Tensor]:
    """Run ``ids`` as a prompt and write the outputs of all modules whose names match the glob
    ``pattern``.

    A module's output has a row for each token; where it gives several tensors they are NAME.0,
    NAME.1, … . ids themselves are written as ``ids`` [T] int64. A former dump is replaced. Raises
    UsageError where nothing matches, the file cannot be written, or another file stands there.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_output_file(path)
    known = [name for name, _ in engine_core.model.named_modules() if name]
    if not any(fnmatch(name, pattern) for name in known):
        hint = closest_name(pattern, known)
        raise UsageError(
            f"--dump {pattern!r} matches no module" + (f"; did you mean {hint}?" if hint else "")
            + f" (modules: {', '.join(known[:4])}, …)"
        )  # fmt: skip
    tensors = _concat_chunks(engine_core.trace([list(ids)], pattern))
    tensors["ids"] = torch.tensor(list(ids))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path))
    except (OSError, SafetensorError) as error:  # the latter of a folder, for one
        raise UsageError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return tensors


def check_output_file(path: Path) -> None:
    """Raises UsageError where a file stands that is no dump: a checkpoint is as well a safetensors
    file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return
    try:
        with safe_open(str(path), "pt") as file:
            former = "ids" in file.keys()  # noqa: SIM118 -- it is no dict
    except (OSError, SafetensorError):
        former = False
    if not former:
        raise UsageError(f"{path} exists and is no dump; choose another file, or remove it")


def _concat_chunks(chunks: dict[str, list[Any]]) -> dict[str, Tensor]:
    """The steps of a prompt that went in chunks, put together again along the tokens."""
    tensors: dict[str, Tensor] = {}
    for name, steps in chunks.items():
        if isinstance(steps[0], Tensor):
            tensors[name] = torch.cat(steps).contiguous()
            continue
        if isinstance(steps[0], tuple):
            for place in range(len(steps[0])):
                parts = [step[place] for step in steps]
                if all(isinstance(part, Tensor) for part in parts):
                    tensors[f"{name}.{place}"] = torch.cat(parts).contiguous()
    return tensors
