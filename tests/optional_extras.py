"""Skips tests whose optional extra is not installed, with the reason.

Importing a missing optional package skips the module (at collection) or the test (when it runs).
Which parts of modelmill may import which package is checked by test_architecture.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

import pytest

from modelmill.core.errors import MissingDependency

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {
    "eval": ("transformers", "rouge_score"),
    "gpu": ("triton", "pynvml"),
    "report": ("matplotlib",),
    "browser": ("playwright",),
    "serve": ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"),
    "ray": ("ray",),
    "conformance": ("schemathesis", "lm_eval"),
    "otel": ("opentelemetry",),
    "test": ("hypothesis", "gguf", "openai", "httpx2"),
}
EXTRA_OF = {module: extra for extra, modules in EXTRAS.items() for module in modules}


def is_missing(module: str) -> bool:
    """Whether a top-level module is not installed, whatever a test makes ``import`` believe."""
    return PathFinder.find_spec(module) is None


def missing_extra_reason(error: BaseException) -> str | None:
    """The reason if an error is a missing extra; None for every other error."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module in EXTRA_OF and is_missing(module):
            return f"needs {module}: pip install -e '.[{EXTRA_OF[module]}]'"
    return (
        str(error) if isinstance(error, MissingDependency) and _missing_extra(str(error)) else None
    )


def skip_if_extra_missing(stderr: str) -> None:
    """Skip the running test if a command's stderr reports a missing extra."""
    line = next(filter(_missing_extra, stderr.splitlines()), None)
    if line is not None:
        pytest.skip(line)


def _missing_extra(line: str) -> bool:
    named = re.search(r"pip install -e '[^']*\[([a-z,]+)\]'", line)
    extras = named[1].split(",") if named else []
    return any(is_missing(module) for extra in extras for module in EXTRAS.get(extra, ()))


class SkippingModule(pytest.Module):
    """A test module that is skipped if it imports a missing extra."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except (self.CollectError, MissingDependency) as error:
            cause = error.__cause__ if isinstance(error, self.CollectError) else error
            why = None if cause is None else missing_extra_reason(cause)
            if why is None:
                raise
            # remove the half-imported module: a module that imports it must get the same error
            sys.modules.pop(".".join(self.path.relative_to(ROOT).with_suffix("").parts), None)
            pytest.skip(why, allow_module_level=True)


def skip_or_raise(error: BaseException) -> NoReturn:
    """Skip the running test where the error is an absent extra, raise it otherwise."""
    why = missing_extra_reason(error)
    if why is None:
        raise error
    pytest.skip(why)
