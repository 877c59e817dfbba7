"""The only reader of the environment. Each variable is named here with its meaning.

======================  ==========================================================================
MODELMILL_CACHE         folder for pulled models, built engines and compiled kernels (~/.cache/modelmill)
MODELMILL_<FLAG>        any command line flag, e.g. MODELMILL_MAX_MODEL_LEN (read by the command line)
MODELMILL_COMMIT        commit of the code, in rows of measurements, where it is no checkout
MODELMILL_CPU_KERNELS   auto (default): the compiled CPU kernels of the package, else compiled on this machine;
                        prebuilt: only those of the package; native: only compiled here; none: torch computes
CUDA_VISIBLE_DEVICES    CUDA's own: the first GPU of it is named in rows of measurements
TRITON_INTERPRET        1: Triton kernels run in its interpreter on the CPU (for tests)
OMP_WAIT_POLICY         how threads of torch's OpenMP wait: modelmill's own processes (the command line, workers) set
GOMP_SPINCOUNT          PASSIVE if the user has set none of these three; read when torch is imported
KMP_BLOCKTIME           the same for LLVM's and Intel's OpenMP
MALLOC_*, GLIBC_TUNABLES  glibc's own: if one sets malloc's thresholds, modelmill does not set them
NO_COLOR, CI, TERM=dumb plain output without colours and progress bars
======================  ==========================================================================
"""  # noqa: E501

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE_PREFIX = "MODELMILL_"
"""What the names of modelmill's own variables begin with."""
OPENMP_WAIT_VARS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables for how OpenMP's threads wait; its runtime reads them when torch is imported."""
_OPENMP_PASSIVE_ENV = {"OMP_WAIT_POLICY": "PASSIVE"}
_values_read: dict[str, str] = {}  # variables that were set only during an import


def cache_dir() -> Path:
    """Return the folder for all that can be recreated; its first writer creates it."""
    named = os.environ.get("MODELMILL_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "modelmill"


def option_from_env(name: str) -> str | None:
    """Return the value of a command line flag's variable.

    ``option_from_env("max_model_len")`` reads MODELMILL_MAX_MODEL_LEN.
    """
    return os.environ.get(VARIABLE_PREFIX + name.upper())


NON_FLAG_VARIABLES = (
    "MODELMILL_CACHE",
    "MODELMILL_COMMIT",
    "MODELMILL_CPU_KERNELS",
    "MODELMILL_WHEEL_KERNELS",
)
"""Variables of modelmill that are not those of a command line flag."""


def flag_variables_in_env() -> set[str]:
    """Return the variables that begin with MODELMILL_ and are no others of modelmill's."""
    named = {name for name in os.environ if name.startswith(VARIABLE_PREFIX)}
    return named - set(NON_FLAG_VARIABLES)


def first_visible_gpu() -> str | None:
    """The index or id of the first GPU in CUDA_VISIBLE_DEVICES; None where it names none."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or None


def triton_interpret() -> bool:
    """Whether Triton kernels are to run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def requested_cpu_kernels() -> str:
    """Which compiled CPU kernels are to be used; "auto" where MODELMILL_CPU_KERNELS is unset."""
    return os.environ.get("MODELMILL_CPU_KERNELS") or "auto"


def cxx_from_env() -> str | None:
    """The C++ compiler named by CXX; None where the variable is unset."""
    return os.environ.get("CXX")


def set_env_defaults(**values: str) -> None:
    """Set variables that a library reads on import, unless the user has set them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def child_process_env() -> dict[str, str]:
    """A copy of the environment for child processes."""
    return dict(os.environ)


def openmp_wait_vars_in_env() -> dict[str, str]:
    """Return the variables set for how OpenMP's threads wait; empty: its runtime's defaults."""
    return {
        **_values_read,
        **{name: os.environ[name] for name in OPENMP_WAIT_VARS if name in os.environ},
    }


def set_openmp_passive_waiting() -> None:
    """Make OpenMP's threads sleep while they wait, in this process and its children.

    For modelmill's own processes. By default the threads spin for up to 20 ms at each barrier; if
    another process uses one of the cores, a spinning thread may occupy the core that the last
    thread needs. Does nothing if the user has set one of the variables, or if torch is imported
    already.
    """
    if not openmp_wait_vars_in_env() and "torch" not in sys.modules:
        os.environ.update(_OPENMP_PASSIVE_ENV)


@contextlib.contextmanager
def openmp_passive_during_imports() -> Iterator[None]:
    """As ``set_openmp_passive_waiting``, but only for imports within the context.

    A user's program and its child processes keep their environment.
    """
    if openmp_wait_vars_in_env() or "torch" in sys.modules:
        yield
        return
    os.environ.update(_OPENMP_PASSIVE_ENV)
    try:
        yield
    finally:
        for name in _OPENMP_PASSIVE_ENV:
            os.environ.pop(name, None)
        if "torch" in sys.modules:
            _values_read.update(_OPENMP_PASSIVE_ENV)


def has_user_malloc_thresholds() -> bool:
    """Whether the user has set thresholds of glibc's malloc."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        n.startswith("MALLOC_") for n in os.environ
    )


def worker_env() -> dict[str, str]:
    """Return the environment for a worker process."""
    named = {name for name in OPENMP_WAIT_VARS if name in os.environ}
    return child_process_env() if named else {**child_process_env(), **_OPENMP_PASSIVE_ENV}


def is_plain_output() -> bool:
    """Whether output must have no colors and no progress bars."""
    dumb = os.environ.get("TERM") == "dumb"  # it cannot move its cursor
    return dumb or bool(os.environ.get("NO_COLOR") or os.environ.get("CI"))
