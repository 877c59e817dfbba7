"""The only reader of the environment. Each variable is named here with its meaning.

======================  ==========================================================================
MODELMILL_CACHE         folder for pulled models, built engines and compiled kernels (~/.cache/modelmill)
MODELMILL_<FLAG>        any command line flag, e.g. MODELMILL_MAX_MODEL_LEN (read by the command line)
TRITON_INTERPRET        1: Triton kernels run in its interpreter on the CPU (for tests)
NO_COLOR, CI, TERM=dumb plain output without colours and progress bars
======================  ==========================================================================
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for everything that can be made again; created on first use by whoever writes there."""
    named = os.environ.get("MODELMILL_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "modelmill"


def flag(name: str) -> str | None:
    """Value of a command line flag's variable, e.g. ``flag("max_model_len")`` reads MODELMILL_MAX_MODEL_LEN."""
    return os.environ.get("MODELMILL_" + name.upper())


def triton_interpret() -> bool:
    """Whether Triton kernels are to run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def compiler() -> str | None:
    """The C++ compiler named by CXX; None where the variable is unset."""
    return os.environ.get("CXX")


def default(**values: str) -> None:
    """Set variables that a library reads when it is imported, where the user has not set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def child() -> dict[str, str]:
    """A copy of the environment for child processes."""
    return dict(os.environ)


def plain() -> bool:
    """Whether output is to be without colours and progress bars."""
    dumb = os.environ.get("TERM") == "dumb"  # it cannot move its cursor
    return dumb or bool(os.environ.get("NO_COLOR") or os.environ.get("CI"))
