"""Intermediate tensors of one prompt, written to a safetensors file by module name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelmill.core.errors import UsageError
from modelmill.core.find import nearest


def dump(loop: Any, ids: Sequence[int], pattern: str, path: Path) -> dict[str, Tensor]:
    """Run ``ids`` as a prompt and write the outputs of all modules whose names match the glob ``pattern``.

    A module's output has a row for each token; where it gives several tensors they are NAME.0, NAME.1, … . ids
    themselves are written as ``ids`` [T] int64. Raises UsageError where nothing matches or the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    known = [name for name, _ in loop.model.named_modules() if name]
    if not any(fnmatch(name, pattern) for name in known):
        hint = nearest(pattern, known)
        raise UsageError(
            f"--dump {pattern!r} matches no module" + (f"; did you mean {hint}?" if hint else "")
            + f" (modules: {', '.join(known[:4])}, …)"
        )  # fmt: skip
    tensors = _joined(loop.trace([list(ids)], pattern))
    tensors["ids"] = torch.tensor(list(ids))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path))
    except (OSError, SafetensorError) as error:  # the latter of a folder, for one
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    return tensors


def _joined(kept: dict[str, list[Any]]) -> dict[str, Tensor]:
    """The steps of a prompt that went in chunks, put together again along the tokens."""
    tensors: dict[str, Tensor] = {}
    for name, steps in kept.items():
        if isinstance(steps[0], Tensor):
            tensors[name] = torch.cat(steps).contiguous()
            continue
        if isinstance(steps[0], tuple):
            for place in range(len(steps[0])):
                parts = [step[place] for step in steps]
                if all(isinstance(part, Tensor) for part in parts):
                    tensors[f"{name}.{place}"] = torch.cat(parts).contiguous()
    return tensors
