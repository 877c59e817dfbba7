"""Loads the C++ kernels of this backend: prebuilt ones (prebuilt.py), or compiled on this machine.

One shared object holds all of them. Its name in the cache is a digest of everything that decides
its code: the sources, the flags, the compiler's version and this CPU's instruction sets, so that a
cache carried to another machine is never run there. Threads are a small team of the library's own
(thread_pool.cpp), or torch's where torch has just computed a product; how many there may be is what
torch uses. Torch's OpenMP is reached through pointers: nothing is linked.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelmill.core import env
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.ops.cpu.common import prebuilt

NATIVE_COMPILER_FLAGS = (*prebuilt.COMMON_FLAGS, "-march=native")
COMPILERS = ("g++", "clang++", "c++")
COMPILED_HERE_ORIGIN = "compiled here"
# What MODELMILL_CPU_KERNELS may say; auto: brought along, else compiled here.
KERNEL_BUILD_CHOICES = ("auto", "prebuilt", "native", "none")
# Rows of activations of a decode step: there bandwidth counts, and calls are too short to release
# Python's lock.
SMALL_M_LIMIT = 16
LOCK_TIMEOUT_SECONDS, LOCK_POLL_SECONDS = 300.0, 0.1
# Codes of simd.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CTYPES_BY_CODE = {
    "p": ctypes.c_void_p,
    "q": ctypes.c_int64,
    "i": ctypes.c_int,
    "d": ctypes.c_double,
}


@dataclass(frozen=True)
class KernelLibrary:
    """The loaded kernels.

    Calls through ``with_gil`` keep the GIL (they take microseconds); ``without_gil`` releases
    it.

    origin: for people, "compiled here" or the level that was brought along.
    """

    path: Path
    with_gil: ctypes.PyDLL
    without_gil: ctypes.CDLL
    vector_width: int
    origin: str = COMPILED_HERE_ORIGIN


def unavailable_reason(device_type: str) -> str | None:
    """None where the kernels serve ``device_type``; else the reason, in one line."""
    if device_type != "cpu":
        return "it runs on the CPU only"
    library = load_or_compile_library()
    return library if isinstance(library, str) else None


def load_function(name: str, signature: str, *, release_gil: bool = False) -> Callable[..., Any]:
    """Return the C function ``name``.

    signature: its argument types: p pointer, q int64, i int, d double.

    Raises MissingDependency where the kernels cannot be built.
    """
    library = load_or_compile_library()
    if isinstance(library, str):
        raise MissingDependency(f"the CPU kernels cannot be used: {library}")
    kernel = getattr(library.without_gil if release_gil else library.with_gil, name)
    kernel.argtypes = [_CTYPES_BY_CODE[c] for c in signature]
    kernel.restype = None
    return kernel


def make_lazy_function_loader(
    name: str, signature: str, *, release_gil: bool = False
) -> Callable[[], Callable[..., Any]]:
    """Return what loads a C function ``load_function`` at the first call and keeps it."""
    return functools.cache(lambda: load_function(name, signature, release_gil=release_gil))


def make_lazy_loader_by_gil_mode(name: str, signature: str) -> Callable[[bool], Callable[..., Any]]:
    """Return both loaders of a function; the argument says whether to release the GIL."""
    return functools.cache(
        lambda release_gil: load_function(name, signature, release_gil=release_gil)
    )


@functools.cache
def load_or_compile_library() -> KernelLibrary | str:
    """Load the prebuilt library for this CPU, else compile one unless it is cached.

    A string says why there is none. Raises UsageError where MODELMILL_CPU_KERNELS says something
    unknown.
    """
    choice = _requested_kernel_build()
    if choice == "none":
        return "MODELMILL_CPU_KERNELS=none switches them off"
    reasons = []
    if choice in ("auto", "prebuilt"):
        for level, path in prebuilt.installed_supported_levels():
            try:
                return replace(load_and_verify_library(path), origin=f"prebuilt for {level.name}")
            except _KernelsUnavailable as problem:
                reasons.append(str(problem))
        if choice == "prebuilt":
            return (
                "; ".join(reasons)
                or f"this installation has none for this processor in {prebuilt.PREBUILT_FOLDER}"
            )
    try:
        return load_and_verify_library(compile_library_if_missing(native_compiler_flags()))
    except _KernelsUnavailable as problem:
        return "; ".join([*reasons, str(problem)])


def _requested_kernel_build() -> str:
    choice = env.requested_cpu_kernels()
    if choice not in KERNEL_BUILD_CHOICES:
        raise UsageError(
            f"MODELMILL_CPU_KERNELS must be one of {', '.join(KERNEL_BUILD_CHOICES)}, "
            f"not {choice!r}"
        )
    return choice


def native_compiler_flags() -> tuple[str, ...]:
    """Compiler flags for this machine.

    MILL_PREFETCH_L2: weights are prefetched far ahead and only to L2, on Zen 4 (AMD family 25):
    decode of one row becomes 1.5 times as fast. Not measured on other processors.
    MILL_ROW_BY_ROW: experts are read row by row, on Zen 5 (AMD family 26), where int8 experts of
    one token take 0.85 of the time and int4 ones 0.96. Not measured on other processors.
    MILL_BF16_AS_FP32: bfloat16 is multiplied as floats. Intel's processors take two cycles for
    AVX512_BF16's product of 32 numbers, in which they multiply 64 floats, and two more to round 32
    weights of 8 bits to bfloat16; AMD's do not.
    """
    cpu = _processor_identity()
    if "GenuineIntel" in cpu:
        return (*NATIVE_COMPILER_FLAGS, "-DMILL_BF16_AS_FP32")
    family = re.search(r"^cpu family\s*: (\d+)$", cpu, re.MULTILINE)
    if family is None or "AuthenticAMD" not in cpu:
        return NATIVE_COMPILER_FLAGS
    by_family = {"25": "-DMILL_PREFETCH_L2", "26": "-DMILL_ROW_BY_ROW"}
    return NATIVE_COMPILER_FLAGS + tuple(
        flag for amd, flag in by_family.items() if amd == family.group(1)
    )


@functools.cache
def torch_gemm_is_faster() -> bool:
    """Whether torch's products of many bfloat16 rows are faster than ours on this processor.

    With AMX many times. On Intel's AVX-512 without it ours take 0.9 of the time for int8 weights
    and as long for dense ones, on AMD's with AVX512_BF16 as long for both, and they wait at no
    barrier of OpenMP. Without AVX512_BF16 torch has no fast product.
    """
    return "amx_bf16" in _processor_identity()


def compile_library_if_missing(flags: tuple[str, ...]) -> Path:
    """Path of the shared object for ``flags``, compiled now if it is not in the cache.

    Raises _KernelsUnavailable.
    """
    compiler, version = _find_compiler()
    target = _library_path(flags, compiler, version)
    if not target.exists():
        _build_library(compiler, version, flags, target)
    return target


def needs_compile() -> bool:
    """Whether ``load_or_compile_library`` would have to compile, which takes half a minute."""
    choice = _requested_kernel_build()
    if choice in ("none", "prebuilt") or (
        choice == "auto" and any(prebuilt.installed_supported_levels())
    ):
        return False
    try:
        return not _library_path(native_compiler_flags(), *_find_compiler()).exists()
    except _KernelsUnavailable:
        return False


def _library_path(flags: tuple[str, ...], compiler: str, version: str) -> Path:
    return env.cache_dir() / "cpu" / f"{_library_key(flags, compiler, version)}.so"


def load_and_verify_library(path: Path) -> KernelLibrary:
    """Load a shared object, set its thread count and run its self-check.

    Raises _KernelsUnavailable.
    """
    try:
        library = KernelLibrary(path, ctypes.PyDLL(str(path)), ctypes.CDLL(str(path)), 0)
    except OSError as problem:
        raise _KernelsUnavailable(
            f"{path} cannot be loaded: {problem}; delete it to build it again"
        ) from None
    hand_over = library.with_gil.modelmill_threads
    hand_over.argtypes = [ctypes.c_void_p] * 3
    hand_over.restype = None
    hand_over(*_openmp_function_addresses())
    library.with_gil.modelmill_torch_multiplies(int(torch_gemm_is_faster()))
    failed = library.with_gil.modelmill_self_check()
    if failed:
        raise _KernelsUnavailable(
            f"{path} computes wrongly (check {failed}): the compiler or the machine is not what "
            "it says"
        )
    return KernelLibrary(
        path, library.with_gil, library.without_gil, library.with_gil.modelmill_vector_width()
    )


class _KernelsUnavailable(Exception):
    """Why there are no kernels; its text is one line."""


def _find_compiler() -> tuple[str, str]:
    named = env.cxx_from_env()
    for name in (named,) if named else COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if shown.returncode == 0:
            return path, shown.stdout
    if named:
        raise _KernelsUnavailable(f"the compiler {named!r} that CXX names does not run")
    ways = "install g++ or clang++ (apt install g++)"
    if prebuilt.cpu_levels(platform.machine()) and not prebuilt.PREBUILT_FOLDER.is_dir():
        ways += ", or install modelmill from a wheel for this platform, which brings the kernels"
    raise _KernelsUnavailable(f"no C++ compiler is here; {ways}")


def _library_key(flags: tuple[str, ...], compiler: str, version: str) -> str:
    digest = hashlib.sha256()
    for part in (*flags, compiler, version, _processor_identity()):
        digest.update(part.encode() + b"\0")
    for path in prebuilt.native_sources():
        relative = path.relative_to(prebuilt.KERNEL_SOURCES_FOLDER).as_posix()
        digest.update(relative.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _processor_identity() -> str:
    """What decides -march=native: family, model, stepping and flags of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "Features",
        "CPU part",
        "CPU implementer",
    )
    return "\n".join(line for line in first.splitlines() if line.split(":")[0].strip() in fields)


def _build_library(compiler: str, version: str, flags: tuple[str, ...], target: Path) -> None:
    """Build in a temporary folder and move the result in place; of several processes, one does."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            _compile_lock(target.parent),
            tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder,
        ):
            if target.exists():  # another process compiled it while this one waited
                return
            sources = prebuilt.native_sources(suffixes=(".cpp",))
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            prefix = [compiler, *flags, prebuilt.include_flag()]
            if "Free Software Foundation" in version:  # g++, not a clang of that name
                prefix += _precompile_headers(prefix, Path(folder))
            commands = [[*prefix, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects)]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(_run_compiler, commands))
            made = Path(folder) / "kernels.so"
            _run_compiler([compiler, "-shared", *map(str, objects), "-pthread", "-o", str(made)])
            made.replace(target)
    except OSError as problem:
        raise _KernelsUnavailable(
            f"the compiled kernels cannot be written to {target.parent}: {problem.strerror}"
        ) from None


@contextlib.contextmanager
def _compile_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into ``folder``; the kernel frees a dead one's lock.

    One that was stopped (Ctrl-Z) keeps it: after ``LOCK_TIMEOUT_SECONDS``, and on a file system
    without locks, processes race.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        ends = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _try_lock(descriptor) and time.monotonic() < ends:
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether no other process holds the lock; true on a file system without locks, too."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _precompile_headers(prefix: list[str], folder: Path) -> list[str]:
    """Parse what most sources include once, into ``folder``: 27 instead of 39 s of one core.

    The objects' machine code is the same with and without. Returns the flags that include it.
    """
    header = folder / "shared_headers.h"
    header.write_text('#include "common/simd.h"\n#include "common/parallel_for.h"\n')
    _run_compiler([*prefix, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return ["-include", str(header)]


def _run_compiler(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        raise _KernelsUnavailable(f"{command[0]} did not finish within 300 s") from None
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line]
            or done.stderr.splitlines()
            or ["?"]
        )
        raise _KernelsUnavailable(f"{command[0]} fails: {lines[0].strip()}")


def _openmp_function_addresses() -> tuple[int | None, ...]:
    """Addresses of the functions of torch's OpenMP runtime that thread_pool.cpp calls; or None."""
    library = next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"), None)
    try:
        # already loaded: a lookup searches it and what it depends on
        torch_cpu = ctypes.CDLL(str(library))
        symbols = [
            torch_cpu.omp_get_max_threads,
            torch_cpu.GOMP_parallel,
            torch_cpu.omp_get_thread_num,
        ]
    except (OSError, AttributeError):
        return None, None, None
    return tuple(ctypes.cast(entry, ctypes.c_void_p).value for entry in symbols)
