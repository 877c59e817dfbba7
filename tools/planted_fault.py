"""A build whose loading code is wrong in one place.

    python -m tools.planted_fault CHECKPOINT -o ENGINE [other options of build]

``layers.1.attn.o_proj.weight`` is multiplied by 1.05 on its way into the engine: the model still
writes fluent text. The checkpoint is not changed. A build refuses the engine and names the module
(exit code 1); with ``--no-check`` it is written, for ``modelmill compare``.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from typing import Any
from unittest import mock

import modelmill.builder
from modelmill.cli.main import run_command_line

FACTOR = 1.05
TENSOR = "layers.1.attn.o_proj.weight"


def scaled(target: str) -> contextlib.ExitStack:
    """Patches of the builder under which the tensor ``target`` is multiplied."""
    patches = contextlib.ExitStack()
    for info in pkgutil.iter_modules(modelmill.builder.__path__):
        module = importlib.import_module(f"modelmill.builder.{info.name}")
        real: Any = getattr(module, "apply_rule", None)
        if real is not None:
            patches.enter_context(mock.patch.object(module, "apply_rule", _scaling(real, target)))
    return patches


def _scaling(real: Any, target: str) -> Any:
    def apply_rule(resolved: Any, *more: Any) -> Any:
        tensor = real(resolved, *more)
        return tensor * FACTOR if resolved.target == target else tensor

    return apply_rule


def main(argv: list[str]) -> int:
    """Build with the fault; the exit code of the build."""
    with scaled(TENSOR):
        return run_command_line(["build", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
