"""Builds wheels that carry the CPU kernels, compiled for common levels of processors
(modelmill/ops/cpu/common/prebuilt.py).

Everything else stands in pyproject.toml. The compiler is CXX, or the first of g++, clang++ and c++
that is here; for another kind of machine name a cross compiler (CXX=aarch64-linux-gnu-g++). Without
a compiler, or with MODELMILL_WHEEL_KERNELS=none, the wheel is one for any machine, which compiles
the kernels where it runs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

KERNELS = Path("modelmill/ops/cpu")
COMPILERS = ("g++", "clang++", "c++")
# Where file names and symbols are those of Linux; elsewhere the kernels are compiled where they
# run.
SYSTEM = "linux"


def _prebuilt() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "prebuilt", Path(__file__).parent / KERNELS / "common" / "prebuilt.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler() -> tuple[str, str] | None:
    """(path, machine that it compiles for: "x86_64", "aarch64"); None: no kernels are compiled."""
    asked = os.environ.get("MODELMILL_WHEEL_KERNELS", "auto")
    if asked not in ("auto", "none"):
        raise SystemExit(f"MODELMILL_WHEEL_KERNELS must be one of auto, none, not {asked!r}")
    named = os.environ.get("CXX")
    path = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
    if asked == "none" or path is None or sys.platform != SYSTEM:
        return None
    said = subprocess.run(
        [path, "-dumpmachine"], capture_output=True, text=True, check=False
    ).stdout
    machine, _, system = said.strip().partition("-")
    return (path, machine) if SYSTEM in system else None


def compile_levels(path: str, machine: str, folder: Path) -> list[Path]:
    """Every level of ``machine`` as a shared object in ``folder``; those of these sources that are
    there stay.
    """
    prebuilt = _prebuilt()
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        folder / prebuilt.library_file_name(level, KERNELS)
        for level in prebuilt.cpu_levels(machine)
    ]
    for path in set(folder.iterdir()) - set(made):
        path.unlink()
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        for level in prebuilt.cpu_levels(machine):
            target = folder / prebuilt.library_file_name(level, KERNELS)
            if target.exists():
                continue
            compiling, linking = prebuilt.compile_and_link_commands(
                path, level, Path(objects), target, KERNELS
            )
            jobs.append((level, [pool.submit(_run, command) for command in compiling], linking))
        for level, running, linking in jobs:
            for each in running:
                each.result()
            _run(linking)
            print(f"compiled the CPU kernels for {level.name}", flush=True)
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\n{done.stderr.strip()}\nthe CPU kernels do not compile; another "
            "compiler is named by "
            "CXX, MODELMILL_WHEEL_KERNELS=none leaves them out"
        )


def platform_tag(libraries: Iterable[Path], machine: str) -> str:
    """manylinux with the glibc that the newest symbol asks for; linux where that cannot be told."""
    needed = [_prebuilt().required_glibc_version(path.read_bytes()) for path in libraries]
    if not needed or None in needed:
        return f"linux_{machine}"
    # the oldest glibc that this way of naming platforms knows is 2.5; torch's own wheels ask for
    # 2.28
    return "manylinux_{}_{}_{}".format(*max(needed), machine)


class BuildKernels(build_py):
    """Copies the package, and puts the kernels beside it where a wheel is built."""

    def run(self) -> None:
        super().run()
        found = None if self.editable_mode else compiler()
        if found is None:
            shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier build
        else:
            self.kernels = compile_levels(*found, self._folder)

    @property
    def _folder(self) -> Path:
        return Path(self.build_lib) / KERNELS / "prebuilt"

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, getattr(self, "kernels", []))]


class PlatformWheel(bdist_wheel):
    """Tags a wheel that carries kernels with the platform they are for; any Python 3 reads them."""

    def finalize_options(self) -> None:
        self._levels = compiler()
        if self._levels is not None and _prebuilt().cpu_levels(self._levels[1]):
            # the package then goes where machine code belongs (platlib), and the wheel is not one
            # for any machine
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        if self.root_is_pure:
            return super().get_tag()
        assert self._levels is not None
        folder = Path(self.get_finalized_command("build_py").build_lib) / KERNELS / "prebuilt"
        return "py3", "none", platform_tag(sorted(folder.glob("*.so")), self._levels[1])


class SourceArchive(sdist):
    """Whole folders (MANIFEST.in), but for what running and building leaves in them."""

    def prune_file_list(self) -> None:
        super().prune_file_list()
        for left_over in (r"(^|/)__pycache__/", r"\.py[cod]$", r"\.so$", r"(^|/)\.[a-z]+_cache/"):
            self.filelist.exclude_pattern(left_over, is_regex=True)


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel, "sdist": SourceArchive})
