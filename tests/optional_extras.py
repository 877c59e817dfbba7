"""Tests whose extra is not installed are skipped with the reason, wherever its import stands.

An import of an absent optional package skips the module, when it is collected, or the test, when it
runs. Which parts of modelmill may import which package is the business of test_architecture: a core
that needs an extra fails there.
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
    """Why an error is only the absence of an extra; None for every other error."""
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if module in EXTRA_OF and is_missing(module):
            return f"needs {module}: pip install 'modelmill[{EXTRA_OF[module]}]'"
    return (
        str(error) if isinstance(error, MissingDependency) and _missing_extra(str(error)) else None
    )


def skip_if_extra_missing(said: str) -> None:
    """Skip the running test where a command's stderr asks for an extra that is not installed."""
    line = next(filter(_missing_extra, said.splitlines()), None)
    if line is not None:
        pytest.skip(line)


def _missing_extra(said: str) -> bool:
    named = re.search(r"pip install '?modelmill\[([a-z,]+)\]", said)
    wanted = named[1].split(",") if named else []
    return any(is_missing(module) for extra in wanted for module in EXTRAS.get(extra, ()))


class SkippingModule(pytest.Module):
    """A test module that is skipped where what it imports is an extra that is not installed."""

    def _getobj(self) -> Any:
        try:
            return super()._getobj()
        except (self.CollectError, MissingDependency) as error:
            cause = error.__cause__ if isinstance(error, self.CollectError) else error
            why = None if cause is None else missing_extra_reason(cause)
            if why is None:
                raise
            # half made, it would lend nothing to a module that imports from it: that one must meet
            # the cause itself
            sys.modules.pop(".".join(self.path.relative_to(ROOT).with_suffix("").parts), None)
            pytest.skip(why, allow_module_level=True)


def skip_or_raise(error: BaseException) -> NoReturn:
    """Skip the running test where the error is an absent extra, raise it otherwise."""
    why = missing_extra_reason(error)
    if why is None:
        raise error
    pytest.skip(why)
