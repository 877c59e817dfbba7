"""modelmill turns a checkpoint into a verified engine, and runs, compares and evaluates it.

``from modelmill import LLM, SamplingParams``; the heavy parts are imported on first use.
"""

from __future__ import annotations

from typing import Any

from modelmill.core.errors import ModelmillError
from modelmill.core.types import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "AsyncLLM",
    "LLM",
    "ModelmillError",
    "SamplingParams",
    "Segmenter",
    "__version__",
    "build_engine",
]

_LAZY = {
    "AsyncLLM": ("modelmill.async_llm", "AsyncLLM"),
    "LLM": ("modelmill.llm", "LLM"),
    "Segmenter": ("modelmill.segmenter", "Segmenter"),
    "build_engine": ("modelmill.llm", "build_engine"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        from modelmill.core import env

        module, attribute = _LAZY[name]
        with env.openmp_passive_during_imports():
            return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'modelmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the lazily imported public names as well, so that tab completion finds them."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
